"""Classes as response formats: schemas closed as OpenAI's strict mode closes them, and answers as instances."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import anyio
import pydantic
import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from headrace.engine import LLM, Choice, Completion, Engine, InvalidParams, ResponseFormat, SamplingParams, Usage


class Mood(Enum):
    CALM = "calm"
    WILD = "wild"


class Bank(BaseModel):
    properties: Literal["sand", "rock"] = "sand"
    towns: list[Literal["Basel", "Bonn"]] = Field(default_factory=list, max_length=2)


class River(BaseModel):
    name: str = Field(max_length=12)
    km: int = Field(ge=1, le=99)
    mood: Mood = Mood.CALM
    left: Bank
    right: Bank | None = None
    depths: dict[str, int] = Field(default_factory=dict, max_length=1)


@dataclass
class Point:
    x: int
    y: int = 0


class Named(TypedDict, total=False):
    name: str


def schema_of(described: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ResponseFormat.json_schema(described).source)
    return found


def test_objects_are_closed_as_openais_client_closes_them() -> None:
    theirs = to_strict_json_schema(River)
    ours = schema_of(River)
    for mine, other in ((ours, theirs), (ours["$defs"]["Bank"], theirs["$defs"]["Bank"])):
        assert mine["required"] == other["required"] == list(mine["properties"])
        assert mine["additionalProperties"] is other["additionalProperties"] is False
    assert ours["properties"]["depths"]["additionalProperties"] == {"type": "integer"}
    assert schema_of(Point)["required"] == ["x", "y"] and schema_of(Named)["required"] == ["name"]


def test_a_format_of_a_class_is_a_value_as_any_other() -> None:
    made = ResponseFormat.json_schema(River)
    assert made == ResponseFormat.json_schema(River) and hash(made) == hash(ResponseFormat.json_schema(River))
    assert made.described is River and SamplingParams(response_format=made).response_format.described is River  # type: ignore[union-attr]
    assert ResponseFormat.model_validate(made.model_dump()).source == made.source
    assert ResponseFormat.json_schema(made.source).described is None


@pytest.mark.parametrize("described", [type("Plain", (), {}), type(lambda: None)])
def test_a_class_without_a_schema_is_refused(described: Any) -> None:
    with pytest.raises(InvalidParams, match="no JSON schema describes this class") as caught:
        ResponseFormat.json_schema(described)
    assert caught.value.field == "response_format"


def choice(text: str, **more: Any) -> Choice:
    return Choice(index=0, text=text, token_ids=[], **{"finish_reason": "stop", **more})


def test_a_choice_that_is_cut_or_has_no_class_has_no_instance() -> None:
    whole = choice('{"x": 1, "y": 2}', described=Point)
    assert whole.parsed == Point(1, 2) and whole.parsed is whole.parsed
    assert Completion(prompt_token_ids=[], choices=[whole], usage=Usage()).parsed == Point(1, 2)
    assert replace(whole, finish_reason="length").parsed is None
    assert choice("1").parsed is None
    with pytest.raises(pydantic.ValidationError):
        _ = choice('{"x": "y"}', described=Point).parsed


def test_a_model_answers_with_instances(smollm2: Path) -> None:
    format_of = ResponseFormat.json_schema(River)
    params = SamplingParams(max_tokens=120, seed=3, n=2, response_format=format_of)

    async def run() -> list[Completion]:
        async with Engine(smollm2, kv_memory="32MiB") as engine:
            streamed = await engine.generate("The Rhine, as JSON: ", params)
            ranked = await engine.generate("The Rhine, as JSON: ", SamplingParams(
                max_tokens=120, seed=3, best_of=2, response_format=format_of
            ))  # fmt: skip
            return [streamed, ranked]

    for completion in anyio.run(run):
        for each in completion.choices:
            assert each.finish_reason == "stop" and isinstance(each.parsed, River)
            assert each.parsed.model_dump(mode="json") == json.loads(each.text)
        assert completion.parsed is completion.choices[0].parsed
    with LLM(smollm2, kv_memory="32MiB") as llm:
        found = llm.generate(
            "A point: ", SamplingParams(response_format=ResponseFormat.json_schema(Bank)), progress=False
        )
        assert isinstance(found.parsed, Bank)
