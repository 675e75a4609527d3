"""Grammars of forced calls: whatever a model writes within one is read as calls that satisfy the tools' schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.engine import InvalidParams, ResponseFormat
from headrace.engine.tools import (
    ReasoningMode,
    ReasoningTags,
    Tool,
    ToolChoice,
    call_structure,
    detect,
    format_names,
    parse,
    parser_class,
)
from headrace.server.protocol.forced import answer_format, checked

END = 256
HARMONY = detect("<|channel|>").tags
SCHEMAS: dict[str, dict[str, Any]] = {
    "find": {  # whose type goes without saying
        "properties": {"text": {"type": "string", "maxLength": 5}, "deep": {"$ref": "#/$defs/deep"}},
        "required": ["text"],
        "additionalProperties": False,
        "$defs": {"deep": {"enum": ["a\n", "é\\u00e9", "</tool_call>", None]}},
    },
    "wait-2": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [Tool(name=name, parameters=schema) for name, schema in SCHEMAS.items()]


class Bytes:
    """A vocabulary of single bytes and an end."""

    bos_token_id, eos_token_id, special_token_ids = None, END, [END]
    tokens = [bytes([value]) for value in range(256)] + [b"<end>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def matcher_of(wanted: ResponseFormat | None) -> LLMatcher:
    assert wanted is not None and wanted.kind == "lark"
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(wanted.source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes(wanted: ResponseFormat | None, text: str) -> bool:
    """Whether `text` may be a whole answer."""
    matcher = matcher_of(wanted)
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


def walk(wanted: ResponseFormat | None, rng: random.Random, before: str) -> str:
    """A random answer that begins with `before`."""
    matcher = matcher_of(wanted)
    written = list(before.encode())
    assert matcher.try_consume_tokens(written) == len(written)
    while True:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(END + 1) if mask[token // 8] >> (token % 8) & 1]
        token = END if END in allowed and (rng.random() < 0.3 or len(written) > 400) else rng.choice(allowed)
        if len(written) > 200:
            token = next((each for each in closing(bytes(written)) if each in allowed), token)
        if token == END:
            return bytes(written).decode()
        written.append(token)
        assert matcher.consume_token(token)


def closing(written: bytes) -> list[int]:
    """What ends a text, a list or an object, the likeliest first, so that a walk comes to an end."""
    mark = b'<|"|>'
    begun = next(count for count in (4, 3, 2, 1, 0) if written.endswith(mark[:count]))
    return [END, *mark[begun : begun + 1], *b'"}])']


@pytest.mark.parametrize("reasoning", ["none", "tagged", "opened"])
@pytest.mark.parametrize("name", format_names())
@pytest.mark.parametrize("choice", [ToolChoice(mode="required"), ToolChoice(mode="named", name="find")])
def test_whatever_is_written_is_a_call(name: str, choice: ToolChoice, reasoning: ReasoningMode) -> None:
    rng = random.Random(f"{name} {reasoning} {choice.mode}")
    calls = 0
    for parallel in (True, False):
        structure = call_structure(parser_class(name), TOOLS, choice, parallel)
        tags = HARMONY if name == "harmony" else ReasoningTags()
        wanted = answer_format(None, structure, reasoning, tags)
        start, end = tags.opens[0], tags.closes[0]
        for _ in range(8):
            before = {"none": "", "tagged": f"{start}Hm.{end}", "opened": f"Hm.{end}\n\n"}[reasoning]
            text = walk(wanted, rng, before)
            if name == "harmony" and reasoning == "opened":
                text = start + text  # no prompt of gpt-oss ends within reasoning
            parsed = parse(text, name, reasoning, tags=tags, offered=TOOLS)
            assert not parsed.content and parsed.reasoning == ("" if reasoning == "none" else "Hm.")
            for call in parsed.tool_calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
                assert call.complete and (choice.mode == "required" or call.name == "find")
            calls += len(parsed.tool_calls)
            assert len(parsed.tool_calls) == 1 or (parallel and choice.mode == "required" and parsed.tool_calls)
    assert calls > 16 or choice.mode == "named"


def test_reasoning_comes_first_where_the_prompt_has_begun_it() -> None:
    structure = call_structure(parser_class("hermes"), TOOLS, ToolChoice(mode="named", name="wait-2"))
    call = '<tool_call>\n{"name": "wait-2", "arguments": {}}\n</tool_call>'
    expected = {"none": (True, False, False), "tagged": (True, True, False), "opened": (False, True, True)}
    mode: Any
    for mode, answers in expected.items():
        wanted = answer_format(None, structure, mode)
        texts = (call, f"<think>a</think>{call}", f"a <b\n</think>\n\n{call}")
        assert tuple(takes(wanted, text) for text in texts) == answers, mode
        assert not takes(wanted, f"Well. {call}") and not takes(wanted, f"{call} ")


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (ResponseFormat.json_schema({"type": "array", "items": {"type": "integer"}}), "[1, 2]", "[1,2]"),
        (ResponseFormat.json_object(), '{"a": {}}', "[]"),
        (ResponseFormat.regex(r"a/b\/[\n/]c|\\"), "a/b/\nc", "a/bc"),
        (ResponseFormat.regex(r"a/b\/[\n/]c|\\"), "\\", "/"),
        (ResponseFormat.regex("x\ny"), "x\ny", "xny"),
        (ResponseFormat.choice(["a/b", "\\n", "né\n"]), "\\n", "\n"),
        (ResponseFormat.choice(["a/b", "\\n", "né\n"]), "né\n", "nén"),
    ],
)
def test_content_behind_reasoning_or_beside_calls(wanted: ResponseFormat, good: str, bad: str) -> None:
    assert answer_format(wanted, None, "none") is wanted
    opened = answer_format(wanted, None, "opened")
    assert takes(opened, f"So</think>{good}") and not takes(opened, f"So</think>{bad}") and not takes(opened, good)
    structure = call_structure(parser_class("hermes"), TOOLS, ToolChoice(mode="required"))
    beside = answer_format(wanted, structure, "none")
    assert takes(beside, good) and not takes(beside, bad)
    assert takes(beside, '<tool_call>\n{"name": "wait-2", "arguments": {}}\n</tool_call>')


DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {
            "type": "object",
            "properties": {"City": {"type": "string", "minLength": 1, "maxLength": 4}, "at": {"$ref": "#/$defs/point"}},
            "required": ["City"],
        },
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}, "minItems": 1},
        "unit": {"enum": ["C", "F"]},
        "limit": {"type": ["number", "null"], "minimum": 0},
        "then": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"const": "<"}, "maxItems": 2}]},
        "tree": {"$ref": "#/$defs/tree"},
        "free": {"type": "object"},
        "sizes": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["unit", "days"],
    "$defs": {
        "point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False},
    },
}


@pytest.mark.parametrize("name", ["gemma4", "olmo3", "pythonic"])
def test_arguments_of_any_depth_satisfy_their_schema(name: str) -> None:
    tools = [Tool(name="go", parameters=DEEP)]
    structure = checked(call_structure(parser_class(name), tools, ToolChoice(mode="required"), parallel=False))
    wanted, rng, seen = answer_format(None, structure, "none"), random.Random(name), set()
    for _ in range(60):
        (call,) = parse(walk(wanted, rng, ""), name, offered=tools).tool_calls
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, DEEP)
        seen |= arguments.keys()
    assert seen == DEEP["properties"].keys()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "gemma4",
            '<|tool_call>call:go{days:[3,31],unit:<|"|>C<|"|>,where:{at:[1,2],City:<|"|>a"b<|"|>}}<tool_call|>',
            '<|tool_call>call:go{days:[32],unit:<|"|>C<|"|>}<tool_call|>',
        ),
        ("gemma4", '<|tool_call>call:go{days:[3],unit:<|"|>C<|"|>}<tool_call|>', "<|tool_call>call:go{}<tool_call|>"),
        (
            "olmo3",
            '<function_calls>go(days=[3], unit="C", limit=null)\ngo(days=[1, 2], unit="F")</function_calls>',
            '<function_calls>go(days=[3], unit="C", limit=null), go(days=[1, 2], unit="F")</function_calls>',
        ),
        ("pythonic", '[go(days=[3], unit="C"), go(days=[4], unit="F")]', '[go(unit="C")]'),
    ],
)
def test_calls_are_forced_as_templates_write_them(name: str, good: str, bad: str) -> None:
    tools = [Tool(name="go", parameters=DEEP)]
    wanted = answer_format(None, call_structure(parser_class(name), tools, ToolChoice(mode="required")), "none")
    assert takes(wanted, good) and not takes(wanted, bad)


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("pythonic", of(**{"a b": {}})),
        ("pythonic", {"anyOf": [of(a={})]}),
        ("olmo3", of(**{"é": {}})),
        ("glm45", of(a={"type": "string", "maxLength": "x"})),
        ("gemma4", {"anyOf": [of(a={})]}),
        ("gemma4", of(**{"a{": {}})),
        ("gemma4", of(a={"type": "string", "contentEncoding": "base64"})),
        ("gemma4", of(a={"oneOf": [{"type": "integer"}, {"type": "number"}]})),
        ("gemma4", of(a={"type": "array", "uniqueItems": True})),
        ("gemma4", of(a={"type": "array", "items": False})),
        ("gemma4", of(a={"type": "object", "required": ["b"]})),
        ("gemma4", of(a={"type": "object", "properties": 1})),
        ("gemma4", of(a={"type": "planted"})),
        ("gemma4", of(a={"enum": 'a"'})),
        ("gemma4", of(a={"enum": ['<|"|>']})),
        ("gemma4", of(a={"type": "string", "minLength": -1})),
    ],
)
def test_what_no_grammar_can_say(name: str, schema: dict[str, Any]) -> None:
    tools = [Tool(name="go", parameters=schema)]
    structure = call_structure(parser_class(name), tools, ToolChoice(mode="required"))
    with pytest.raises(InvalidParams) as refused:
        checked(structure)
    assert refused.value.field == "tool_choice"


def test_nested_lists_take_no_more_rules_than_they_nest() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    structure = call_structure(
        parser_class("gemma4"), [Tool(name="go", parameters=of(a=schema))], ToolChoice(mode="required")
    )
    wanted = answer_format(None, checked(structure), "none")
    assert wanted is not None and len(wanted.source) < 10_000
    assert takes(wanted, f"<|tool_call>call:go{{a:{'[' * 40}1{']' * 40}}}<tool_call|>")


def test_a_grammar_of_the_client_goes_with_no_reasoning() -> None:
    with pytest.raises(InvalidParams):
        answer_format(ResponseFormat.lark('start: "a"'), None, "tagged")


OPEN = {"type": "object", "properties": {"city": {"type": "string"}, "at": {"properties": {"x": {"type": "integer"}}}}}
PART = {"properties": {"b": {"type": "string"}}}
ARGUMENTS: list[tuple[dict[str, Any], str, bool]] = [
    (OPEN, '{"city": "a", "hours": 2}', False),
    (OPEN, '{"city": "a", "at": {"x": 1}}', True),
    (OPEN, '{"city": "a", "at": {"x": 1, "y": 2}}', False),
    ({"type": "object", "properties": {}}, '{"a": 1}', False),
    (OPEN | {"additionalProperties": True}, '{"city": "a", "hours": 2}', True),
    (OPEN | {"required": ["hours"]}, '{"city": "a", "hours": 2}', True),
    ({"type": "object"}, '{"a": 1}', True),
    ({"type": "object", "properties": {"a": {"type": "object"}}}, '{"a": {"b": 1}}', True),
    ({"allOf": [OPEN, PART]}, '{"city": "a", "b": "c"}', True),
    ({"properties": {"a": {"$ref": "#/$defs/p"}}, "$defs": {"p": PART}}, '{"a": {"b": "c", "d": 1}}', False),
]


@pytest.mark.parametrize(("schema", "arguments", "admitted"), ARGUMENTS)
def test_forced_arguments_are_those_that_the_tool_names(schema: dict[str, Any], arguments: str, admitted: bool) -> None:
    """A small model that may name arguments of its own does so until its tokens end."""
    tools = [Tool(name="go", parameters=schema)]
    wanted = answer_format(None, call_structure(parser_class("hermes"), tools, ToolChoice(mode="required")), "none")
    call = f'<tool_call>\n{{"name": "go", "arguments": {arguments}}}\n</tool_call>'
    assert takes(wanted, call) == admitted
