"""Pages that slid out of every layer's window serve other tokens, on the CPU and on the emulated GPU."""

from __future__ import annotations

import pytest
from emulated_cuda import emulated
from gpu.conftest import Zoo
from gpu.judge import Judge
from gpu.windows import check_windows


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"), "cpu")


def test_a_request_on_the_cpu_holds_its_window_and_a_page_whatever_its_length(zoo: Zoo) -> None:
    check_windows(zoo, zoo.judge("mistral"), "cpu")


def test_a_request_on_a_gpu_holds_its_window_and_a_page_whatever_its_length(zoo: Zoo) -> None:
    with emulated():
        check_windows(zoo, Judge(zoo.folder("mistral"), "cpu"), "cuda")
