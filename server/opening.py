"""Opens an engine for a command that talks to a person; owns the spinner and names the model where that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.engine import Engine, LoadFailed

__all__ = ["opened"]


@asynccontextmanager
async def opened(model: str, console: Console, **options: Any) -> AsyncIterator[Engine]:
    """An open engine; closed when the block ends.

    Raises:
        LoadFailed: The model cannot be opened; a note on the error says which model that was.
    """
    async with AsyncExitStack() as stack:
        with console.status(f"opening {Path(model).name} ..."):
            try:
                engine = await stack.enter_async_context(Engine(model, **options))
            except LoadFailed as error:
                if model not in str(error):
                    error.add_note(f"(opening {model})")
                raise
        yield engine
