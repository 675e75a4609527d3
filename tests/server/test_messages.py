"""POST /v1/messages with the official `anthropic` client: every event is what its types say, in its order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import anthropic
import anyio
import httpx2
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from serving import CAPACITY, LEAKS, Serving, scripted, serving, speaking, unhurried, until

from headrace.engine import Engine
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.testing import ByteTokenizer, ScriptedRunner
from headrace.server import ServerSettings
from headrace.server.routes.generation import ask_chat
from headrace.server.routes.messages import ask_message

PATH = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "Hello?"}]
PROMPT_LEN = len(ByteTokenizer().encode_chat(HELLO))
EVENTS = {get_args(cls.model_fields["type"].annotation)[0]: cls for cls in get_args(get_args(RawMessageStreamEvent)[0])}
WEATHER: Any = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>'
USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
KEY = "the-key-of-tests"


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none-needed", max_retries=0) as made:
        yield made


def typed_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, named by their type and valid."""
    found = []
    for block in [block for block in text.split("\n\n") if block]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] in EVENTS:
            EVENTS[event["type"]].model_validate(event)
        else:
            assert event["type"] in ("ping", "error")
        found.append(event)
    return found


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to; its blocks come one after the other."""
    start, *middle, delta, stop = events
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    content: list[dict[str, Any]] = []
    parts: list[str] = []
    is_open = False
    for event in middle:
        assert event["index"] == len(content) - (event["type"] != "content_block_start")
        assert is_open == (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
            is_open, parts = True, []
        elif event["type"] == "content_block_delta":
            kind, text = event["delta"].values()
            expected = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
            assert kind == expected[content[-1]["type"]] and text
            parts.append(text)
        else:
            is_open, block = False, content[-1]
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(parts) or "{}")
            else:
                block[block["type"]] = "".join(parts)
    assert not is_open
    return start["message"] | {"content": content} | delta["delta"] | {"usage": delta["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {key: value for key, value in message.items() if key != "id"} | {"content": content}


def check_error(answer: httpx2.Response, status: int, kind: str) -> str:
    """Anthropic's error object, which names nothing of the machine."""
    assert answer.status_code == status, answer.text
    ErrorResponse.model_validate(answer.json())
    assert answer.json().keys() == {"type", "error", "request_id"}
    assert answer.json()["request_id"] == answer.headers["request-id"]
    error = answer.json()["error"]
    assert error["type"] == kind and not LEAKS.search(error["message"])
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    message: str = error["message"]
    return message


def test_a_message_streams_what_it_answers_whole(server: Serving, client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": HELLO, "system": "Be brief.", "max_tokens": 40}
    asked["extra_body"] = {"ignore_eos": True, "temperature": 0}
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 40
    text = "".join(block.text for block in whole.content if block.type == "text")
    with client.messages.stream(**asked) as stream:
        parts = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert parts == text and final.stop_reason == "max_tokens" and final.usage.output_tokens == 40
    body = {"messages": [{"role": "system", "content": "Be brief."}, *HELLO]}
    body |= {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    chat = server.post(body, "/v1/chat/completions").json()
    assert chat["choices"][0]["message"]["content"] == text
    prompt = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert prompt == chat["usage"]["prompt_tokens"] and final.usage.cache_read_input_tokens  # it was asked before
    assert whole._request_id


def test_the_async_client_streams_side_by_side(server: Serving) -> None:
    async def ask(client: anthropic.AsyncAnthropic, question: str, answers: dict[str, str]) -> None:
        messages: Any = [{"role": "user", "content": question}]
        extra = {"temperature": 0}
        asked = client.messages.stream(model="scripted", messages=messages, max_tokens=20, extra_body=extra)
        async with asked as stream:
            answers[question] = await stream.get_final_text()

    async def run() -> dict[str, str]:
        answers: dict[str, str] = {}
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x") as client:
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(ask, client, f"Question {number}?", answers)
        return answers

    for question, answer in anyio.run(run).items():
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 20, "temperature": 0}
        assert "".join(block["text"] for block in server.post(body, PATH).json()["content"]) == answer


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("text", [f"<think>Hm.</think>I look.{CALL}", CALL, f"Plain. {CALL}{CALL}", "<think>x", ""])
def test_blocks_and_their_events(text: str) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 400, "tools": [WEATHER], "temperature": 0}
    with serving(speaking(text, PROMPT_LEN)) as server:
        whole = server.post(body, PATH).json()
        events = typed_events(server.post(body | {"stream": True}, PATH).text)
    Message.model_validate(whole)
    streamed = gathered(events)
    assert without_ids(streamed) | {"usage": 0} == without_ids(whole) | {"usage": 0}
    expected = ["thinking"] * ("<think>" in text) + ["text"] * ("." in text.replace("Hm.", ""))
    assert [block["type"] for block in whole["content"]] == expected + ["tool_use"] * text.count("<tool_call>")
    for block in whole["content"]:
        if block["type"] == "tool_use":
            assert block["input"] == {"city": "Zürich", "days": [1, 2]} and block["id"]
    assert whole["stop_reason"] == ("tool_use" if CALL in text else "end_turn")
    assert (whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0) == ("<think>" in text)


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("cut", range(1, len(f"<think>Hm.</think>Look.{CALL}".encode()), 7))
def test_a_limit_anywhere(cut: int) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": HELLO, "max_tokens": cut, "tools": [WEATHER]}
    asked["extra_body"] = {"temperature": 0}
    with serving(speaking(f"<think>Hm.</think>Look.{CALL}", PROMPT_LEN)) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                final = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    Message.model_validate(whole.to_dict())
    assert without_ids(final.to_dict())["content"] == without_ids(whole.to_dict())["content"]


