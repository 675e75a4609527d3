"""`Serving`: the parts of an open engine, for callers who may use them now; opens, closes and drives nothing.

Every call of a user passes here. Next to read: lifespan.py, which opens the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.adapters import Adapters
from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.concurrency.threads import Poster
from headrace.engine.errors import EngineCrashed, EngineStopped
from headrace.engine.grammar.compiler import Grammars
from headrace.engine.life.opened import Opened
from headrace.engine.steps.loop import StepLoop

__all__ = ["Parts", "Serving"]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an open engine that its users' calls need."""

    opened: Opened
    loop: StepLoop
    adapters: Adapters
    grammars: Grammars
    helper: FairWorker
    """Threads that tokenise long prompts, in turns by tenant."""
    post: Poster
    """Poster of the event loop that the engine was opened on."""


class Serving:
    """Whether an engine serves, and with which parts."""

    def __init__(self) -> None:
        """Refuse every call until `start`."""
        self._parts: Parts | None = None
        self._crashed: EngineCrashed | None = None
        self._closing = False

    def start(self, parts: Parts) -> None:
        """Serve with `parts` from now on."""
        self._parts = parts

    def refuse(self) -> None:
        """Refuse new requests from now on; those that have begun may go on."""
        self._closing = True

    def end(self, crashed: EngineCrashed | None) -> None:
        """Release the parts; later calls are refused, with `crashed` if the step loop died."""
        self._parts = None
        self._crashed = crashed

    @property
    def closing(self) -> bool:
        """Whether new requests are refused."""
        return self._closing

    def parts(self, draining: bool = False) -> Parts:
        """Return the parts to a caller on the engine's event loop.

        Args:
            draining: Whether the call may still be made while the engine drains.

        Raises:
            EngineStopped: The engine is not open, or closing.
            EngineCrashed: Its step loop died.
            RuntimeError: The call comes from another event loop or thread.
        """
        parts = self.parts_anywhere(draining)
        parts.post.check_here()
        return parts

    def parts_anywhere(self, draining: bool = False) -> Parts:
        """Return the parts to a caller in any thread, who may only look at plain values; raises as `parts` does."""
        parts = self._parts
        crashed = self._crashed if parts is None else parts.loop.crashed
        if crashed is not None:
            raise crashed.with_traceback(None)
        if parts is None or parts.loop.closed or (self._closing and not draining):
            raise EngineStopped("the engine is not open: use it inside `async with Engine(...)`")
        return parts
