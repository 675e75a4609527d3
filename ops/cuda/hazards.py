"""`Chain`: checks that no kernel reads something before it waits that a kernel before it may still be writing.

With programmatic dependent launch, a kernel starts while those before it still run, back to the last one that was
launched without it, and so may read only what none of these writes. Every kernel declares what it reads so early and
what it writes; knows no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

__all__ = ["Chain", "Hazard", "Launch", "Thing"]

Thing = Literal[
    "weights", "rotary table", "pages", "lengths", "division", "old keys", "new keys", "adapters", "activations"
]
"""What kernels read and write: parameters of the model; the table of rotations; page numbers, lengths and the division
of a step's rows; keys and values of earlier tokens, and those of the step's own; adapters and their places; and
everything that products pass to each other."""


class Hazard(RuntimeError):
    """A kernel may read what another one is still writing."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch of a kernel does to memory."""

    name: str
    overlaps: bool
    """Whether it may start while kernels before it still run."""
    early: frozenset[Thing] = frozenset()
    """What it reads before it waits for the kernels before it."""
    writes: frozenset[Thing] = frozenset()


class Chain:
    """The launches of one stream, checked as they come while somebody watches."""

    def __init__(self) -> None:
        """Start unwatched."""
        self._running: list[Launch] | None = None
        """Launches that may still run: those since the last one without overlap, which is the first of them."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check the launches that are noted until this ends; none runs when it begins."""
        self._running = []
        try:
            yield
        finally:
            self._running = None

    def note(self, launch: Launch) -> None:
        """Note a launch; costs next to nothing while nobody watches.

        Raises:
            Hazard: The kernel reads something early that one before it may still be writing.
        """
        running = self._running
        if running is None:
            return
        if not launch.overlaps:
            self._running = [launch]
            return
        for other in running:
            if shared := launch.early & other.writes:
                raise Hazard(
                    f"{launch.name} reads {' and '.join(sorted(shared))} before it waits, "
                    f"and {other.name} may still be writing: a kernel without dependent launch must run between them"
                )
        running.append(launch)
