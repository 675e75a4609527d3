"""Adapters under a CUDA runner on an emulated GPU: see tests/emulated_cuda.py; the kernels are tested on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_cuda import emulated
from gpu.conftest import Zoo
from gpu.test_adapters import BASE, check_batches


@pytest.mark.filterwarnings("ignore")
def test_each_of_a_batch_says_what_it_wears(tmp_path: Path) -> None:
    base = Zoo(tmp_path, "cuda").folder(BASE)
    with emulated() as gpu:
        check_batches(base, "cuda", "cpu", tmp_path)
    kernels = ("shrink_row", "shrink_group", "shrink_long", "vector_shrink", "expand_norm", "look_up")
    assert gpu.replays and all(gpu.launches[f"_{name}_kernel"] for name in kernels)
