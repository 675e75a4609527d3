"""Numbers that a schema admits: exact beyond 2^53, refused by name beyond 2^63, and never of digits without end."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.engine.grammar.json_schemas import JSON_STYLE, exact_schema

END = 256
MOST = 2**53 - 1


class _Bytes:
    """A vocabulary of single bytes and an end."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENS = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=END)


def matcher_of(schema: dict[str, Any]) -> LLMatcher:
    source = LLMatcher.grammar_from_json_schema(json.dumps(exact_schema(schema)), overrides=JSON_STYLE)
    matcher = LLMatcher(TOKENS, source, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    return matcher


def takes(schema: dict[str, Any], text: str) -> bool:
    matcher = matcher_of(schema)
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode())) and matcher.is_accepting()


def written(schema: dict[str, Any], chance: random.Random, most: int) -> str:
    """A text of random bytes that the schema admits, which goes on while it may."""
    matcher, text = matcher_of(schema), b""
    while True:
        mask = matcher.compute_bitmask()
        ids = [token for token in range(END) if mask[token // 8] >> token % 8 & 1]
        if not ids:
            return text.decode()
        token = chance.choice(ids)
        text += bytes([token])
        assert len(text) <= most, (schema, text)
        matcher.consume_token(token)


INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "text", "admitted"),
    [
        (INTEGER, str(MOST), True),
        (INTEGER, str(-MOST), True),
        (INTEGER, 17 * "9", False),
        (INTEGER | {"maximum": 2**63 - 1}, str(10**18), True),  # as an int64 is described
        (INTEGER | {"minimum": -(2**63), "maximum": 2**63 - 1}, str(-(10**18)), True),
        (INTEGER | {"minimum": 0, "maximum": 2**64 - 1}, str(10**18), True),
        (INTEGER | {"minimum": 0, "maximum": 2**64 - 1}, "-1", False),
        (INTEGER | {"minimum": 2**53 + 1, "maximum": 2**53 + 9}, str(2**53), False),
        (INTEGER | {"minimum": 2**53 + 1, "maximum": 2**53 + 9}, str(2**53 + 3), True),
        (INTEGER | {"minimum": 10**17}, str(10**17), True),
        (INTEGER | {"exclusiveMinimum": 10**17}, str(10**17), False),
        (INTEGER | {"maximum": -(10**17)}, str(-(10**17)), True),
        ({"type": ["integer", "null"], "minimum": 3}, 20 * "9", False),
        ({"type": ["integer", "null"], "minimum": 3}, "null", True),
        ({"const": 10**17}, str(10**17), True),
        ({"enum": [2**62, "a"]}, str(2**62), True),
        (NUMBER, "3.25", True),
        (NUMBER, "-0.000000001", True),
        (NUMBER, "0.0000000001", False),
        (NUMBER, 20 * "1", False),
        (NUMBER, "1e999", False),
        (NUMBER | {"maximum": 1e300}, "7", True),
        (NUMBER | {"multipleOf": 0.25}, 20 * "1", False),
        (NUMBER | {"minimum": 0, "maximum": 1e-9}, "0.0000000005", True),
        ({"type": "number", "enum": [1e-12, 3]}, "0.000000000001", True),
    ],
)
def test_what_number_is_admitted(schema: dict[str, Any], text: str, admitted: bool) -> None:
    assert takes(schema, text) == admitted
    if admitted:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"const": 2**53 + 1}, "const"),
        ({"const": {"a": [2**64]}}, "const"),
        ({"enum": [1, -(2**63) - 1]}, "enum"),
        ({"enum": [1e30]}, "enum"),  # which would be written as 10^30, another number
        ({"const": 10**400}, "const"),
        (INTEGER | {"minimum": 2**63}, "minimum"),
        (INTEGER | {"exclusiveMaximum": -(2**64)}, "exclusiveMaximum"),
        ({"properties": {"a": NUMBER | {"minimum": 1e20}}}, "minimum"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}[: ]"):
        exact_schema(schema)


