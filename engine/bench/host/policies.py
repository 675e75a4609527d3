"""`headrace bench policies`: waiting times under each policy, on a simulated clock with the steps of an H200.

The real scheduler and the real policies run over a device that only takes time: that of Llama-3.1-8B as
docs/performance.md has it. Only the host time of plan and commit is measured on a real clock.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from headrace.engine.bench.report import conditions, percentile, save, table
from headrace.engine.errors import Overloaded
from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.plan import Capacity, Emission, StepPlan
from headrace.engine.scheduling.policies import POLICIES, policy_of
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.scheduler import Scheduler

__all__ = [
    "DEVICE",
    "TENANTS",
    "Arrival",
    "ArrivalOutcome",
    "Simulation",
    "goodput",
    "greedy_load",
    "hurried_load",
    "loud_load",
    "mixed_load",
    "quiet_load",
    "run",
    "served",
    "simulate",
]

_DECODE_ROWS = (1, 16, 64, 256)
_DECODE_SECONDS = (3.98e-3, 4.87e-3, 6.57e-3, 14.7e-3)
_PREFILL_SECONDS = 1 / 43_009  # a token
_ROWS = 64
_SECONDS = 60.0
_SHAPE = {"page_size": 16, "max_context": 8192, "vocab_size": 1000}


@dataclass
class Arrival:
    """A request that is to come; `at` and `deadline` are in seconds, `prompt` and `output` in tokens."""

    at: float
    prompt: int
    output: int
    tenant: str = ""
    deadline: float | None = None


@dataclass
class ArrivalOutcome:
    """The result of one request, in seconds of the simulated clock from its arrival."""

    arrival: Arrival
    first: float | None = None
    end: float | None = None
    reason: str = "refused"

    @property
    def in_time(self) -> bool:
        """Whether the request ended with its whole answer."""
        return self.reason == "length"


@dataclass
class Simulation:
    """A scheduler on its clock, and the results of its requests."""

    scheduler: Scheduler
    outcomes: dict[int, ArrivalOutcome] = field(default_factory=dict)
    now: float = 0.0
    late_tokens: int = 0
    """Tokens planned for requests whose deadline had passed."""
    tokens: int = 0
    """Tokens of answered prompts, and generated ones; tokens that are computed again do not count."""


def step_seconds(plan: StepPlan) -> float:
    """Return the seconds of a step: decodes interpolated between measured batches, and prompts by the token."""
    rows = sum(1 for work in plan.works if work.num_tokens == 1)
    prefilled = plan.tokens - rows
    place = min(max(1, bisect_left(_DECODE_ROWS, rows)), len(_DECODE_ROWS) - 1)
    low, high = _DECODE_ROWS[place - 1 : place + 1]
    from_, to = _DECODE_SECONDS[place - 1 : place + 1]
    return from_ + (to - from_) * (rows - low) / (high - low) + prefilled * _PREFILL_SECONDS


def simulate(policy: Any, arrivals: Sequence[Arrival], itl_target: float | None = None) -> Simulation:
    """Serve `arrivals` for `_SECONDS`; leave unfinished what runs or waits then."""
    until = _SECONDS
    capacity = Capacity(num_pages=_ROWS * 512, max_rows=_ROWS, max_batched_tokens=2048, **_SHAPE)
    made = Simulation(Scheduler(capacity, secret=b"bench", policy=policy_of(policy), itl_target=itl_target))
    coming = sorted(arrivals, key=lambda arrival: arrival.at)
    next_one = 0
    while made.now < until:
        while next_one < len(coming) and coming[next_one].at <= made.now:
            _submit(made, coming[next_one])
            next_one += 1
        plan = made.scheduler.plan(made.now)
        _take(made, made.scheduler.deadlines.pop_lapsed())
        if plan is None:
            if next_one == len(coming) and not made.scheduler.roster.requests:
                break
            made.now = coming[next_one].at if next_one < len(coming) else until
            continue
        for work in plan.works:
            if work.request.asked.deadline is not None and work.request.asked.deadline <= made.now:
                made.late_tokens += work.num_tokens
        seconds = step_seconds(plan)
        made.now += seconds
        prefilled = sum(work.num_tokens for work in plan.works if work.num_tokens > 1)
        made.scheduler.pace.observe(prefilled, seconds)
        _take(made, made.scheduler.commit(plan, StepResult([5] * len(plan.works))).each())
    return made


def _submit(made: Simulation, arrival: Arrival) -> None:
    deadline = None if arrival.deadline is None else arrival.at + arrival.deadline
    request = Request(
        Asked(limit=arrival.prompt + arrival.output, tenant=arrival.tenant, deadline=deadline),
        [len(made.outcomes), *[7] * (arrival.prompt - 1)],  # no two have a page in common
        arrived=arrival.at,
    )
    outcome = ArrivalOutcome(arrival)
    try:
        made.scheduler.submit(request)
    except Overloaded:
        made.outcomes[-1 - len(made.outcomes)] = outcome
    else:
        outcome.reason = "unfinished"
        made.outcomes[request.id] = outcome


def _take(made: Simulation, emissions: Iterable[Emission]) -> None:
    for emission in emissions:
        outcome = made.outcomes[emission.request.id]
        if emission.token is not None:
            made.tokens += 1
            if outcome.first is None:
                made.tokens += outcome.arrival.prompt
                outcome.first = made.now - outcome.arrival.at
        if emission.finish_reason is not None:
            outcome.end = made.now - outcome.arrival.at
            outcome.reason = emission.finish_reason


def poisson(rate: float, make: Callable[[random.Random, float], Arrival], seed: str) -> list[Arrival]:
    """Return requests that come at random, `rate` a second."""
    chance = random.Random(seed)
    found, now = [], 0.0
    while (now := now + chance.expovariate(rate)) < _SECONDS:
        found.append(make(chance, now))
    return found


# -- the cases --------------------------------------------------------------------------------------------------------

_SIZES = ((10, None), (30, None), (30, 0.03))
_FAIRNESS = (("ttft_p99", 2), ("ratio", 2), ("jain", 3), ("tokens_per_second", 0))
TENANTS = ("a", "b", "c", "d")
_FAIR = 9.2  # requests a second of each tenant: together what the device can do
_LESS = 8.0
DEVICE = 36.0
"""Requests a second that the device can serve, if `_chat` draws them."""


def _chat(tenant: str) -> Callable[[random.Random, float], Arrival]:
    return lambda chance, now: Arrival(now, chance.randint(300, 700), chance.randint(100, 200), tenant)


def quiet_load(rate: float) -> list[Arrival]:
    """Return the requests of three tenants with `rate` requests a second each."""
    return [arrival for tenant in TENANTS[1:] for arrival in poisson(rate, _chat(tenant), tenant)]


def loud_load(rate: float) -> list[Arrival]:
    """Return the requests of the fourth tenant, `rate` a second."""
    return poisson(rate, _chat("a"), f"a {rate}")


def greedy_load(rate: float) -> list[Arrival]:
    """Return the requests of four tenants that ask for 2, 5, 8 and 11 times `rate`."""
    return [a for number, t in enumerate(TENANTS) for a in poisson((2 + 3 * number) * rate, _chat(t), t)]


def fairness(rate: float = _FAIR) -> dict[str, Any]:
    """Simulate a tenant at ten times the `rate`, in requests a second, to which three others keep."""
    quiet, greedy = quiet_load(rate), greedy_load(rate)
    flood = [*quiet, *loud_load(10 * rate)]
    calm = simulate("fair_share", [*quiet, *loud_load(rate)])
    found: dict[str, Any] = {"ttft_p99_all_fair": _ttft(calm)}
    for policy in ("first_come", "fair_share"):
        made = simulate(policy, flood)
        shares = list(served(simulate(policy, greedy)).values())
        found[policy] = {
            "ttft_p99": _ttft(made),
            "ratio": _ttft(made) / found["ttft_p99_all_fair"],
            "jain": sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)),
            "tokens_per_second": made.tokens / made.now,
        }
    return found


def _ttft(made: Simulation) -> float:
    """Return the quiet tenants' p99 time to first token; a request without a token has waited until now."""
    outcomes = [outcome for outcome in made.outcomes.values() if outcome.arrival.tenant in TENANTS[1:]]
    return percentile([made.now - each.arrival.at if each.first is None else each.first for each in outcomes], 0.99)


