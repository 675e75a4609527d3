"""The official `openai` client against a real server: every answer is what its own types say, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import anyio
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.model import Model
from serving import CAPACITY, Serving, check_error, events_of, scripted, serving, speaking

from headrace.engine.testing import ByteTokenizer
from headrace.server import ServerSettings

CHAT: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello?"}]
PROMPT_LEN = len(ByteTokenizer().encode_chat(CHAT))


def test_models(server: Serving, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "scripted"
    assert client.models.retrieve("scripted") == model
    Model.model_validate(server.client.get("/v1/models/scripted").json(), strict=True)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_streams_what_it_answers_whole(server: Serving, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": CHAT, "max_completion_tokens": 40, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None and whole.usage.completion_tokens == 40 and whole.usage.prompt_tokens == PROMPT_LEN
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("length") == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 40 + PROMPT_LEN
    )
    assert {c.id for c in chunks} == {chunks[0].id} and chunks[0].id != whole.id
    assert whole.usage.prompt_tokens_details is not None


def test_the_stream_helper_gathers_the_same_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=CHAT, max_tokens=8, temperature=0) as stream:
        for _ in stream:
            pass
        gathered = stream.current_completion_snapshot.choices[0]
    plain = client.chat.completions.create(model="scripted", messages=CHAT, max_tokens=8, temperature=0)
    assert gathered.message.content == plain.choices[0].message.content
    assert gathered.finish_reason == plain.choices[0].finish_reason


def test_the_async_client_streams_side_by_side(server: Serving) -> None:
    async def ask(client: openai.AsyncOpenAI, question: str, answers: dict[str, str]) -> None:
        messages: Any = [{"role": "user", "content": question}]
        stream = await client.chat.completions.create(
            model="scripted", messages=messages, max_tokens=30, temperature=0, stream=True
        )
        answers[question] = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> dict[str, str]:
        answers: dict[str, str] = {}
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(ask, client, f"Question {number}?", answers)
        return answers

    answers = anyio.run(run)
    for question, answer in answers.items():
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 30, "temperature": 0}
        whole = server.post(body, "/v1/chat/completions").json()
        assert whole["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize("usage", [None, {}, {"include_usage": True}, {"include_usage": False}])
def test_raw_chat_chunks_are_valid(server: Serving, usage: dict[str, bool] | None) -> None:
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 6, "n": 2, "stream": True, "ignore_eos": True}
    answer = server.post(body | {"stream_options": usage}, "/v1/chat/completions")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(answer.text)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    wants = bool(usage and usage.get("include_usage"))
    assert all(("usage" in chunk) == wants for chunk in chunks)
    body_chunks = chunks[:-1] if wants else chunks
    finishes = [c["choices"][0] for c in body_chunks if c["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in finishes) == [0, 1]
    assert all(choice["delta"] == {} for choice in finishes)
    if wants:
        assert chunks[-1]["usage"]["completion_tokens"] == 12


def test_raw_answers_are_valid(server: Serving) -> None:
    chat = server.post({"messages": CHAT, "max_tokens": 3, "n": 2}, "/v1/chat/completions").json()
    ChatCompletion.model_validate(chat)
    assert [choice["index"] for choice in chat["choices"]] == [0, 1]
    text = server.post({"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "echo": True, "ignore_eos": True}).json()
    Completion.model_validate(text)
    assert [choice["index"] for choice in text["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][0] for choice in text["choices"]] == ["a", "a", "b", "b"]
    assert text["usage"]["prompt_tokens"] == 2 and text["usage"]["completion_tokens"] == 12


def test_completions_take_text_and_ids_alone_and_in_lists(client: openai.OpenAI) -> None:
    def texts(prompt: Any) -> list[str]:
        answer = client.completions.create(
            model="scripted", prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in answer.choices]

    (alone,) = texts("Once")
    assert texts(list(b"Once")) == [alone]
    assert texts(["Once", "Twice"]) == [alone, *texts("Twice")]
    assert texts([list(b"Once"), list(b"Twice")]) == texts(["Once", "Twice"])


def test_completions_stream_what_they_answer_whole(server: Serving) -> None:
    body = {"prompt": ["Once", "Twice"], "n": 2, "max_tokens": 20, "seed": 5, "echo": True, "ignore_eos": True}
    whole = server.post(body).json()
    *chunks, done = events_of(server.post(body | {"stream": True}).text)
    assert done == "[DONE]"
    for chunk in chunks:  # the client's own type knows no choice that goes on, though OpenAI's service sends null, too
        (choice,) = chunk["choices"]
        Completion.model_validate(chunk | {"choices": [choice | {"finish_reason": choice["finish_reason"] or "stop"}]})
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]] == ["length"]


def test_the_default_length_of_a_completion_is_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="x", extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_tokens_and_back(server: Serving) -> None:
    ids = server.post({"prompt": "héllo"}, "/tokenize").json()
    assert ids == {"count": 6, "max_model_len": CAPACITY.max_context, "tokens": list("héllo".encode())}
    assert server.post({"tokens": ids["tokens"]}, "/detokenize").json() == {"prompt": "héllo"}
    assert server.post({"messages": CHAT}, "/tokenize").json()["count"] == PROMPT_LEN


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (openai.BadRequestError, {"temperature": 3}),
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"extra_body": {"logit_bias": {"5": 1000}}}),
    ],
)
def test_refusals_are_the_classes_that_the_client_knows(
    client: openai.OpenAI, error: type[openai.APIStatusError], body: dict[str, Any]
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "scripted", "messages": CHAT, **body})
    assert caught.value.param in (*body, "logit_bias") and caught.value.request_id


WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>'


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("text", [f"<think>Hm.</think>I look.{CALL}", CALL, f"Plain. {CALL}{CALL}"])
def test_tool_calls_and_reasoning(text: str) -> None:
    body: dict[str, Any] = {"messages": CHAT, "tools": [WEATHER], "temperature": 0}
    with serving(speaking(text, PROMPT_LEN)) as server:
        whole = server.post(body, "/v1/chat/completions").json()
        *chunks, _ = events_of(server.post(body | {"stream": True}, "/v1/chat/completions").text)
    ChatCompletion.model_validate(whole)
    message = whole["choices"][0]["message"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    calls: dict[int, dict[str, Any]] = {}
    content = reasoning = ""
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] not in calls:
                assert part["id"] and part["type"] == "function" and part["function"]["arguments"] == ""
                calls[part["index"]] = {"name": part["function"]["name"], "arguments": ""}
            else:
                assert part.keys() == {"index", "function"}
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert list(calls.values()) == [call["function"] for call in message["tool_calls"]]
    assert all(json.loads(call["arguments"]) == {"city": "Zürich", "days": [1, 2]} for call in calls.values())
    assert len(calls) == text.count("<tool_call>")
    assert content == (message["content"] or "") and reasoning == message.get("reasoning_content", "")
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["tool_calls"]


@pytest.mark.usefixtures("taught")
def test_without_tools_a_call_is_text() -> None:
    with serving(speaking(CALL, PROMPT_LEN)) as server:
        message = server.post({"messages": CHAT, "temperature": 0}, "/v1/chat/completions").json()["choices"][0][
            "message"
        ]
    assert message["content"] == CALL and "tool_calls" not in message


@pytest.mark.usefixtures("taught")
def test_calls_behind_the_first_are_left_out_where_they_may_not_be_parallel() -> None:
    body: dict[str, Any] = {"messages": CHAT, "tools": [WEATHER], "temperature": 0, "parallel_tool_calls": False}
    with serving(speaking(f"Plain. {CALL}{CALL}", PROMPT_LEN)) as server:
        choice = server.post(body, "/v1/chat/completions").json()["choices"][0]
        *chunks, _ = events_of(server.post(body | {"stream": True}, "/v1/chat/completions").text)
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert parts and {part["index"] for part in parts} == {0}


HARMONY = "{{ tools }}{{ messages[0].tool_calls }}<|channel|>commentary"
GLM = "{{ tools }}{{ messages[0].tool_calls }}<think></think><tool_call>{function-name}<arg_key>"
# Chat template, answer, reasoning, content, and the arguments of the call.
FAMILIES = [
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Yes.",
        None,
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "1"}<|call|>',
        None,
        {"city": "1"},
    ),
    (
        GLM,
        "<think>Hm.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        None,
        {"city": "1"},
    ),
]


@pytest.mark.parametrize(("template", "text", "content", "arguments"), FAMILIES)
def test_a_template_of_another_family_tells_how_its_answers_are_read(
    monkeypatch: pytest.MonkeyPatch, template: str, text: str, content: str | None, arguments: dict[str, str] | None
) -> None:
    monkeypatch.setattr(ByteTokenizer, "chat_template", template)
    body: dict[str, Any] = {"messages": CHAT, "temperature": 0} | ({"tools": [WEATHER]} if arguments else {})
    with serving(speaking(text, PROMPT_LEN)) as server:
        message = server.post(body, "/v1/chat/completions").json()["choices"][0]["message"]
        *chunks, _ = events_of(server.post(body | {"stream": True}, "/v1/chat/completions").text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for key, expected in (("reasoning_content", "Hm."), ("content", content)):
        assert message[key] == expected
        assert "".join(delta.get(key) or "" for delta in deltas) == (expected or "")
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    assert [json.loads(call["arguments"]) for call in calls] == ([arguments] if arguments else [])
    parts = [part["function"]["arguments"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(parts) == "".join(call["arguments"] for call in calls)


@pytest.mark.parametrize("asked", ["tool_choice", "response_format"])
def test_calls_in_a_format_that_no_grammar_says_are_refused_by_name(asked: str) -> None:
    values: dict[str, Any] = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    alternatives = {"type": "object", "oneOf": [{"required": ["city"]}, {"required": ["place"]}]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": alternatives}}
    with serving(scripted(), ServerSettings(tool_call_parser="pythonic")) as server:
        answer = server.post({"messages": CHAT, "tools": [tool], asked: values[asked]}, "/v1/chat/completions")
    error = check_error(answer, 400, "invalid_value")
    assert error["param"] == asked and error["message"] == f"{asked}: calls of this format cannot be forced"
