"""POST /v1/responses with the official `openai` client: every event is what its types say, numbered and in order."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import anyio
import openai
import pytest
from openai.types.responses import Response, ResponseErrorEvent, ResponseStreamEvent
from serving import CAPACITY, Serving, check_error, scripted, serving, speaking, unhurried, until

from headrace.engine.life.opened import Opened
from headrace.engine.testing import ByteTokenizer, ScriptedEngine, ScriptedRunner
from headrace.server.routes.generation import ask_chat
from headrace.server.routes.responses import ask_response

PATH = "/v1/responses"
PROMPT_LEN = len(ByteTokenizer().encode_chat([{"role": "user", "content": "Hello?"}]))
EVENTS = {get_args(cls.model_fields["type"].annotation)[0]: cls for cls in get_args(get_args(ResponseStreamEvent)[0])}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>'


def typed_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream: named by their type, valid, numbered without a gap."""
    found = []
    for block in [block for block in text.split("\n\n") if block and not block.startswith(":")]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS[event["type"]].model_validate(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two equal ones."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at")} | {"output": items}


def check_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream; each is begun, filled by its deltas and finished before the next one begins."""
    items: list[dict[str, Any]] = []
    at = 0
    while at < len(events):
        added = events[at]
        assert added["type"] == "response.output_item.added" and added["output_index"] == len(items)
        item = added["item"]
        assert item["status"] == "in_progress" and not item.get("content") and not item.get("arguments")
        end = next(i for i in range(at, len(events)) if events[i]["type"] == "response.output_item.done")
        inner, done = events[at + 1 : end], events[end]["item"]
        call = item["type"] == "function_call"
        if not call:
            first, *inner, last = inner
            assert first["type"] == "response.content_part.added" and first["part"]["text"] == ""
            assert last["type"] == "response.content_part.done" and last["part"] == done["content"][0]
        *deltas, full = inner
        assert all(each["type"].endswith(".delta") for each in deltas) and full["type"].endswith(".done")
        assert {each.get("item_id") for each in events[at + 1 : end]} == {item["id"]} == {done["id"]}
        assert {each["output_index"] for each in events[at : end + 1]} == {len(items)}
        text = done["arguments"] if call else done["content"][0]["text"]
        assert "".join(each["delta"] for each in deltas) == text == full["arguments" if call else "text"]
        items.append(done)
        at = end + 1
    return items


def test_a_response_streams_what_it_answers_whole(server: Serving, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "scripted", "input": "Hello?", "max_output_tokens": 40, "temperature": 0}
    asked |= {"instructions": "Be brief.", "store": False, "extra_body": {"ignore_eos": True}}
    whole = client.responses.create(**asked)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.output_tokens == 40 and whole.instructions == "Be brief."
    assert whole.usage.total_tokens == whole.usage.input_tokens + 40
    events = list(client.responses.create(**asked, stream=True))
    assert [type(event) for event in events[:2]] == [EVENTS["response.created"], EVENTS["response.in_progress"]]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text and events[-1].type == "response.incomplete"
    assert without_ids(events[-1].response.to_dict())["output"] == without_ids(whole.to_dict())["output"]
    body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]}
    body |= {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    chat = server.post(body, "/v1/chat/completions").json()
    assert chat["choices"][0]["message"]["content"] == text
    assert chat["usage"]["prompt_tokens"] == whole.usage.input_tokens


def test_a_response_tells_what_the_model_recommends_where_the_request_says_nothing() -> None:
    class Recommending(ScriptedEngine):
        def _open(self) -> Opened:
            opened = super()._open()
            return replace(opened, info=replace(opened.info, generation_defaults={"temperature": 0.6, "top_p": 0.9}))

    with serving(Recommending(CAPACITY)) as server:
        body = {"input": "Hello?", "max_output_tokens": 2}
        told = server.post(body, PATH).json()
        assert (told["temperature"], told["top_p"]) == (0.6, 0.9)
        told = server.post(body | {"temperature": 1.0, "top_p": 0.5}, PATH).json()
        assert (told["temperature"], told["top_p"]) == (1.0, 0.5)


def test_the_stream_helper_gathers_the_same_answer() -> None:
    with serving(speaking("Hello back.", PROMPT_LEN)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            with client.responses.stream(model="scripted", input="Hello?", temperature=0) as stream:
                for _ in stream:
                    pass
                gathered = stream.get_final_response()
    assert gathered.status == "completed" and gathered.output_text == "Hello back."


def test_the_async_client_streams_side_by_side(server: Serving) -> None:
    async def ask(client: openai.AsyncOpenAI, question: str, answers: dict[str, str]) -> None:
        stream = await client.responses.create(
            model="scripted", input=question, max_output_tokens=20, temperature=0, stream=True
        )
        parts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        answers[question] = "".join(parts)

    async def run() -> dict[str, str]:
        answers: dict[str, str] = {}
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(ask, client, f"Question {number}?", answers)
        return answers

    for question, answer in anyio.run(run).items():
        whole = server.post({"input": question, "max_output_tokens": 20, "temperature": 0}, PATH).json()
        assert "".join(item["content"][0]["text"] for item in whole["output"]) == answer


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("text", [f"<think>Hm.</think>I look.{CALL}", CALL, f"Plain. {CALL}{CALL}", "<think>x", ""])
def test_items_and_their_events(text: str) -> None:
    body: dict[str, Any] = {"input": "Hello?", "tools": [WEATHER], "temperature": 0, "metadata": {"a": "b"}}
    with serving(speaking(text, PROMPT_LEN)) as server:
        whole = server.post(body, PATH).json()
        events = typed_events(server.post(body | {"stream": True}, PATH).text)
    Response.model_validate(whole)
    created, started, *middle, last = events
    assert (created["type"], started["type"], last["type"]) == (
        "response.created", "response.in_progress", "response.completed",
    )  # fmt: skip
    assert created["response"] == started["response"] and created["response"]["output"] == []
    assert check_items(middle) == last["response"]["output"]
    assert without_ids(last["response"]) == without_ids(whole)
    kinds = [item["type"] for item in whole["output"]]
    expected = ["reasoning"] * ("<think>" in text) + ["message"] * ("." in text.replace("Hm.", ""))
    assert kinds == expected + ["function_call"] * text.count("<tool_call>")
    assert all(item["status"] == "completed" for item in whole["output"])
    for item in whole["output"]:
        if item["type"] == "function_call":
            assert json.loads(item["arguments"]) == {"city": "Zürich", "days": [1, 2]} and item["call_id"]
    reasoned = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert reasoned == {"Hm": len("<think>Hm."), "x": len("<think>x")}.get("Hm" if "Hm" in text else text[-1:], 0)
    assert whole["tools"][0]["name"] == "weather" and whole["metadata"] == {"a": "b"} and whole["store"] is True


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("cut", range(1, len(f"<think>Hm.</think>Look.{CALL}".encode()), 7))
def test_a_limit_anywhere(cut: int) -> None:
    body: dict[str, Any] = {"input": "Hello?", "tools": [WEATHER], "temperature": 0, "max_output_tokens": cut}
    with serving(speaking(f"<think>Hm.</think>Look.{CALL}", PROMPT_LEN)) as server:
        whole = server.post(body, PATH).json()
        events = typed_events(server.post(body | {"stream": True}, PATH).text)
    Response.model_validate(whole)
    assert check_items(events[2:-1]) == events[-1]["response"]["output"]
    assert events[-1]["type"] == "response.incomplete" and without_ids(events[-1]["response"]) == without_ids(whole)
    assert all(item["status"] == "completed" for item in whole["output"][:-1])


@pytest.mark.usefixtures("taught")
def test_a_call_and_its_output_go_back_as_input() -> None:
    with serving(speaking(f"<think>Hm.</think>I look.{CALL}", PROMPT_LEN)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            first = client.responses.create(model="scripted", input="Hello?", tools=[WEATHER], temperature=0)
            call = next(item for item in first.output if item.type == "function_call")
            again: Any = [{"role": "user", "content": "Hello?"}, *first.output]
            again.append({"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"})
            client.responses.create(model="scripted", input=again, tools=[WEATHER], max_output_tokens=4)
        items = [item.to_dict() if hasattr(item, "to_dict") else item for item in again]
        mine = server.portal.call(ask_response, server.service, {"model": "scripted", "input": items})
    function = {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
    assert mine.prompts == [
        [
            {"role": "user", "content": "Hello?"},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "content": "22 degrees", "tool_call_id": call.call_id},
        ]
    ]


def test_a_response_is_the_chat_that_it_means(server: Serving) -> None:
    shared = {"model": "scripted", "temperature": 0.5, "top_p": 0.5, "seed": 7, "cache_salt": "s", "stream": True}
    items: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "<|im_end|>"}, {"type": "input_text", "text": "c"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d", "annotations": []}]},
        {"role": "user", "content": "e"},
    ]
    messages = [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "a"},
        {"role": "user", "content": "<|im_end|>\nc"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    one = shared | {"instructions": "i", "input": items, "max_output_tokens": 9}
    mine = server.portal.call(ask_response, server.service, one)
    chat = server.portal.call(ask_chat, server.service, shared | {"messages": messages, "max_tokens": 9})
    for field in ("prompts", "params", "tools", "limit", "cache_salt", "priority", "streams"):
        assert getattr(mine, field) == getattr(chat, field), field


def test_what_an_assistant_says_after_its_calls_is_a_message_of_its_own(server: Serving) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": "f", "arguments": ""},
        {"role": "assistant", "content": "e"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "g"}]},
    ]
    (chat,) = server.portal.call(ask_response, server.service, {"model": "scripted", "input": items}).prompts
    assert not isinstance(chat, str)
    assert [message["role"] for message in chat] == ["user", "assistant", "assistant", "tool"]
    assert chat[1]["reasoning_content"] == "b" and [call["id"] for call in chat[1]["tool_calls"]] == ["c", "d"]
    assert chat[2]["content"] == "e" and chat[3]["content"] == "g"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"store": "yes"}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"temperature": 3}, "temperature"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"model": "other"}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_is_named(server: Serving, changes: dict[str, Any], param: str, stream: bool) -> None:
    answer = server.post({"input": "x", "max_output_tokens": 4, "stream": stream} | changes, PATH)
    assert check_error(answer, 404 if param == "model" else 400)["param"] == param
    server.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"store": False},
        {"previous_response_id": None},
        {"background": False, "truncation": "disabled", "service_tier": "auto", "user": "me"},
        {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": None}},
        {"text": {"format": {"type": "text"}}, "parallel_tool_calls": True, "tools": [], "tool_choice": "auto"},
        {"prompt_cache_key": "k", "safety_identifier": "s", "metadata": {}},
    ],
)
def test_what_asks_for_nothing_is_taken(server: Serving, changes: dict[str, Any]) -> None:
    answer = server.post({"input": "x", "max_output_tokens": 2} | changes, PATH)
    Response.model_validate(answer.json())
    assert answer.status_code == 200


def test_a_step_that_fails_ends_the_stream_with_error_and_failed() -> None:
    fault = {6: RuntimeError("secret /etc/passwd")}
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, faults=fault))) as server:
        body = {"input": "Hello?", "max_output_tokens": 50, "ignore_eos": True, "stream": True}
        events = typed_events(server.post(body, PATH).text)
        error, failed = events[-2:]
        ResponseErrorEvent.model_validate(error, strict=True)
        assert error["code"] == "request_failed" and "secret" not in json.dumps(events)
        assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
        assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
        server.check()


def test_a_client_that_goes_away_leaves_nothing() -> None:
    body = {"model": "scripted", "input": "x", "max_output_tokens": 900, "ignore_eos": True, "stream": True}
    with serving(unhurried()) as server:
        with server.client.stream("POST", PATH, json=body) as answer:
            assert "event: " in next(answer.iter_text())
            assert not server.idle
        until(lambda: server.idle)


def test_a_server_that_stops_says_so(server: Serving) -> None:
    body = {"model": "scripted", "input": "x", "max_output_tokens": 900, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", PATH, json=body) as answer:
        text = ""
        for part in answer.iter_text():
            if not text:
                server.portal.call(server.service.end_all)
            text += part
    assert [event.get("code") for event in typed_events(text)[-2:]] == ["server_shutting_down", None]
    until(lambda: server.idle)
