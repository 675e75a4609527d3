"""Rows with options beside rows without generate on the device what they generate on the CPU, token for token.

The exact checkpoint's logits are the same on both, and so are the changed ones: greedy rows cannot differ.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.driving import PATIENCE, at_rest, draw, open_engine

from headrace.engine import Engine, SamplingParams

KINDS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.8},
    {"logit_bias": {30: 6.0, 40: 5.5, 50: -99.0}, "frequency_penalty": 2.0},
    {"allowed_token_ids": [20, 21, 22, 23, 24, 60]},
    {"forbidden_token_ids": range(0, 512, 2), "bad_words": ["ab", "river"]},
    {"min_tokens": 12, "stop_token_ids": list(range(100, 116)), "repetition_penalty": 0.7},
    {
        "presence_penalty": -1.0,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {70: 3.5, 80: -2.0, 90: 1.0},
        "allowed_token_ids": list(range(5, 400)),
        "forbidden_token_ids": [11, 12],
        "min_tokens": 6,
        "stop_token_ids": [33, 34, 35],
    },
]


async def outputs(engine: Engine, cases: Sequence[tuple[list[int], dict[str, Any]]]) -> list[tuple[int, ...]]:
    """All at once."""
    found: dict[int, tuple[int, ...]] = {}

    async def one(index: int) -> None:
        prompt, asked = cases[index]
        params = SamplingParams(temperature=0.0, max_tokens=24, **asked)
        found[index] = tuple((await engine.generate(prompt, params)).choices[0].token_ids)

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for index in range(len(cases)):
                tasks.start_soon(one, index)
    return [found[index] for index in range(len(cases))]


@pytest.mark.parametrize("cramped", [False, True], ids=["room for all", "chunked and preempted"])
def test_rows_with_options_are_those_of_the_cpu(zoo: Zoo, device: str, cramped: bool) -> None:
    """Twice: the second time on cached pages, in rows whose last requests asked for something else."""
    generator = random.Random(9)
    prompts = [draw(generator.randrange(1, 90), generator.random()) for _ in range(40)]
    first = [(prompt, KINDS[at % len(KINDS)]) for at, prompt in enumerate(prompts)]
    second = [(prompt, KINDS[(at + 3) % len(KINDS)]) for at, prompt in enumerate(prompts)]
    pages = kv_bytes(zoo.folder("exact"), 18 if cramped else 400)
    options = {"max_rows": 12, "max_batched_tokens": 20} if cramped else {"max_rows": 40}

    async def run(device: str) -> list[tuple[int, ...]]:
        async with open_engine(zoo.folder("exact"), device, max_context=128, kv_memory=pages, **options) as engine:
            found = await outputs(engine, first) + await outputs(engine, second)
            assert bool(engine.stats().preemptions) is cramped
            await at_rest(engine)
        return found

    assert anyio.run(run, device) == anyio.run(run, "cpu")


def test_options_of_one_row_change_no_other(zoo: Zoo, device: str) -> None:
    """Sampled, with filters and without, in rows that ask for nothing, beside rows that ask for much."""
    plain = [
        SamplingParams(
            max_tokens=24, temperature=1.0, seed=seed, top_k=[0, 20][seed % 2], top_p=[1.0, 0.9][seed % 3 > 0]
        )
        for seed in range(12)
    ]
    prompts = [draw(7 + seed, seed) for seed in range(12)]

    async def run(beside: Sequence[tuple[list[int], dict[str, Any]]]) -> list[tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}

        async def one(engine: Engine, index: int) -> None:
            found[index] = tuple((await engine.generate(prompts[index], plain[index])).choices[0].token_ids)

        async with open_engine(zoo.folder("exact"), device, max_rows=20, max_context=128) as engine:
            async with anyio.create_task_group() as tasks:
                for index in range(len(prompts)):
                    tasks.start_soon(one, engine, index)
                await outputs(engine, beside)
        return [found[index] for index in range(len(prompts))]

    assert anyio.run(run, [([5, 6, 7], KINDS[at]) for at in range(1, 8)]) == anyio.run(run, [])
