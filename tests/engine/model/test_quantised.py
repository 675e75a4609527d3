"""Quantised models on the emulated GPU, and models quantised while they are loaded on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_cuda import emulated
from gpu.composed import check_composition
from gpu.conftest import Zoo
from gpu.quantised import check_checkpoint, check_gguf, check_quantise

from headrace.ops.quantise import Method


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"), "cpu")


@pytest.mark.rotated(2)
@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_a_gpu_gives_the_tokens_of_the_dequantised_model(zoo: Zoo, method: Method, tmp_path: Path) -> None:
    with emulated() as gpu:
        check_quantise(zoo, "cuda", "cpu", method, tmp_path)
        kind = {"fp8": "fp8", "int4": "int4-g128-zeros"}[method]
        used = {name for name, launches in gpu.launches.items() if kind in name and launches}
        many = () if method == "fp8" else ("many rows",)
        assert used == {f"product: {kernel}, {kind}" for kernel in ("even", "even heads", *many)}


def test_a_cpu_gives_the_tokens_of_the_dequantised_model(zoo: Zoo, tmp_path: Path) -> None:
    check_quantise(zoo, "cpu", "cpu", "int8", tmp_path)


@pytest.mark.rotated(2)
@pytest.mark.parametrize(("method", "family"), [("int8", "llama 3"), ("fp8", "smollm2")])
def test_a_gpu_multiplies_by_codes_of_a_head(method: Method, family: str, zoo: Zoo, tmp_path: Path) -> None:
    with emulated() as gpu:
        check_quantise(zoo, "cuda", "cpu", method, tmp_path, family=family, head=True)
        assert gpu.launches[f"product: tiles, {method}"]


@pytest.mark.parametrize("family", ["llama 3", "smollm2"])
def test_a_cpu_multiplies_by_a_quantised_head(family: str, zoo: Zoo, tmp_path: Path) -> None:
    check_quantise(zoo, "cpu", "cpu", "int8", tmp_path, family=family, head=True)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_model_composes_with_all_that_a_plain_one_does(zoo: Zoo, tmp_path: Path) -> None:
    with emulated():
        check_composition(zoo, "cuda", "cpu", "int4", tmp_path)


EMULATED = (
    "fp8 blocks", "awq", "compressed nvfp4", "bitsandbytes nf4", "compressed mxfp4", "compressed int8 with zeros"
)  # fmt: skip


@pytest.mark.rotated(2)
@pytest.mark.parametrize("name", EMULATED)
def test_a_gpu_reads_quantised_checkpoints(name: str, tmp_path: Path) -> None:
    with emulated():
        check_checkpoint(name, "cuda", "cpu", tmp_path)


@pytest.mark.rotated(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_gpu_reads_embeddings_and_head_from_codes(tied: bool, tmp_path: Path) -> None:
    with emulated() as gpu:
        check_gguf("cuda", "cpu", tmp_path, tied=tied)
        kind = "int4-g32-minima-factors" if tied else "int6-g16-factors"
        assert gpu.launches["_read_rows_kernel"] and gpu.launches[f"product: tiles, {kind}"]