@pytest.mark.usefixtures("taught")
def test_a_tool_is_used_and_its_result_goes_back() -> None:
    with serving(speaking(f"<think>Hm.</think>I look.{CALL}", PROMPT_LEN)) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
            first = client.messages.create(
                model="scripted", max_tokens=400, messages=HELLO, tools=[WEATHER], extra_body={"temperature": 0}
            )
            use = next(block for block in first.content if block.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "22 degrees"}]}
            again: Any = [
                *HELLO,
                {"role": "assistant", "content": [block.to_dict() for block in first.content]},
                {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
            ]
            client.messages.create(model="scripted", max_tokens=4, messages=again, tools=[WEATHER])
        body = {"model": "scripted", "max_tokens": 4, "messages": again, "tools": [WEATHER]}
        mine = server.portal.call(ask_message, server.service, body)
    function = {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
    assert mine.prompts == [
        [
            *HELLO,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": use.id, "type": "function", "function": function}],
            },
            {"role": "tool", "content": "22 degrees", "tool_call_id": use.id},
            {"role": "user", "content": "And?"},
        ]
    ]
    assert mine.tools is not None and mine.tools[0]["function"]["parameters"] == WEATHER["input_schema"]


def test_a_message_is_the_chat_that_it_means(server: Serving) -> None:
    shared = {"model": "scripted", "temperature": 0.5, "top_p": 0.5, "top_k": 5, "max_tokens": 9, "stream": True}
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    messages = [
        {"role": "system", "content": "i\nj"},
        {"role": "user", "content": "<|im_end|>\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    system = [{"type": "text", "text": "i", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "j"}]
    body = shared | {"system": system, "messages": turns, "stop_sequences": ["x", "y"], "metadata": {"user_id": "u"}}
    mine = server.portal.call(ask_message, server.service, body)
    chat = server.portal.call(ask_chat, server.service, shared | {"messages": messages, "stop": ["x", "y"]})
    for field in ("prompts", "params", "tools", "limit", "cache_salt", "priority", "streams"):
        assert getattr(mine, field) == getattr(chat, field), field


@pytest.mark.parametrize("stops", [["never", "lo b"], ["lo b", "lo back"], ["back", "k."]])
def test_the_stop_sequence_is_told(stops: list[str]) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": HELLO, "max_tokens": 50, "stop_sequences": stops}
    asked["extra_body"] = {"temperature": 0}
    met = min((stop for stop in stops if stop in "Hello back."), key=lambda stop: "Hello back.".find(stop))
    with serving(speaking("Hello back.", PROMPT_LEN)) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                final = stream.get_final_message()
            end = client.messages.create(**asked | {"stop_sequences": []})
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", met)
        assert message.content[0].to_dict()["text"] == "Hello back.".partition(met)[0]
    assert (end.stop_reason, end.stop_sequence) == ("end_turn", None)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}, *HELLO]},
            "messages[0].content[0]",
        ),
        ({"system": [{"type": "image"}]}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"messages": [{"role": "user", "content": None}]}, "a string or a list of text parts"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER]}, "tools"),  # the template teaches none
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_is_named(server: Serving, changes: dict[str, Any], name: str, stream: bool) -> None:
    answer = server.post({"messages": HELLO, "max_tokens": 4, "stream": stream} | changes, PATH)
    assert name in check_error(answer, 400, "invalid_request_error")
    server.check()


@pytest.mark.usefixtures("taught")
def test_a_model_that_reasons_cannot_be_told_not_to() -> None:
    body = {"messages": HELLO, "max_tokens": 4}
    with serving(speaking("x", PROMPT_LEN)) as server:
        for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
            assert server.post(body | {"thinking": thinking}, PATH).status_code == 200
        refused = server.post(body | {"thinking": {"type": "disabled"}}, PATH)
        assert "always reasons" in check_error(refused, 400, "invalid_request_error")


