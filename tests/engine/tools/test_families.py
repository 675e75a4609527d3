"""The formats of single families, on completions as their model cards show them and on what models make of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.tools import (
    Event,
    Tool,
    ToolCallArguments,
    ToolCallStart,
    collect,
    detect,
    make_parser,
    parse,
)
from headrace.engine.tools.machine import MAX_HELD

TYPES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "deep": {"$ref": "#/$defs/deep"},
    "unit": {"enum": ["C", "F"]},
    "maybe": {"type": ["string", "null"]},
}
OFFERED = [Tool(name="f", parameters={"properties": TYPES, "$defs": {"deep": {"type": "string"}}})]
Calls = list[tuple[str, object]]

# format, completion, reasoning, content, calls
EXAMPLES: dict[str, tuple[str, str, str, str, Calls]] = {
    "GLM-4.5": (
        "glm45",
        "\n<think>Hm.</think>\nI look.\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>g-2\n</tool_call>",
        "Hm.",
        "I look.",
        [("f", {"city": "5", "days": 5}), ("g-2", {})],
    ),
    "GLM-4.7 leaves out line feeds": (
        "glm45",
        '<tool_call>f<arg_key>city</arg_key><arg_value> "a" <b>\n</arg_value><arg_key>deep</arg_key>'
        "<arg_value>true</arg_value><arg_key>unit</arg_key><arg_value>C</arg_value></tool_call>",
        "",
        "",
        [("f", {"city": ' "a" <b>\n', "deep": "true", "unit": "C"})],
    ),
    "GLM-4.5: types that no schema tells": (
        "glm45",
        "<tool_call>h<arg_key>a</arg_key><arg_value>[1, {'b': None}]</arg_value><arg_key>b</arg_key><arg_value> -1.5 "
        '</arg_value><arg_key>c</arg_key><arg_value>1.5 km</arg_value><arg_key>d</arg_key><arg_value>{"}</arg_value>'
        '<arg_key>e</arg_key><arg_value>"}</arg_value>"</arg_value></tool_call>',
        "",
        '"</arg_value></tool_call>',
        [],
    ),
    "GLM-4.5: types that no schema tells, each read for itself": (
        "glm45",
        "<tool_call>h<arg_key>a</arg_key><arg_value>[1, {'b': None}]</arg_value><arg_key>b</arg_key><arg_value> -1.5 "
        '</arg_value><arg_key>c</arg_key><arg_value>1.5 km</arg_value><arg_key>d</arg_key><arg_value>{"}</arg_value>'
        "</tool_call>",
        "",
        "",
        [("h", {"a": [1, {"b": None}], "b": -1.5, "c": "1.5 km", "d": '{"}'})],
    ),
    "GLM-4": ("glm4", '\nf\n{"city": "Rome"}', "", "", [("f", {"city": "Rome"})]),
    "GLM-4: words and JSON are no call": ("glm4", 'Here\n{"city": "Rome"}', "", 'Here\n{"city": "Rome"}', []),
    "Seed-OSS": (
        "seed_oss",
        "<seed:think>Hm.<seed:cot_budget_reflect>I used 128 tokens.</seed:cot_budget_reflect> Yes.</seed:think>"
        "<seed:tool_call>\n<function=f>\n<parameter=city>two\nlines</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        "Hm.<seed:cot_budget_reflect>I used 128 tokens.</seed:cot_budget_reflect> Yes.",
        "",
        [("f", {"city": "two\nlines", "days": 3})],
    ),
    "Qwen3-Coder": (
        "qwen3_coder",
        "Now.\n\n<tool_call>\n<function=f>\n<parameter=city>\nif a < b:\n    print('</p')\n\n</parameter>\n"
        "<parameter=maybe>\nnull\n</parameter>\n</function>\n</tool_call>",
        "",
        "Now.",
        [("f", {"city": "if a < b:\n    print('</p')\n", "maybe": None})],
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "```<｜tool▁call▁end｜>"}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        "",
        [("f", {"a": "```<｜tool▁call▁end｜>"}), ("g", {})],
    ),
    "DeepSeek R1 reasons, and forgets the outer tag": (
        "deepseek_v3",
        "<think>\nHm.\n</think>\n\n"
        "So: <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
        "Hm.",
        "So:",
        [("f", {})],
    ),
    "DeepSeek V3.1": (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": {"b": "}"}}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        [("f", {"a": {"b": "}"}}), ("function", {})],
    ),
    "gpt-oss": (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": "<|end|> {"}<|call|>',
        "Hm.",
        "I look.",
        [("f", {"a": "<|end|> {"})],
    ),
    "gpt-oss: the recipient before the channel": (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
        "Hm.",
        "",
        [("f", {})],
    ),
    "gpt-oss: the prompt holds the role": (
        "harmony",
        ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}',
        "",
        "",
        [("f", {"a": 1})],
    ),
    "gpt-oss: an answer": ("harmony", "<|channel|>final<|message|>2 < 3<|return|>", "", "2 < 3", []),
    "gpt-oss: without a header": ("harmony", "to be", "", "to be", []),
    "gpt-oss: code for Python is content": (
        "harmony",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "",
        "<|channel|>analysis to=python code<|message|>print(1)",
        [],
    ),
    "Granite 3.1": (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        "",
        "",
        [("f", {"a": "]"}), ("g", {})],
    ),
    "Granite 3, another tag": ("granite", 'So <tool_call>{"name": "f"}', "", "So", [("f", {})]),
    "Granite: an empty list": ("granite", "<|tool_call|>[]", "", "", []),
    "Phi-4-mini": (
        "phi4_mini_json",
        '<|tool_call|>[{"name": "f", "arguments": {"a": [1]}}]<|/tool_call|>',
        "",
        "",
        [("f", {"a": [1]})],
    ),
    "Phi-4-mini: functools": ("phi4_mini_json", 'functools[{"name": "f", "arguments": {}}]', "", "", [("f", {})]),
    "Phi-4-mini: functools are also Python's": (
        "phi4_mini_json",
        "Use functools.cache or functools[0].",
        "",
        "Use functools.cache or functools[0].",
        [],
    ),
    "Ministral 3": (
        "mistral_args",
        '[THINK]Hm. [TOOL_CALLS][/THINK]Well.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "Hm. [TOOL_CALLS]",
        "Well.",
        [("f", {"a": 1}), ("g", {})],
    ),
    "Hunyuan A13B": (
        "hunyuan_a13b",
        '<think>\nHm.\n</think>\n<tool_calls>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]'
        "</tool_calls>",
        "Hm.",
        "",
        [("f", {}), ("g", {"a": 1})],
    ),
    "Command R7B": (
        "cohere",
        "<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        "I will look.",
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    "OLMo 3 as its template writes calls: JSON, and a line for each call": (
        "olmo3",
        'A moment.<function_calls>find-it(city="San \\"Fran\\" é", on=true, deep={"a": [1, null]})\nstop()'
        "</function_calls>",
        "",
        "A moment.",
        [("find-it", {"city": 'San "Fran" é', "on": True, "deep": {"a": [1, None]}}), ("stop", {})],
    ),
    "OLMo 3 writes Python, on several lines": (
        "olmo3",
        "<function_calls>\n  f(\n    x=1,\n    y=['it\\'s', None],\n  )\n\n  g(z=False)\n</function_calls>\nDone.",
        "",
        "Done.",
        [("f", {"x": 1, "y": ["it's", None]}), ("g", {"z": False})],
    ),
    "OLMo 3: a list, and no closing tag": (
        "olmo3",
        "<function_calls>[f(a=1), g()]",
        "",
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    "OLMo 3: a tag without calls is content": (
        "olmo3",
        "<function_calls></function_calls>",
        "",
        "<function_calls></function_calls>",
        [],
    ),
    "OLMo 3 reasons": ("olmo3", "<think>Hm.</think><function_calls>f()</function_calls>", "Hm.", "", [("f", {})]),
    "Gemma 3: Python": (
        "tool_code",
        'Sure.\n```tool_code\nf(city="it\'s", days=3)\ng()\n```',
        "",
        "Sure.",
        [("f", {"city": "it's", "days": 3}), ("g", {})],
    ),
    "Gemma 3: a list": ("tool_code", "```tool_code\n[f(a=1), g()]\n```", "", "", [("f", {"a": 1}), ("g", {})]),
    "Gemma 3: JSON": ("tool_code", '```json\n{"name": "f", "parameters": {"a": 1}}\n```', "", "", [("f", {"a": 1})]),
    "Gemma 3: JSON that is no call": (
        "tool_code",
        '```json\n{"name": "Bob", "age": 3}\n```',
        "",
        '```json\n{"name": "Bob", "age": 3}\n```',
        [],
    ),
    "ERNIE 4.5": (
        "hermes",
        '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n',
        "Hm.",
        "",
        [("f", {"a": 1})],
    ),
}
TEMPLATES = {"seed_oss": "<seed:think>", "mistral_args": "[THINK]", "cohere": "<|START_THINKING|>"}


def split(text: str, tools: str, size: int) -> list[Event]:
    tags = detect(TEMPLATES.get(tools, "<think>")).tags
    parser = make_parser(tools, "tagged", str, tags=tags, offered=OFFERED)
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    return events + parser.finish()


@pytest.mark.parametrize("name", EXAMPLES)
def test_completions_of_each_family(name: str) -> None:
    tools, text, reasoning, content, calls = EXAMPLES[name]
    for size in (len(text), 1, 3):
        events = split(text, tools, size)
        parsed = collect(events)
        found = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls if call.complete]
        assert (parsed.reasoning, parsed.content, found) == (reasoning, content, calls)
        assert "".join(event.raw for event in events) == text


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example[4]])
def test_a_completion_that_breaks_off_loses_nothing_and_completes_no_call_too_early(name: str) -> None:
    tools, text, _, _, calls = EXAMPLES[name]
    for size in range(len(text)):
        events = split(text[:size], tools, max(size, 1))
        assert "".join(event.raw for event in events) == text[:size]
        found = [(call.name, json.loads(call.arguments)) for call in collect(events).tool_calls if call.complete]
        assert found == calls[: len(found)]


def test_strings_of_arguments_come_as_they_are_written() -> None:
    parser = make_parser("glm45", make_id=str, offered=OFFERED)
    pieces = [
        "<tool_call>f<arg_key>ci",
        "ty</arg_key><arg_value>Ro",
        'me"\n</arg',
        "_x",
        "</arg_value>",
        "</tool_call>",
    ]
    got = [parser.feed(piece) for piece in pieces]
    texts = ["".join(event.text for event in events if isinstance(event, ToolCallArguments)) for events in got]
    assert texts == ["", '{"city": "Ro', 'me\\"\\n', "</arg_x", '"', "}"]
    assert isinstance(got[0][0] if got[0] else got[1][0], ToolCallStart)


def test_a_value_of_unknown_type_may_be_of_any_length() -> None:
    long = "{" + "x" * (2 * MAX_HELD)
    text = f"<tool_call>h<arg_key>a</arg_key><arg_value>{long}</arg_value></tool_call>"
    for pieces in ([text], [text[:MAX_HELD], text[MAX_HELD:]]):
        parser = make_parser("glm45")
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        (call,) = collect(events).tool_calls
        assert call.complete and json.loads(call.arguments) == {"a": long}


@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text(), max_size=4))
def test_offered_strings_come_back_whatever_they_hold(arguments: dict[str, str]) -> None:
    tool = Tool(name="f", parameters={"properties": {name: {"type": "string"} for name in arguments}})
    glm = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    seed = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in arguments.items())
    qwen = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    forms = {
        "glm45": f"<tool_call>f\n{glm}</tool_call>",
        "seed_oss": f"<seed:tool_call>\n<function=f>\n{seed}</function>\n</seed:tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=f>\n{qwen}</function>\n</tool_call>",
    }
    for tools, text in forms.items():
        (call,) = parse(text, tools, offered=[tool]).tool_calls
        assert call.complete and json.loads(call.arguments) == arguments
