"""Opens an engine for a command that talks to a person; owns the spinner, and names the model in errors.

What headrace logs at INFO meanwhile, such as how much of the weights is loaded, stands beside the spinner.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from anyio.lowlevel import checkpoint
from rich.console import Console
from rich.markup import escape

from headrace.engine import Engine, LoadFailed
from headrace.server.commands.interrupts import ending_at_once

__all__ = ["opened"]


@asynccontextmanager
async def opened(model: str, console: Console, **options: Any) -> AsyncIterator[Engine]:
    """Open an engine for the block. Ctrl-C ends the process at once while the engine opens.

    Raises:
        LoadFailed: The model cannot be opened; notes on the error say which model that was, and how a command gets one
            from the hub.
    """
    async with AsyncExitStack() as stack:
        opening = f"opening {Path(model).name}"
        status = console.status(escape(f"{opening} ..."))
        telling = _told_progress(lambda message: status.update(escape(f"{opening}: {message}")), console.is_terminal)
        with status, telling, ending_at_once(opening, console):
            await checkpoint()  # nothing is opened if Ctrl-C came before it was caught here
            try:
                engine = await stack.enter_async_context(Engine(model, **options))
            except LoadFailed as error:
                if "allow_download=True" in str(error):
                    missing = error.value if error.field == "speculation.path" else model
                    error.add_note(f"(`hf download {missing}` does, too; headrace serve has --set allow_download=true)")
                if model not in str(error):
                    error.add_note(f"(opening {model})")
                raise
        yield engine


class _Teller(logging.Handler):
    """A handler that passes messages of the level INFO to a function."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell
        self.addFilter(lambda record: record.levelno == logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


@contextmanager
def _told_progress(tell: Callable[[str], None], wanted: bool) -> Iterator[None]:
    """Hand each message that headrace logs at INFO in the block to `tell`, if `wanted`."""
    if not wanted:
        yield
        return
    logger, teller = logging.getLogger("headrace"), _Teller(tell)
    level = logger.level
    logger.addHandler(teller)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(teller)
