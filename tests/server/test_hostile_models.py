"""A model whose tokenizer fails for some texts: every such request gets JSON, and the others their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
from serving import CAPACITY, Serving, check_error, serving
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.engine import Engine
from headrace.engine.intake.messages import Message
from headrace.engine.life.opened import Opened
from headrace.engine.testing import ByteTokenizer, ScriptedEngine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A tokenizer with a regular expression that gives up on some texts, after a million ways to match them."""
    folder = tiny_models.whole_folder(tmp_path_factory.mktemp("model"))
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    state["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(z+)+$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(state))
    settings = {"chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving(Engine(folder, dtype="float32", kv_memory=32 * tiny_models.PAGE_BYTES)) as here:
        yield here


BAD = "z" * 40 + "!"
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": BAD},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": BAD}]},
    "/v1/responses": {"input": BAD},
    "/v1/embeddings": {"input": BAD},
    "/v1/score": {"text_1": BAD, "text_2": "a"},
    "/tokenize": {"prompt": BAD},
}


STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
CASES = [*ASKED.items(), *((path, ASKED[path] | {"stream": True}) for path in STREAMS)]


@pytest.mark.parametrize(("path", "body"), CASES)
def test_a_text_that_the_tokenizer_fails_on_is_told_in_json(server: Serving, path: str, body: dict[str, Any]) -> None:
    model = server.engine.info.model
    check_error(server.post(body | {"model": model}, path), 500, "tokenizer_failed")
    fine = server.post({"model": model, "prompt": "abc", "max_tokens": 2, "ignore_eos": True})
    assert fine.status_code == 200, fine.text


def panic() -> list[int]:
    """Panic in a library written in Rust."""
    core = Tokenizer(models.BPE({"a": 0}, []))
    core.pre_tokenizer = pre_tokenizers.FixedLength(length=0)
    return list(core.encode("a").ids)


class _Panicking(ByteTokenizer):
    def encode_chat(self, messages: Sequence[Message], *options: Any, **named: Any) -> list[int]:
        return panic()


class _PanickingEngine(ScriptedEngine):
    def _open(self) -> Opened:
        return replace(super()._open(), tokenizer=_Panicking())


def test_a_panic_is_told_in_json_wherever_it_happens() -> None:
    async def broken(request: Request) -> Response:
        return Response(bytes(panic()))

    with serving(_PanickingEngine(CAPACITY)) as server:
        for text in ("a", "a" * 3000):
            chat = [{"role": "user", "content": text}]
            for path, body in {
                "/v1/chat/completions": {"messages": chat},
                "/v1/responses": {"input": chat},
                "/tokenize": {"messages": chat},
            }.items():
                check_error(server.post(body, path), 500, "tokenizer_failed")
        server.app.router.routes.append(Route("/broken", broken))
        check_error(server.client.get("/broken"), 500, "internal_error")
        server.check()
