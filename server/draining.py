"""`Drain`: the end of an application's requests before its server stops; knows no server and installs no handler.

While a drain lasts, new requests are refused with 503 and a time to come again, and those that run go on. `running.py`
drives it for uvicorn; `drain` and `drained_at_signal` do for any other server.
"""

from __future__ import annotations

import signal
import time

import anyio
from starlette.applications import Starlette

from headrace.server.service import Service

__all__ = ["Drain", "drain", "drained_at_signal"]

_LAST_WORDS = 1.0  # seconds for the error events of what was ended
_TICK = 0.05  # seconds between two looks at what still runs


class Drain:
    """The drain of one application of `create_app`, driven by repeated calls of `advance`."""

    def __init__(self, app: Starlette, seconds: float | None = None) -> None:
        """Prepare to drain `app`; begin nothing yet.

        Args:
            app: Application made by `create_app`.
            seconds: Seconds for which requests may still run; None means `drain_seconds` of the application's settings.
        """
        self._service: Service = app.state.service
        self._seconds = self._service.settings.drain_seconds if seconds is None else seconds
        self._deadline: float | None = None
        self._ended_at: float | None = None
        self._hurried = False

    @property
    def is_late(self) -> bool:
        """Whether requests run on although their clients have been told that they end."""
        return self._ended_at is not None and bool(self._service.running)

    def hurry(self) -> None:
        """Let the next `advance` end the requests that still run."""
        self._hurried = True

    def advance(self, now: float) -> bool:
        """Advance the drain, at the first call by refusing new requests; return whether the server may stop.

        Args:
            now: Seconds on a clock that never goes back.
        """
        if self._deadline is None:
            self._service.drain()
            self._deadline = now + self._seconds
        if self._hurried:
            self._deadline = min(self._deadline, now)
        if not self._service.running:
            return True
        if self._ended_at is not None:
            return now >= self._ended_at + _LAST_WORDS
        if now >= self._deadline:
            self._ended_at = now
            self._service.end_all()
        return False


async def drain(app: Starlette, seconds: float | None = None) -> None:
    """Refuse new requests of an application with 503, and wait until those that run have ended.

    Await it before the server stops: what still runs after `seconds` ends with an error that its client is told.

    Args:
        app: Application made by `create_app`, served alone or mounted.
        seconds: Seconds for which requests may still run; None means `drain_seconds` of the application's settings.
    """
    await _finish(Drain(app, seconds))


async def drained_at_signal(app: Starlette, seconds: float | None = None) -> None:
    """Wait for SIGINT or SIGTERM, then `drain`; a second signal ends at once what still runs.

    It is for servers that wait for a coroutine before they stop, such as hypercorn with its `shutdown_trigger`. Await
    it in the main thread; the arguments are those of `drain`.
    """
    ending = Drain(app, seconds)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        await anext(aiter(signals))
        async with anyio.create_task_group() as tasks:

            async def hurry() -> None:
                await anext(aiter(signals))
                ending.hurry()

            tasks.start_soon(hurry)
            await _finish(ending)
            tasks.cancel_scope.cancel()


async def _finish(ending: Drain) -> None:
    while not ending.advance(time.monotonic()):  # noqa: ASYNC110 - the end of a request sets no event
        await anyio.sleep(_TICK)
