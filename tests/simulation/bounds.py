"""`Bounds`: how far anybody may be passed over under each policy (docs/scheduling.md), seen to hold at every start.

Wraps the methods of a scheduler and keeps accounts of its own; asks no policy whose turn it is, and changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from math import inf
from typing import Any

from headrace.engine.scheduling.order.background import BackgroundLast
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.policies import Ageing, Deadlines, FairShare, SizeClasses
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.scheduler import Scheduler

__all__ = ["Bounds"]

_MOST_YIELDS = 2  # rows that a request gives up to others
_ERROR = 1e-6  # of sums of floats


@dataclass(slots=True)
class _Mark:
    """What its party had been given when a request began to be passed over, and from where on others are counted."""

    party: str | None
    given: float
    lead: float
    """What its party was given by its latest start, and since."""
    bases: dict[str | None, float]
    """What each other party had been given when it queued, the request's beginning at the earliest."""


class _Ledger:
    """Weighted tokens that were given to each of several parties."""

    def __init__(self, burst: float, weights: Mapping[str, float]) -> None:
        self._burst = burst
        self._weights = weights
        self._given: dict[str | None, float] = defaultdict(float)
        self._latest: dict[str | None, float] = defaultdict(float)
        self._queued: dict[str | None, set[int]] = defaultdict(set)
        self._behind: set[str | None] = set()
        """Parties that were passed over because none of theirs could start: they may catch up."""
        self._marks: dict[int, _Mark] = {}

    def queue(self, party: str | None, name: int) -> None:
        """A new request waits."""
        if not self._queued[party]:
            self._behind.discard(party)
            for mark in self._marks.values():
                mark.bases.setdefault(party, self._given[party])
        self._queued[party].add(name)

    def mark(self, party: str | None, name: int) -> None:
        """Count from now on what others are given while the request is not served."""
        bases = {other: self._given[other] for other, names in self._queued.items() if names}
        bases = {other: given for other, given in bases.items() if other not in self._behind}
        self._marks[name] = _Mark(party, self._given[party], self._latest[party], bases)

    def start(self, party: str | None, name: int, able: Set[int]) -> None:
        """A new request is served, where those in `able` could have been."""
        self._behind |= {other for other, names in self._queued.items() if other != party and names.isdisjoint(able)}
        self._queued[party].discard(name)
        self._latest[party] = 0.0

    def charge(self, party: str | None, tokens: float) -> None:
        weighted = tokens / self._weights.get(party or "", 1.0)
        self._given[party] += weighted
        self._latest[party] += weighted

    def forget(self, party: str | None, name: int) -> None:
        self._queued[party].discard(name)
        self._marks.pop(name, None)

    def check(self, party: str | None, passed: int) -> None:
        """Assert that a request of `party` may start before the request `passed`."""
        mark = self._marks[passed]
        got = self._given[party] - mark.bases.get(party, self._given[party])
        most = self._burst + mark.lead + self._given[mark.party] - mark.given
        assert got <= most + _ERROR, (
            f"r{passed} waits: {party} was given {got:g} meanwhile and starts another, {mark.party} had {most:g} coming"
        )


