"""Watches an open engine's step loop from outside while a benchmark runs; besides chosen.py, no file looks inside it.

It replaces methods of the loop, its scheduler and its runner on these instances and puts them back; it never changes
what runs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, NamedTuple

from headrace.engine import Engine
from headrace.engine.bench.report import percentile
from headrace.engine.scheduling.plan import Committed

__all__ = ["Commit", "HostProfile", "Watch", "host_profile", "replaced", "steady_intervals", "watching"]

_Method = Callable[..., Any]


class Commit(NamedTuple):
    """One committed step."""

    at: float
    """Time of the commit, in seconds of the process's clock."""
    generated: int
    """Tokens that the step gave."""
    used: float = 0.0
    """Processor time of the process until the commit, in seconds."""
    depth: int = 0
    """Most drafts of a row in the step planned last."""


class Watch:
    """Times at which steps were committed and at which requests got their first tokens."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.commits: list[Commit] = []
        self.first_tokens: dict[int, float] = {}
        """Request id -> time of its first token, in seconds of `time.perf_counter`."""


@contextmanager
def watching(engine: Engine, requests: int) -> Iterator[Watch]:
    """Watch the next `requests` requests while the block lasts."""
    loop: Any = engine._life.loop
    watch = Watch()

    def committed(original: _Method) -> _Method:
        def call(now: float, generated: int) -> Any:
            speculation = loop.scheduler.speculation
            depth = 0 if speculation is None else speculation.latest
            watch.commits.append(Commit(now, generated, time.process_time(), depth))
            return original(now, generated)

        return call

    def deliver(original: _Method) -> _Method:
        def call(outcome: Committed) -> None:
            if len(watch.first_tokens) < requests:
                now = time.perf_counter()
                for emission in outcome.each():
                    watch.first_tokens.setdefault(emission.request.id, now)
            original(outcome)

        return call

    with replaced(loop.meter, "committed", committed), replaced(loop, "_deliver", deliver):
        yield watch


def steady_intervals(commits: Sequence[Commit], rows: int, skip: int) -> list[float]:
    """Return the seconds between successive steps in which all `rows` decoded, without the first `skip`.

    A step counts only if the one before it was full too, so the step that ends the last prefill does not.
    """
    intervals = [
        later.at - earlier.at
        for earlier, later in zip(commits, commits[1:], strict=False)
        if earlier.generated == rows and later.generated == rows
    ]
    return intervals[skip:]


class HostProfile:
    """Host time of each step by part, without the time of parts inside it."""

    def __init__(self) -> None:
        """Start with no step."""
        self.steps: list[dict[str, float]] = []
        """Seconds by part, one entry a committed step."""
        self._step: dict[str, float] = defaultdict(float)
        self._inner = 0.0

    def timed(self, part: str, *, ends_step: bool = False) -> Callable[[_Method], _Method]:
        """Return a wrapper that counts a method's own time for `part`."""

        def wrap(original: _Method) -> _Method:
            def call(*args: Any, **options: Any) -> Any:
                outer, self._inner = self._inner, 0.0
                started = time.perf_counter()
                try:
                    return original(*args, **options)
                finally:
                    elapsed = time.perf_counter() - started
                    self._step[part] += elapsed - self._inner
                    self._inner = outer + elapsed
                    if ends_step:
                        self.steps.append(dict(self._step))
                        self._step.clear()

            return call

        return wrap

    def rows(self) -> list[tuple[str, float, float]]:
        """Return (part, median, p99) in seconds a step, followed by the sums of all but `deliver` and of all parts."""
        parts = [part for part in _PARTS if any(part in step for step in self.steps)]
        sums = [(part, [step.get(part, 0.0) for step in self.steps]) for part in parts]
        work = [sum(seconds for part, seconds in step.items() if part != "deliver") for step in self.steps]
        sums.append(("all but deliver", work))
        sums.append(("all", [sum(step.values()) for step in self.steps]))
        return [(part, median(values), percentile(values, 0.99)) for part, values in sums]


_PARTS = ("plan", "pack", "launch", "commit", "deliver")


@contextmanager
def host_profile(engine: Engine) -> Iterator[HostProfile]:
    """Time the parts of every step while the block lasts."""
    profile = HostProfile()
    with ExitStack() as stack:
        for part, owner, name in _places(engine):
            stack.enter_context(replaced(owner, name, profile.timed(part, ends_step=part == "commit")))
        yield profile


def _places(engine: Engine) -> list[tuple[str, Any, str]]:
    """Return (part, object, method); `pack` is a GPU runner's work on the host before it launches, in `launch`."""
    loop: Any = engine._life.loop
    runner = loop._runner
    places = [
        ("plan", loop.scheduler, "plan"),
        ("launch", runner, "launch"),
        ("commit", loop.scheduler, "commit"),
        ("deliver", loop, "_deliver"),
    ]
    if engine.info.device.startswith("cuda"):
        inside = [
            (runner._rows, "add"),
            (runner._rows, "batch"),
            (runner._rows, "hand_over"),
            (runner._prefills, "_pack"),
        ]
        places += [("pack", owner, name) for owner, name in inside]
    return places


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Put what `wrap` makes of an attribute of `owner`, such as a method, in its place while the block lasts."""
    before = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
