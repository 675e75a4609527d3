"""Stored responses: found again by who made them alone, within a bound, and gone on from without computing anew."""

from __future__ import annotations

from array import array
from typing import Any

import openai
import pytest
from serving import Serving, check_error, scripted, serving, speaking

from headrace.engine.testing import ByteTokenizer
from headrace.server import ServerSettings
from headrace.server.errors import ApiError
from headrace.server.routes.responses import ask_response
from headrace.server.stored import ResponseStore, StoredResponse

PATH = "/v1/responses"
PROMPT_LEN = len(ByteTokenizer().encode_chat([{"role": "user", "content": "Hello?"}]))
ASKED: dict[str, Any] = {"model": "scripted", "max_output_tokens": 40, "temperature": 0}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PAGE = 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_found_again_until_it_is_deleted(client: openai.OpenAI, stream: bool) -> None:
    made: Any = client.responses.create(input="Hello?", stream=stream, **ASKED)
    if stream:
        made = [event for event in made if event.type in ("response.completed", "response.incomplete")][0].response
    assert made.to_dict()["store"] is True
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="And?", previous_response_id=made.id, **ASKED)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_computes_nothing_of_the_turn_before_again(server: Serving, stream: bool) -> None:
    """The answers are no UTF-8, so that their ids cannot be made from their text again."""
    body = {"input": "Hello?", "max_output_tokens": 100, "ignore_eos": True, "instructions": "Be brief."}
    first = server.post(body, PATH).json()
    assert "\ufffd" in first["output"][0]["content"][0]["text"]
    before = first["usage"]["total_tokens"]
    for question in ("And?", "So?"):
        more = {"input": question, "previous_response_id": first["id"]}
        second = server.post(body | more, PATH).json()
        usage = second["usage"]
        assert usage["input_tokens"] == before + len(f"\nuser: {question}\n")
        assert usage["input_tokens_details"]["cached_tokens"] >= (before - 1) // PAGE * PAGE
        first, before = second, usage["total_tokens"]
    assert server.client.get(f"{PATH}/{first['id']}").json() == first


def test_other_instructions_replace_those_of_the_turn_before(server: Serving) -> None:
    first = server.post({"input": "Hello?", "max_output_tokens": 9, "instructions": "Be brief."}, PATH).json()
    text = first["output"][0]["content"][0]["text"] if first["output"] else ""
    body = {"model": "scripted", "input": "And?", "previous_response_id": first["id"]}
    ask = server.portal.call(ask_response, server.service, body)
    (chat,) = ask.prompts
    assert ask.after is None and [message["role"] for message in chat] == ["user", "assistant", "user"]
    assert chat[1]["content"] == text and chat[2]["content"] == "And?"
    same = server.portal.call(ask_response, server.service, body | {"instructions": "Be brief."})
    assert same.after is not None and same.after[1] == [{"role": "user", "content": "And?"}]


def test_what_a_stop_string_ended_is_rendered_anew() -> None:
    with serving(speaking("Hello back.", PROMPT_LEN)) as server:
        first = server.post({"input": "Hello?", "temperature": 0, "stop": " back"}, PATH).json()
        assert first["output"][0]["content"][0]["text"] == "Hello"
        body = {"model": "scripted", "input": "And?", "previous_response_id": first["id"]}
        assert server.portal.call(ask_response, server.service, body).after is None


