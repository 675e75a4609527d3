"""Any text at all, cut anywhere: nothing raises, nothing is lost, and the cuts do not matter; in linear time."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.engine.tools import (
    Content,
    End,
    Event,
    Malformed,
    Parsed,
    Reading,
    Reasoning,
    ReasoningMode,
    ReasoningTags,
    Tool,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
    collect,
    format_names,
    make_parser,
    merge,
    parse,
)
from headrace.engine.tools.machine import MAX_HELD
from headrace.engine.tools.values import MAX_DEPTH, JsonScanner, PythonScanner

FORMATS = [None, *format_names()]
MODES: list[ReasoningMode] = ["none", "tagged", "opened"]

# What completions are made of, whole and in part, so that random joins come close to calls and go wrong everywhere.
PARTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '[{"name": "g"}, ',
    "[f(a=1, b='x'), g()]", '{"name": ', '"f"', '"arguments": ', '"parameters": ', '"id"', "{", "}", "[", "]", "(", ")",
    ",", ":", ";", "=", " ", "\n", '"', "'", "\\", "\\u00e9", "\\x41", "\\U0001F600", "a", "f", "a=", "null", "None",
    "<tool_call>f\n", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_calls>", "</tool_calls>",
    "<seed:tool_call>", "</seed:tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f<｜tool▁sep｜>", "function<｜tool▁sep｜>f\n```json\n", "```",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```tool_code", "```json\n", "f\n{", "functools", "<|tool_call|>",
    "<|/tool_call|>", "<|START_ACTION|>[", '"tool_name": "f"', "<|END_ACTION|>", "<|start|>assistant", "<|channel|>",
    "analysis", "commentary to=functions.f ", "<|message|>", "<|end|>", "<|call|>", " to=f", "final", "</answer>",
    "<response>", "</response>", "Here is my thought process:", "Here's my response:", "[THINK]", "[/THINK]", "</",
    "<|tool_call>", "<|tool_call>call:f{", "call:f", '<|"|>', "<tool_call|>", "<|channel>thought", "<channel|>", "<|",
    "<function_calls>", "</function_calls>", "f(a=1)", "f(a=",
    "true", "1", "-1.5e3", "0", "<", "[TOOL", "é😀", "\x00", " " * 70, "plain words",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3))).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(), json_values, max_size=4)


def events_of(parser: ToolParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]


def bare(events: list[Event]) -> list[Event]:
    return [replace(event, raw="") for event in merge(events)]


def check(events: list[Event], text: str) -> None:
    """The order of events, and that nothing is lost."""
    assert "".join(event.raw for event in events) == text
    assert [event for event in events if isinstance(event, End)] == events[-1:]
    calls, is_open = 0, False
    for event in events:
        if isinstance(event, ToolCallStart):
            assert not is_open and event.index == calls and event.name
            is_open = True
        elif isinstance(event, ToolCallArguments | ToolCallEnd):
            assert is_open and event.index == calls
            if isinstance(event, ToolCallEnd):
                calls, is_open = calls + 1, False
        else:
            assert not is_open
            assert isinstance(event, End) or event.text
    for call in collect(events).tool_calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


TAGS = [
    ReasoningTags(),
    ReasoningTags(answer=("<response>", "</response>")),
    ReasoningTags(("Here is my thought process:", "Here's my thought process:"), ("Here's my response:",)),
    ReasoningTags(("[THINK]",), ("[/THINK]",)),
]
OFFERED = [Tool(name="f", parameters={"properties": {"a": {"type": "string"}}})]


@settings(max_examples=400)
@given(texts, st.sampled_from(FORMATS), st.sampled_from(MODES), st.sampled_from(TAGS), st.booleans(), st.data())
def test_any_text_in_any_pieces(
    text: str, tools: str | None, mode: ReasoningMode, tags: ReasoningTags, known: bool, data: st.DataObject
) -> None:
    offered = OFFERED if known else []
    whole = events_of(make_parser(tools, mode, str, tags=tags, offered=offered), [text])
    check(whole, text)
    for pieces in (cut(text, data), list(text)):
        events = events_of(make_parser(tools, mode, str, tags=tags, offered=offered), pieces)
        check(events, text)
        assert bare(events) == bare(whole)
    assert collect(whole) == parse(text, tools, mode, str, tags=tags, offered=offered)


@given(st.lists(st.tuples(st.sampled_from(["f", "get_weather", "a-b"]), arguments), min_size=1, max_size=3), st.data())
def test_calls_come_back_as_they_were_written(calls: list[tuple[str, dict[str, object]]], data: st.DataObject) -> None:
    ascii_only = data.draw(st.booleans())
    written = [(name, json.dumps(value, ensure_ascii=ascii_only)) for name, value in calls]
    forms = {
        "hermes": "\n".join(f'<tool_call>{{"name": "{n}", "arguments": {a}}}</tool_call>' for n, a in written),
        "llama3_json": "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in written),
        "mistral": "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in written),
    }
    for tools, text in forms.items():
        parsed = collect(events_of(make_parser(tools), cut(text, data)))
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == written
        assert not parsed.content and all(call.complete for call in parsed.tool_calls)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), json_values, max_size=4), st.data())
def test_python_literals_become_the_json_of_their_value(value: dict[str, object], data: st.DataObject) -> None:
    text = f"[f({', '.join(f'{name}={item!r}' for name, item in value.items())})]"
    (call,) = collect(events_of(make_parser("pythonic"), cut(text, data))).tool_calls
    assert call.complete and json.loads(call.arguments) == value


@given(st.text(alphabet='{}[]",:\\ue0019-+.tfrn \n') | json_values.map(json.dumps))
@example("[1,]")
@example('{"a":1,}')
@example("1.")
@example("-")
@example("01")
@example("[tru]")
def test_the_scanner_accepts_what_json_does(text: str) -> None:
    scanner = JsonScanner()
    end = scanner.feed(text + "\x00", 0, len(text) + 1)  # a character that ends a number
    try:
        json.loads(text, strict=False)
        sound = True
    except ValueError:
        sound = False
    if sound:
        assert scanner.done and not text[end:].strip()
        assert json.loads(scanner.take()) == json.loads(text, strict=False)
    else:
        assert not scanner.done or text[end:].strip()


@pytest.mark.parametrize("scanner", [JsonScanner, PythonScanner])
def test_nesting_has_a_limit(scanner: type[JsonScanner]) -> None:
    deep = scanner()
    assert deep.feed("[" * 10**6, 0, 10**6) == MAX_DEPTH and deep.bad
    at_limit = scanner()
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert at_limit.feed(text, 0, len(text)) == len(text) and at_limit.done


SIZE = 200_000
HUGE = {
    "content": ("hermes", "a b\n" * (SIZE // 4)),
    "whitespace": ("hermes", " " * SIZE),
    "beginnings of tags": ("hermes", "<" * SIZE),
    "almost tags": ("hermes", "<tool_cal" * (SIZE // 9)),
    "tags": ("hermes", "<tool_call>" * (SIZE // 11)),
    "calls that never get a name": ("hermes", '<tool_call>{"' * (SIZE // 13)),
    "empty calls": ("hermes", '<tool_call>{"name":"f"}</tool_call>' * (SIZE // 35)),
    "a huge string before the name": ("hermes", f'<tool_call>{{"arguments": {{"a": "{"x" * SIZE}"}}, "name": "f"}}'),
    "a huge list": ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": [{"1," * (SIZE // 2)}1]}}}}</tool_call>'),
    "deep nesting": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * SIZE),
    "escapes": ("pythonic", "[f(a='" + "\\x41" * (SIZE // 4) + "')]"),
    "keywords": ("pythonic", "[f(" + ",".join(["a=1"] * (SIZE // 4)) + ")]"),
    "whitespace between values": ("pythonic", "[f(a=" + " " * SIZE + "1)]"),
    "separators": ("llama3_json", '{"name":"f","parameters":{}};' * (SIZE // 29)),
    "openings": ("mistral", "[TOOL_CALLS][" * (SIZE // 13)),
    "a long name": ("mistral", "[TOOL_CALLS]" + "f" * SIZE + "[ARGS]{}"),
    "almost the end of a value": ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>" + "</arg_" * (SIZE // 6)),
    "line feeds in a value": ("qwen3_coder", "<tool_call><function=f><parameter=a>" + "\n" * SIZE),
    "names of arguments": ("glm45", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * (SIZE // 43)),
    "arguments without values": ("glm45", "<tool_call>f<arg_key>" * (SIZE // 21)),
    "headers": ("harmony", "<|channel|>a" * (SIZE // 12)),
    "short messages": ("harmony", "<|channel|>final<|message|>a<|end|>" * (SIZE // 35)),
    "calls that never begin": ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f" * (SIZE // 40)),
    "a thought": ("hermes", "<think>" + "Hm. " * (SIZE // 4)),
    "a million characters": (
        "hermes",
        "<think>"
        + "Hm. " * 50_000
        + "</think>"
        + "So, " * 50_000
        + '<tool_call>{"name": "f", "arguments": {"a": "'
        + "x" * 600_000
        + '"}}</tool_call>',
    ),
}


@pytest.mark.rotated(2)
@pytest.mark.parametrize("name", HUGE)
def test_huge_texts_one_character_at_a_time_take_seconds_and_little_memory(name: str) -> None:
    tools, text = HUGE[name]
    started = time.perf_counter()
    whole = events_of(make_parser(tools, "tagged", str), [text])
    parser = make_parser(tools, "tagged", str)
    events: list[Event] = []
    for piece in text:
        events += parser.feed(piece)
    most = max([len(event.raw) for event in events], default=0)  # what was held at any time
    events += parser.finish()
    assert time.perf_counter() - started < 30  # a second or few; quadratic time would take minutes to hours
    assert bare(events) == bare(whole)
    assert "".join(event.raw for event in events) == text
    assert most <= MAX_HELD + 1


def test_arguments_before_the_name_may_be_long_but_not_endless() -> None:
    def completion(size: int) -> str:
        return '<tool_call>{"arguments": {"a": "' + "x" * size + '"}, "name": "f"}</tool_call>'

    frame = len(completion(0)) - len("</tool_call>") - len("}")
    assert parse(completion(MAX_HELD - frame - 1), "hermes").tool_calls[0].complete
    refused = completion(MAX_HELD)
    assert parse(refused, "hermes") == Parsed(refused, "", ())


class Shouting(ToolParser):
    """`CALL name` up to the end of the line; the first line must not be empty."""

    def read(self) -> Reading[None]:
        while (yield from self.text_until(("CALL",))):
            yield from self.attempt(self.shout())

    def shout(self) -> Reading[None]:
        yield from self.expect(" ")
        self.start_call((yield from self.word("")))
        self.write_arguments("{}")
        self.end_call()
        if not (yield from self.accept("\n")):
            raise Malformed


@given(st.lists(st.sampled_from(["CALL", " ", "x", "\n", "CA"])).map("".join))
def test_a_format_of_an_application(text: str) -> None:
    whole = events_of(Shouting(make_id=str), [text])
    check(whole, text)
    assert bare(events_of(Shouting(make_id=str), list(text))) == bare(whole)


def test_neighbours_are_merged_and_others_are_not() -> None:
    events: list[Event] = [Content("a", "1"), Content("b", "2"), Reasoning("c"), ToolCallArguments(0, "d")]
    events += [ToolCallArguments(0, "e"), ToolCallArguments(1, "f"), End(), End()]
    expected: list[Event] = [Content("ab", "12"), Reasoning("c"), ToolCallArguments(0, "de"), ToolCallArguments(1, "f")]
    assert merge(events) == [*expected, End(), End()]
