"""Quantised checkpoints generate what transformers generates from the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch
import transformers
from quantised_checkpoints import CASES, CONFIG, write_checkpoint

from headrace.engine import Engine, SamplingParams

COUNT = 32
MARGIN = 1e-2
NAMES = (
    "fp8 blocks", "modelopt fp8", "modelopt nvfp4", "compressed int8 with zeros", "compressed int4 in an order",
    "compressed nvfp4", "compressed mixture", "gptq v2 in an order", "gptq with rules", "awq", "auto-round mixture",
    "mxfp4", "bitsandbytes nf4", "bitsandbytes int8",
)  # fmt: skip
"""At least one checkpoint in each format, and the mixtures."""


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_generates_what_transformers_does_from_the_plain_model(name: str, tmp_path: Path) -> None:
    """Every token is the likeliest behind those before it, unless two are all but equally likely."""
    state = write_checkpoint(tmp_path, CASES[name])
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).float().eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    prompts = [[5, 17, 40, 3], [60, 2, 2, 33]]

    async def run() -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        async with Engine(tmp_path, dtype="float32", kv_memory="4MiB") as engine:
            return [(await engine.generate(prompt, params)).choices[0].token_ids for prompt in prompts]

    found = torch.tensor(anyio.run(run))
    with torch.inference_mode():
        logits = model(torch.cat([torch.tensor(prompts), found], dim=1)).logits[:, len(prompts[0]) - 1 : -1]
    best = logits.topk(2)
    is_clear = best.values[..., 0] - best.values[..., 1] > MARGIN
    assert torch.equal(best.indices[..., 0][is_clear], found[is_clear])
    assert is_clear.sum() > COUNT and len(set(found.flatten().tolist())) > 5, "the weights decide the tokens"