class Bounds:
    """Watches who starts before whom."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Watch `scheduler`, which has served nobody yet."""
        self._scheduler = scheduler
        tiers = isinstance(scheduler._policy, BackgroundLast)
        self._policy: Any = scheduler._policy._tiers[0] if tiers else scheduler._policy
        self._first_of_background = 1 if tiers else inf
        """The lowest priority that waits for all others."""
        self._roster = scheduler.roster
        fair = isinstance(self._policy, FairShare)
        self._burst = self._policy.burst if fair else inf
        self._tenants = [_Ledger(self._burst, self._policy.weights if fair else {}) for _ in range(2)]
        """Of users, and of background."""
        self._adapters: dict[tuple[int, str | None], _Ledger] = {}
        self._plans = 0
        self._marked: dict[int, int] = {}
        """Request -> the plan in which it began to wait."""
        self._hindered: set[int] = set()
        """Requests that could not start in this plan, whoever comes first."""
        self._paid: dict[int, int] = {}
        self._planning = self._sharing = False
        roster, admission = scheduler.roster, scheduler._admission
        for owner, name, wrapped in (
            (roster, "add", self._add),
            (roster, "start", self._start),
            (scheduler.suspension, "_requeue", self._wait_again),
            (scheduler.suspension, "resume", self._wait_again),
            (scheduler.suspension, "preempt", self._preempt),
            (roster, "end", self._end),
            (roster, "charge", self._gain),
            (scheduler, "plan", self._plan),
            (admission, "share_rows", self._share_rows),
            (scheduler.prefixes, "find", self._find),
            (scheduler.swaps, "is_ready", self._allowed),
            (admission._overtaking, "may_start", self._allowed),
        ):
            self._wrap(owner, name, wrapped)

    @staticmethod
    def _wrap(owner: object, name: str, wrapped: Callable[..., Any]) -> None:
        call = getattr(owner, name)
        setattr(owner, name, lambda *values, **named: wrapped(call, *values, **named))

    # -- what happens -------------------------------------------------------------------------------------------------

    def _add(self, call: Callable[[Request], None], request: Request) -> None:
        call(request)
        self._among(request).queue(request.asked.tenant, request.id)
        self._within(request).queue(request.asked.adapter, request.id)
        self._mark(request)

    def _wait_again(self, call: Callable[[Request], None], request: Request) -> None:
        call(request)
        if request.state is State.WAITING:
            self._mark(request)

    def _start(self, call: Callable[..., None], request: Request, pages: Any) -> None:
        able = {other.id: other for other in self._roster.waiting if other is not request and self._could_start(other)}
        for other in able.values():
            self._check_passed(request, other)
        for other in self._roster.running:
            if not request.asked.alone and self._is_left_out(other):
                self._check_begun(request, other)
        call(request, pages)
        if not request.preemptions:
            self._among(request).start(request.asked.tenant, request.id, able.keys())
            self._within(request).start(request.asked.adapter, request.id, able.keys())
            self._charge(request, "prompt_cost", request.known - request.planned)
        if request.known > request.prompt_len:
            self._paid[request.id] = request.known
        self._mark(request)

    def _plan(self, call: Callable[..., StepPlan | None], now: float = 0.0) -> StepPlan | None:
        self._plans += 1
        self._hindered.clear()
        self._planning = True
        made = call(now)
        self._planning = False
        for request, _, start, count, samples in [] if made is None else made.each_work():
            if count > 1 and start >= request.prompt_len:
                known = max(start + 1, self._paid.get(request.id, 0))
                self._charge(request, "prompt_cost", max(0, start + count - known))
            if samples:
                self._charge(request, "output_cost", 1)
        return made

    def _gain(
        self, call: Callable[[Iterable[tuple[Request, int]]], None], further: Iterable[tuple[Request, int]]
    ) -> None:
        """Right drafts gave requests more tokens than the one that was charged with the plan."""
        runs = list(further)
        call(runs)
        for request, tokens in runs:
            self._charge(request, "output_cost", tokens)

    def _end(self, call: Callable[[Request], None], request: Request) -> None:
        call(request)
        self._among(request).forget(request.asked.tenant, request.id)
        self._within(request).forget(request.asked.adapter, request.id)
        self._paid.pop(request.id, None)
        self._marked.pop(request.id)

    def _share_rows(self, call: Callable[[], None]) -> None:
        self._sharing = True
        call()
        self._sharing = False

    def _preempt(self, call: Callable[[Request], bool], victim: Request) -> bool:
        if victim.state is State.RUNNING and self._planning:
            if self._sharing and self._tier(victim) == 0:
                assert victim.preemptions < _MOST_YIELDS, f"r{victim.id} gives up its row once too often"
            elif not self._sharing:
                self._check_victim(victim)
        return call(victim)

    def _find(self, call: Callable[..., Any], request: Request, step: int) -> Any:
        found = call(request, step)
        if found is None:
            self._hindered.add(request.id)
        return found

    def _allowed(self, call: Callable[[Request], bool], request: Request) -> bool:
        may = call(request)
        if not may:
            self._hindered.add(request.id)
        return may

    def _within(self, request: Request) -> _Ledger:
        """The accounts of the adapters of its tenant."""
        key = self._tier(request), request.asked.tenant
        if key not in self._adapters:
            weights = self._policy.adapter_weights if isinstance(self._policy, FairShare) else {}
            self._adapters[key] = _Ledger(self._burst, weights)
        return self._adapters[key]

    def _among(self, request: Request) -> _Ledger:
        """The accounts of the tenants of its tier."""
        return self._tenants[self._tier(request)]

    def _tier(self, request: Request) -> int:
        return int(request.asked.priority >= self._first_of_background)

    def _mark(self, request: Request) -> None:
        self._marked[request.id] = self._plans
        self._among(request).mark(request.asked.tenant, request.id)
        self._within(request).mark(request.asked.adapter, request.id)

    def _charge(self, request: Request, cost: str, tokens: int) -> None:
        if isinstance(self._policy, FairShare):
            weighted = getattr(self._policy, cost) * tokens
            self._among(request).charge(request.asked.tenant, weighted)
            self._within(request).charge(request.asked.adapter, weighted)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _could_start(self, request: Request) -> bool:
        """Whether nothing but its turn keeps a waiting request from starting in this plan."""
        new = self._marked[request.id] == self._plans  # in the middle of it
        missed = request in self._scheduler._admission.missed
        return not (new or missed or request.id in self._hindered)

    def _is_left_out(self, request: Request) -> bool:
        """Whether the prompt of a running request does not go on in this plan, so far; steps of one are in turn."""
        late = request.latest_step != self._scheduler.roster.step
        owes = request.known - request.planned > 1 and request.is_plannable
        return late and owes and not request.asked.alone

    def _check_passed(self, starts: Request, waits: Request) -> None:
        """`starts` gets a row while `waits` could."""
        policy, now = self._policy, self._scheduler.roster.now
        if self._tier(starts) != self._tier(waits):
            assert self._tier(starts) < self._tier(waits), f"r{starts.id} of background starts, and r{waits.id} waits"
        elif isinstance(policy, FairShare):
            self._check_shares(starts, waits)
        elif isinstance(policy, Ageing):
            ahead, behind = self._score(starts, now), self._score(waits, now)
            assert ahead >= behind * (1 - _ERROR), f"r{waits.id} has {behind:g}, and r{starts.id} with {ahead:g} starts"
        elif isinstance(policy, SizeClasses):
            assert self._rank(starts, now) < self._rank(waits, now), f"r{starts.id} starts before r{waits.id}"
        else:
            assert starts.order < waits.order, f"r{waits.id} waits, and r{starts.id} starts, which came later"

    def _check_begun(self, starts: Request, begun: Request) -> None:
        """`starts` gets a row in a plan in which the prompt of `begun` does not go on."""
        policy, now = self._policy, self._scheduler.roster.now
        if self._tier(starts) != self._tier(begun):
            assert self._tier(starts) < self._tier(begun), f"r{starts.id} of background starts before r{begun.id}"
        elif isinstance(policy, SizeClasses):
            assert self._rank(starts, now) < self._rank(begun, now), f"r{starts.id} starts, r{begun.id} does not go on"
        elif isinstance(policy, FairShare) and starts.asked.tenant != begun.asked.tenant:
            if not starts.preemptions:
                self._among(starts).check(starts.asked.tenant, begun.id)
        else:
            within = isinstance(policy, Deadlines) and self._due(starts) < self._due(begun)
            assert within, f"r{starts.id} starts, and the prompt of r{begun.id} does not go on"

    def _check_shares(self, starts: Request, waits: Request) -> None:
        by_deadline = isinstance(self._policy, Deadlines)
        if starts.asked.tenant != waits.asked.tenant:
            if not starts.preemptions:
                self._among(starts).check(starts.asked.tenant, waits.id)
        elif starts.asked.adapter != waits.asked.adapter and not by_deadline:
            if not starts.preemptions:
                self._within(starts).check(starts.asked.adapter, waits.id)
        elif by_deadline:
            assert self._due(starts) < self._due(waits), f"r{waits.id} is due before r{starts.id}, which starts"
        else:
            assert starts.order < waits.order, f"r{waits.id} waits, and r{starts.id} of the same tenant starts"

    def _check_victim(self, victim: Request) -> None:
        """`victim` gives way for pages: somebody always gets on."""
        now = self._scheduler.roster.now
        for other in self._roster.running:
            if other is victim:
                continue
            if self._tier(other) != self._tier(victim):
                behind = self._tier(other) < self._tier(victim)
            elif isinstance(self._policy, FairShare):
                first = victim.preemptions < _MOST_YIELDS
                behind = first or (other.preemptions >= _MOST_YIELDS and other.order < victim.order)
            elif isinstance(self._policy, SizeClasses):
                behind = self._rank(other, now) < self._rank(victim, now)
            else:
                behind = other.order < victim.order
            assert behind, f"r{victim.id} gives way for the {victim.preemptions + 1}th time, and r{other.id} goes on"

    def _score(self, request: Request, now: float) -> float:
        policy = self._policy
        waited = min((now - request.arrived) / policy.seconds, policy.most)
        return float(
            (1 + waited + policy.moe + (policy.adapter if request.asked.adapter else 1.0))
            / policy.ratio**request.asked.priority
        )

    def _size(self, request: Request) -> int:
        return sum(request.prompt_len >= least for least in (self._policy.short, self._policy.long))

    def _rank(self, request: Request, now: float) -> tuple[int, tuple[int, int, int]]:
        late = now - request.arrived >= self._policy.most_wait
        return -1 if late else self._size(request), request.order

    @staticmethod
    def _due(request: Request) -> tuple[float, tuple[int, int, int]]:
        return inf if request.asked.deadline is None else request.asked.deadline, request.order
