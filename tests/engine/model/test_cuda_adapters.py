"""Adapters under a CUDA runner on an emulated GPU: see tests/emulated_cuda.py; the kernels are tested on a GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from emulated_cuda import emulated
from gpu.conftest import Zoo
from gpu.driving import draw, open_engine
from gpu.test_adapters import BASE, check_batches, check_modules
from gpu.wearing import make
from numpy.typing import NDArray


@pytest.mark.filterwarnings("ignore")
def test_each_of_a_batch_says_what_it_wears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Zoo(tmp_path, "cuda").folder(BASE)
    with emulated() as gpu:
        bank = importlib.import_module("headrace.engine.model.cuda.adapters")
        arch = importlib.import_module("headrace.ops.cuda.arch").Arch
        tuning = replace(arch.named("sm_90").tuning, adapter_rows=3, adapter_share=3)  # few rows share, too
        monkeypatch.setattr(arch, "tuning", tuning)
        for module in (bank, importlib.import_module("headrace.ops.cuda.adapters.products")):  # and few are many
            monkeypatch.setattr(module, "MAX_ROWS", 8)
        check_batches(base, "cuda", "cpu", tmp_path)
    few = ("norm_shrink", "vector_expand", "vector_shrink", "shrink_alike", "expand_alike")
    kernels = (
        *few,
        "shrink_row",
        "shrink_group",
        "shrink_long",
        "expand_norm",
        "expand_row",
        "activate_mul",
        "look_up",
    )
    assert gpu.replays and all(gpu.launches[f"_{name}_kernel"] for name in kernels)
    assert gpu.launches["product: even, updated"] and gpu.launches["product: even heads, updated"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["glm 4.5 experts", "deepseek v3"])
def test_every_module_but_experts(family: str, tmp_path: Path) -> None:
    base = Zoo(tmp_path, "cuda").folder(family)
    with emulated():
        check_modules(base, "cuda", "cpu", tmp_path, family)


@pytest.mark.filterwarnings("ignore")
def test_updates_are_inside_the_products_of_a_feed_without_a_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind RMS norms and without biases; by kernels that take its products, but none of a gate beside them."""
    base = Zoo(tmp_path, "cuda").folder("arcee")
    with emulated() as gpu:
        arch = importlib.import_module("headrace.ops.cuda.arch").Arch
        monkeypatch.setattr(arch, "tuning", replace(arch.named("sm_90").tuning, even_weights=256 * 512))
        check_modules(base, "cuda", "cpu", tmp_path, "arcee", rows=8)
        assert gpu.launches["product: even, updated"] and gpu.launches["product: even heads, updated"]


@pytest.mark.filterwarnings("ignore")
def test_each_input_of_embed_wears_its_own(tmp_path: Path) -> None:
    base = Zoo(tmp_path, "cuda").folder(BASE)
    worn = make(base, tmp_path, "q and v").folder
    asked = [draw(length, length) for length in (1, 9, 40, 40, 40)]
    names = [None, "worn", "worn", None, "worn"]

    async def run(device: str, dtype: str) -> NDArray[np.float32]:
        options = {
            "max_context": 128,
            "max_batched_tokens": 24,
            "max_rows": 4,
            "adapter_slots": 1,
            "adapter_host_memory": "4MiB",
        }
        async with open_engine(base, device, **(options | {"dtype": dtype})) as engine:
            await engine.adapters.load("worn", worn)
            vectors = [(await engine.embed(asked, adapter=names, pooling=kind)).vectors for kind in ("last", "mean")]
        return np.stack(vectors)

    expected = anyio.run(run, "cpu", "float32")
    with emulated():
        found = anyio.run(run, "cuda", "bfloat16")
    assert (found * expected).sum(-1).min() > 0.99
    assert (expected[:, 2] * expected[:, 3]).sum(-1).max() < 0.97, "the adapter changes too little to mean anything"


def test_pieces_come_back_when_they_are_dropped() -> None:
    with emulated():
        pool = importlib.import_module("headrace.ops.host_memory").PiecePool(64, 16)
        first, second = pool.take(33), pool.take(17)
        assert [len(first), len(second)] == [3, 2], "one more than the pool had"
        addresses = {piece.data_ptr() for piece in (*first, *second)}
        assert len(addresses) == 5
        del first
        third = pool.take(48)
        assert {piece.data_ptr() for piece in (*second, *third)} == addresses
