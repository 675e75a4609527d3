"""Answers in Markdown, copying, other answers, kept chats and a lost server, on the page in a headless Chromium.

The first tests need no browser; the others are skipped where there is none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from itertools import count
from typing import Any

import pytest
from pages import answer, opened, say
from serving import CAPACITY, Serving, serving, until

from headrace.engine import Engine
from headrace.engine.testing import ScriptedEngine, ScriptedRunner
from headrace.server.routes.page import ASSETS

CODE = '# reverse\ndef reverse(items):\n    return items[::-1], "done", 3'
MARKDOWN = f"""Some **bold**, *slanted* and `inline <b>` words, [a link](https://example.org/a_b).

## Steps

1. First
   - nested with `x`
2. Second

| Name | Speed |
|:-----|------:|
| `a`  | 12 |

```python
{CODE}
```

> Quoted

[bad](javascript:alert(1)) <img src=x onerror=alert(1)> ![image](https://example.org/x.png)"""
SOURCES = {name: files("headrace.server").joinpath("page", name).read_text("utf-8") for name, _ in ASSETS.values()}


def test_no_text_is_ever_parsed_as_markup_or_code() -> None:
    makers = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
        r"|\beval\b|new Function|setHTML"
    )
    assert {name: found for name, text in SOURCES.items() if (found := makers.findall(text))} == {}


def test_the_page_is_whole_and_asks_nobody_else() -> None:
    folder = {entry.name for entry in files("headrace.server").joinpath("page").iterdir()}
    assert folder == SOURCES.keys()  # what lies there is served
    for name, text in SOURCES.items():
        imported = re.findall(r'from "\./([^"]+)"', text)
        named = re.findall(r'(?:src|href)="page/([^"]+)"', text)
        assert {*imported, *named} <= folder, name
        assert not re.search(r'(?:src|href)="(?!page/)|(?<!\w)url\(|@import|//[a-z0-9-]+\.[a-z]{2,}', text), name


def speaking(answers: Callable[[str], str]) -> Engine:
    gate = partial(time.sleep, 0.0005)
    return ScriptedEngine(CAPACITY, lambda: ScriptedRunner(CAPACITY, gate=gate), answer=answers)


@pytest.fixture(scope="module")
def writer() -> Iterator[Serving]:
    with serving(speaking(lambda prompt: MARKDOWN)) as here:
        yield here


@pytest.fixture
def numbered() -> Iterator[Serving]:
    """Answers `answer N to LAST QUESTION`, N of `SEEN` messages of the user."""
    numbers = count(1)

    def reply(prompt: str) -> str:
        questions = re.findall(r"^user: (.*)$", prompt, re.MULTILINE)
        return f"answer {next(numbers)} to {questions[-1]}, of {len(questions)}"

    with serving(speaking(reply)) as here:
        yield here


def asked(page: Any, server: Serving) -> Any:
    """Open the page, lift the limit of answer tokens, and return the body of an answer in Markdown."""
    opened(page, server)
    page.get_by_label("Answer tokens").fill("")
    say(page, "Go on")
    answer(page)
    return page.locator(".assistant .body")


def test_markdown_becomes_elements_and_markup_stays_text(writer: Serving, page: Any) -> None:
    body = asked(page, writer)
    for selector, text in (
        ("strong", "bold"), ("em", "slanted"), ("p > code", "inline <b>"), ("h4", "Steps"),
        ("ol > li > ul > li", "nested"),
        ("th.right", "Speed"), ("td.left > code", "a"), ("td.right", "12"), ("blockquote", "Quoted"),
        (".keyword >> nth=0", "def"), (".comment", "# reverse"), (".string", '"done"'), (".number >> nth=-1", "3"),
        ("figcaption > span", "python"),
    ):  # fmt: skip
        assert text in body.locator(selector).inner_text(), selector
    assert body.locator("ol > li").count() == 2 and body.locator("pre").inner_text() == CODE
    links = body.locator("a").evaluate_all("all => all.map((one) => [one.href, one.rel, one.target])")
    assert links == [
        [address, "noopener noreferrer", "_blank"]
        for address in ("https://example.org/a_b", "https://example.org/x.png")
    ]
    assert body.locator("img, b, script").count() == 0
    assert "[bad](javascript:alert(1)) <img src=x onerror=alert(1)>" in body.inner_text()


def test_code_and_answers_are_copied(writer: Serving, page: Any) -> None:
    body = asked(page, writer)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for button, text in ((body.locator(".copy"), CODE), (page.locator(".assistant .actions .copy"), MARKDOWN)):
        button.click()
        page.get_by_text("Copied", exact=True).wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == text
        page.get_by_text("Copied", exact=True).wait_for(state="detached")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as where there is no HTTPS
    body.locator(".copy").click()
    page.get_by_text("Copied", exact=True).wait_for()


def test_an_answer_is_made_again_and_a_question_edited(numbered: Serving, page: Any) -> None:
    opened(page, numbered)
    say(page, "First")
    assert answer(page) == "answer 1 to First, of 1"
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("answer 2 to First, of 1").wait_for()
    say(page, "Second")
    page.get_by_text("answer 3 to Second, of 2").wait_for()
    assert answer(page) and page.locator(".message").count() == 4
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("Changed")
    page.keyboard.press("Enter")
    page.get_by_text("answer 4 to Changed, of 1").wait_for()  # what followed is forgotten
    assert answer(page) and page.locator(".message").count() == 2
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").press("Escape")
    assert page.locator(".user .body").inner_text() == "Changed"


def test_chats_are_kept_in_the_browser_until_they_are_deleted(numbered: Serving, page: Any) -> None:
    opened(page, numbered)
    for text in ("One", "Two"):
        say(page, text)
        answer(page)
        page.get_by_role("button", name="New chat").click()
    other = page.context.new_page()  # of the same browser
    opened(other, numbered)
    other.get_by_role("button", name="Chats").click()
    other.get_by_role("button", name=re.compile("^One")).click()
    assert other.locator(".assistant .body").inner_text() == "answer 1 to One, of 1"
    say(other, "More")
    other.get_by_text("answer 3 to More, of 2").wait_for()
    answer(other)
    other.reload()
    assert other.locator(".message").count() == 4
    other.get_by_role("button", name="Chats").click()
    other.get_by_role("button", name="Delete One").click()
    assert other.locator(".message").count() == 0 and other.locator("#chats-list li").count() == 1
    other.get_by_role("button", name="Delete all").click()
    assert other.evaluate("localStorage.length") == 0


def test_a_server_that_is_gone_is_said_to_be(page: Any) -> None:
    with serving(speaking(lambda prompt: "Hello")) as server:
        opened(page, server)
        assert page.locator("#unreachable").is_hidden()
    page.get_by_text("Server not reachable.").wait_for()
    assert page.locator("#health").inner_text() == "server not reachable"
    say(page, "Anybody?")
    until(lambda: page.locator(".assistant .problem").count() == 1)
    assert page.locator(".assistant .problem").inner_text() in (
        "server not reachable",
        "the connection to the server was lost",
    )
    assert page.get_by_role("button", name="Regenerate").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_phones_and_screens_light_and_dark(writer: Serving, page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)
    page.goto(writer.url)
    page.locator("#health.well").wait_for()
    page.get_by_label("Answer tokens").evaluate("(one) => { one.value = ''; }")
    say(page, "Go on")
    answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    tops = page.locator("header > *:visible").evaluate_all("all => all.map((one) => one.getBoundingClientRect())")
    assert len(tops) >= 4 and max(one["top"] for one in tops) < min(one["bottom"] for one in tops)  # one row
    for selector in (".assistant .body p", ".code pre", ".code .comment", ".code .keyword", ".user .body", ".foot"):
        assert contrast(page, selector) >= 4.5, selector


def contrast(page: Any, selector: str) -> float:
    """The ratio of luminances of the first such element's text and of what is behind it, as WCAG has it."""
    colours = page.locator(f"{selector}:visible").first.evaluate(
        """(one) => {
          const behind = (node) => {
            const colour = getComputedStyle(node).backgroundColor;
            return colour === "rgba(0, 0, 0, 0)" && node.parentElement ? behind(node.parentElement) : colour;
          };
          return [getComputedStyle(one).color, behind(one)];
        }"""
    )
    light, dark = sorted((luminance(colour) for colour in colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    "text",
    [
        "*a " * 60_000,
        "[a](" * 50_000,
        "|" * 50_000 + "\n" + "-|" * 50_000,
        ">" * 20_000,
        "- a\n\n" * 20_000,
        "`" * 90_000,
    ],
)
def test_no_text_holds_the_page_up(text: str, writer: Serving, page: Any) -> None:
    """Work that grew with the square of the length would take minutes."""
    opened(page, writer)
    took = page.evaluate(
        "async (text) => { const { blocksOf } = await import('/page/markdown.js'); const begun = performance.now();"
        " blocksOf(text); return performance.now() - begun; }",
        text,
    )
    assert took < 10_000
