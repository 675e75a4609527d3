"""Requests that keep to formats of every kind, beside one that does not, for engines with drafts; holds no tests."""

from __future__ import annotations

from typing import Any

import anyio
from speculating import Answers

from headrace.engine import Engine, ResponseFormat, SamplingParams

__all__ = ["ASKED", "JSON", "PROMPTS", "ask_all"]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "the_kind_of_thing": {"enum": ["river", "mountain"]},
        "the_number_of_them": {"type": "integer", "minimum": 0, "maximum": 999},
        "names": {"type": "array", "items": {"enum": ["ab", "abc", "b"]}, "maxItems": 3},
    },
    "required": ["the_kind_of_thing", "the_number_of_them", "names"],
    "additionalProperties": False,
}
JSON = ResponseFormat.json_schema(SCHEMA)
REGEX = ResponseFormat.regex("(one|two|three)( (one|two|three)){2,8}, and the rest is (known|open)\\.")
CHOICE = ResponseFormat.choice(["stone", "stony ground", "rain"])
GRAMMAR = ResponseFormat.lark('start: item (", " item)*\nitem: "red" | "green" | /[0-9]{1,3}/')
PROMPTS = ["one two three one two three one two", "a", '{"the_kind_of_thing": "river", "the_number_of_them": 12']
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "response_format": JSON},
    {"temperature": 1.0, "seed": 1, "response_format": JSON},
    {"temperature": 1.0, "seed": 2, "response_format": JSON, "logprobs": 2},
    {"temperature": 1.3, "seed": 3, "response_format": JSON, "n": 2, "repetition_penalty": 1.2},
    {"temperature": 0.0, "response_format": REGEX},
    {"temperature": 1.0, "seed": 4, "response_format": REGEX, "top_k": 30},
    {"temperature": 1.0, "seed": 5, "response_format": REGEX, "stop": ["two three"]},
    {"temperature": 1.0, "seed": 6, "response_format": REGEX, "max_tokens": 21},
    {"temperature": 0.0, "response_format": CHOICE},
    {"temperature": 1.5, "seed": 7, "response_format": CHOICE, "n": 3},
    {"temperature": 1.0, "seed": 8, "response_format": GRAMMAR},
    {"temperature": 1.0, "seed": 9, "response_format": {"type": "json_object"}},
    {"temperature": 1.0, "seed": 10},
]  # fmt: skip


async def ask_all(engine: Engine) -> Answers:
    found: Answers = {}

    async def one(index: int) -> None:
        params = SamplingParams(**({"max_tokens": 60} | ASKED[index]))
        found[index] = await engine.generate(PROMPTS[index % len(PROMPTS)], params)

    async with anyio.create_task_group() as group:
        for index in range(len(ASKED)):
            group.start_soon(one, index)
    return found
