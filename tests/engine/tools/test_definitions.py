"""Tools, choices, the registry, and how forced calls are written: every refusal names its field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import InvalidParams
from headrace.engine.tools import (
    ArgumentTags,
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
    format_names,
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
        inner = (
            tagged(shape.tags, arguments)
            if shape.tags
            else json.dumps(arguments)
            if shape.style == "json"
            else marked(arguments)
            if shape.style == "marked"
            else keywords
        )
        texts.append(shape.before + inner + shape.after)
    return structure.opening + structure.separator.join(texts) + structure.closing


def marked(arguments: dict[str, Any]) -> str:
    """Arguments, all of them strings, as a grammar for Gemma 4 would allow them."""
    return ",".join(f'{name}:<|"|>{text}<|"|>' for name, text in arguments.items())


def tagged(tags: ArgumentTags, arguments: dict[str, Any]) -> str:
    """Arguments, all of them strings, as a grammar would allow them."""
    feed = "\n" if tags.between.endswith("\n") else ""
    texts = [tags.before + name + tags.between + text + feed + tags.after for name, text in arguments.items()]
    return "".join(text + tags.last for text in texts)


@pytest.mark.parametrize("name", format_names())
@given(
    st.lists(st.one_of(st.tuples(st.just(0), st.fixed_dictionaries({"city": st.text()})), st.just((1, {}))), min_size=1)
)
def test_forced_calls_are_what_the_parser_reads(name: str, calls: list[tuple[int, dict[str, Any]]]) -> None:
    structure = call_structure(parser_class(name), TOOLS, ToolChoice(mode="required"))
    assert structure and structure.maximum is None
    parsed = parse(written(structure, calls), name, offered=TOOLS)
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
    "Qwen3-Coder": ("<tool_call>\\n<function=example_function_name>\\n<parameter=a>", "qwen3_coder", False),
    "GLM-4.5": ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key> <think></think>", "glm45", True),
    "Hy3": ("<tool_calls>\n<tool_call>{name}<tool_sep>\n<arg_key>{key}</arg_key> </think>", None, True),
    "Gemma 4": ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4", False),
    "GLM-4": ("{{ tool | tojson(indent=4) }}\n在调用上述函数时，请使用 Json 格式表示调用的参数。", "glm4", False),
    "Seed-OSS": ("<seed:tool_call>\\n<function=f>\\n<parameter=a>value_1</parameter>", "seed_oss", False),
    "DeepSeek-V3.1": ("'<｜tool▁call▁begin｜>'+ tool.name + '<｜tool▁sep｜>' + '</think>'", "deepseek_v31", True),
    "Granite 3.1": ("write <|tool_call|> followed by a JSON list of tools used", "granite", False),
    "Phi-4-mini": ("{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json", False),
    "Hunyuan A13B": ('<tool_calls>[{"name": "func_name1", "arguments": {}},...]</tool_calls>', "hunyuan_a13b", False),
    "EXAONE 4": ('<tool_call>{\\"name\\": \\"<function_1_name>\\"</tool_call> <think>', "hermes", True),
    "SmolLM3": ("return a json object within <tool_call></tool_call> XML tags <think>", "hermes", True),
    "Gemma 3, prompted": ("To call a function, write it in a fence: ```tool_code\\nf()\\n```", "tool_code", False),
    "Llama 3.1": (
        '{{- "<|python_tag|>" + tool_call.name }} Respond in the format {"name": function name, "parameters"',
        "llama3_json",
        False,
    ),
    "Llama 3.2": ('Respond in the format {"name": function name, "parameters": dictionary of', "llama3_json", False),
    "Llama 4": ("put it in the format of [func_name1(params_name1=params_value1, params_name2=", "pythonic", False),
    "OLMo 3": (
        "{{- '<function_calls>' -}} {{- tool_call['function']['name'] + '(' + arguments + ')' -}}",
        "olmo3",
        False,
    ),
    "calls of another kind in the same tags": ('<function_calls>\\n<invoke name=\\"f\\">', None, False),
    "Mistral Nemo": ('{{- "[TOOL_CALLS][" }} {{- "[AVAILABLE_TOOLS][" }}', "mistral", False),
    "Mistral Small 3.2": ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral_args", False),
    "Ministral 3": (
        "{{- '[THINK]' + block['thinking'] + '[/THINK]' }} {{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
        "mistral_args",
        True,
    ),
    "gpt-oss": (
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
        "{{- '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>' }}",
        "harmony",
        True,
    ),
    "Command A": (
        "<|START_THINKING|>{{ message.tool_plan }}<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "{{ tool_call.name }}", "parameters": {}}\n]<|END_ACTION|>',
        "cohere",
        True,
    ),
    "DeepSeek-R1": ("{{'<｜tool▁sep｜>' + name + '\\n```json\\n'}} <think>", "deepseek_v3", True),
    "SmolLM2": ("{% for message in messages %}{{'<|im_start|>' + message['role']}}{% endfor %}", None, False),
    "none": ("", None, False),
}


# What reasoning begins with, where it is not <think>.
OPENS = {"Ministral 3": "[THINK]", "gpt-oss": "<|channel|>analysis<|message|>", "Command A": "<|START_THINKING|>"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_tell_the_format(name: str) -> None:
    template, tools, reasoning = TEMPLATES[name]
    found = detect(template)
    assert found == Detected(tools, reasoning, tags=found.tags)
    assert found.tags.opens[0] == OPENS.get(name, "<think>")


@pytest.mark.parametrize("tools", format_names())
def test_every_format_has_a_template_that_tells_it(tools: str) -> None:
    assert tools in {told for _, told, _ in TEMPLATES.values()}


# What the template of a model with other tags than <think> contains, a completion, its reasoning and its content.
TAGGED = {
    "gpt-oss": (
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    ),
    "Gemma 4": ("{{- '<|channel>thought\\n<channel|>' -}}", "<|channel>thought\nHm.<channel|>Yes."),
    "Gemma 4 without a thought": ("{{- '<|channel>thought\\n' -}}", "<|channel>thought\n<channel|>Yes."),
    "Seed-OSS": ("{%- set think_begin_token = '<seed:think>' %}", "<seed:think>\nHm.</seed:think>Yes."),
    "Ministral 3": ("{{- '[THINK]' + block['thinking'] + '[/THINK]' }}", "[THINK]Hm.[/THINK]Yes."),
    "Command A": (
        "write <|START_THINKING|> followed by a plan <|START_RESPONSE|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
    ),
    "Command A without a plan": ("<|START_THINKING|>", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
    "Granite 3.2": (
        "Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'",
        "Here is my thought process:\nHm.\n\nHere's my response:\n\nYes.",
    ),
    "Granite 3.3": (
        "your thoughts between <think></think> and your response between <response></response>",
        "<think>Hm.</think><response>Yes.</response>",
    ),
    "Hunyuan": ("{%- set answer = '<think>' ~ '<answer>' %}", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>"),
}


@pytest.mark.parametrize("name", TAGGED)
def test_templates_tell_the_tags_of_reasoning(name: str) -> None:
    template, text = TAGGED[name]
    found = detect(template)
    mode = reasoning_mode(found, "<|user|>Is it?<|assistant|>")
    assert mode == "tagged"
    parsed = parse(text, found.tools, mode, tags=found.tags)
    assert (parsed.reasoning, parsed.content) == ("" if "without" in name else "Hm.", "Yes.")
    for opened in found.tags.opens + found.tags.prompts:
        assert reasoning_mode(found, f"<|assistant|>{opened}\n") == "opened"
        assert found.tags.are_open(f"{opened} so") and not found.tags.are_open(f"so {found.tags.closes[-1]}")


def test_the_prompt_tells_whether_reasoning_is_open() -> None:
    thinks = Detected(None, True)
    assert reasoning_mode(thinks, "<|im_start|>assistant\n<think>\n") == "opened"
    assert reasoning_mode(thinks, "<|im_start|>assistant\n<think>\n\n</think>\n\n") == "tagged"
    assert reasoning_mode(Detected(None, False), "<think>") == "none"


def test_the_guide_lists_all_formats() -> None:
    guide = (Path(__file__).parents[3] / "docs/embedding.md").read_text(encoding="utf-8")
    table = guide.split("| format | written as | models |")[1].split("\n\n")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)) == format_names()


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
