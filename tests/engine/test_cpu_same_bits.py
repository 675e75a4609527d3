"""With quantised weights on a CPU, an answer is the same alone, in a batch, behind a prefix hit and in chunks."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from headrace.engine import Engine, SamplingParams
from headrace.ops.cpu.native.library import library

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2"),
    pytest.mark.xdist_group("precision"),
]

PROMPTS = [[(7 * row + 13 * at) % 49_000 + 100 for at in range(20 + 30 * row)] for row in range(5)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)

Answer = list[tuple[int, float, list[float]]]


async def answer(engine: Engine, prompt: list[int]) -> Answer:
    """The tokens of an answer with their log-probabilities and those of the second best, as exact floats."""
    completion = await engine.generate(prompt, PARAMS)
    found = completion.choices[0].logprobs
    assert found is not None
    return [(each.id, each.logprob, [other.logprob for other in each.top_logprobs]) for each in found]


async def answers(engine: Engine) -> list[Answer]:
    """The answers to all prompts at once."""
    found: dict[int, Answer] = {}

    async def one(index: int) -> None:
        found[index] = await answer(engine, PROMPTS[index])

    async with anyio.create_task_group() as group:
        for index in range(len(PROMPTS)):
            group.start_soon(one, index)
    return [found[index] for index in range(len(PROMPTS))]


def test_an_answer_has_the_same_bits_in_every_company(smollm2: Path) -> None:
    async def run() -> None:
        async with Engine(smollm2, kv_memory="64MiB", cpu_threads=1) as engine:
            alone = [await answer(engine, prompt) for prompt in PROMPTS]
            behind_a_hit = [await answer(engine, prompt) for prompt in PROMPTS]
            assert behind_a_hit == alone
            assert engine.stats().cached_tokens > 0
            assert await answers(engine) == alone
        async with Engine(smollm2, kv_memory="64MiB", cpu_threads=2, max_batched_tokens=24, max_rows=8) as engine:
            assert await answers(engine) == alone

    anyio.run(run)