def served(made: Simulation) -> dict[str, float]:
    """Return the tokens that each tenant was given, with generated tokens counted twice."""
    found = dict.fromkeys(TENANTS, 0.0)
    for outcome in made.outcomes.values():
        if outcome.first is not None:
            arrival = outcome.arrival
            found[arrival.tenant] += arrival.prompt + 2 * arrival.output
    return found


def mixed_load(output: int) -> list[Arrival]:
    """Return short questions with `output` tokens of answer beside long documents, at the limit of the device."""
    short = poisson(60.0, lambda chance, now: Arrival(now, chance.randint(20, 120), output, "short"), "short")
    long = poisson(6.0, lambda chance, now: Arrival(now, chance.randint(3000, 7000), 100, "long"), "long")
    return [*short, *long]


def sizes(output: int = 10, itl_target: float | None = None) -> dict[str, Any]:
    """Simulate `mixed_load`, and return the 99th percentile of times from arrival to end, in seconds."""
    found = {}
    for policy in ("first_come", "size_classes"):
        made = simulate(policy, mixed_load(output), itl_target)
        found[policy] = {kind: _latency(made, kind) for kind in ("short", "long")}
    return found


def _latency(made: Simulation, kind: str) -> float:
    outcomes = [outcome for outcome in made.outcomes.values() if outcome.arrival.tenant == kind]
    return percentile([made.now - each.arrival.at if each.end is None else each.end for each in outcomes], 0.99)


