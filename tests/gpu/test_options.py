"""Rows with options beside rows without generate on the device what they generate on the CPU, token for token.

The exact checkpoint's logits are the same on both, and so are the changed ones: no row's choice can differ.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import anyio
import jsonschema
import pytest
import torch
from gpu.checkpoints import exact_logits, kv_bytes
from gpu.choosing import choose
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, open_engine
from gpu.options import KINDS, Answer, Case, answers, check_same
from random_schemas import random_schema
from slow_sampling import shaped

from headrace.engine import ResponseFormat, SamplingParams
from headrace.engine.intake.requests import Asking, make_requests
from headrace.engine.scheduling.asked import Asked
from headrace.engine.tokens.tokenizer import Tokenizer


def mixed(seed: int, count: int) -> tuple[list[Case], list[Case]]:
    """Twice the same prompts, some of which begin alike, the second time with other options."""
    generator = random.Random(seed)
    shared = draw(40, 3)
    prompts = [draw(generator.randrange(1, 60), at) if at % 3 else [*shared, *draw(at, at)] for at in range(count)]
    first, second = (
        [(prompt, KINDS[(at + turn) % len(KINDS)]) for at, prompt in enumerate(prompts)] for turn in (0, 4)
    )
    return first, second


@pytest.mark.parametrize("cramped", [False, True], ids=["room for all", "chunked and preempted"])
def test_rows_with_options_are_those_of_the_cpu(zoo: Zoo, device: str, cramped: bool) -> None:
    """The second time on cached pages, in rows whose last requests asked for something else."""
    first, second = mixed(9, 26)
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


EACH: dict[str, list[Any]] = {
    "presence_penalty": [-1.5, 0.7, 2.0],
    "frequency_penalty": [-0.5, 0.3, 2.0],
    "repetition_penalty": [0.6, 1.3, 5.0],
    "logit_bias": [{40: 3.5, 41: 3.0, 42: -7.0}, dict.fromkeys(range(0, 512, 3), 0.375)],
    "allowed_token_ids": [[30, 31, 32], list(range(0, 512, 5))],
    "forbidden_token_ids": [[30, 31, 32], list(range(0, 512, 2))],
    "bad_words": [["a", "bc", "de f"], [chr(97 + at) * 2 for at in range(20)]],
    "min_tokens": [1, 9],
    "temperature": [0.4, 1.7, 5e-324, 1e300],
    "top_k": [1, 5, 100],
    "top_p": [0.2, 0.9],
    "min_p": [0.05, 0.5],
}
SAMPLED = ("top_k", "top_p", "min_p")


def slowly(device: str, prompt: list[int], asked: Asked) -> list[int]:
    """What the exact checkpoint goes on with, by the slow account of each option and the device's sampler."""
    table_VV = exact_logits().bfloat16().float()
    ids = list(prompt)
    while len(ids) < asked.limit and not (len(ids) > len(prompt) and ids[-1] in asked.stop_ids):
        values = table_VV[ids[-1]]
        if asked.shaping is not None:
            values = torch.tensor(shaped(values.tolist(), ids, len(prompt), asked.shaping))
        ids += choose(device, values[None].float(), [asked.sampling], [len(ids)])
    return ids[len(prompt) :]


def test_each_parameter_is_what_the_slow_account_gives(zoo: Zoo, device: str) -> None:
    """Alone and with one other, all in one batch."""
    generator = random.Random(4)
    asked: list[dict[str, Any]] = [{field: value} for field, values in EACH.items() for value in values]
    for _ in range(20):
        fields = generator.sample(sorted(EACH), 2)
        asked.append({field: generator.choice(EACH[field]) for field in fields})
    cases: list[Case] = []
    for at, each in enumerate(asked):
        sampled = {"temperature": 1.0} if any(field in each for field in SAMPLED) else {"temperature": 0.0}
        stops = {"stop_token_ids": list(range(0, 512, 7))[:16], "seed": at, "max_tokens": 16}
        cases.append(([97 + at % 9, *draw(1 + at % 20, at)], sampled | stops | each))

    async def run() -> list[Answer]:
        async with open_engine(zoo.folder("speaking"), device, max_rows=40, max_context=128) as engine:
            return await answers(engine, cases)

    found = anyio.run(run)
    tokenizer = Tokenizer.from_folder(zoo.folder("speaking"))
    for (prompt, fields), answer in zip(cases, found, strict=True):
        asking = Asking(SamplingParams(**fields), None, None, None, 0)
        request = make_requests(prompt, asking, tokenizer, 512, generator)[0]
        assert answer.tokens == slowly(device, prompt, request.asked), fields


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
