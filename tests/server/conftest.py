"""What several tests of the server use: a scripted server, OpenAI's client, a browser, and a model that calls tools."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, chromium_sandbox=os.geteuid() != 0)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab of its own; a script that fails, or that the policy stops, fails the test."""
    context = browser.new_context()
    context.set_default_timeout(10_000)
    tab, troubles = context.new_page(), []
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on("console", lambda message: troubles.append(message.text) if "Content Security" in message.text else None)
    yield tab
    context.close()
    assert not troubles


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