@pytest.mark.usefixtures("taught")
def test_the_output_of_a_call_follows_it() -> None:
    with serving(speaking(CALL, PROMPT_LEN)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            first = client.responses.create(model="scripted", input="Hello?", tools=[WEATHER], temperature=0)
            (call,) = [item for item in first.output if item.type == "function_call"]
            output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
            again: Any = {"input": [output], "previous_response_id": first.id, "tools": [WEATHER]}
            second = client.responses.create(model="scripted", max_output_tokens=4, **again)
            listed = client.responses.input_items.list(second.id, order="asc").data
        ask = server.portal.call(ask_response, server.service, {"model": "scripted", **again})
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
    (chat,) = ask.prompts
    assert [message["role"] for message in chat] == ["user", "assistant", "tool"] and chat[1]["tool_calls"]
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= (first.usage.total_tokens - 1) // PAGE * PAGE


def test_input_items_come_in_pages(server: Serving, client: openai.OpenAI) -> None:
    items: Any = [{"role": "user" if place % 2 == 0 else "assistant", "content": str(place)} for place in range(5)]
    made = client.responses.create(input=items, **ASKED)
    found = [item.to_dict() for item in client.responses.input_items.list(made.id, order="asc", limit=2)]
    assert [item["content"][0]["text"] for item in found] == ["0", "1", "2", "3", "4"]
    assert len({item["id"] for item in found}) == 5
    newest = [item.to_dict() for item in client.responses.input_items.list(made.id)]
    assert newest == found[::-1]
    for wrong, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=no", "after")):
        answer = server.client.get(f"{PATH}/{made.id}/input_items?{wrong}")
        assert check_error(answer, 400, "invalid_value")["param"] == param
    assert check_error(server.client.get(f"{PATH}/{made.id}?stream=true"), 400)["param"] == "stream"


def test_one_key_finds_nothing_of_another() -> None:
    keys = {"a": "the-key-of-a", "b": "the-key-of-b"}
    with serving(scripted(), ServerSettings(api_keys=keys)) as server:
        mine = {"headers": {"authorization": "Bearer the-key-of-a"}}
        other = {"headers": {"authorization": "Bearer the-key-of-b"}}
        made = server.post({"input": "secret", "max_output_tokens": 4}, PATH, **mine).json()
        for path in (f"{PATH}/{made['id']}", f"{PATH}/{made['id']}/input_items"):
            assert server.client.get(path, **mine).status_code == 200
            refused = check_error(server.client.get(path, **other), 404, "response_not_found")
            unknown = check_error(server.client.get(path.replace(made["id"], "resp_0"), **other), 404)
            assert refused["message"].replace(made["id"], "resp_0") == unknown["message"]
            assert server.client.get(path, headers={"authorization": ""}).status_code == 401
        check_error(server.client.delete(f"{PATH}/{made['id']}", **other), 404)
        body = {"input": "x", "previous_response_id": made["id"], "max_output_tokens": 4}
        check_error(server.post(body, PATH, **other), 400, "previous_response_not_found")
        assert server.post(body, PATH, **mine).status_code == 200


def test_nothing_is_stored_where_that_is_not_wished() -> None:
    with serving(scripted()) as server:
        made = server.post({"input": "x", "max_output_tokens": 4, "store": False}, PATH).json()
        assert made["store"] is False and server.service.responses.held == 0
        check_error(server.client.get(f"{PATH}/{made['id']}"), 404, "response_not_found")
    with serving(scripted(), ServerSettings(max_stored_bytes=0)) as server:
        made = server.post({"input": "x", "max_output_tokens": 4}, PATH).json()
        assert made["store"] is False and server.service.responses.held == 0
        refused = server.post({"input": "x", "store": True}, PATH)
        assert check_error(refused, 400, "unsupported_parameter")["param"] == "store"


def test_memory_is_bounded_while_conversations_grow() -> None:
    most = 64 * 2**10
    with serving(scripted(), ServerSettings(max_stored_bytes=most)) as server:
        made: list[dict[str, Any]] = []
        for number in range(40):
            body = {"input": f"{number}" * 20, "max_output_tokens": 4, "ignore_eos": True}
            made.append(server.post(body, PATH).json())
            assert 0 < server.service.responses.held <= most
            if number == 5:
                assert server.client.get(f"{PATH}/{made[0]['id']}").status_code == 200
        found = [server.client.get(f"{PATH}/{each['id']}").status_code == 200 for each in made]
    assert not found[0] and found[-1] and found == sorted(found)


def response(size: int) -> StoredResponse:
    return StoredResponse(b"x" * size, b"[]", b"", array("i"))


def test_the_largest_tenant_makes_room_with_what_it_used_least_recently() -> None:
    one = response(1000)
    store = ResponseStore(5 * one.nbytes)
    store.put("small", "s", one)
    for number in range(4):
        store.put("large", str(number), one)
    store.get("large", "0")
    for number in range(4, 6):
        store.put("large", str(number), one)
    assert store.held == 5 * one.nbytes and store.get("small", "s") is one
    left = []
    for number in range(6):
        try:
            store.get("large", str(number))
            left.append(number)
        except ApiError as error:
            assert error.status == 404
    assert left == [0, 3, 4, 5]
    store.put("small", "huge", response(20_000))
    assert store.held == 5 * one.nbytes
    for number in left:
        store.delete("large", str(number))
    store.delete("small", "s")
    assert store.held == 0
