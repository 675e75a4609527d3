"""Each format on completions as model cards show them, and on what models make of them."""

from __future__ import annotations

import json

import pytest

from headrace.engine.tools import (
    Content,
    End,
    Event,
    Parsed,
    Reasoning,
    ReasoningMode,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    make_parser,
    parse,
)

Calls = list[tuple[str, object]]


def calls_of(parsed: Parsed) -> Calls:
    assert all(call.complete for call in parsed.tool_calls)
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


# format, completion, content, calls
EXAMPLES: dict[str, tuple[str, str, str, Calls]] = {
    "Gemma 4 as its template writes calls, in the order of their keys": (
        "gemma4",
        'A moment.<|tool_call>call:find{city:<|"|>San "Fran"<|"|>,days:[1,2],deep:{on:true,x:-1.5}}<tool_call|>'
        "<|tool_call>call:stop{}<tool_call|>",
        "A moment.",
        [("find", {"city": 'San "Fran"', "days": [1, 2], "deep": {"on": True, "x": -1.5}}), ("stop", {})],
    ),
    "Gemma 4: what looks like marks, braces or escapes in a string is text": (
        "gemma4",
        '<|tool_call>call:say{<|"|>key<|"|>:<|"|>a\\n\n}<|"<||"|<tool_call|><|"|>, none:None}<tool_call|>',
        "",
        [("say", {"key": 'a\\n\n}<|"<||"|<tool_call|>', "none": None})],
    ),
    "Gemma 4 without a closing tag": (
        "gemma4",
        "<|tool_call>call:a.b{}<|tool_call>call:c{x:1}",
        "",
        [("a.b", {}), ("c", {"x": 1})],
    ),
    "Hermes 2 Pro puts the arguments first": (
        "hermes",
        '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_stock_fundamentals"}\n</tool_call>',
        "",
        [("get_stock_fundamentals", {"symbol": "TSLA"})],
    ),
    "Qwen2.5, parallel": (
        "hermes",
        '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_temperature_date", "arguments": {"location": "San Francisco, CA, USA"'
        ', "date": "2024-10-01"}}\n</tool_call>',
        "",
        [
            ("get_current_temperature", {"location": "San Francisco, CA, USA"}),
            ("get_temperature_date", {"location": "San Francisco, CA, USA", "date": "2024-10-01"}),
        ],
    ),
    "Qwen with words around": (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\nDone.',
        "Let me look.Done.",
        [("look", {})],
    ),
    "Hermes: no arguments, no braces at the end, no closing tag, more keys": (
        "hermes",
        '<tool_call>{"name":"a"}</tool_call><tool_call>{"name":"b","arguments":{"x":1}</tool_call>'
        '<tool_call>{"id":[1,{"q":2}],"name":"c","parameters":{},"more":-1.5e3}<tool_call>{"name":"d","arguments":null}',
        "",
        [("a", {}), ("b", {"x": 1}), ("c", {}), ("d", {})],
    ),
    "Hermes: tags and braces inside strings": (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> \\"}} <tool_call>{"}}</tool_call>',
        "",
        [("say", {"text": '</tool_call> "}} <tool_call>{'})],
    ),
    "a raw newline inside a string is escaped": (
        "hermes",
        '<tool_call>{"name": "run", "arguments": {"code": "a\n\tb\x01"}}</tool_call>',
        "",
        [("run", {"code": "a\n\tb\x01"})],
    ),
    "Hermes: arguments written as a string": (
        "hermes",
        '<tool_call>{"name": "a", "arguments": " {\\"x\\": \\"\\u00e9\\"}"}</tool_call>'
        '<tool_call>{"name": "b", "arguments": ""}</tool_call>',
        "",
        [("a", {"x": "é"}), ("b", {})],
    ),
    "Llama 3.1": (
        "llama3_json",
        '{"name": "get_current_conditions", "parameters": {"location": "San Francisco, CA", "unit": "Fahrenheit"}}',
        "",
        [("get_current_conditions", {"location": "San Francisco, CA", "unit": "Fahrenheit"})],
    ),
    "Llama 3.1 with a type and a tag": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "trending_songs", "parameters": {"n": "10"}}',
        "",
        [("trending_songs", {"n": "10"})],
    ),
    "Llama 3.x, several": (
        "llama3_json",
        '{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}\n{"name": "c", "arguments": {}};',
        ";",
        [("a", {"x": 1}), ("b", {}), ("c", {})],
    ),
    "Llama: words, then a tagged call": (
        "llama3_json",
        'One moment. <|python_tag|>{"name": "a", "parameters": {}}',
        "One moment.",
        [("a", {})],
    ),
    "Llama: JSON that is no call": ("llama3_json", ' {"name": "Bob", "age": 3}', ' {"name": "Bob", "age": 3}', []),
    "Llama: a name alone is no call": ("llama3_json", '{"name": "Bob"}', '{"name": "Bob"}', []),
    "Llama: Python behind the tag": (
        "llama3_json",
        '<|python_tag|>brave_search.call(query="x")',
        '<|python_tag|>brave_search.call(query="x")',
        [],
    ),
    "Llama 3.2 pythonic": (
        "pythonic",
        "[get_user_info(user_id=7890, special='black'), clock.now()]",
        "",
        [("get_user_info", {"user_id": 7890, "special": "black"}), ("clock.now", {})],
    ),
    "pythonic values": (
        "pythonic",
        """[f(b=None, c=[1, -2.5e3, {'k': "it's", "l": [True]}], d='say "hi"\\n\\x41\\u00e9\\U0001F600\\d', e={})]""",
        "",
        [
            (
                "f",
                {"b": None, "c": [1, -2500.0, {"k": "it's", "l": [True]}], "d": 'say "hi"\nA\xe9😀\\d', "e": {}},
            )
        ],
    ),
    "pythonic: a list that is no call": ("pythonic", "[1, 2, f(3)]", "[1, 2, f(3)]", []),
    "pythonic: a link": ("pythonic", "[f(x)](http://y)", "[f(x)](http://y)", []),
    "Mistral 7B v0.3": (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_current_weather", "arguments": {"location": "Paris", "format": "celsius"}}, '
        '{"name": "b", "arguments": {"x": [1]}, "id": "abcdefghi"}]',
        "",
        [("get_current_weather", {"location": "Paris", "format": "celsius"}), ("b", {"x": [1]})],
    ),
    "Mistral Small 3.2": (
        "mistral",
        'Sure.[TOOL_CALLS]f-1[ARGS]{"x": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        "Sure.",
        [("f-1", {"x": "[TOOL_CALLS]"}), ("g", {})],
    ),
    "no tools": (
        "",
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>',
        [],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_completions_of_each_format(name: str) -> None:
    tools, text, content, calls = EXAMPLES[name]
    parsed = parse(text, tools or None)
    assert (parsed.content, parsed.reasoning, calls_of(parsed)) == (content, "", calls)


def test_the_model_may_name_the_id_of_a_mistral_call() -> None:
    parsed = parse("[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]g[ARGS]{}", "mistral")
    assert parsed.tool_calls[0].id == "123456789"
    assert len(parsed.tool_calls[1].id) == 9 and parsed.tool_calls[1].id.isalnum()


def test_ids_differ_unless_they_are_given() -> None:
    text = '<tool_call>{"name": "a"}</tool_call>' * 2
    first, second = parse(text, "hermes").tool_calls
    assert first.id != second.id
    assert [call.id for call in parse(text, "hermes", make_id=lambda index: f"call {index}").tool_calls] == [
        "call 0",
        "call 1",
    ]


# mode, completion, reasoning, content
THOUGHTS: dict[str, tuple[ReasoningMode, str, str, str]] = {
    "Qwen3": ("tagged", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    "no reasoning": ("tagged", " Yes. <think>no</think>", "", " Yes. <think>no</think>"),
    "the prompt opened it": ("opened", "Hm, <b>.\n</think>\n\nYes.", "Hm, <b>.", "Yes."),
    "opened twice": ("opened", "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    "cut while reasoning": ("opened", "Hm. </thin", "Hm. </thin", ""),
    "an empty one": ("tagged", "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "a second tag is content": ("tagged", "<think>a</think>b</think>c", "a", "b</think>c"),
    "not asked for": ("none", "<think>a</think>b", "", "<think>a</think>b"),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_is_split_from_content(name: str) -> None:
    mode, text, reasoning, content = THOUGHTS[name]
    for tools in (None, "hermes", "llama3_json", "pythonic", "mistral"):
        parsed = parse(text, tools, mode)
        assert (parsed.reasoning, parsed.content, parsed.tool_calls) == (reasoning, content, ())


def test_calls_come_after_reasoning_and_not_inside_it() -> None:
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    parsed = parse(f"<think>{call}</think>\n{call}", "hermes", "tagged")
    assert (parsed.reasoning, parsed.content, calls_of(parsed)) == (call, "", [("a", {})])
    parsed = parse('Hm.</think>\n\n{"name": "a", "parameters": {}}', "llama3_json", "opened")
    assert (parsed.reasoning, parsed.content, calls_of(parsed)) == ("Hm.", "", [("a", {})])
    parsed = parse(f"\n\n{call}", "hermes", "tagged")
    assert (parsed.content, calls_of(parsed)) == ("", [("a", {})])


def test_what_is_certain_comes_at_once() -> None:
    parser = make_parser("hermes", "tagged", make_id=str)
    pieces = [
        "<thi",
        "nk>Hm",
        " </th",
        "ink>",
        "\n",
        "Hi <",
        "b> ",
        '<tool_call>{"name": "f", "argum',
        'ents": ',
        '{"a"',
    ]
    pieces += [': "\\', 'n"', "}", "}</tool_call>", " "]
    got: list[list[Event]] = [parser.feed(piece) for piece in pieces]
    got.append(parser.finish())
    assert got == [
        [],
        [Reasoning("Hm", "<think>Hm")],
        [],
        [],
        [],
        [Content("Hi", " </think>\nHi")],
        [Content(" <b>", " <b>")],
        [],
        [],
        [ToolCallStart(0, "0", "f", ' <tool_call>{"name": "f", "arguments": '), ToolCallArguments(0, '{"a"', '{"a"')],
        [ToolCallArguments(0, ': "', ': "\\')],
        [ToolCallArguments(0, '\\n"', 'n"')],
        [ToolCallArguments(0, "}", "}"), ToolCallEnd(0, True)],
        [],
        [],
        [End("}</tool_call> ")],
    ]


# format, completion, content, arguments that are left
BROKEN: dict[str, tuple[str, str, str, list[str]]] = {
    "no JSON": ("hermes", "<tool_call>hello</tool_call> x", "<tool_call>hello</tool_call> x", []),
    "a call follows": ("hermes", '<tool_call>{"name": <tool_call>{"name": "a"}', '<tool_call>{"name": ', ["{}"]),
    "an unnamed call": ("hermes", '<tool_call>{"arguments": {}}', '<tool_call>{"arguments": {}}', []),
    "a name that is none": ("hermes", '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
    "arguments that are none": (
        "hermes",
        '<tool_call>{"name": "a", "arguments": [1]}',
        '<tool_call>{"name": "a", "arguments": [1]}',
        [],
    ),
    "a string that is no object": (
        "hermes",
        '<tool_call>{"name": "a", "arguments": "{} x"}',
        '<tool_call>{"name": "a", "arguments": "{} x"}',
        [],
    ),
    "cut before the arguments": ("hermes", 'Hm. <tool_call>{"name": "a", ', 'Hm. <tool_call>{"name": "a", ', []),
    "cut in a tag": ("hermes", "Hm. <tool_ca", "Hm. <tool_ca", []),
    "cut in the arguments": ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "y', "", ['{"x": "y']),
    "broken arguments": (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"x": tru}}</tool_call>',
        "}}</tool_call>",
        ['{"x": '],
    ),
    "broken in the list": ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, 5]', ", 5]", ["{}"]),
    "broken keywords": ("pythonic", "[f(a=1, 2)]", ", 2)]", ['{"a": 1']),
    "an expression": (
        "pythonic",
        "[f(a=__import__('os').system('true'))]",
        "__import__('os').system('true'))]",
        ['{"a": '],
    ),
    "digits first": ("pythonic", "[1f()]", "[1f()]", []),
    "numbers that JSON has not": ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 01}', "1}", ['{"x": 0']),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_becomes_content(name: str) -> None:
    tools, text, content, arguments = BROKEN[name]
    parsed = parse(text, tools)
    assert (parsed.content, [call.arguments for call in parsed.tool_calls]) == (content, arguments)
    assert all(call.complete == (call.arguments == "{}") for call in parsed.tool_calls)


def test_a_parser_is_for_one_completion() -> None:
    parser = make_parser("hermes")
    assert parser.finish() == [End()]
    with pytest.raises(RuntimeError):
        parser.feed("x")
    with pytest.raises(RuntimeError):
        parser.finish()
