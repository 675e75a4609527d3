"""The floor is the arithmetic that was done by hand for one H200: 4.3 TB/s and 791 TFLOP/s."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import tiny_models
import torch

from headrace.engine import Engine
from headrace.engine.bench.floor import Cost, Speed, cost_of, measure, model_cost, stored_bytes
from headrace.engine.bench.shapes import SHAPES
from headrace.engine.bench.workload import public_workload
from headrace.engine.model.families.registry import from_hf

H200 = Speed(4.3e12, 791e12)


def bf16(name: str) -> Cost:
    spec = from_hf(SHAPES[name])
    return cost_of(spec, weight_bytes=stored_bytes(None, spec, torch.bfloat16)[0], kv_size=2)


@pytest.mark.parametrize(
    ("name", "batch", "milliseconds"),
    [
        ("qwen3-0.6b", 1, 0.30),
        ("qwen3-0.6b", 64, 2.03),
        ("qwen3-0.6b", 256, 7.27),
        ("llama-3.1-8b", 1, 3.52),
        ("llama-3.1-8b", 16, 3.99),
        ("llama-3.1-8b", 64, 5.49),
        ("llama-3.1-8b", 256, 11.5),
    ],
)
def test_decode_steps_at_1024_tokens(name: str, batch: int, milliseconds: float) -> None:
    seconds = bf16(name).decode_seconds([1024] * batch, H200)
    assert 1000 * seconds == pytest.approx(milliseconds, abs=0.006 if milliseconds < 10 else 0.06)


@pytest.mark.parametrize(("name", "rate"), [("qwen3-0.6b", 791_000), ("llama-3.1-8b", 56_000)])
def test_prompts_of_1024_tokens(name: str, rate: float) -> None:
    assert 1024 / bf16(name).prefill_seconds([1024], H200) == pytest.approx(rate, rel=0.01)


def test_the_public_workload() -> None:
    workload = public_workload(vocab_size=151_936)
    seconds = bf16("qwen3-0.6b").workload_seconds(list(map(len, workload.prompts)), workload.outputs, H200)
    assert workload.output_tokens / seconds == pytest.approx(36_450, rel=0.005)


def test_arithmetic_is_the_floor_where_it_takes_longer_than_the_bytes() -> None:
    cost = bf16("qwen3-0.6b")
    slow = Speed(1e20, 1e12)
    per_token = 2 * (cost.linear_params + cost.head_params) + cost.attention_flops * 10
    assert cost.decode_seconds([10], slow) == pytest.approx(per_token / 1e12)


def test_a_window_bounds_what_is_read_and_computed() -> None:
    cost = replace(bf16("qwen3-0.6b"), windows=(100,) * 14 + (None,) * 14, weight_bytes=0)
    whole = replace(cost, windows=(None,) * 28)
    assert cost.decode_seconds([1000], H200) / whole.decode_seconds([1000], H200) == pytest.approx(0.55, abs=0.001)
    triangle, strip = 1000 * 1001 / 2, 100 * 101 / 2 + 900 * 100
    with_window, without = (each.prefill_seconds([1000], Speed(1e20, 1.0)) for each in (cost, whole))
    assert without - with_window == pytest.approx(cost.attention_flops * (triangle - (triangle + strip) / 2))


def test_cached_elements_are_those_of_the_open_engine(tmp_path: Path) -> None:
    folder = str(tiny_models.random_folder(tmp_path))

    async def cost() -> Cost:
        async with Engine(folder, load_format="random", dtype="float32", device="cpu") as engine:
            return model_cost(folder, engine.info)

    found = anyio.run(cost)
    assert found.kv_bytes == 2 * 2 * 2 * 8 * 4  # layers, key and value, heads, head size, float32
    linear = 2 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 48)
    assert (found.linear_params, found.head_params) == (linear, 32 * 96)
    assert found.weight_bytes == 4 * (linear + 32 * 96)


def test_weights_of_a_gguf_file_count_as_stored(smollm2: Path) -> None:
    async def cost() -> Cost:
        async with Engine(smollm2, device="cpu", kv_memory="16MiB") as engine:
            return model_cost(str(smollm2), engine.info)

    stored = anyio.run(cost).weight_bytes
    assert 0.95 < stored / smollm2.stat().st_size < 1.0  # the embedding is the head; the rest of the file is text


def test_the_machine_is_measured() -> None:
    speed = measure("cpu")
    assert 1e8 < speed.bytes_per_second < 1e13
    assert 1e8 < speed.flops_per_second < 1e16
