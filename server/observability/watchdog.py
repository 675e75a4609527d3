"""`Watchdog`: a thread that notices hanging steps and event loops, and measures the loop's lag; mends nothing itself.

A task of the loop could not tell that the loop is held, so this is a thread. It reads a few numbers, and does the rest
on the event loop.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

from headrace.engine import HeadraceError
from headrace.engine.concurrency.stacks import stacks
from headrace.engine.concurrency.threads import Poster
from headrace.server.errors import ApiError
from headrace.server.service import Service

__all__ = ["Watchdog"]

logger = logging.getLogger("headrace.server")

_INTERVAL = 0.25
_LOOP_HANGS = 5.0  # seconds: far beyond any slice of work


class Watchdog:
    """A watch over one service for a block: `with Watchdog(service)`, on the event loop's thread."""

    def __init__(self, service: Service) -> None:
        """Prepare to watch `service`; start nothing yet."""
        self._service = service
        self._stop = threading.Event()
        self._asked: float | None = None
        """Time of a request to the event loop for a sign of life that it has not given; None where there is none."""
        self._step_hangs = False
        self._loop_hangs = False

    def __enter__(self) -> None:
        """Start the thread."""
        self._post = Poster()
        self._thread = threading.Thread(target=self._run, name="headrace-watchdog", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL):
            try:
                self._look(time.monotonic())
            except Exception:
                logger.exception("the watchdog failed to look")

    def _look(self, now: float) -> None:
        asked = self._asked
        if asked is None:
            asked = self._asked = now
            self._post(self._answer)
        self._loop_hangs = self._told(self._loop_hangs, now - asked > _LOOP_HANGS, "the event loop is held")
        age, settings = self._step_age(), self._service.settings
        what = f"no step has ended for {age:.1f} seconds"
        self._step_hangs = self._told(self._step_hangs, age > settings.ready_stall, what)
        if age > settings.stall_abort:
            stalled = ApiError(503, "engine_stalled", "the engine makes no progress", headers={"retry-after": "30"})
            self._post(partial(self._service.end_all, stalled))

    def _told(self, before: bool, hangs: bool, what: str) -> bool:
        """Log the beginning of a hang once, with the stacks of all threads; return `hangs`."""
        if hangs and not before:
            self._service.telemetry.recorder.stalls += 1
            logger.error("%s; the stacks of all threads follow\n%s", what, stacks())
        return hangs

    def _answer(self) -> None:
        """Give a sign of life, on the event loop, and record how late it comes."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._service.telemetry.recorder.loop_lag.add(time.monotonic() - asked)

    def _step_age(self) -> float:
        try:
            return self._service.engine.step_age
        except HeadraceError:  # closed or dead, which is no hang
            return 0.0
