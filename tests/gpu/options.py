"""Requests that ask for all kinds of options, and what becomes of them, log-probabilities included; holds no tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from gpu.driving import PATIENCE

from headrace.engine import Engine, ResponseFormat, SamplingParams, TokenLogprobs

__all__ = ["KINDS", "Answer", "Case", "answers", "check_same"]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
Case = tuple[list[int], dict[str, Any]]


def shy(tokens: list[int], logits: Any) -> Any:
    """A `logits_processor`: what was said of late is said less, and the rest more boldly."""
    logits *= 1.5
    logits[tokens[-8:]] -= len(tokens) % 3
    return logits


KINDS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "logprobs": 3},
    {"repetition_penalty": 1.8, "temperature": 1.0, "seed": 5},
    {"logit_bias": {30: 6.0, 40: 5.5, 50: -99.0}, "frequency_penalty": 2.0, "temperature": 1.0, "seed": 3, "n": 3},
    {"allowed_token_ids": [20, 21, 22, 23, 24, 60], "temperature": 2.0, "seed": 4, "top_k": 3, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.8, "seed": 6, "prompt_logprobs": 4},
    {"logprobs": 20, "prompt_logprobs": 0},
    {"forbidden_token_ids": range(0, 512, 2), "bad_words": ["ab", "river"], "temperature": 0.9, "seed": 7},
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
        "temperature": 1.2,
        "min_p": 0.01,
        "seed": 11,
        "logprobs": 5,
        "prompt_logprobs": 20,
    },
    {"beam_width": 4, "n": 2, "max_tokens": 8},
    {"response_format": ResponseFormat.json_schema(SCHEMA), "temperature": 1.5, "seed": 8, "logprobs": 2, "n": 2},
    {"response_format": ResponseFormat.regex("[a-f]{3,40}"), "frequency_penalty": 1.0, "logit_bias": {97: 2.0}},
    {"response_format": ResponseFormat.json_schema(SCHEMA), "temperature": 1.2, "seed": 3},
    {"hook": shy, "temperature": 1.0, "seed": 9, "logprobs": 2, "presence_penalty": 0.5, "n": 2, "prompt_logprobs": 1},
    {"hook": shy, "response_format": ResponseFormat.regex("[a-f]{3,40}"), "top_k": 7, "temperature": 1.1, "seed": 2},
    {"best_of": 3, "n": 2, "temperature": 1.0, "seed": 12, "stop": ["q", "zz"], "include_stop_str_in_output": True},
    {"deterministic": True, "temperature": 1.0, "seed": 13, "logprobs": 1, "frequency_penalty": 0.4},
    {
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
        "stop": "never",
        "temperature": 1.6,
        "seed": 14,
    },
    {"beam_width": 3, "length_penalty": 0.5, "early_stopping": True, "max_tokens": 6},
    {"response_format": ResponseFormat.lark('start: "<" start ">" | "a".."f"'), "temperature": 1.3, "seed": 15},
    {"response_format": ResponseFormat.choice(["river bank", "river", "bank"]), "temperature": 1.3, "seed": 16},
]
"""Some rows want nothing, and everything comes beside everything else; for the checkpoint `speaking`."""


@dataclass
class Answer:
    """What a request gave."""

    tokens: list[int]
    """Of all choices."""
    texts: list[str]
    reports: list[TokenLogprobs | None]
    """On the tokens, and then on the prompt."""


async def answers(engine: Engine, cases: Sequence[Case]) -> list[Answer]:
    """All at once; what ends by its stop tokens is shorter than 24 tokens."""
    found: dict[int, Answer] = {}

    async def one(index: int) -> None:
        prompt, asked = cases[index]
        fields = {"temperature": 0.0, "max_tokens": 24} | asked
        hook = fields.pop("hook", None)
        completion = await engine.generate(prompt, SamplingParams(**fields), logits_processor=hook)
        tokens = [token for choice in completion.choices for token in choice.token_ids]
        reports = [report for choice in completion.choices for report in choice.logprobs or []]
        assert len(reports) == len(tokens) * ("logprobs" in asked)
        texts = [choice.text for choice in completion.choices]
        found[index] = Answer(tokens, texts, [*reports, *(completion.prompt_logprobs or [])])

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for index in range(len(cases)):
                tasks.start_soon(one, index)
    return [found[index] for index in range(len(cases))]


def check_same(found: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    """Assert that tokens, ranks and orders are equal, and log-probabilities but for the rounding of their sums."""
    for place, (each, right) in enumerate(zip(found, wanted, strict=True)):
        assert each.tokens == right.tokens and each.texts == right.texts, place
        for report, expected in zip(each.reports, right.reports, strict=True):
            assert (report is None) == (expected is None), place
            if report is not None and expected is not None:
                assert _discrete(report) == _discrete(expected), (place, report, expected)
                assert _values(report) == pytest.approx(_values(expected), abs=1e-4), place


def _discrete(report: TokenLogprobs) -> list[tuple[int, int]]:
    return [(report.id, report.rank), *((other.id, other.rank) for other in report.top_logprobs)]


def _values(report: TokenLogprobs) -> list[float]:
    return [report.logprob, *(other.logprob for other in report.top_logprobs)]
