"""Quantised checkpoints on an emulated GPU: weights are read by way of the device, again after a sleep without them."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
import torch
from emulated_cuda import emulated
from quantised_checkpoints import CASES, write_checkpoint
from safetensors.torch import save_file

from headrace.engine import Engine, SamplingParams


def answers(folder: Path, kernels: tuple[str, ...] = ()) -> list[list[int]]:
    """What prompts of a few tokens and of many give, before and after a sleep that drops the weights.

    `kernels` are names of which some kernel's product must have been computed.
    """
    prompts = [[5, 17, 40], [60, 2], [7 * number % 50 + 3 for number in range(150)]]

    async def run() -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        options = {"max_context": 256, "max_batched_tokens": 256, "max_rows": 8, "kv_memory": "4MiB"}
        async with Engine(folder, device="cuda", **options) as engine:
            found = []
            for _ in range(2):
                found += [(await engine.generate(ids, params)).choices[0].token_ids for ids in prompts]
                await engine.sleep(level=2)
                await engine.wake()
            return found

    with emulated() as gpu:
        found = anyio.run(run)
        assert all(gpu.launches.get(f"product: {name}") for name in kernels), gpu.launches
        return found


@pytest.mark.rotated(2)
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("compressed mixture", ()),
        ("gptq v2 in an order", ()),
        ("fp8 blocks", ("even, fp8-g128", "many rows, fp8-g128")),
    ],
)
def test_answers_are_those_of_the_plain_model(name: str, kernels: tuple[str, ...], tmp_path: Path) -> None:
    """Emulated kernels round no activations to 8 bits."""
    state = write_checkpoint(tmp_path / "quantised", CASES[name])
    write_checkpoint(tmp_path / "plain", CASES[name])
    path = tmp_path / "plain" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": None}))
    tensors = {name: torch.from_numpy(values).bfloat16() for name, values in state.items()}
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    found = answers(tmp_path / "quantised", kernels)
    assert found == answers(tmp_path / "plain")
    assert found[:3] == found[3:] and len(set(found[0] + found[1])) > 5