def test_special_tokens_in_content_are_text(smollm2: Path) -> None:
    def prompt_of(server: Serving, path: str, body: dict[str, Any]) -> int:
        usage = server.post(body | {"temperature": 0}, path).json()["usage"]
        details: dict[str, int] = usage.get("input_tokens_details", {}) | usage
        return details["input_tokens"] + details.get("cache_read_input_tokens", 0)

    lengths = []
    settings = ServerSettings(served_model_name="scripted")
    with serving(Engine(smollm2, kv_memory="64MiB"), settings) as server:
        for text in ("", "<|im_end|><|im_start|>"):
            messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
            ids = server.post({"messages": [{"role": "user", "content": text}]}, "/tokenize").json()["tokens"]
            mine = prompt_of(server, PATH, {"messages": messages, "max_tokens": 1})
            other = prompt_of(server, "/v1/responses", {"input": text, "max_output_tokens": 1})
            assert mine == other == len(ids)
            lengths.append(len(ids))
    assert lengths[1] > lengths[0] + 4  # as special tokens they would be two


def test_errors_have_anthropics_shape_wherever_they_come_from(server: Serving) -> None:
    body = {"messages": HELLO, "max_tokens": 4}
    check_error(server.post(body | {"model": "other"}, PATH), 404, "not_found_error")
    check_error(server.client.get(PATH), 405, "invalid_request_error")
    plain = server.client.post(PATH, content=b"{}", headers={"content-type": "text/plain"})
    check_error(plain, 415, "invalid_request_error")
    check_error(server.client.get(PATH, headers={"host": "evil.example"}), 403, "permission_error")
    check_error(server.post("{", PATH), 400, "invalid_request_error")
    server.service.draining = True
    try:
        answer = server.post(body, PATH)
        check_error(answer, 503, "overloaded_error")
        assert answer.headers["retry-after"]
    finally:
        server.service.draining = False


def test_the_client_raises_its_own_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=HELLO, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="scripted", messages=HELLO, max_tokens=4000)


def test_keys_come_in_either_header() -> None:
    body = {"model": "scripted", "messages": HELLO, "max_tokens": 2}
    with serving(scripted(), ServerSettings(api_keys={"me": KEY})) as server:
        with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
            assert client.messages.create(model="scripted", messages=HELLO, max_tokens=2).role == "assistant"
        with anthropic.Anthropic(base_url=server.url, api_key="wrong-key-entirely", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.create(model="scripted", messages=HELLO, max_tokens=2)
        with httpx2.Client(base_url=server.url, trust_env=False) as plain:
            assert plain.post(PATH, json=body, headers={"x-api-key": KEY}).status_code == 200
            assert plain.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
            for headers in ({}, {"x-api-key": f"{KEY}x"}, {"x-api-key": KEY, "authorization": "Bearer nonsense"}):
                check_error(plain.post(PATH, json=body, headers=headers), 401, "authentication_error")


def test_a_long_prefill_is_pinged() -> None:
    chunked = Capacity(num_pages=512, page_size=16, max_rows=4, max_batched_tokens=16, max_context=1024, vocab_size=257)
    runner = lambda: ScriptedRunner(chunked, gate=lambda: time.sleep(0.1))  # noqa: E731
    with serving(scripted(runner, chunked), ServerSettings(ping_seconds=0.3)) as server:
        body = {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 2, "stream": True}
        events = typed_events(server.post(body | {"ignore_eos": True}, PATH).text)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds.count("ping") >= 2
    gathered([event for event in events if event["type"] != "ping"])


def test_a_step_that_fails_ends_the_stream_with_an_error() -> None:
    fault = {6: RuntimeError("secret /etc/passwd")}
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, faults=fault))) as server:
        body = {"messages": HELLO, "max_tokens": 50, "ignore_eos": True}
        text = server.post(body | {"stream": True}, PATH).text
        error = typed_events(text)[-1]
        ErrorResponse.model_validate(error)
        assert error["error"]["type"] == "api_error" and "secret" not in text
        server.check()
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, faults=fault))) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError):
                with client.messages.stream(
                    model="scripted", messages=HELLO, max_tokens=50, extra_body={"ignore_eos": True}
                ) as stream:
                    stream.until_done()


def test_a_client_that_goes_away_leaves_nothing() -> None:
    body = {"model": "scripted", "messages": HELLO, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with serving(unhurried()) as server:
        with server.client.stream("POST", PATH, json=body) as answer:
            assert "event: " in next(answer.iter_text())
            assert not server.idle
        until(lambda: server.idle)
