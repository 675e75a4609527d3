"""GPUs other than Hopper, emulated: what runs on them, and what is refused when an engine opens, by name.

The emulation fails a kernel that its chip cannot run; whether kernels compile for a chip is tests/ops/test_matrix.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import anyio
import pytest
from emulated_cuda import CHIPS, emulated
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, one_by_one, open_engine, together
from gpu.judge import Judge, Output

from headrace.engine import DeviceUnavailable, InvalidParams

SMALL = {"max_context": 256, "max_batched_tokens": 256, "max_rows": 4}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"), "cuda")


def opened(zoo: Zoo, **options: Any) -> None:
    async def run() -> None:
        async with open_engine(zoo.folder("exact"), "cuda", **(SMALL | options)):
            pass

    anyio.run(run)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_tokens_are_right_on_other_gpus(zoo: Zoo, capability: tuple[int, int]) -> None:
    async def run() -> list[Output]:
        async with open_engine(zoo.folder("qwen3"), "cuda", **SMALL) as engine:
            outputs = await one_by_one(engine, [draw(length, length) for length in (1, 45, 150)], 8)
            outputs += await together(engine, [draw(length, length) for length in (3, 17, 64, 127)], greedy(8))
            await at_rest(engine)
        return outputs

    with emulated(capability) as gpu:
        outputs = anyio.run(run)
    Judge(zoo.folder("qwen3"), "cpu").check(outputs, f"on {CHIPS[capability][0]}")
    assert not gpu.launches.get("product: even") and not gpu.launches.get("prefill: tile")


def test_a_lone_request_outgrows_few_tokens_where_there_is_no_xqa(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at token 4,097: contexts count a hundredfold here."""

    async def run() -> list[Output]:
        async with open_engine(zoo.folder("exact"), "cuda", **SMALL | {"max_rows": 1}) as engine:
            return await one_by_one(engine, [draw(38, 1)], 8)

    with emulated((8, 0)) as gpu:
        choice = importlib.import_module("headrace.ops.cuda.attention.registry").DecodeChoice
        at = choice.at
        monkeypatch.setattr(choice, "at", lambda self, rows, context: at(self, rows, 100 * context))
        (output,) = anyio.run(run)
    assert len(output.tokens) == 8
    assert gpu.launches["decode: fa2"] and gpu.launches["decode: fused"]


def test_a_gpu_without_bfloat16_is_refused_by_name(zoo: Zoo) -> None:
    with (
        emulated((7, 5)),
        pytest.raises(DeviceUnavailable, match="NVIDIA T4 cannot run this engine: sm_75 lacks arith"),
    ):
        opened(zoo)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_a_cache_of_8_bits_is_refused_where_no_kernel_converts_it(zoo: Zoo, capability: tuple[int, int]) -> None:
    with emulated(capability), pytest.raises(InvalidParams, match="kv_dtype: fp8 cannot run on NVIDIA") as refused:
        opened(zoo, kv_dtype="fp8")
    assert (refused.value.field, refused.value.value, refused.value.limit) == ("kv_dtype", "fp8", "auto")


@pytest.mark.parametrize(
    ("way", "why"),
    [("xqa", "sm_80 lacks FlashInfer's XQA"), ("even", "sm_80 lacks bulk copies")],
)
def test_ways_to_attend_that_a_gpu_lacks_are_refused(zoo: Zoo, way: str, why: str) -> None:
    with emulated((8, 0)), pytest.raises(InvalidParams, match=f"decode_attention: {way} cannot run here: {why}"):
        opened(zoo, decode_attention=way)


def test_a_hopper_gpu_can_pretend_to_be_an_older_one(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ARCH", "sm_80")
    with emulated() as gpu:
        opened(zoo)
    assert not gpu.launches.get("product: even") and not gpu.launches.get("decode: even")
    monkeypatch.setenv("HEADRACE_ARCH", "sm_81")
    with emulated(), pytest.raises(DeviceUnavailable, match="HEADRACE_ARCH: must be one of sm_70, sm_75"):
        opened(zoo)