def hurried_load(rate: float) -> list[Arrival]:
    """Return `rate` requests a second, each to be done within a few seconds."""

    def make(chance: random.Random, now: float) -> Arrival:
        arrival = _chat(chance.choice(TENANTS))(chance, now)
        arrival.deadline = chance.uniform(2.0, 8.0)
        return arrival

    return poisson(rate, make, "deadlines")


def deadlines() -> dict[str, Any]:
    """Simulate half as much again as the device can do, with deadlines."""
    arrivals = hurried_load(1.5 * DEVICE)
    found = {}
    for name in ("first_come", "deadlines"):
        made = simulate(name, arrivals)
        found[name] = {"goodput": goodput(made), "late_tokens": made.late_tokens}
    return found


def goodput(made: Simulation) -> float:
    """Return the answers a second that ended in time."""
    return sum(outcome.in_time for outcome in made.outcomes.values()) / made.now


def host_time() -> dict[str, float]:
    """Measure the median microseconds of plan and commit, 256 rows decoding and 1,000 waiting, under each policy."""
    return {name: _host_time(name) for name in POLICIES}


def _host_time(policy: str) -> float:
    rows = 256
    capacity = Capacity(num_pages=rows * 64, max_rows=rows, max_batched_tokens=8192, **_SHAPE)
    scheduler = Scheduler(capacity, secret=b"bench", policy=policy_of(policy))
    for index in range(rows + 1000):
        prompt = [(index * 7919 + place) % 1000 for place in range(30)]
        deadline = None if index < rows else 1e6 + index
        asked = Asked(limit=900, tenant=f"t{index % 50}", priority=index % 3, deadline=deadline)
        request = Request(asked, prompt, arrived=index / 1000)
        scheduler.submit(request)
    spent: list[float] = []
    pending: StepPlan | None = None
    for turn in range(400):
        started = time.perf_counter()
        plan = scheduler.plan(1.0 + turn / 100)
        if pending is not None:
            scheduler.commit(pending, StepResult([5] * len(pending.works)))
        if plan is not None and plan.tokens == rows:
            spent.append(time.perf_counter() - started)
        pending = plan
    return 1e6 * median(spent)


def run(*, json_path: str | None) -> None:
    """Simulate all cases and print them."""
    data: dict[str, Any] = {"conditions": conditions(rows=_ROWS, seconds=_SECONDS)}
    fair, less, late, host = fairness(), fairness(_LESS), deadlines(), host_time()
    classes = {(output, target): sizes(output, target) for output, target in _SIZES}
    data |= {"fairness": fair, "fairness below the share": less, "deadlines": late}
    data |= {"sizes": {f"{output} tokens, {target}": found for (output, target), found in classes.items()}}
    data |= {"plan_and_commit_microseconds": host}
    for rate, found in ((_FAIR, fair), (_LESS, less)):
        table(
            f"a tenant at 10 times the {rate} requests a second of three others, and these "
            f"(TTFT p99 with all alike: {found['ttft_p99_all_fair']:.2f} s)",
            ("policy", "TTFT p99, s", "of all alike", "Jain index", "tokens/s"),
            [
                [name, *(f"{f[key]:.{digits}f}" for key, digits in _FAIRNESS)]
                for name, f in found.items()
                if isinstance(f, dict)
            ],
        )
    table(
        "short questions beside long documents: p99 from arrival to end, s",
        ("short answers, tokens", "ITL target", "policy", "short", "long"),
        [
            [str(output), str(target or ""), name, f"{f['short']:.2f}", f"{f['long']:.2f}"]
            for (output, target), found in classes.items()
            for name, f in found.items()
        ],
    )
    table(
        "1.5 times what the device can do, with deadlines",
        ("policy", "ended in time, 1/s", "tokens computed too late"),
        [[name, f"{f['goodput']:.2f}", str(f["late_tokens"])] for name, f in late.items()],
    )
    table(
        "plan and commit, 256 rows, 1,000 waiting",
        ("policy", "µs, median"),
        [[name, f"{value:.0f}"] for name, value in host.items()],
    )
    save(data, json_path)
