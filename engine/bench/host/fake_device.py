"""`FakeEngine`: all of headrace over a device that only takes time; measures the code around a model, never a model.

headrace.engine.testing has a scripted device for tests where tokens must be right. The fake one gives every request the
same letter, at the pace that it was made for, and costs next to nothing.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from headrace.engine.engine import Engine
from headrace.engine.life.opened import Opened
from headrace.engine.scheduling.plan import Capacity, StepPlan
from headrace.engine.scheduling.result import StepResult
from headrace.engine.stats import EngineInfo
from headrace.engine.testing import ByteTokenizer

__all__ = ["FAKE_LETTER", "FakeEngine"]

FAKE_LETTER = "Q"
"""The text of every token."""
_PAGE = 16


class _FakeStep:
    """A step whose end is known when it is launched."""

    def __init__(self, ends: float, works: int, closed: threading.Event) -> None:
        self._ends = ends
        self._works = works
        self._closed = closed

    def wait(self) -> StepResult:
        """Sleep until the step's end, and return the same letter for every work."""
        pause = self._ends - time.monotonic()
        if pause > 0:
            self._closed.wait(pause)
        return StepResult([ord(FAKE_LETTER)] * self._works)


class _FakeRunner:
    """A runner that takes `step_seconds` for a step and `token_seconds` more for each token, one step at a time."""

    def __init__(self, step_seconds: float, token_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._token_seconds = token_seconds
        self._free_at = 0.0
        self._closed = threading.Event()

    def launch(self, plan: StepPlan) -> _FakeStep:
        """Queue a step behind the steps that were launched before."""
        seconds = self._step_seconds + self._token_seconds * plan.tokens
        self._free_at = max(self._free_at, time.monotonic()) + seconds
        return _FakeStep(self._free_at, plan.size, self._closed)

    def close(self) -> None:
        """Wake all steps that still sleep."""
        self._closed.set()


class FakeEngine(Engine):
    """An engine without a model, with steps of a chosen length; prompts are bytes."""

    def __init__(
        self,
        *,
        max_rows: int = 256,
        max_context: int = 4096,
        num_pages: int = 65_536,
        max_batched_tokens: int = 8192,
        step_seconds: float = 0.0,
        token_seconds: float = 0.0,
        **options: Any,
    ) -> None:
        """Choose the device's size and pace.

        Args:
            max_rows: Requests in one step.
            max_context: Tokens of prompt and completion together.
            num_pages: Pages of 16 tokens.
            max_batched_tokens: Tokens in one step.
            step_seconds: Seconds that each step takes.
            token_seconds: Seconds more for each token of a step.
            options: Fields of `EngineConfig` other than the model.
        """
        super().__init__("fake", **options)
        self._capacity = Capacity(
            num_pages=num_pages,
            page_size=_PAGE,
            max_rows=max_rows,
            max_batched_tokens=max(max_batched_tokens, max_rows),
            max_context=max_context,
            vocab_size=ByteTokenizer.vocab_size,
        )
        self._pace = step_seconds, token_seconds

    def _open(self) -> Opened:
        capacity = self._capacity
        names = {"model": "fake", "architecture": "fake", "dtype": "none", "device": "fake"}
        info = EngineInfo.of(capacity, **names, page_bytes=0, embedding_size=0, weights=())
        return Opened(_FakeRunner(*self._pace), ByteTokenizer(), capacity, info)
