"""Commands that talk to a person say on a terminal that they load, and how far they are; a pipe gets none of it."""

from __future__ import annotations

import io
import logging
from typing import Any, Self

import anyio
import pytest
from rich.console import Console

from headrace.server.commands.opening import opened


class Loading:
    """Stands in for an engine that takes its time to open."""

    def __init__(self, model: str, **options: Any) -> None:
        pass

    async def __aenter__(self) -> Self:
        logging.getLogger("headrace.engine").info("%s", "loading weights: 40 % of 15.2 GB")
        logging.getLogger("headrace.engine").warning("%s", "something else")
        await anyio.sleep(0.3)  # the spinner is drawn every eightieth of a second
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_what_loads_and_how_far_it_is(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.commands.opening.Engine", Loading)
    logger, shown = logging.getLogger("headrace.engine"), io.StringIO()
    before = logger.level, logger.handlers[:]

    async def run() -> None:
        console = Console(file=shown, force_terminal=terminal, width=100)
        async with opened("folder/llama-8b", console):
            assert (logger.level, logger.handlers) == before

    anyio.run(run)
    assert ("opening llama-8b: loading weights: 40 % of 15.2 GB" in shown.getvalue()) == terminal
    assert "something else" not in shown.getvalue()


@pytest.mark.parametrize("line", ["taken from /srv/[bold]/old", "taken from /srv/old[/old]/all"])
def test_brackets_are_shown_as_they_are(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Telling(Loading):
        async def __aenter__(self) -> Self:
            logging.getLogger("headrace.ops").info("%s", line)
            await anyio.sleep(0.3)
            return self

    monkeypatch.setattr("headrace.server.commands.opening.Engine", Telling)
    shown = io.StringIO()

    async def run() -> None:
        async with opened("folder/llama[red]", Console(file=shown, force_terminal=True, width=100)):
            pass

    anyio.run(run)
    assert f"opening llama[red]: {line}" in shown.getvalue()
