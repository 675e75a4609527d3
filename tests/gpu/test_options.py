"""Rows with options beside rows without generate on the device what they generate on the CPU, token for token.

The exact checkpoint's logits are the same on both, and so are the changed ones: no row's choice can differ.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import anyio
import jsonschema
import pytest
import torch
from gpu.checkpoints import exact_logits, kv_bytes
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, open_engine
from gpu.options import KINDS, Answer, Case, answers, check_same
from random_schemas import random_schema

from headrace.engine import ResponseFormat, SamplingParams


def mixed(seed: int, count: int = 24) -> tuple[list[Case], list[Case]]:
    """Twice the same prompts, some of which begin alike, the second time with other options."""
    generator = random.Random(seed)
    shared = draw(40, 3)
    prompts = [draw(generator.randrange(1, 60), at) if at % 3 else [*shared, *draw(at, at)] for at in range(count)]
    return tuple([(prompt, KINDS[(at + turn) % len(KINDS)]) for at, prompt in enumerate(prompts)] for turn in (0, 4))  # type: ignore[return-value]


@pytest.mark.parametrize("cramped", [False, True], ids=["room for all", "chunked and preempted"])
def test_rows_with_options_are_those_of_the_cpu(zoo: Zoo, device: str, cramped: bool) -> None:
    """The second time on cached pages, in rows whose last requests asked for something else."""
    first, second = mixed(9)
    pages = kv_bytes(zoo.folder("speaking"), 24 if cramped else 600)
    options = {"max_rows": 12, "max_batched_tokens": 20} if cramped else {"max_rows": 40}

    async def run(device: str) -> list[Answer]:
        async with open_engine(zoo.folder("speaking"), device, max_context=128, kv_memory=pages, **options) as engine:
            found = await answers(engine, first) + await answers(engine, second)
            assert engine.stats().cached_tokens and (engine.stats().preemptions or not cramped)
            await at_rest(engine)
        return found

    check_same(anyio.run(run, device), anyio.run(run, "cpu"))


def test_each_is_what_it_is_alone(zoo: Zoo, device: str) -> None:
    cases = [(draw(3 + 5 * at, at), kind) for at, kind in enumerate(KINDS)]

    async def run() -> None:
        async with open_engine(zoo.folder("speaking"), device, max_rows=30, max_context=128) as engine:
            alone = [(await answers(engine, [case]))[0] for case in cases]
            check_same(await answers(engine, cases), alone)

    anyio.run(run)


def test_options_of_one_row_change_no_other(zoo: Zoo, device: str) -> None:
    """Sampled, with filters and without, in rows that ask for nothing, beside rows that ask for much."""
    plain = [
        SamplingParams(
            max_tokens=24, temperature=1.0, seed=seed, top_k=[0, 20][seed % 2], top_p=[1.0, 0.9][seed % 3 > 0]
        )
        for seed in range(12)
    ]
    prompts = [draw(7 + seed, seed) for seed in range(12)]

    async def run(beside: Sequence[Case]) -> list[tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}

        async def one(index: int) -> None:
            found[index] = tuple((await engine.generate(prompts[index], plain[index])).choices[0].token_ids)

        async with open_engine(zoo.folder("speaking"), device, max_rows=30, max_context=128) as engine:
            async with anyio.create_task_group() as tasks:
                for index in range(len(prompts)):
                    tasks.start_soon(one, index)
                await answers(engine, beside)
        return [found[index] for index in range(len(prompts))]

    assert anyio.run(run, [([5, 6, 7], KINDS[at]) for at in range(1, len(KINDS))]) == anyio.run(run, [])


def test_log_probabilities_are_those_of_a_float32_log_softmax(zoo: Zoo, device: str) -> None:
    """Of the logits as the model gives them, whatever a row asks for beside; of completion and of a long prompt."""
    exact_VV = torch.log_softmax(exact_logits().bfloat16().double(), 1)
    prompt = draw(400, 1)
    asked = SamplingParams(
        max_tokens=30, temperature=1.3, seed=1, frequency_penalty=1.0, top_k=50, logprobs=20, prompt_logprobs=3
    )

    async def run() -> None:
        async with open_engine(zoo.folder("speaking"), device, max_context=512) as engine:
            found = await engine.generate(prompt, asked)
        reports = [*(found.prompt_logprobs or []), *(found.choices[0].logprobs or [])]
        known = [*prompt, *found.choices[0].token_ids]
        assert len(reports) == len(known) and reports[0] is None
        for before, token, report in zip(known, known[1:], reports[1:], strict=False):
            assert report is not None and report.id == token
            line_V = exact_VV[before]
            pairs = [(token, report.logprob), *((other.id, other.logprob) for other in report.top_logprobs)]
            for other, value in pairs:
                assert value == pytest.approx(float(line_V[other]), abs=1e-4)
            assert report.rank == 1 + int((line_V > line_V[token]).sum())

    anyio.run(run)


def test_100_random_schemas_are_kept_at_temperature_1_5(zoo: Zoo, device: str) -> None:
    """In rows beside others that keep to nothing, whose tokens are what they are without them."""
    schemas = [random_schema(seed) for seed in range(100)]
    kept = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=800, response_format=ResponseFormat.json_schema(schema))
        for seed, schema in enumerate(schemas)
    ]
    free = [SamplingParams(temperature=1.0, seed=seed, max_tokens=100) for seed in range(20)]

    async def run() -> None:
        async with open_engine(zoo.folder("speaking"), device, max_rows=64, max_context=1024) as engine:
            alone = await engine.generate_many([draw(9, 1)] * len(free), free)
            found = await engine.generate_many([draw(9, 1)] * len([*free, *kept]), [*free, *kept])
            await at_rest(engine)
        assert [each.choices for each in found[: len(free)]] == [each.choices for each in alone]
        for schema, each in zip(schemas, found[len(free) :], strict=True):
            choice = each.choices[0]
            assert choice.finish_reason == "stop", (schema, choice.text)
            jsonschema.validate(json.loads(choice.text), schema)

    anyio.run(run)
