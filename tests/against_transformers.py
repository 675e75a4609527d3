"""What tests of whole models share that compare them with transformers; holds no tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import torch
from model_driver import ModelUnderTest
from torch import Tensor

from headrace.engine import Completion, Engine, SamplingParams

__all__ = ["CUTS", "FEW_CUTS", "all_at_once", "check_bits", "check_cuts", "drawn_with_logits", "greedy"]

FEW_CUTS: Mapping[str, tuple[int, int | None]] = {
    "in one piece": (128, None),
    "in chunks": (7, None),
    "decode after chunks": (5, 11),
    "one by one": (1, None),
}
"""Tokens of a step, and of the prompt before tokens come one by one; None for a prompt that is all."""
CUTS: Mapping[str, tuple[int, int | None]] = {
    **FEW_CUTS,
    "in chunks of a page": (4, None),
    "decode after a prefill": (128, 15),
}


def drawn_with_logits(model: Any, lengths: Sequence[int]) -> tuple[list[list[int]], list[Tensor]]:
    """Random sequences of these lengths, and their logits in one piece by a model of transformers."""
    sequences = [torch.randint(0, model.config.vocab_size, (length,)).tolist() for length in lengths]
    with torch.inference_mode():
        return sequences, [model(torch.tensor([ids])).logits[0] for ids in sequences]


def check_cuts(
    tested: ModelUnderTest,
    sequences: Sequence[list[int]],
    expected: Sequence[Tensor],
    cuts: Mapping[str, tuple[int, int | None]] = CUTS,
) -> None:
    """Compare logits for any cut of sequences into steps with the expected ones, which must say something."""
    assert max(float(logits.std()) for logits in expected) > 0.1
    for cut, (chunk, prompt) in cuts.items():
        for wanted, found in zip(expected, tested.logits(sequences, chunk, prompt), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4, msg=lambda text: f"{cut}: {text}")  # noqa: B023


def check_bits(tested: ModelUnderTest, sequences: Sequence[list[int]]) -> None:
    """Demand the bits that each sequence has alone, in one piece, in every company and cut."""
    alone = [tested.logits([ids], 128)[0] for ids in sequences]
    for chunk, prompt in FEW_CUTS.values():
        for wanted, found in zip(alone, tested.logits(sequences, chunk, prompt), strict=True):
            assert torch.equal(found, wanted)


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The tokens that a model of transformers chooses."""
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    made = model.generate(torch.tensor([ids]), attention_mask=mask, **options)
    return [int(token) for token in made[0, len(ids) :]]


async def all_at_once(engine: Engine, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """The tokens that an engine chooses for prompts that it computes together."""
    params = SamplingParams(temperature=0, max_tokens=count)
    found: dict[int, Completion] = {}

    async def one(index: int) -> None:
        found[index] = await engine.generate(prompts[index], params)

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return [found[index].choices[0].token_ids for index in range(len(prompts))]
