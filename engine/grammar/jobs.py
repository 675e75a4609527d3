"""`GrammarJobs`: the requests that wait for response formats, and the turns that compile them; compiles nothing.

A format is compiled once for all requests. Each tenant that asks queues a turn of its own for it, so that none waits
for the turn of another; the first of these turns begins the compilation, and the others find it begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.engine.grammar.compiled import CompiledGrammar
from headrace.engine.intake.prompts import Charge, charge_nobody
from headrace.engine.life.opened import Opened
from headrace.engine.response_format import ResponseFormat

__all__ = ["Claim", "Done", "GrammarJob", "GrammarJobs", "Waiter"]

Done = Callable[[CompiledGrammar | None, BaseException | None], None]
"""Function that gets the grammar, or an error, or neither if nobody wants the grammar any more; on the event loop."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits for its format."""

    tenant: str | None
    since: float
    """Seconds at which the request began to wait, on the clock of `GrammarJobs.claim`."""
    still_wanted: Callable[[], bool]
    done: Done
    charge: Charge = charge_nobody


@dataclass(eq=False, slots=True)
class GrammarJob:
    """A format that somebody waits for."""

    wanted: ResponseFormat
    opened: Opened
    waiters: list[Waiter] = field(default_factory=list)
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of a tenant's turn."""

    begins: bool
    """Whether the turn is to compile the format."""
    gone: list[Waiter]
    """Requests of the tenant that no longer want the format."""
    late: list[Waiter]
    """Requests of the tenant that have waited too long."""


class GrammarJobs:
    """The formats that somebody waits for. Safe to use from several threads."""

    def __init__(self, patience: float) -> None:
        """Start empty; `patience` is the seconds that a request may wait for its tenant's turn."""
        self._patience = patience
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: dict[ResponseFormat, GrammarJob] = {}

    def join(self, wanted: ResponseFormat, opened: Opened, waiter: Waiter) -> GrammarJob | None:
        """Let a request wait for `wanted`; return the job if its tenant must queue a turn for it, else None."""
        with self._lock:
            job = self._jobs.get(wanted)
            if job is None:
                job = self._jobs[wanted] = GrammarJob(wanted, opened)
            queued = job.begun or any(other.tenant == waiter.tenant for other in job.waiters)
            job.waiters.append(waiter)
            return None if queued else job

    def claim(self, job: GrammarJob, tenant: str | None, now: float) -> Claim:
        """Begin `job` in a turn of `tenant`, unless it has begun or no request of that tenant can still use it."""
        with self._lock:
            if job.begun:
                return Claim(False, [], [])
            waiters, gone, late = job.waiters, list[Waiter](), list[Waiter]()
            job.waiters = []
            for waiter in waiters:
                if waiter.tenant != tenant:
                    job.waiters.append(waiter)
                elif self._closed or not waiter.still_wanted():
                    gone.append(waiter)
                elif now - waiter.since > self._patience:
                    late.append(waiter)
                else:
                    job.waiters.append(waiter)
                    job.begun = True
            if not job.waiters:
                self._forget(job)
            return Claim(job.begun, gone, late)

    def still_wanted(self, job: GrammarJob) -> bool:
        """Return whether anybody wants a job that has begun; if not, a later request begins a new job."""
        with self._lock:
            if not self._closed and any(waiter.still_wanted() for waiter in job.waiters):
                return True
            self._forget(job)
            return False

    def end(self, job: GrammarJob) -> list[Waiter]:
        """Forget a job that has ended and return the requests that wait for it."""
        with self._lock:
            self._forget(job)
            waiters, job.waiters = job.waiters, []
            return waiters

    def close(self) -> None:
        """Begin nothing more, and want nothing that has begun."""
        self._closed = True

    def _forget(self, job: GrammarJob) -> None:
        if self._jobs.get(job.wanted) is job:
            del self._jobs[job.wanted]
