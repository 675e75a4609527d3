"""What several tests of the server use: a scripted server, OpenAI's client of it, and a model that calls tools."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from serving import Serving, scripted, serving

from headrace.engine.testing import ByteTokenizer


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(scripted()) as here:
        yield here


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none-needed", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def untaught() -> Iterator[None]:
    """The scripted model's template teaches no calls, except where a test has it `taught`, and shows no tools."""
    encode = ByteTokenizer.encode_chat
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteTokenizer, "chat_template", template)
        patch.setattr(
            ByteTokenizer, "encode_chat", lambda self, messages, tools=None, *more: encode(self, messages, None, *more)
        )
        yield


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's template teaches Hermes calls and reasoning."""
    monkeypatch.setattr(ByteTokenizer, "chat_template", "<tool_call> in {{ tools }}; <think>")
