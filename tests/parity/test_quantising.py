"""Quantised copies in transformers with compressed-tensors: the tokens that an engine gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from quantising import copied, dense_folder, sequences, unstack

from headrace.engine import Engine, SamplingParams

COUNT = 32
MARGIN = 1e-2
SQUARE = {"intermediate_size": 256}
"""With 192 inputs of the other products, a model in which no size of groups is the largest for all layers."""
EXPERTS = {
    "architecture": "Qwen3Moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "head_dim": 64,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp8": ("fp8", {}, {}),
    "int8": ("int8", {}, {}),
    "int8 with a head": ("int8", {"head": True}, {}),
    "int8 with data": ("int8", {"data": sequences()}, {}),
    "int4": ("int4", {}, {}),
    "int4 of experts": ("int4", {}, EXPERTS),
    "fp8 of experts": ("fp8", {}, EXPERTS),
    "int4 where inputs differ": ("int4", {}, SQUARE),
    "int4 beside dense layers": ("int4", {}, {"intermediate_size": 176}),
    "int4 with a head": ("int4", {"head": True, "group": 32}, {}),
    "int4 with data": ("int4", {"data": sequences()}, SQUARE),
    "symmetric int4": ("int4", {"symmetric": True}, SQUARE),
    "symmetric int4 beside dense layers": ("int4", {"symmetric": True}, {"intermediate_size": 176}),
    "symmetric int4 with data": ("int4", {"symmetric": True, "data": sequences()}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_transformers_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Every token is the likeliest behind those before it, unless two are all but equally likely."""
    method, options, changes = CASES[name]
    folder = dense_folder(tmp_path / "model", **changes)
    if changes is EXPERTS:
        unstack(folder / "model.safetensors")
    out = tmp_path / "out"
    copied(folder, out, method, shard_bytes=300_000, **options)
    prompts = [[5, 17, 40, 3], [60, 2, 2, 33]]

    async def run() -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        async with Engine(out, dtype="float32", kv_memory="4MiB") as engine:
            return [(await engine.generate(prompt, params)).choices[0].token_ids for prompt in prompts]

    found = torch.tensor(anyio.run(run))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(prompts), found], dim=1)).logits[:, len(prompts[0]) - 1 : -1]
    best = logits.topk(2)
    is_clear = best.values[..., 0] - best.values[..., 1] > MARGIN
    assert torch.equal(best.indices[..., 0][is_clear], found[is_clear])
    assert is_clear.sum() > COUNT and len(set(found.flatten().tolist())) > 5, "the weights decide the tokens"
    if method == "int4":
        dense = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            plain = dense(torch.cat([torch.tensor(prompts), found], dim=1)).logits[:, len(prompts[0]) - 1 : -1]
        assert (plain - logits).abs().max() > 10 * MARGIN, "4 bits are felt"
