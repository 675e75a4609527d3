"""Progress bars on stderr, for many prompts and for reading a model's weights; never does the work that they show.

The library that draws is imported only where a bar is asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from headrace.engine.errors import HeadraceError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["ManyBar", "OpeningBar"]

_DRAW_SECONDS = 0.25


class ManyBar:
    """Bar on stderr with the prompts done and the engine's tokens a second, drawn from the event loop."""

    def __init__(self, ended: Callable[[], int], tokens: Callable[[], int], total: int) -> None:
        """Show nothing yet.

        Args:
            ended: Returns the number of prompts done.
            tokens: Returns the tokens of the whole engine so far, whose rate is shown; if it raises a `HeadraceError`,
                the engine has ended and the last rate stays.
            total: Number of prompts, below 0 if nobody knows.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        rate = TextColumn("{task.fields[rate]:,.0f} tok/s")
        columns = (BarColumn(), MofNCompleteColumn(), rate, TimeElapsedColumn())
        self._progress = Progress(*columns, console=_stderr(), auto_refresh=False)
        self._task = self._progress.add_task("", total=total if total >= 0 else None, rate=0.0)
        self._ended = ended
        self._tokens = tokens
        self._begin = time.perf_counter()
        self._tokens_before = tokens()
        self._rate = 0.0

    def __enter__(self) -> ManyBar:
        """Show the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the terminal."""
        self._draw()
        self._progress.stop()

    async def keep_drawing(self) -> None:
        """Draw until cancelled."""
        while True:
            await anyio.sleep(_DRAW_SECONDS)
            self._draw()

    def _draw(self) -> None:
        try:
            self._rate = (self._tokens() - self._tokens_before) / (time.perf_counter() - self._begin)
        except HeadraceError:
            pass
        self._progress.update(self._task, completed=self._ended(), rate=self._rate, refresh=True)


class OpeningBar:
    """Bar with the bytes of the weights read so far, on a terminal or in a notebook; shows nothing elsewhere.

    It is called in the threads that read the weights, appears with the first call and is gone when the block ends.
    """

    def __init__(self) -> None:
        """Show nothing yet."""
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._ended = False
        self._drawn = 0.0

    def __enter__(self) -> OpeningBar:
        """Return the bar itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Erase the bar; later calls draw nothing."""
        with self._lock:
            self._ended = True
            if self._progress is not None:
                self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        """Draw the bar, unless it was drawn a moment ago."""
        now = time.monotonic()
        with self._lock:
            if self._ended or now - self._drawn < _DRAW_SECONDS:
                return
            self._drawn = now
            if self._progress is None:
                self._progress = _bytes_bar()
                self._progress.start()
            self._progress.update(self._progress.task_ids[0], completed=done, total=total, refresh=True)


def _bytes_bar() -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = _stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    bar.add_task("loading weights")
    return bar


def _stderr() -> Console:
    """Return a console that draws on stderr, even in a notebook, whose output rewrites a line as a terminal does.

    rich's own way to draw in a notebook needs ipywidgets; without it, rich warns and draws nothing.
    """
    from rich.console import Console

    is_notebook = Console(stderr=True).is_jupyter
    return Console(stderr=True, force_jupyter=False, force_terminal=True if is_notebook else None)
