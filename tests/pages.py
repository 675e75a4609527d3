"""Using the playground as a person would, in a tab of a headless Chromium; holds no tests."""

from __future__ import annotations

from typing import Any

from serving import Serving

__all__ = ["answer", "opened", "say"]


def opened(page: Any, server: Serving) -> Any:
    page.goto(server.url)
    page.get_by_text("ready", exact=True).wait_for()
    return page


def say(page: Any, text: str) -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answer(page: Any, place: int = -1) -> str:
    """The text of an answer that has ended."""
    page.locator("#send").wait_for()
    text: str = page.locator(".message.assistant .body").nth(place).inner_text()
    return text
