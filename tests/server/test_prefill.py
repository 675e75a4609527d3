"""Prompts with an end of their own: answers that continue a message, counts of tokens, and what makes the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel
from serving import CAPACITY, Serving, check_error, events_of, serving, speaking

from headrace.engine import Engine
from headrace.server import ServerSettings
from headrace.server.routes.generation import ask_chat
from headrace.server.routes.messages import ask_message

HELLO: Any = {"role": "user", "content": "Hello?"}
BEGUN: Any = {"role": "assistant", "content": "Hel"}
OPEN = b"user: Hello?\nassistant: Hel"
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_continues_the_last_message(path: str, stream: bool) -> None:
    body: dict[str, Any] = {"messages": [HELLO, BEGUN], "max_tokens": 40, "temperature": 0, "stream": stream}
    if path == CHAT:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    with serving(speaking("lo back.", len(OPEN))) as server:
        answer = server.post(body, path)
        if path == CHAT and stream:
            chunks = [each["choices"][0]["delta"] for each in events_of(answer.text)[:-1]]
            text = "".join(delta.get("content") or "" for delta in chunks)
        elif path == CHAT:
            text = answer.json()["choices"][0]["message"]["content"]
            assert answer.json()["usage"]["prompt_tokens"] == len(OPEN)
        elif stream:
            text = "lo back." if '"text":"l"' in answer.text else answer.text
        else:
            (block,) = answer.json()["content"]
            text = block["text"]
    assert text == "lo back."


def test_a_message_is_the_chat_that_is_continued(server: Serving) -> None:
    shared = {"model": "scripted", "messages": [HELLO, BEGUN], "max_tokens": 4}
    mine = server.portal.call(ask_message, server.service, shared)
    chat = server.portal.call(ask_chat, server.service, shared | {"continue_final_message": True})
    assert mine.prompts == chat.prompts and mine.ending == chat.ending == {"continue_final_message": True}


def test_a_prompt_may_end_with_its_last_message(server: Serving) -> None:
    body = {"messages": [HELLO], "max_tokens": 2, "add_generation_prompt": False}
    assert server.post(body, CHAT).status_code == 200
    ask = server.portal.call(ask_chat, server.service, body | {"model": "scripted"})
    assert ask.ending == {"add_generation_prompt": False}


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize(("begun", "reasoning"), [("<think>Let", "me see."), ("<think>x</think>So", None)])
def test_reasoning_that_was_begun_goes_on(begun: str, reasoning: str | None) -> None:
    body = {"messages": [HELLO, {"role": "assistant", "content": begun}], "continue_final_message": True}
    with serving(speaking(" me see.</think>It is.", len(f"user: Hello?\nassistant: {begun}"))) as server:
        message = server.post(body | {"temperature": 0}, CHAT).json()["choices"][0]["message"]
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == ("It is." if reasoning else " me see.</think>It is.")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": [HELLO]}, "continue_final_message"),
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"continue_final_message": None, "add_generation_prompt": 1}, "add_generation_prompt"),
        (
            {
                "messages": [
                    HELLO,
                    {
                        "role": "assistant",
                        "content": "x",
                        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
                    },
                ]
            },
            "continue_final_message",
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_what_cannot_be_continued_is_refused(server: Serving, path: str, changes: dict[str, Any], param: str) -> None:
    body = {"messages": [HELLO, BEGUN], "continue_final_message": True} | changes
    assert check_error(server.post(body, path), 400)["param"] == param


def test_tokens_are_counted_as_the_message_would_have_them(server: Serving) -> None:
    asked: Any = {"model": "scripted", "system": "Be brief.", "messages": [HELLO, BEGUN]}
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        counted = client.messages.count_tokens(**asked).input_tokens
        usage = client.messages.create(**asked, max_tokens=1).usage
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            client.messages.count_tokens(model="scripted", messages=[])
        with pytest.raises(anthropic.NotFoundError):
            client.messages.count_tokens(**asked | {"model": "other"})
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(b"system: Be brief.\n" + OPEN)
    server.check()


def test_tokenize_takes_the_end_of_a_chat(server: Serving) -> None:
    whole = server.post({"messages": [HELLO, BEGUN]}, "/tokenize").json()["tokens"]
    begun = server.post({"messages": [HELLO, BEGUN], "continue_final_message": True}, "/tokenize").json()["tokens"]
    assert bytes(begun) == OPEN and whole == [*begun, ord("\n")]


def test_control_tokens_come_back_as_text(server: Serving) -> None:
    assert server.post({"tokens": [*b"a", 256, *b"b"]}, "/detokenize").json() == {"prompt": "a<end>b"}


def test_the_tokenizer_is_told(server: Serving) -> None:
    info = server.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<end>" and info["bos_token"] is None and info["eos_token_ids"] == [256]
    assert info["added_tokens_decoder"] == {"256": {"content": "<end>", "special": True}}
    assert "message.role" in info["chat_template"] and info["model_max_length"] == CAPACITY.max_context


class City(BaseModel):
    """What the tests ask for."""

    size: Literal["a", "b"]
    kind: Literal["c"]


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Serving]:
    """A real model, which keeps to formats."""
    settings = ServerSettings(served_model_name="scripted")
    with serving(Engine(smollm2, kv_memory="64MiB"), settings) as here:
        yield here


@pytest.mark.parametrize("named", ["output_config", "output_format"])
def test_messages_have_structured_output(real: Serving, named: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["a", "b"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted: dict[str, Any] = {"type": "json_schema", "schema": schema}
    body = {"messages": [HELLO], "max_tokens": 60, named: {"format": wanted} if named == "output_config" else wanted}
    (block,) = real.post(body, "/v1/messages").json()["content"]
    assert block["text"].replace(" ", "").replace("\n", "") in ('{"a":"a"}', '{"a":"b"}')
    prefilled = body | {"messages": [HELLO, BEGUN]}
    assert "cannot go with" in real.post(prefilled, "/v1/messages").json()["error"]["message"]
    both = body | {"guided_choice": ["a"]}
    assert "cannot go with" in real.post(both, "/v1/messages").json()["error"]["message"]


def test_the_official_client_asks_for_a_class(real: Serving) -> None:
    with anthropic.Anthropic(base_url=real.url, api_key="x", max_retries=0) as client:
        message = client.messages.create(
            model="scripted",
            max_tokens=200,
            messages=[HELLO],
            output_config={"format": {"type": "json_schema", "schema": anthropic.transform_schema(City)}},
        )
    assert message.content[0].type == "text"
    assert City.model_validate_json(message.content[0].text).kind == "c"


def test_the_official_client_of_openai_passes_the_field_on(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="scripted", messages=[HELLO, BEGUN], max_tokens=3, extra_body={"continue_final_message": True}
    )
    assert made.usage is not None and made.usage.prompt_tokens == len(OPEN)