def random_numbers(chance: random.Random) -> dict[str, Any]:
    """A schema of numbers whose bounds lie around the limits of integers and doubles."""
    around = [0, 1.5, 10**6, 2**53, 10**17, 2**62, 2**63]
    ends = sorted(chance.choice([1, -1]) * chance.choice(around) + chance.randint(-9, 9) for _ in range(2))
    schema: dict[str, Any] = {"type": chance.choice(["integer", "number", ["number", "null"]])}
    if chance.random() < 0.7:
        schema[chance.choice(["minimum", "exclusiveMinimum"])] = ends[0]
    if chance.random() < 0.7:
        schema[chance.choice(["maximum", "exclusiveMaximum"])] = ends[1] + 3
    return schema


def test_random_numbers_are_kept_and_end() -> None:
    chance, kept = random.Random(16), 0
    for _ in range(60):
        schema = random_numbers(chance)
        try:
            matcher_of(schema)
        except (ValueError, AssertionError) as refusal:  # of a range that holds no double
            assert re.search("imum: |Unsatisfiable", str(refusal)), (schema, refusal)
            continue
        for _ in range(3):
            text = written(schema, chance, most=32)
            jsonschema.validate(json.loads(text), schema)
            kept += 1
    assert kept > 80


# -- numbers in values that a schema leaves free --------------------------------------------------------------------

FREE: list[dict[str, Any]] = [
    {},
    {"type": "object"},
    {"type": "array"},
    {"type": ["object", "null"]},
    {"type": "object", "properties": {"a": {"type": "string"}}},
    {"type": "object", "properties": {"a": True, "b": {}}, "required": ["a"]},
    {"properties": {"a": {"type": "integer"}}, "title": "T"},
    {"anyOf": [{"type": "object", "description": "whatever"}, {"type": "null"}]},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "object"}}},
    {"type": "object", "patternProperties": {"^x": {"type": "string"}}, "minProperties": 1},
    {"type": "array", "prefixItems": [{"type": "string"}], "items": True},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}]},
]
VALUES: list[Any] = [
    None,
    True,
    7,
    "s",
    [],
    ["s", 1.5, {"a": []}],
    {},
    {"a": 1},
    {"a": "s", "z": {"q": [1.5, None, {}]}},
    {"x": {"k": -2.25}},
    {"x": "s"},
    {"a": {"a": [[]]}, "b": False},
]


@pytest.mark.parametrize("schema", FREE, ids=json.dumps)
def test_free_values_are_all_values_with_numbers_that_end(schema: dict[str, Any]) -> None:
    matcher = matcher_of(schema)
    for value in VALUES:
        text = json.dumps(value).encode()
        mine = matcher.deep_copy()
        taken = mine.try_consume_tokens(list(text)) == len(text) and mine.is_accepting()
        expected = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert taken == expected, value
    if "allOf" not in schema:  # in which a value has to satisfy two schemas
        for text in ('{"z": %s}', '["s", %s]', '{"z": [{"y": %s}]}'):
            assert not takes(schema, text % ("0." + 40 * "3")) and not takes(schema, text % (40 * "3"))


def test_a_model_that_goes_on_with_a_number_in_a_free_value_comes_to_its_end() -> None:
    for begun in ('{"a": ', '{"a": [1, ', '{"a": {"b": -0.'):
        matcher, text = matcher_of({"type": "object"}), begun
        assert matcher.try_consume_tokens(list(begun.encode())) == len(begun)
        while True:
            mask = matcher.compute_bitmask()
            going_on = [char for char in "7e.1" if mask[ord(char) // 8] >> ord(char) % 8 & 1]
            if not going_on:
                break
            text += going_on[0]
            assert len(text) < len(begun) + 30
            matcher.consume_token(ord(going_on[0]))
