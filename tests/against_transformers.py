"""What tests of whole models share that compare them with transformers; holds no tests.

HEADRACE_PARITY=all, which `make soak` sets, cuts sequences into steps in more ways.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import tiny_models
import torch
from model_driver import ModelUnderTest, capacity
from torch import Tensor

from headrace.engine import Completion, Engine, EngineStats, SamplingParams
from headrace.engine.model.checkpoint.weights import DecoderWeights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.spec import DecoderSpec

__all__ = [
    "CUTS", "EVERYTHING", "all_at_once", "check_bits", "check_cuts", "check_engine", "difference", "drawn_with_logits",
    "greedily",
]  # fmt: skip

EVERYTHING = os.environ.get("HEADRACE_PARITY") == "all"
CUTS: dict[str, tuple[int, int | None]] = {
    "in one piece": (128, None),
    "in chunks": (7, None),
    "decode after chunks": (5, 11),
}
"""Tokens of a step, and of the prompt before tokens come one by one; None for a prompt that is all."""
if EVERYTHING:
    CUTS |= {"one by one": (1, None), "in chunks of a page": (4, None), "decode after a prefill": (128, 15)}
COUNT = 32
"""Tokens that an engine generates for each sequence."""


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
    for chunk, prompt in CUTS.values():
        for wanted, found in zip(alone, tested.logits(sequences, chunk, prompt), strict=True):
            assert torch.equal(found, wanted)


def check_engine(folder: Path, model: Any, ids: list[int], **options: Any) -> EngineStats:
    """Demand of an engine what a model of transformers generates and embeds.

    A prompt comes alone, in chunks. Then it comes again, behind the pages that it has left, together with two short
    ones, until pages run out and one of the three begins again.

    Args:
        folder: The folder that the model was saved to; it gets a tokenizer.
        model: The model.
        ids: The prompt: 64 tokens.
        options: More options of the engine.
    """
    spec = from_hf(read_hf_config(folder))
    tiny_models.write_tokenizer(folder)
    page = 4 * spec.cached_elements * 4  # tokens, elements, bytes
    pages = 32 if None in spec.windows else 11  # those behind a window are given back
    sizes = {"dtype": "float32", "page_size": 4, "max_batched_tokens": 18, "max_rows": 4, "max_context": 96}
    prompts = [ids, ids[20:26], ids[40:46]]

    async def run() -> tuple[list[Completion], EngineStats]:
        async with Engine(folder, **sizes, kv_memory=pages * page, **options) as engine:
            assert engine.info.page_bytes == page
            alone = await engine.generate(ids, SamplingParams(temperature=0, max_tokens=2))
            together, stats = await all_at_once(engine, prompts, COUNT), engine.stats()
            await _check_vectors(engine, model, ids[:17], ids[30:50])
            return [alone, *together], stats

    found, stats = anyio.run(run)
    for prompt, completion in zip([ids, *prompts], found, strict=True):
        tokens = completion.choices[0].token_ids
        assert tokens == greedily(model, prompt, tokens)
    assert [len(each.choices[0].token_ids) for each in found] == [2, COUNT, COUNT, COUNT]
    assert found[1].usage.cached_tokens >= len(ids) - 4, "its prefix was found"
    assert stats.preemptions > 0, "pages ran out"
    return stats


async def _check_vectors(engine: Engine, model: Any, query: list[int], document: list[int]) -> None:
    """Compare embeddings and their score with the normalised last hidden states of a model of transformers."""
    with torch.inference_mode():
        states = [model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in (query, document)]
    wanted = [torch.nn.functional.normalize(state, dim=0) for state in states]
    embedded = (await engine.embed([query])).vectors[0]
    torch.testing.assert_close(torch.from_numpy(embedded), wanted[0], rtol=0, atol=1e-4)
    score = float((await engine.score(query, [document])).scores[0])
    assert score == pytest.approx(float(wanted[0] @ wanted[1]), abs=1e-4)


def greedily(model: Any, ids: list[int], tokens: list[int]) -> list[int]:
    """The token that a model of transformers finds likeliest in the place of each of `tokens`, behind those before it.

    They are the given ones only where these are what the model generates greedily after `ids`.
    """
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    return [int(token) for token in logits.argmax(-1)]


async def all_at_once(engine: Engine, prompts: Sequence[list[int]], count: int) -> list[Completion]:
    """The greedy completions of prompts that an engine computes together."""
    params = SamplingParams(temperature=0, max_tokens=count)
    found: dict[int, Completion] = {}

    async def one(index: int) -> None:
        found[index] = await engine.generate(prompts[index], params)

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return [found[index] for index in range(len(prompts))]


def difference(
    spec: DecoderSpec, weights: DecoderWeights, ids: list[int], expected: Tensor, *, native: bool = False
) -> float:
    """How far the logits of a model with this arithmetic and these weights are from the expected ones, at most."""
    tested = ModelUnderTest.make(spec, weights, torch.float32, capacity(spec.vocab_size), native=native)
    (found,) = tested.logits([ids], 128)
    return float((found - expected).abs().max())
