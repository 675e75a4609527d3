"""Forced calls that end in the middle: no part of a call is content, and the next turn takes what there was of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from serving import events_of, serving, speaking

from headrace.engine import Token, Usage
from headrace.engine.intake.messages import checked_messages
from headrace.engine.testing import ByteTokenizer
from headrace.engine.tokens.chat_template import ChatTemplate
from headrace.engine.tools import Tool, ToolChoice, call_structure, collect, make_parser, parser_class
from headrace.server.protocol.answers import Header, Piece
from headrace.server.protocol.blocks import BlockReader
from headrace.server.protocol.chat import ChatMessage
from headrace.server.protocol.chat_answer import ChatAnswer

FIND = Tool(name="find", parameters={"type": "object", "properties": {"text": {"type": "string"}}})
ARGUMENTS = '{"text": "a <b> \\"c\\""}'
FORMATS = ["hermes", "llama3_json", "mistral", "mistral_args"]


def written(name: str) -> str:
    """Two calls as the grammar of the format writes them."""
    structure = call_structure(parser_class(name), [FIND], ToolChoice(mode="required"))
    assert structure is not None
    (shape,) = structure.calls
    call = shape.before + ARGUMENTS + shape.after
    return structure.opening + call + structure.separator + call + structure.closing


def answer_to(name: str) -> ChatAnswer:
    return ChatAnswer(
        Header("chatcmpl-1", 1, "m", "fp"),
        1,
        include_usage=False,
        make_parser=lambda: make_parser(name, "tagged"),
        only_calls=True,
    )


def pieces(text: str, size: int) -> list[Piece]:
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    tokens = [Token(id=1, text=part, position=place) for place, part in enumerate(parts)]
    return [
        *(Piece(0, part, None, [token]) for part, token in zip(parts, tokens, strict=True)),
        Piece(0, "", "length", ()),
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("thought", ["", "<think>so</think>\n"])
def test_a_call_that_is_cut_anywhere_is_no_content(name: str, thought: str) -> None:
    text = thought + written(name)
    for end in range(1, len(text)):
        streamed, whole, reader = answer_to(name), answer_to(name), BlockReader(make_parser(name), only_calls=True)
        events = streamed.opening()
        for piece in pieces(text[:end], 3):
            events += streamed.feed(piece)
            whole.keep(piece)
            reader.feed(piece)
        assert all(block.kind == "call" for block in reader.blocks) or thought
        body = json.loads(whole.whole(Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)))
        (choice,) = body["choices"]
        assert choice["message"]["content"] is None and choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", ()):
            assert ARGUMENTS.startswith(call["function"]["arguments"]) and call["function"]["name"] == "find"
        deltas = [each["choices"][0]["delta"] for each in events_of(events.decode())]
        assert all(delta.get("content") is None for delta in deltas), text[:end]


CALLS = {
    "hermes": '<tool_call>\n{"name": "find", "arguments": {"text": "a"}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "find", "parameters": {"text": "a"}}',
    "mistral": '[TOOL_CALLS][{"name": "find", "arguments": {"text": "a"}}, {"name": "find", "arguments": {}}]',
    "mistral_args": '[TOOL_CALLS]find[ARGS]{"text": "a"}',
    "gemma4": '<|tool_call>call:find{text:<|"|>a<|"|>,size:3}<tool_call|>',
    "pythonic": '<|python_tag|>[find(text="a", size=3)]',
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("text", ["", "So it is. "])
def test_a_call_of_a_free_model_that_is_cut_behind_its_tag_is_no_content(name: str, text: str) -> None:
    if name == "pythonic":  # whose calls stand at the start of the text alone
        text = ""
    whole, tag = text + CALLS[name], len(text) + CALLS[name].index("]" if "[T" in CALLS[name] else ">") + 1
    for end in range(tag, len(whole)):
        for size in (3, 200):
            parser = make_parser(name)
            events = [each for at in range(0, end, size) for each in parser.feed(whole[:end][at : at + size])]
            events += parser.finish(cut=True)
            assert collect(events).content in (text, text.rstrip()), whole[:end]
            assert "".join(each.raw for each in events) == whole[:end]


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_call_of_a_free_model_that_is_cut_is_not_shown(path: str, stream: bool) -> None:
    said = 'Yes.<tool_call>\n{"name": "fi'
    prompt_len = len(ByteTokenizer().encode_chat(CHAT, TOOLS))
    tools: Any = TOOLS if "chat" in path else [{"name": "find", "input_schema": FIND.parameters}]
    body = {"messages": CHAT, "tools": tools, "temperature": 0, "max_tokens": len(said), "stream": stream}
    with serving(speaking(said, prompt_len)) as server:
        answer = server.post(body, path)
    assert answer.status_code == 200, answer.text
    assert "".join(re.findall(r'"(?:content|text)":"([^"]*)"', answer.text)) == "Yes."


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_what_a_model_ends_itself_or_is_no_call_stays_content(name: str) -> None:
    for text, cut in (("<tool_call>\nlike so", True), ('<tool_call>\n{"name": "fi', False), ('{"name": "Rhine', True)):
        parser = make_parser(name)
        assert collect([*parser.feed(text), *parser.finish(cut=cut)]).content == text


CHAT: Any = [{"role": "user", "content": "Weather?"}]
TOOLS = [FIND.as_function()]
CUT = '<tool_call>\n{"name": "find", "arguments": {"text": "wh'


@pytest.mark.usefixtures("taught")
def test_arguments_that_were_cut_go_back_as_they_are() -> None:
    prompt_len = len(ByteTokenizer().encode_chat(CHAT, TOOLS))
    with serving(speaking(CUT, prompt_len)) as server:
        asked = {"messages": CHAT, "tools": TOOLS, "temperature": 0}
        answer = server.post(asked | {"max_tokens": len(CUT)}, "/v1/chat/completions").json()
        message = answer["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == '{"text": "wh'
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "It was cut."}
        again = server.post(asked | {"messages": [*CHAT, message, result], "max_tokens": 4}, "/v1/chat/completions")
        assert again.status_code == 200, again.text
        item = {"type": "function_call", "call_id": "c", "name": "find", "arguments": '{"text": "wh'}
        output = {"type": "function_call_output", "call_id": "c", "output": "It was cut."}
        body = {"input": [{"role": "user", "content": "Weather?"}, item, output], "max_output_tokens": 4}
        assert server.post(body, "/v1/responses").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [('{"text": "wh', "text {'text': 'wh"), ('{"text": "who"}', "object who"), ("", "object "), ("[1]", "text [1]")],
)
def test_templates_get_whole_arguments_as_an_object_and_others_as_text(arguments: str, rendered: str) -> None:
    source = "{% set it = messages[0].tool_calls[0].function.arguments %}"
    source += "{% if it is string %}text {{ it }}{% else %}object {{ it.text }}{% endif %}"
    call = {"id": "c", "function": {"name": "find", "arguments": arguments}}
    chat = [ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]}).for_template()]
    template = ChatTemplate(source)
    try:
        assert template.render(checked_messages(chat)).replace('"', "'") == rendered
    finally:
        template.close()
