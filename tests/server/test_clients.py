"""What the clients that people bring expect: paths, sentences that they look for, and words that they show."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tiny_models
from serving import CAPACITY, Serving, check_error, logged, scripted, serving, until

from headrace.engine import Engine
from headrace.engine.testing import ByteTokenizer
from headrace.engine.tokens.chat_template import ChatTemplate
from headrace.server import ServerSettings

CHAT = "/v1/chat/completions"
MOST = CAPACITY.max_context
SENTENCE = "This model's maximum context length is 1024 tokens. However, you requested "


# -- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_where_charts_and_load_generators_ask(path: str) -> None:
    with serving(scripted(), ServerSettings(api_keys={"a": "a-key-of-tests"})) as server:
        with httpx2.Client(base_url=server.url, trust_env=False) as client:  # which has no key
            assert client.get(path).json() == client.get("/health/ready").json() == {"status": "ready"}
            assert client.get("/version").status_code == 401
            server.service.drain()
            answers = [client.get(each) for each in (path, "/health/ready")]
            assert [(each.status_code, each.json()["reason"]) for each in answers] == [(503, "draining")] * 2
        assert server.client.get("/version").json().keys() == {"version"}
        # Metrics and the log know one name of each; what came without a key is "other".
        until(lambda: {key[1] for key in _counted(server)} == {"/health/ready", "/version", "other"})


def _counted(server: Serving) -> list[tuple[str, str, str]]:
    return list(server.service.telemetry.recorder.http)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/score", {"text_1": "ab", "text_2": ["c", "d"]}), ("/rerank", {"query": "ab", "documents": ["c", "d"]})],
)
def test_scores_and_ranks_beside_their_versioned_paths(server: Serving, path: str, body: dict[str, Any]) -> None:
    found, versioned = server.post(body, path), server.post(body, f"/v1{path}")
    assert found.status_code == 200, found.text
    varying = ("id", "created")
    assert {key: value for key, value in found.json().items() if key not in varying} == {
        key: value for key, value in versioned.json().items() if key not in varying
    }


# -- the context ----------------------------------------------------------------------------------------------------


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


LONG = "a" * MOST
TOO_LONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": chat(LONG)}, "messages", "messages"),
    (CHAT, {"messages": chat(LONG), "max_tokens": 5}, "messages", "messages"),
    (CHAT, {"messages": chat("ab"), "max_tokens": MOST}, "max_tokens", "messages"),
    (CHAT, {"messages": chat("ab"), "max_completion_tokens": MOST}, "max_completion_tokens", "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt", "prompt"),
    ("/v1/completions", {"prompt": ["a", LONG]}, "prompt[1]", "prompt[1]"),
    ("/v1/completions", {"prompt": "ab", "max_tokens": MOST}, "max_tokens", "prompt"),
    ("/v1/responses", {"input": LONG}, "input", "input"),
    ("/v1/responses", {"input": "ab", "max_output_tokens": MOST}, "max_output_tokens", "input"),
    ("/v1/embeddings", {"input": LONG + "a"}, "input", "input"),
    ("/v1/embeddings", {"input": ["a", LONG + "a"]}, "input[1]", "input[1]"),
    ("/v1/rerank", {"query": "a", "documents": ["a", LONG + "a"]}, "documents[1]", "documents[1]"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "where"), TOO_LONG)
def test_the_context_is_refused_in_the_words_of_openai(
    server: Serving, path: str, body: dict[str, Any], param: str, where: str, stream: bool
) -> None:
    generates = path in (CHAT, "/v1/completions", "/v1/responses")
    error = check_error(server.post(body | ({"stream": stream} if generates else {}), path), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith(SENTENCE)
    said = re.fullmatch(
        r"(\d+) tokens \((\d+) in (?:the )?(\S+), (\d+) in the completion\)\. Please reduce the length of .*\.",
        error["message"].removeprefix(SENTENCE),
    )
    assert said is not None, error
    asked = body.get("max_tokens") or body.get("max_completion_tokens") or body.get("max_output_tokens")
    assert int(said[1]) == int(said[2]) + int(said[4]) > MOST
    assert int(said[4]) == (asked or int(generates)) and said[3] == where


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "messages", chat(9 * LONG)),
        ("/v1/completions", "prompt", 9 * LONG),
        ("/v1/embeddings", "input", 9 * LONG),
    ],
)
def test_a_text_that_is_not_even_tokenized_is_refused_in_the_same_words(
    server: Serving, path: str, name: str, value: Any
) -> None:
    error = check_error(server.post({name: value}, path), 400, "context_length_exceeded")
    assert error["param"] == name and error["message"].startswith(f"{SENTENCE}more than that: {name}: ")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": chat(LONG), "max_tokens": 5}, r"prompt is too long: \d+ tokens > 1024 maximum"),
        (
            {"messages": chat("ab"), "max_tokens": MOST},
            r"input length and `max_tokens` exceed context limit: \d+ .*",
        ),
    ],
)
def test_messages_refuse_the_context_in_the_words_of_anthropic(server: Serving, body: Any, said: str) -> None:
    answer = server.post(body, "/v1/messages")
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert re.fullmatch(said, answer.json()["error"]["message"]), answer.text


# -- words ----------------------------------------------------------------------------------------------------------


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
WORDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, user(None), "messages[0].content: must be a string or a list of text parts, got null"),
    (CHAT, user([TEXT, IMAGE]), "messages[0].content[1]: images are not supported, only text"),
    (CHAT, user([{"type": "input_audio"}]), "messages[0].content[0]: audio files are not supported, only text"),
    (CHAT, user([{"type": "text"}]), "messages[0].content[0]: must have its text in text"),
    (CHAT, user([7]), "messages[0].content[0]: must be an object with a type"),
    (CHAT, user(7), "messages[0].content: must be a string or a list of text parts, got 7"),
    (CHAT, {"messages": []}, "messages: must have at least 1 item, got a list of 0"),
    (CHAT, {"messages": None}, "messages: must be a list, got null"),
    (CHAT, user("a") | {"stop": ["a"] * 5}, "stop: must have at most 4 items, got a list of 5"),
    (CHAT, user("a") | {"model": ""}, "model: must not be empty, got ''"),
    (CHAT, user("a") | {"n": 17}, "n: at most 16 here, got 17"),
    (CHAT, user("a") | {"n": 1000}, "n: at most 16 here, got 1000"),
    (CHAT, user("a") | {"n": 2**40}, "n: at most 16 here, got 1099511627776"),
    (CHAT, user("a") | {"best_of": 2**40}, "best_of: at most 16 here, got 1099511627776"),
    (CHAT, user("a") | {"stop": 3}, "stop: must be a string or a list of strings, got 3"),
    (CHAT, {}, "messages: is required"),
    ("/v1/responses", {"input": 3}, "input: must be a string or a list of items, got 3"),
    (
        "/v1/responses",
        {"input": user(None)["messages"]},
        "input[0].content: must be a string or a list of text parts, got null",
    ),
    ("/v1/completions", {"prompt": "a", "best_of": 1000}, "best_of: at most 16 here, got 1000"),
    ("/v1/responses", {"input": user([{"type": "input_image"}])["messages"]},
     "input[0].content[0]: images are not supported, only text"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "message"), WORDS)
def test_refusals_are_in_the_words_of_the_api(server: Serving, path: str, body: Any, message: str) -> None:
    assert check_error(server.post(body, path), 400)["message"] == message


def test_messages_name_what_is_not_text(server: Serving) -> None:
    answer = server.post(user([{"type": "image", "source": {}}]) | {"max_tokens": 3}, "/v1/messages")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "messages[0].content[0]: images are not supported, only text"


def test_an_answer_without_content_goes_back_as_it_is(server: Serving) -> None:
    chat = [*user("a")["messages"], {"role": "assistant", "content": None}, *user("b")["messages"]]
    assert server.post({"messages": chat, "max_tokens": 2}, CHAT).status_code == 200


# -- fields that are not built --------------------------------------------------------------------------------------

ENDPOINTS: dict[str, dict[str, Any]] = {
    CHAT: user("a"),
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": user("a") | {"max_tokens": 3},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
_ASKED = ENDPOINTS | {"/tokenize": {"messages": [{"role": "user", "content": "a"}]}}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_not_built_is_refused_everywhere_alike(server: Serving, path: str) -> None:
    body = ENDPOINTS[path]
    asked = {"mirostat": 2, "dry_multiplier": 0.8, "typical_p": 0.9, "web_search_options": {}, "xtc_probability": 0.5}
    for name, value in asked.items():
        refused = server.post(body | {name: value}, path)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == f"{name}: this server does not support it"
    nothing = {"mirostat": 0, "dry_multiplier": 0.0, "typical_p": 1, "web_search_options": None, "mirostat_tau": 5.0}
    assert server.post(body | nothing, path).status_code == 200


def test_a_refused_field_says_what_it_is_called_here(server: Serving) -> None:
    for name, ours in {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}.items():
        error = check_error(server.post(user("a") | {name: 7}, CHAT), 400, "unsupported_parameter")
        assert error["message"] == f"{name}: this server does not support it; use {ours}"


# -- special tokens around a text -----------------------------------------------------------------------------------


def test_a_text_may_be_given_without_the_special_tokens_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ByteTokenizer, "encode", lambda self, text, *, framed=True: [256] * framed + list(text.encode())
    )
    with serving(scripted()) as server:

        def ids_of(**fields: Any) -> list[int]:
            found: list[int] = server.post({"prompt": "a"} | fields, "/tokenize").json()["tokens"]
            return found

        assert ids_of() == ids_of(add_special_tokens=True) == ids_of(add_special_tokens=None) == [256, 97]
        assert ids_of(add_special_tokens=False) == [97]
        for added, count in ((None, 2), (True, 2), (False, 1)):
            body = {"prompt": "a", "max_tokens": 1, "add_special_tokens": added}
            assert server.post(body, "/v1/completions").json()["usage"]["prompt_tokens"] == count
        for path in (CHAT, "/tokenize"):
            assert server.post(user("a") | {"add_special_tokens": False, "max_tokens": 1}, path).status_code == 200
            error = check_error(server.post(user("a") | {"add_special_tokens": True}, path), 400)
            assert error["param"] == "add_special_tokens"
        assert server.post({"input": "a", "add_special_tokens": True}, "/v1/embeddings").status_code == 200
        check_error(server.post({"input": "a", "add_special_tokens": False}, "/v1/embeddings"), 400)


# -- how much a model reasons ---------------------------------------------------------------------------------------

QWEN3 = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}"
SWITCHES = [
    # template, path, fields, the values that reach it; None is refused
    (QWEN3, CHAT, {"reasoning_effort": "none"}, {"enable_thinking": False}),
    (QWEN3, CHAT, {"reasoning_effort": "low"}, {"enable_thinking": True}),
    (QWEN3, CHAT, {"enable_thinking": False}, {"enable_thinking": False}),
    (QWEN3, CHAT, {"chat_template_kwargs": {"enable_thinking": False, "a": [1]}}, {"enable_thinking": False, "a": [1]}),
    (QWEN3, CHAT, {}, {}),
    (QWEN3, "/v1/responses", {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    (QWEN3, "/v1/messages", {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    (QWEN3, "/tokenize", {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    (QWEN3, "/tokenize", {"enable_thinking": False}, {"enable_thinking": False}),
    (QWEN3, "/tokenize", {"reasoning_effort": "none"}, {"enable_thinking": False}),
    (QWEN3, "/v1/messages", {"output_config": {"effort": "low"}}, {"enable_thinking": True}),
    (QWEN3, "/v1/messages", {"output_config": {"effort": "high"}}, {}),  # as if it were left out
    (
        QWEN3,
        "/v1/messages",
        {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
        {"enable_thinking": False},
    ),
    (QWEN3, "/v1/responses", {"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
    (QWEN3, "/v1/messages", {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
    (QWEN3, "/v1/messages", {"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
    ("{{ reasoning_effort }}", CHAT, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ("{{ reasoning_effort }}", "/v1/responses", {"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ("{{ reasoning_effort }}", "/v1/responses", {"reasoning": {"effort": "max"}}, {"reasoning_effort": "max"}),
    ("{{ reasoning_effort }}", "/v1/messages", {"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ("{{ reasoning_effort }}", "/v1/messages", {"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
    ("<think>", CHAT, {"reasoning_effort": "none"}, None),
    ("<think>", CHAT, {"reasoning_effort": "medium"}, {}),
    ("<think>", CHAT, {"enable_thinking": False}, None),
    ("<think>", "/v1/messages", {"thinking": {"type": "disabled"}}, None),
    ("plain", CHAT, {"reasoning_effort": "high"}, None),
    ("plain", CHAT, {"reasoning_effort": "none"}, {}),
    ("plain", "/v1/messages", {"output_config": {"effort": "low"}}, None),
    ("plain", "/v1/messages", {"output_config": {"effort": "high"}}, {}),
    ("plain", "/tokenize", {"reasoning_effort": "high"}, None),
    ("plain", CHAT, {"chat_template_kwargs": {"messages": []}}, None),
    ("plain", "/v1/responses", {"chat_template_kwargs": {"messages": []}}, None),
    ("plain", "/v1/messages", {"chat_template_kwargs": {"messages": []}}, None),
    ("plain", CHAT, {"chat_template_kwargs": {"add_generation_prompt": False}}, None),
    ("plain", CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, None),
    ("plain", CHAT, {"chat_template_kwargs": {"a b": 1}}, None),
    ("plain", CHAT, {"chat_template_kwargs": {"a": 20_000 * "x"}}, None),
    ("plain", CHAT, {"chat_template_kwargs": 7}, None),
]


@pytest.mark.parametrize(("template", "path", "fields", "reach"), SWITCHES)
def test_what_switches_reasoning_reaches_the_template(
    monkeypatch: pytest.MonkeyPatch, template: str, path: str, fields: dict[str, Any], reach: dict[str, Any] | None
) -> None:
    found: list[Any] = []
    encode_chat = ByteTokenizer.encode_chat

    def spied(self: ByteTokenizer, messages: Any, tools: Any, end: Any, template_kwargs: Any) -> list[int]:
        found.append(template_kwargs)
        return encode_chat(self, messages, tools, end)

    monkeypatch.setattr(ByteTokenizer, "chat_template", template)
    monkeypatch.setattr(ByteTokenizer, "encode_chat", spied)
    with serving(scripted()) as server:
        answer = server.post({"max_tokens": 2} | _ASKED[path] | fields | (_OUTPUT if "resp" in path else {}), path)
    if reach is None:
        assert answer.status_code == 400 and not found
        name = next(iter(fields))
        assert name in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text
        assert [values or {} for values in found] == [reach]


_OUTPUT = {"max_tokens": None, "max_output_tokens": 2}


def test_a_template_reads_what_a_request_gives_and_its_own_values_come_first() -> None:
    source = "{{ enable_thinking }} {{ bos_token }} {{ messages | length }} {{ level.deep[0] }}"
    with closing(ChatTemplate(source, {"bos_token": "<s>"})) as template:
        chat = [{"role": "user", "content": "a"}]
        given = {"enable_thinking": False, "level": {"deep": [3]}, "bos_token": "x", "messages": []}
        assert template.render(chat, more=given) == "False <s> 1 3"


# -- tools of a template that knows none ----------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def test_the_refusal_of_tools_says_what_would_serve_them(server: Serving) -> None:
    error = check_error(server.post(user("a") | {"tools": TOOLS}, CHAT), 400, "unsupported_parameter")
    assert error["param"] == "tools" and "--tool-call-parser" in error["message"] and "hermes" in error["message"]


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        ("{{ messages[0].content }}", "the tools of a request and the calls of earlier turns"),
        ("{{ tools }}", "the calls of earlier turns"),
        ("{{ tools }} {{ messages[0]['tool_calls'] }}", None),
    ],
)
def test_a_format_that_the_prompt_does_not_show_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, template: str, missing: str | None
) -> None:
    monkeypatch.setattr(ByteTokenizer, "chat_template", template)
    with logged() as found, serving(scripted(), ServerSettings(tool_call_parser="hermes")):
        said = [each.getMessage() for each in found if "tool_call_parser" in each.getMessage()]
    if missing is None:
        assert not said
    else:
        assert len(said) == 1 and f"leaves out {missing}, so" in said[0]


def test_thinking_is_switched_off_for_a_model_of_its_own(tmp_path: Path) -> None:
    """A real tokenizer and template: the prompt of a chat ends with the empty reasoning that the template writes."""
    folder = tiny_models.whole_folder(tmp_path)
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    source += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ note }}"
    (folder / "chat_template.jinja").write_text(source)
    with serving(
        Engine(folder, kv_memory="16MiB", dtype="float32"), ServerSettings(served_model_name="scripted")
    ) as it:

        def prompt_of(fields: dict[str, Any]) -> int:
            found: int = it.post(user("a") | {"max_tokens": 1} | fields, CHAT).json()["usage"]["prompt_tokens"]
            return found

        plain = prompt_of({})
        off = prompt_of({"chat_template_kwargs": {"enable_thinking": False}})
        assert off > plain == prompt_of({"reasoning_effort": "high"})
        assert off == prompt_of({"reasoning_effort": "none"}) == prompt_of({"enable_thinking": False})
        assert off < prompt_of({"enable_thinking": False, "chat_template_kwargs": {"note": "<s>"}})  # which stays text
