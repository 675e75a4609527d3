"""The playground at `/` in a headless Chromium over a real server, and what lets a page ask.

The device repeats each question, so a test chooses what the model says. test_page_chats.py has more.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import lora_folder
from pages import answer, opened, say
from serving import CAPACITY, Serving, scripted, serving, until
from tiny_models import whole_folder
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headrace.engine import Engine
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.testing import ScriptedRunner
from headrace.server import ServerSettings

KEY = "the-key/of+tests?"
LONG = "abcdefghij" * 20


class Parrot(ScriptedRunner):
    """Answers with the last question, `|` as a new line."""

    def _sample(self, plan: StepPlan) -> list[int]:
        size, sampled = CAPACITY.page_size, []
        for work in plan.works:
            end, table = work.start + work.num_tokens, self._tables[work.row]
            if not work.samples:  # a part of a prompt
                sampled.append(0)
                continue
            read = bytes(self._cells[table[place // size]][place % size] for place in range(end))
            question, _, said = read.rpartition(b"user: ")[2].partition(b"\n")
            left = question.replace(b"|", b"\n")[len(said) :]
            self._tokens[work.row][end] = left[0] if left else 256
            sampled.append(self._tokens[work.row][end])
        return sampled


def parrot() -> Any:
    return scripted(lambda: Parrot(CAPACITY, gate=lambda: time.sleep(0.005)))


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving(parrot()) as here:
        yield here


@pytest.fixture
def server(shared: Serving) -> Iterator[Serving]:
    yield shared
    until(lambda: shared.idle)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Serving]:
    with serving(parrot(), ServerSettings(api_keys={"me": KEY})) as here:
        yield here


def streamed(page: Any, place: int = 0) -> None:
    """Wait for the beginning of an answer."""
    until(lambda: len(page.locator(".assistant .body").nth(place).inner_text()) > 5)


def test_a_chat_of_two_turns_streams(server: Serving, page: Any) -> None:
    say(opened(page, server), LONG)
    page.get_by_role("button", name="Stop").wait_for()
    body = page.locator(".message.assistant .body")
    streamed(page)
    assert 5 < len(body.inner_text()) < len(LONG)  # it is shown while it comes
    assert answer(page) == LONG
    assert "201 tokens" in page.locator(".assistant .foot").inner_text()
    say(page, "And now?")
    assert answer(page) == "And now?"
    until(lambda: float(page.locator("#tokens-per-second").inner_text()) > 1)
    assert page.locator("#pages").inner_text().endswith(f"of {CAPACITY.num_pages}")
    hits = page.locator("#cache-hits")
    until(lambda: hits.inner_text() not in ("–", "0 %"))  # the first turn was not computed again
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0 and page.locator("#welcome").is_visible()


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_request(how: str, server: Serving, page: Any) -> None:
    say(opened(page, server), LONG)
    streamed(page)
    if how == "key":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    assert 5 < len(answer(page)) < len(LONG)
    assert page.locator(".assistant .foot").inner_text() == "stopped"
    until(lambda: server.idle)
    say(page, "Go on.")  # the cut answer is a turn like others
    assert answer(page) == "Go on."


def test_text_is_never_markup(server: Serving, page: Any) -> None:
    evil = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"
    opened(page, server)
    for text in (evil, f"See:|```{evil}|{evil}|```|{evil}"):
        say(page, text)
        answer(page)
    bodies = page.locator(".assistant .body")
    assert bodies.nth(0).inner_text() == evil
    assert [bodies.nth(1).locator("> p, pre").nth(n).inner_text() for n in range(3)] == ["See:", evil, evil]
    assert bodies.nth(1).locator("pre").count() == 1
    assert page.locator("#log img, #log script").count() == 0 and page.title() == "headrace"
    page.reload()  # what is restored is text as well
    assert page.locator("#log img, #log script").count() == 0 and bodies.nth(0).inner_text() == evil


def test_a_reload_keeps_the_chat_and_ends_the_request(server: Serving, page: Any) -> None:
    opened(page, server)
    page.get_by_label("Temperature").fill("0.2")
    say(page, "First.")
    answer(page)
    say(page, LONG)
    streamed(page, 1)
    page.reload()
    until(lambda: server.idle)
    shown = page.locator(".assistant .body")
    assert shown.nth(0).inner_text() == "First." and 5 < len(shown.nth(1).inner_text()) < len(LONG)
    assert page.locator(".assistant .foot").nth(1).inner_text() == "interrupted"
    assert page.get_by_label("Temperature").input_value() == "0.2"
    page.get_by_text("ready", exact=True).wait_for()
    say(page, "Again.")
    assert answer(page) == "Again."


def test_sampling_controls_reach_the_server(server: Serving, page: Any) -> None:
    opened(page, server)
    page.get_by_label("Answer tokens").fill("3")
    say(page, "abcdef")
    assert answer(page) == "abc"
    assert "limit" in page.locator(".assistant .foot").inner_text()
    page.get_by_label("Answer tokens").fill("2000")
    say(page, "abcdef")
    page.locator(".problem", has_text="context").wait_for()
    page.get_by_label("Answer tokens").fill("")
    say(page, "xyz")  # the question without an answer is no turn
    assert answer(page) == "xyz"


def test_adapters_are_chosen(page: Any, tmp_path: Path) -> None:
    model = whole_folder(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    settings = ServerSettings(adapters={"poet": str(lora_folder(tmp_path / "poet", seed=1))})
    with serving(Engine(model, kv_memory="4MiB", dtype="float32", adapter_slots=2), settings) as server:
        opened(page, server)
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Answer tokens").fill("8")
        said = []
        for choice, name in (("none", "model"), ("poet", "poet"), ("none", "model")):
            page.get_by_label("Adapter").select_option(choice)
            say(page, "Hi")
            said.append(answer(page))
            assert page.locator(".assistant .name").inner_text() == name
            page.get_by_role("button", name="New chat").click()
        assert said[0] == said[2] != said[1]
        page.get_by_label("Adapter").select_option("poet")
        page.reload()
        page.get_by_text("ready", exact=True).wait_for()
        assert page.get_by_label("Adapter").input_value() == "poet"
        server.portal.call(lambda: server.engine.adapters.unload("poet"))
        say(page, "Hi")
        page.get_by_text("'poet'").wait_for()  # the refusal


def test_a_key_is_asked_for_and_stays_in_the_tab(guarded: Serving, page: Any) -> None:
    page.goto(guarded.url)
    for key in ("wrong-key-of-tests", KEY):
        page.get_by_label("Key", exact=True).fill(key)
        page.get_by_role("button", name="Use it").click()
        if key != KEY:
            page.get_by_text("did not take that key").wait_for()
    page.get_by_text("ready", exact=True).wait_for()
    say(page, "Hello")
    assert answer(page) == "Hello"
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")


def test_every_control_has_a_name(server: Serving, page: Any) -> None:
    opened(page, server)
    unnamed = "[...document.querySelectorAll('input, select, textarea, meter, button')].filter((one) => !(%s)).length"
    names = "one.labels?.length || one.ariaLabel || one.textContent.trim()"
    assert page.evaluate(unnamed % names) == 0


# -- what a page may ask, without a browser -------------------------------------------------------------------------


def test_the_policy_lets_nothing_in(server: Serving) -> None:
    answered = server.client.get("/")
    policy = answered.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert "http" not in answered.text.replace("https://", "http://").replace("http-equiv", "")
    again = server.client.get("/", headers={"if-none-match": answered.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_with_keys_the_files_are_public_and_nothing_else(guarded: Serving) -> None:
    nobody = {"authorization": ""}
    assert guarded.client.get("/", headers=nobody).status_code == 200
    assert guarded.client.get("/page/main.js", headers=nobody).status_code == 200
    assert guarded.client.get("/page/load", headers=nobody).status_code == 401
    assert guarded.client.get("/page/load").json()["pages"] == CAPACITY.num_pages


def handshake(server: Serving, *, origin: str | None = None, protocols: list[Any] | None = None) -> int:
    try:
        with connect(
            f"ws://127.0.0.1:{server.port}/v1/chat/completions", proxy=None, origin=origin, subprotocols=protocols
        ) as socket:
            assert socket.subprotocol == ("headrace" if protocols and "headrace" in protocols else None)
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


def test_only_the_own_page_may_ask(server: Serving) -> None:
    assert handshake(server, origin=server.url) == 101
    for other in (f"http://127.0.0.1:{server.port + 1}", "http://127.0.0.1", "https://example.org", "null"):
        assert handshake(server, origin=other) == 403


@pytest.mark.parametrize("settings", [{"page": False}, {"allowed_hosts": ("*",)}])
def test_without_a_page_or_a_way_to_know_it_none_may_ask(settings: dict[str, Any]) -> None:
    """Where any Host is served without keys, a page of any name could lead it here and pass for the own one."""
    with serving(parrot(), ServerSettings(**settings)) as here:
        assert here.client.get("/page/load").status_code == (404 if "page" in settings else 200)
        assert here.client.get("/").status_code == (404 if "page" in settings else 200)
        assert handshake(here, origin=here.url) == 403


def test_a_socket_may_bring_its_key_as_a_protocol(guarded: Serving) -> None:
    def protocol(key: str) -> str:
        return "headrace.key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")

    assert handshake(guarded, protocols=["headrace", protocol(KEY)]) == 101
    assert handshake(guarded, protocols=["headrace"]) == 401
    assert handshake(guarded, protocols=["headrace", protocol("wrong-key-of-tests")]) == 401
    assert handshake(guarded, protocols=["headrace", protocol(KEY), protocol("another-of-tests")]) == 401
    assert handshake(guarded, protocols=["headrace", "headrace.key.A"]) == 401
