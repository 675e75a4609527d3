"""Sampling fields in both APIs on the real model: what they do, and how they fail."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import smollm2_reference
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import Serving, check_error, events_of, serving

from headrace.engine import Engine, SamplingParams
from headrace.server import ServerSettings

CHAT: Any = [{"role": "user", "content": "Name a river."}]
PROMPT = smollm2_reference.ECHOED
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Serving]:
    settings = ServerSettings(served_model_name="scripted", tool_call_parser="hermes")
    with serving(Engine(smollm2, kv_memory="64MiB"), settings) as here:
        yield here


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none-needed", max_retries=0, timeout=60) as made:
        yield made


def ids_of(server: Serving, text: str) -> list[int]:
    ids: list[int] = server.post({"prompt": text}, "/tokenize").json()["tokens"]
    return ids


def choice_of(server: Serving, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    question = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": CHAT}
    answer = server.post({"temperature": 0, "max_tokens": 8, **question, **body}, path)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(server: Serving, path: str, **body: Any) -> list[dict[str, Any]]:
    question = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": CHAT}
    answer = server.post({"temperature": 0, "max_tokens": 8, **question, **body, "stream": True}, path)
    *chunks, done = events_of(answer.text)
    assert done == "[DONE]", answer.text
    return [chunk["choices"][0] for chunk in chunks]


# -- log-probabilities ----------------------------------------------------------------------------------------------


def test_log_probabilities_of_chats(client: openai.OpenAI, server: Serving) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": CHAT, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    choice = whole.choices[0]
    assert choice.finish_reason == "stop" and choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == choice.message.content
    assert whole.usage is not None and len(content) == whole.usage.completion_tokens - 1  # its end is not shown
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert [other.logprob for other in entry.top_logprobs] == sorted(
            [other.logprob for other in entry.top_logprobs], reverse=True
        )
    plain = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs
    assert plain is not None and plain.content is not None
    assert [(e.token, e.logprob, e.top_logprobs) for e in plain.content] == [(e.token, e.logprob, []) for e in content]
    assert client.chat.completions.create(**asked).choices[0].logprobs is None


@pytest.mark.parametrize("stop", [None, ["river"], [" the"]])
@pytest.mark.parametrize("n", [1, 2])
def test_log_probabilities_of_streams_are_those_of_whole_answers(server: Serving, stop: Any, n: int) -> None:
    body = {"messages": CHAT, "max_tokens": 24, "seed": 3, "stop": stop, "n": n, "logprobs": True, "top_logprobs": 1}
    whole = server.post(body, CHATS).json()["choices"]
    *chunks, _ = events_of(server.post(body | {"stream": True}, CHATS).text)
    for choice in whole:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        found: list[Any] = []
        text = ""
        for part in mine:
            found += (part["logprobs"] or {"content": []})["content"]
            text += part["delta"].get("content", "")
            said = b"".join(bytes(entry["bytes"]) for entry in found).decode(errors="ignore")
            assert said.startswith(text)  # no text comes before its tokens
        assert found == choice["logprobs"]["content"] and text == choice["message"]["content"]
        joined = b"".join(bytes(entry["bytes"]) for entry in found).decode()
        assert joined.startswith(text) and (stop is not None or joined == text)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


def test_tokens_that_are_parts_of_characters(server: Serving) -> None:
    """The characters of one answer, forced to be some that take several tokens each."""
    body = {"guided_choice": ["a🌊é漢"], "max_tokens": 30, "logprobs": True}
    choice = choice_of(server, CHATS, **body)
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "a🌊é漢" and len(content) > 4
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "a🌊é漢"
    found = [
        entry for part in streamed(server, CHATS, **body) if part["logprobs"] for entry in part["logprobs"]["content"]
    ]
    assert found == content
    legacy = choice_of(server, guided_choice=["a🌊é漢"], max_tokens=30, logprobs=0)["logprobs"]
    assert any(token.startswith("bytes:\\x") for token in legacy["tokens"])
    assert legacy["text_offset"] == sorted(legacy["text_offset"]) and legacy["text_offset"][-1] <= 4
    assert legacy["top_logprobs"] is None


def test_log_probabilities_of_completions(server: Serving) -> None:
    plain = choice_of(server)
    choice = choice_of(server, logprobs=2)
    found = choice["logprobs"]
    assert choice["text"] == plain["text"] and plain["logprobs"] is None
    assert "".join(found["tokens"]) == choice["text"]
    for token, start in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][start:].startswith(token)
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob == max(top.values()) and len(top) == 2
    parts = [part for part in streamed(server, COMPLETIONS, logprobs=2) if part["logprobs"]]
    for name in found:
        assert [value for part in parts for value in part["logprobs"][name]] == found[name]


@pytest.mark.parametrize("ids", [False, True])
def test_an_echo_tells_of_the_prompt_as_well(server: Serving, ids: bool) -> None:
    tokens = ids_of(server, PROMPT)
    body: dict[str, Any] = {"prompt": tokens if ids else PROMPT, "echo": True, "logprobs": 1, "n": 2}
    whole = server.post({"temperature": 0, "max_tokens": 4, **body}).json()
    for choice in whole["choices"]:
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(tokens) + 4 and "".join(found["tokens"]) == choice["text"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert all(logprob <= 0 for logprob in found["token_logprobs"][1:])
        for token, start in zip(found["tokens"], found["text_offset"], strict=True):
            assert choice["text"][start:].startswith(token)
    parts = streamed(server, COMPLETIONS, **body | {"n": 1, "max_tokens": 4})
    assert "".join(part["text"] for part in parts) == whole["choices"][0]["text"]
    offsets = [offset for part in parts if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
    assert offsets == whole["choices"][0]["logprobs"]["text_offset"]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_without_tokens(server: Serving, logprobs: int | None) -> None:
    body: dict[str, Any] = {"prompt": [PROMPT, "Short"], "echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = server.post(body).json()
    assert [choice["text"] for choice in answer["choices"]] == body["prompt"]
    assert answer["usage"]["completion_tokens"] == 0
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    if logprobs is not None:
        assert [len(c["logprobs"]["tokens"]) for c in answer["choices"]] == [
            len(ids_of(server, p)) for p in body["prompt"]
        ]
    *chunks, _ = events_of(server.post(body | {"stream": True}).text)
    for index, prompt in enumerate(body["prompt"]):
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index) == prompt


def test_log_probabilities_are_those_of_transformers(smollm2: Path) -> None:
    """In float32, of a prompt and of what is generated; `make soak` computes what they are compared with again."""
    wanted = smollm2_reference.kept()
    settings = ServerSettings(served_model_name="scripted")
    with serving(Engine(smollm2, kv_memory="16MiB", dtype="float32"), settings) as exact:
        found = choice_of(exact, echo=True, logprobs=3)["logprobs"]
        assert ids_of(exact, PROMPT) + ids_of(exact, choice_of(exact)["text"]) == wanted.echoed
    assert len(found["tokens"]) == len(wanted.echoed)
    assert found["token_logprobs"][1:] == pytest.approx(wanted.logprobs, abs=1e-3)
    for top, likeliest in zip(found["top_logprobs"][1:], wanted.likeliest, strict=True):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(likeliest, abs=1e-3)


def test_the_client_knows_the_shapes(client: openai.OpenAI) -> None:
    asked: Any = {"model": "scripted", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 2}
    answer = client.completions.create(**asked)
    Completion.model_validate(answer.model_dump(), strict=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and "".join(logprobs.tokens) == answer.choices[0].text
    chat: Any = {"model": "scripted", "messages": CHAT, "max_tokens": 60, "temperature": 0, "logprobs": True}
    with client.chat.completions.stream(**chat) as stream:  # raises where an answer was cut
        gathered = stream.get_final_completion().choices[0]
    assert gathered.logprobs is not None and gathered.logprobs.content is not None
    assert "".join(entry.token for entry in gathered.logprobs.content) == gathered.message.content


# -- what shapes the tokens -----------------------------------------------------------------------------------------


def test_fields_do_what_the_engine_does(server: Serving) -> None:
    asked: list[dict[str, Any]] = [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"logit_bias": {"260": 20, "28": -50.5}},
        {"temperature": 1.0, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"min_tokens": 6, "stop_token_ids": [30, 28]},
        {"allowed_token_ids": list(range(300, 400))},
        {"forbidden_token_ids": [260, 28]},
        {"bad_words": ["Danube", "the"]},
        {"ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": True},
    ]
    for fields in asked:
        given = {"temperature": 0, "max_tokens": 8, **fields}
        expected = server.portal.call(server.engine.generate, PROMPT, SamplingParams(**given)).choices[0]
        got = choice_of(server, **given)
        assert (got["text"], got["finish_reason"]) == (expected.text, expected.finish_reason), fields


def test_best_of_returns_the_likeliest(server: Serving) -> None:
    body = {"prompt": [PROMPT, "Rain"], "temperature": 1.0, "seed": 11, "max_tokens": 6, "ignore_eos": True}
    all_of_them = server.post(body | {"n": 4, "logprobs": 0}).json()["choices"]
    answer = server.post(body | {"n": 2, "best_of": 4}).json()
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 6
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for place in (0, 1):
        group = sorted(
            all_of_them[4 * place :][:4], key=lambda choice: sum(choice["logprobs"]["token_logprobs"]), reverse=True
        )
        assert [c["text"] for c in answer["choices"][2 * place :][:2]] == [c["text"] for c in group[:2]]
    assert all(choice["logprobs"] is None for choice in answer["choices"])


def test_beam_search(server: Serving) -> None:
    expected = server.portal.call(server.engine.generate, PROMPT, SamplingParams(n=2, beam_width=3, max_tokens=6))
    body = {"prompt": PROMPT, "n": 2, "best_of": 3, "use_beam_search": True, "max_tokens": 6}
    answer = server.post(body).json()
    assert [choice["text"] for choice in answer["choices"]] == [choice.text for choice in expected.choices]
    assert (
        "".join(part["text"] for part in streamed(server, COMPLETIONS, **body | {"n": 1})) == expected.choices[0].text
    )
    error = check_error(server.post(body | {"top_k": 5}), 400)
    assert error["param"] == "top_k" and error["message"] == "top_k: cannot go with use_beam_search, got 5"


# -- structured output ----------------------------------------------------------------------------------------------

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 10}, "km": {"type": "integer", "maximum": 9999}},
    "required": ["river", "km"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA, "strict": True}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_text_keeps_to_a_schema(server: Serving, fields: dict[str, Any], path: str) -> None:
    choice = choice_of(server, path, **fields, temperature=1.5, seed=5, max_tokens=80)
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_regex": "(Rh[oô]ne|Volga)/[0-9]"}, None),
        ({"guided_choice": ["Rhine", "Po"]}, {"Rhine", "Po"}),
        ({"structured_outputs": {"choice": ["Rhine", "Po"]}}, {"Rhine", "Po"}),
        ({"guided_grammar": 'start: "Po" | "Rhine"'}, {"Rhine", "Po"}),
        ({"structured_outputs": {"grammar": 'start: "Po"'}}, {"Po"}),
    ],
)
def test_text_keeps_to_other_formats(server: Serving, fields: dict[str, Any], texts: set[str] | None) -> None:
    text = choice_of(server, CHATS, **fields, temperature=1.5)["message"]["content"]
    assert text in texts if texts else text[-2] == "/"


def test_json_objects(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=CHAT,
        response_format={"type": "json_object"},
        max_tokens=60,
        temperature=0,
        stop=["}"],
    )
    assert (answer.choices[0].message.content or "").startswith("{")


class River(pydantic.BaseModel):
    name: Literal["Rhine", "Po"]
    km: Annotated[int, pydantic.Field(ge=0, le=9999)]


def test_the_client_parses_into_its_own_models(client: openai.OpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": CHAT, "temperature": 1.5, "seed": 1, "max_tokens": 60}
    parsed = client.chat.completions.parse(**asked, response_format=River).choices[0].message.parsed
    assert parsed is not None and parsed.name in ("Rhine", "Po")
    with client.chat.completions.stream(**asked, response_format=River) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


# -- calls that are demanded ----------------------------------------------------------------------------------------


def tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("length", river={"enum": ["Rhine", "Po"]}), tool("depth", metres={"type": "integer", "maximum": 99})]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "depth"}}])
def test_forced_calls(server: Serving, choice: Any) -> None:
    body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 60, "temperature": 1.2}
    for seed in range(2):
        got = choice_of(server, CHATS, **body, seed=seed)
        assert got["finish_reason"] == "tool_calls", got
        (call,) = got["message"]["tool_calls"]
        schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == call["function"]["name"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        assert choice == "required" or call["function"]["name"] == "depth"
        assert got["message"]["content"] is None


@pytest.mark.parametrize("most", [1, 5, 14])
def test_a_forced_call_that_is_cut_is_no_content(server: Serving, most: int) -> None:
    body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": most}
    got = choice_of(server, CHATS, **body, logprobs=True)
    assert got["finish_reason"] == "length" and got["message"]["content"] is None
    for chunk in streamed(server, CHATS, **body):
        assert chunk["delta"].get("content") is None


def test_calls_and_formats_of_the_other_forms_of_chats(server: Serving) -> None:
    shared = {"temperature": 1.2, "seed": 1}
    functions = [each["function"] for each in TOOLS]
    asked = shared | {"input": "How deep is it?", "max_output_tokens": 60}
    flat = [{"type": "function", **each} for each in functions]
    for choice in ("required", {"type": "function", "name": "depth"}):
        response = server.post(asked | {"tools": flat, "tool_choice": choice}, "/v1/responses").json()
        (item,) = response["output"]
        schema = next(each["parameters"] for each in functions if each["name"] == item["name"])
        jsonschema.validate(json.loads(item["arguments"]), schema)
    schema = TOOLS[1]["function"]["parameters"]
    text = {"format": {"type": "json_schema", "name": "depth", "schema": schema, "strict": True}}
    response = server.post(asked | {"text": text}, "/v1/responses").json()
    jsonschema.validate(json.loads(response["output"][0]["content"][0]["text"]), schema)
    asked = shared | {"messages": [{"role": "user", "content": "How deep is it?"}], "max_tokens": 60}
    asked["tools"] = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    for kind in ({"type": "any"}, {"type": "tool", "name": "depth"}):
        message = server.post(asked | {"tool_choice": kind}, "/v1/messages").json()
        (block,) = message["content"]
        assert message["stop_reason"] == "tool_use" and block["name"] in ("depth", kind.get("name", block["name"]))
        jsonschema.validate(
            block["input"], next(each["parameters"] for each in functions if each["name"] == block["name"])
        )


def test_a_format_or_a_call(server: Serving) -> None:
    """With tools that may be called, content keeps to the format, and what does not is a call."""
    body = {"tools": TOOLS, "response_format": {"type": "json_object"}, "max_tokens": 60, "temperature": 1.5}
    for seed in range(2):
        got = choice_of(server, CHATS, **body, seed=seed)
        if got["finish_reason"] == "stop":
            assert isinstance(json.loads(got["message"]["content"]), dict)
        elif got["finish_reason"] == "length":
            assert got["message"].get("tool_calls") or got["message"]["content"].startswith(("{", "<tool_call>"))


def test_a_refusal_shows_no_grammar_of_the_servers_own(server: Serving) -> None:
    broken = {"tools": [tool("depth", metres={"type": "metre"})], "tool_choice": "required", "max_tokens": 5}
    for fields, said in ((broken, "Invalid type: metre"), (broken | {"use_beam_search": True}, "use_beam_search")):
        error = server.post({"model": "scripted", "messages": CHAT} | fields, CHATS).json()["error"]
        assert error["param"] == "tool_choice" and error["message"].endswith(said), error


# -- refusals -------------------------------------------------------------------------------------------------------

WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHATS, {"logprobs": 3}, "logprobs"),
        (CHATS, {"top_logprobs": 2}, "top_logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs"),
        (COMPLETIONS, {"logit_bias": {"49152": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"abc": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias"),
        (CHATS, {"presence_penalty": 2.1}, "presence_penalty"),
        (CHATS, {"presence_penalty": -2.1}, "presence_penalty"),
        (CHATS, {"frequency_penalty": 2.1}, "frequency_penalty"),
        (CHATS, {"frequency_penalty": -2.1}, "frequency_penalty"),
        (COMPLETIONS, {"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"1": "1"}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        (COMPLETIONS, {"min_tokens": 9}, "min_tokens"),
        (CHATS, {"min_tokens": 9, "max_tokens": None, "max_completion_tokens": 8}, "min_tokens"),
        (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [49152]}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [5], "forbidden_token_ids": [5]}, "allowed_token_ids"),
        (COMPLETIONS, {"bad_words": [""]}, "bad_words[0]"),
        (COMPLETIONS, {"n": 2, "best_of": 1}, "best_of"),
        (COMPLETIONS, {"best_of": 17}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (CHATS, {"max_tokens": 0}, "max_tokens"),
        (CHATS, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (COMPLETIONS, {"use_beam_search": True, "n": 17}, "n"),
        (COMPLETIONS, {"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs"),
        (COMPLETIONS, {"length_penalty": 0.5}, "length_penalty"),
        (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"prompt": [[5] * 2000] * 7, "echo": True, "logprobs": 20}, "logprobs"),
        (CHATS, {"echo": True}, "echo"),
        (CHATS, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHATS, {"response_format": {"type": "poem"}}, "response_format.type"),
        (CHATS, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, None),
        (CHATS, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        (CHATS, {"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        (CHATS, {"guided_json": {"not": {}}}, "guided_json"),
        (CHATS, {"guided_json": "[]"}, "guided_json"),
        (CHATS, {"guided_json": WIDE}, "guided_json"),
        (CHATS, {"guided_regex": "("}, "guided_regex"),
        (CHATS, {"guided_regex": ""}, "guided_regex"),
        (CHATS, {"guided_choice": []}, "guided_choice"),
        (CHATS, {"guided_choice": ["a" * 40_000, "b" * 40_000]}, "guided_choice"),
        (CHATS, {"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        (CHATS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (CHATS, {"structured_outputs": {}}, "structured_outputs"),
        (CHATS, {"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (CHATS, {"tools": TOOLS, "tool_choice": "must"}, "tool_choice"),
        (CHATS, {"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHATS, {"tools": TOOLS, "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        (CHATS, {"tools": [tool("wide", **WIDE["properties"])], "tool_choice": "required"}, "tool_choice"),
        (CHATS, {"tools": TOOLS, "guided_grammar": 'start: "a"'}, "guided_grammar"),
        (CHATS, {"tools": [TOOLS[0], {"type": "function", "function": {}}]}, "tools[1].function.name"),
        (CHATS, {"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_refusals_name_the_field(server: Serving, path: str, fields: dict[str, Any], param: str | None) -> None:
    question = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": CHAT}
    error = check_error(server.post({"max_tokens": 8, **question, **fields}, path), 400)
    if param is not None:
        assert error["param"] == param, error
        assert param in error["message"], error


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    ("schema", "status"),
    [
        ({"type": "strng"}, 400),
        ({"type": "string", "pattern": "("}, 400),
        ({"$ref": "https://example.org/schema"}, 400),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, 400),
        ({"type": "string", "pattern": "(a+)+b"}, 200),  # no trouble to a derivative
        (nested(20), 200),
        (nested(200), 400),
    ],
)
def test_28_schemas_that_are_wrong_or_hard(server: Serving, schema: dict[str, Any], status: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    began = time.monotonic()
    answer = server.post({"messages": CHAT, "max_tokens": 4, "response_format": wanted}, CHATS)
    assert time.monotonic() - began < 5 and answer.status_code == status, answer.text
    if status != 200:
        check_error(answer, 400)
