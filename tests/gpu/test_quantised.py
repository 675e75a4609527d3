"""Quantised models on the device under test."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.composed import check_composition
from gpu.conftest import Zoo
from gpu.quantised import check_checkpoint, check_gguf, check_mxfp4, check_quantise

from headrace.ops.quantise import Method

CHECKPOINTS = (
    "fp8 blocks", "compressed int4 in an order", "gptq with rules", "awq", "auto-round mixture", "compressed nvfp4",
    "bitsandbytes nf4", "compressed mxfp4", "compressed int8 with zeros",
)  # fmt: skip


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_tokens_are_those_of_the_dequantised_model(zoo: Zoo, device: str, method: Method, tmp_path: Path) -> None:
    check_quantise(zoo, device, device, method, tmp_path)


@pytest.mark.parametrize(("method", "family"), [("int8", "llama 3"), ("fp8", "smollm2")])
def test_a_head_is_quantised_where_it_is_asked_for(
    zoo: Zoo, device: str, method: Method, family: str, tmp_path: Path
) -> None:
    check_quantise(zoo, device, device, method, tmp_path, family=family, head=True)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_quantised_checkpoint_is_its_plain_model(device: str, name: str, tmp_path: Path) -> None:
    check_checkpoint(name, device, device, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_a_quantised_model_composes_with_all_that_a_plain_one_does(
    zoo: Zoo, device: str, method: Method, tmp_path: Path
) -> None:
    check_composition(zoo, device, device, method, tmp_path)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_gguf_file_is_its_plain_model(device: str, tied: bool, tmp_path: Path) -> None:
    check_gguf(device, device, tmp_path, tied=tied)


def test_experts_in_4_bit_floats_stay_in_their_bits(zoo: Zoo, device: str) -> None:
    check_mxfp4(zoo, device, zoo.judge("gpt-oss dequantised"))
