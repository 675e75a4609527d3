"""Drafts on a GPU change no token where rounding changes none, and elsewhere as little as batches of other sizes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu.conftest import Zoo
from gpu.drafting import PROMPTS, SPECULATING, draft_by_answers, random_depths, run, same_answers, told
from gpu.judge import Output

from headrace.engine import ResponseFormat

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
