"""Tools, choices, the registry, and how forced calls are written: every refusal names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import InvalidParams
from headrace.engine.tools import (
    CallStructure,
    Detected,
    Parsed,
    Tool,
    ToolChoice,
    ToolParser,
    assistant_message,
    call_structure,
    check_tools,
    detect,
    make_parser,
    parse,
    parser_class,
    reasoning_mode,
    register,
    template_tools,
)
from headrace.engine.tools.values import MAX_DEPTH

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"name": "clock"}
TOOLS = check_tools([WEATHER, CLOCK])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_a_tool_is_read_in_each_way_it_is_written() -> None:
    tool = Tool(**WEATHER)
    for value in (
        WEATHER,
        {"type": "function", **WEATHER},
        {"type": "function", "function": WEATHER | {"strict": True}},
    ):
        assert Tool.parse(value) == tool
    assert Tool.parse(tool) is tool
    assert Tool.parse(tool.as_function()) == tool
    assert Tool.parse({"name": "clock", "parameters": None}).parameters == {"type": "object", "properties": {}}


def test_a_tool_keeps_its_own_parameters() -> None:
    given = {"type": "object", "properties": {"a": {}}}
    tool = Tool(name="f", parameters=given)
    given["properties"] = {}
    tool.as_function()["function"]["parameters"]["properties"].clear()
    assert tool.parameters == {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": 5}, "name"),
        ({"name": "f", "parameters": []}, "parameters"),
        ({"name": "f", "parameters": {"type": "array"}}, "parameters"),
        ({"name": "f", "parameters": {"properties": []}}, "parameters"),
        ({"name": "f", "parameters": {"default": float("nan")}}, "parameters"),
        ({"name": "f", "parameters": {"default": {1}}}, "parameters"),
        ({"name": "f", "parameters": {"x": "y" * 300_000}}, "parameters"),
        ({"name": "f", "parameters": nested(MAX_DEPTH + 1)}, "parameters"),
        ({"name": "f", "parameters": nested(100_000)}, "parameters"),
        ({"name": "f", "nme": 1}, "nme"),
        ({"type": "web_search"}, "tools"),
        ({"type": "function", "function": 5}, "tools"),
        ({"type": "function", "function": {5: 5}}, "tools"),
        (5, "tools"),
    ],
)
def test_what_is_no_tool_is_refused(value: Any, field: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        check_tools([value])
    assert caught.value.field == field


def test_limits_of_tools() -> None:
    assert Tool(name="f", parameters=nested(MAX_DEPTH)).parameters
    assert len(check_tools({"name": f"f{index}"} for index in range(128))) == 128
    for values in ([CLOCK, CLOCK], [{"name": f"f{index}"} for index in range(129)]):
        with pytest.raises(InvalidParams) as caught:
            check_tools(values)
        assert caught.value.field == "tools"


def test_choices_are_read_as_clients_write_them() -> None:
    assert ToolChoice.parse(None) == ToolChoice.parse("auto") == ToolChoice()
    assert ToolChoice.parse("required").allowed(TOOLS) == TOOLS
    assert ToolChoice.parse("none").allowed(TOOLS) == ()
    assert ToolChoice.parse("auto").allowed(()) == ()
    named = ToolChoice.parse({"type": "function", "function": {"name": "clock"}})
    assert named == ToolChoice(mode="named", name="clock") == ToolChoice.parse(named)
    assert named.allowed(TOOLS) == TOOLS[1:]


@pytest.mark.parametrize(
    "value", ["must", "named", {}, {"type": "function"}, {"type": "x", "function": {"name": "f"}}, 5]
)
def test_what_is_no_choice_is_refused(value: Any) -> None:
    with pytest.raises(InvalidParams, match="^tool_choice: must be one of none, auto, required") as caught:
        ToolChoice.parse(value)
    assert caught.value.field == "tool_choice"


def test_a_choice_needs_its_tools() -> None:
    with pytest.raises(InvalidParams) as caught:
        ToolChoice(mode="auto", name="f")
    assert caught.value.field == "name"
    for choice, tools in ((ToolChoice(mode="required"), ()), (ToolChoice(mode="named", name="f"), TOOLS)):
        with pytest.raises(InvalidParams) as caught:
            choice.allowed(tools)
        assert caught.value.field == "tool_choice"


def test_what_templates_get() -> None:
    assert template_tools(TOOLS) == [tool.as_function() for tool in TOOLS]
    assert template_tools(TOOLS, ToolChoice(mode="none")) is None
    assert template_tools(()) is None
    parsed = parse('Hm.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2, "hermes", make_id=str)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert assistant_message(parsed) == {
        "role": "assistant",
        "content": "Hm.Hm.",
        "tool_calls": [{"id": "0", **call}, {"id": "1", **call}],
    }
    cut = parse('<tool_call>{"name": "f", "arguments": {"a": 1', "hermes")
    assert len(cut.tool_calls) == 1 and assistant_message(cut) == {"role": "assistant", "content": ""}


def written(structure: CallStructure, calls: list[tuple[int, dict[str, Any]]]) -> str:
    """The completion that a grammar would allow, for calls given as place in the structure and arguments."""
    texts = []
    for place, arguments in calls:
        shape = structure.calls[place]
        keywords = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        texts.append(shape.before + (json.dumps(arguments) if shape.style == "json" else keywords) + shape.after)
    return structure.opening + structure.separator.join(texts) + structure.closing


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic", "mistral", "mistral_args"])
@given(
    st.lists(st.one_of(st.tuples(st.just(0), st.fixed_dictionaries({"city": st.text()})), st.just((1, {}))), min_size=1)
)
def test_forced_calls_are_what_the_parser_reads(name: str, calls: list[tuple[int, dict[str, Any]]]) -> None:
    structure = call_structure(parser_class(name), TOOLS, ToolChoice(mode="required"))
    assert structure and structure.maximum is None
    parsed = parse(written(structure, calls), name)
    assert not parsed.content and all(call.complete for call in parsed.tool_calls)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [
        (TOOLS[place].name, arguments) for place, arguments in calls
    ]
    assert [shape.schema for shape in structure.calls] == [tool.parameters for tool in TOOLS]


def test_how_many_calls_are_forced() -> None:
    hermes = parser_class("hermes")
    assert call_structure(hermes, TOOLS, ToolChoice()) is None
    assert call_structure(hermes, TOOLS, ToolChoice(mode="none")) is None
    single = call_structure(hermes, TOOLS, ToolChoice(mode="required"), parallel=False)
    assert single and single.maximum == 1 and len(single.calls) == 2
    named = call_structure(hermes, TOOLS, ToolChoice(mode="named", name="clock"))
    assert named and named.maximum == 1 and [shape.name for shape in named.calls] == ["clock"]
    with pytest.raises(InvalidParams):
        call_structure(parser_class(None), TOOLS, ToolChoice(mode="required"))


# From the chat templates that these models ship.
TEMPLATES = {
    "Qwen2.5": (
        'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>',
        "hermes",
        False,
    ),
    "Qwen3": ("<tool_call>\\n{\\\"name\\\": <function-name> {%- if '</think>' in content %}", "hermes", True),
    "Qwen3-Coder": ("<tool_call>\\n<function=example_function_name>\\n<parameter=a>", None, False),
    "GLM-4.5": ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key> <think></think>", None, True),
    "Llama 3.1": (
        '{{- "<|python_tag|>" + tool_call.name }} Respond in the format {"name": function name, "parameters"',
        "llama3_json",
        False,
    ),
    "Llama 3.2": ('Respond in the format {"name": function name, "parameters": dictionary of', "llama3_json", False),
    "Llama 4": ("put it in the format of [func_name1(params_name1=params_value1, params_name2=", "pythonic", False),
    "Mistral Nemo": ('{{- "[TOOL_CALLS][" }} {{- "[AVAILABLE_TOOLS][" }}', "mistral", False),
    "Mistral Small 3.2": ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral_args", False),
    "DeepSeek-R1": ("{{'<｜Assistant｜><think>\\n'}} <｜tool▁calls▁begin｜>", None, True),
    "SmolLM2": ("{% for message in messages %}{{'<|im_start|>' + message['role']}}{% endfor %}", None, False),
    "none": ("", None, False),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_tell_the_format(name: str) -> None:
    template, tools, reasoning = TEMPLATES[name]
    assert detect(template) == Detected(tools, reasoning)


def test_the_prompt_tells_whether_reasoning_is_open() -> None:
    thinks = Detected(None, True)
    assert reasoning_mode(thinks, "<|im_start|>assistant\n<think>\n") == "opened"
    assert reasoning_mode(thinks, "<|im_start|>assistant\n<think>\n\n</think>\n\n") == "tagged"
    assert reasoning_mode(Detected(None, False), "<think>") == "none"


def test_applications_add_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engine.tools import registry

    monkeypatch.setattr(registry, "_formats", dict(registry._formats))

    class Own(ToolParser):
        markers = ("<tool_call>OWN",)

    register("own", Own)
    register("own", Own)
    assert detect("<tool_call>OWN").tools == "own" and detect("<tool_call>").tools == "hermes"
    assert isinstance(make_parser("own"), Own)
    assert parse("x", "own") == Parsed("x", "", ())
    bad: Any = int
    for name, cls, field in (("hermes", Own, "name"), ("other", bad, "cls")):
        with pytest.raises(InvalidParams) as caught:
            register(name, cls)
        assert caught.value.field == field
    with pytest.raises(InvalidParams) as caught:
        make_parser("nope")
    assert caught.value.field == "tools" and "hermes" in str(caught.value.limit)
