"""The device's engine and the CPU's in float32 generate the same greedy tokens, up to near ties in float32."""

from __future__ import annotations

import anyio
import pytest
from gpu.conftest import Zoo
from gpu.driving import draw, greedy, open_engine, together
from gpu.judge import Output


@pytest.mark.parametrize("name", ["llama 3", "smollm2", "mistral", "qwen3"])
def test_greedy_outputs_of_cpu_and_device_are_equal_up_to_ties(zoo: Zoo, name: str) -> None:
    prompts = [draw(length, length) for length in (1, 9, 16, 31, 48, 70, 96, 140)]

    async def run(device: str, dtype: str) -> list[Output]:
        async with open_engine(zoo.folder(name), device, dtype=dtype, max_context=256) as engine:
            return await together(engine, prompts, greedy(32))

    of_device = anyio.run(run, zoo.device, "bfloat16")
    of_cpu = anyio.run(run, "cpu", "float32")
    judge = zoo.judge(name)
    agree = [judge.check_agree(one, other, name) for one, other in zip(of_device, of_cpu, strict=True)]
    assert sum(agree) >= 0.5 * 32 * len(prompts), f"outputs part too soon to mean anything: {agree}"
