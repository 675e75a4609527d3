"""`headrace bench flood`: the effect of a tenant with ten times its share on three quiet ones, on the real engine.

Requests come at random at rates that follow from what the engine does in a closed loop just before. The simulated
counterpart, with more policies, is `headrace bench policies`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import anyio
from rich.console import Console

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.opening import Subject, Target, opened
from headrace.engine.bench.report import percentile, save, table

__all__ = ["run"]

_QUIET = ("b", "c", "d")
_PROMPT, _OUTPUT = (300, 700), (100, 200)
_FLOOD = 10
_WARMING = 6.0
"""Seconds of each load before requests count: rows start and end evenly by then."""
_SETTLING = 1.0
"""Seconds in which cancelled requests leave the engine."""


@dataclass(slots=True)
class _Asked:
    tenant: str
    at: float
    wait: float | None = None
    """Seconds from asking to the first token."""


def run(
    target: Target, *, rows: int, seconds: float, loads: Sequence[float], scale: float, json_path: str | None
) -> None:
    """Measure under `first_come` and `fair_share`, with the quiet tenants at each of `loads` of their fair share."""
    under = {name: replace(target, more={**target.more, "policy": name}) for name in ("first_come", "fair_share")}
    conditions, rate, beside, _ = anyio.run(_measure, under["first_come"], rows, seconds, (), loads, scale, None)
    _, _, flood, calm = anyio.run(_measure, under["fair_share"], rows, seconds, loads, loads, scale, rate)
    cells = []
    for load in loads:
        ratios = [each[load]["ttft_p99"] / calm[load]["ttft_p99"] for each in (beside, flood)]
        cells += [
            _row(load, "fair_share", "all alike", calm[load], ""),
            _row(load, "fair_share", f"one at {_FLOOD} times", flood[load], f"{ratios[1]:.2f}"),
            _row(load, "first_come", f"one at {_FLOOD} times", beside[load], f"{ratios[0]:.2f}"),
        ]
    table(f"four tenants, {rate:.1f} requests a second in a closed loop; TTFT of the three quiet ones", _COLUMNS, cells)
    figures = {"conditions": conditions, "requests_per_second": rate, "all alike": calm}
    save(figures | {"fair_share": flood, "first_come": beside}, json_path)


_COUNTS = ("tokens_per_second", "requests", "preemptions", "steps")
_COLUMNS = (
    "share asked for",
    "policy",
    "load",
    "TTFT p50, s",
    "p99, s",
    "ratio",
    "tokens/s",
    *_COUNTS[1:],
    "Jain index",
)


def _row(load: float, policy: str, name: str, found: dict[str, float], ratio: str) -> list[str]:
    seconds = [f"{found[key]:.3f}" for key in ("ttft_p50", "ttft_p99")]
    return [
        f"{load:g}",
        policy,
        name,
        *seconds,
        ratio,
        *(f"{found[key]:,.0f}" for key in _COUNTS),
        f"{found['jain']:.3f}",
    ]


async def _measure(
    target: Target,
    rows: int,
    seconds: float,
    calm_loads: Sequence[float],
    loads: Sequence[float],
    scale: float,
    rate: float | None,
) -> tuple[dict[str, object], float, dict[float, Any], dict[float, Any]]:
    """Return the conditions, the rate (of a closed loop unless `rate` is given), and figures with and without flood."""
    calm: dict[float, Any] = {}
    flood: dict[float, Any] = {}
    console, policy = Console(stderr=True, highlight=False), target.more["policy"]
    async with opened(target, rows=rows) as subject:
        load = _Load(subject, rows, scale)
        if rate is None:
            rate = await load.closed(_WARMING)
            console.print(f"{policy}: {rate:.1f} requests a second in a closed loop")
        for times, shares, found in ((1, calm_loads, calm), (_FLOOD, loads, flood)):
            for share in shares:
                made = found[share] = await load.open(times * share * rate / 4, share * rate / 4, seconds)
                console.print(
                    f"{policy}, quiet ones at {share:g} of their share, the fourth at {times} times that: "
                    f"TTFT p99 {made['ttft_p99']:.3f} s, {made['tokens_per_second']:,.0f} tokens/s",
                    soft_wrap=True,
                )
        return subject.conditions(target, rows=rows, seconds=seconds, scale=scale), rate, flood, calm


class _Load:
    """Requests of four tenants to one engine; no prompt begins like another."""

    def __init__(self, subject: Subject, rows: int, scale: float) -> None:
        self._engine: Engine = subject.engine
        self._rows = rows
        self._scale = scale
        self._chance = random.Random(0)
        self._names = count()
        vocab = subject.engine.info.vocab_size
        self._words = [self._chance.randrange(vocab) for _ in range(_PROMPT[1])]
        self._vocab = vocab
        self._tokens = dict.fromkeys("abcd", 0)
        """Tokens read so far by each tenant: of answers, and of the prompts that were answered."""

    async def closed(self, seconds: float) -> float:
        """Return the requests a second of twice as many clients as rows, each asking anew when it is answered."""
        answered = 0

        async def client(number: int) -> None:
            nonlocal answered
            while True:
                await self._ask(_Asked("abcd"[number % 4], time.perf_counter()))
                answered += 1

        async with anyio.create_task_group() as tasks:
            for number in range(2 * self._rows):
                tasks.start_soon(client, number)
            await anyio.sleep(_WARMING)
            before, started = answered, time.perf_counter()
            await anyio.sleep(seconds)
            rate = (answered - before) / (time.perf_counter() - started)
            tasks.cancel_scope.cancel()
        await anyio.sleep(_SETTLING)
        return rate

    async def open(self, loud: float, quiet: float, seconds: float) -> dict[str, Any]:
        """Return the figures of the quiet tenants; `loud` and `quiet` are requests a second of each tenant."""
        asked: list[_Asked] = []
        started = time.perf_counter() + _WARMING
        ended = started + seconds

        async def tenant(name: str, rate: float, chance: random.Random) -> None:
            at = time.perf_counter()
            while (at := at + chance.expovariate(rate)) < ended:
                await anyio.sleep(max(0.0, at - time.perf_counter()))
                each = _Asked(name, at)
                if name in _QUIET and at >= started:
                    asked.append(each)
                tasks.start_soon(self._ask, each)

        async with anyio.create_task_group() as tasks:
            for name, rate in (("a", loud), *((name, quiet) for name in _QUIET)):
                tasks.start_soon(tenant, name, rate, random.Random(f"{name} {rate}"))
            await anyio.sleep(_WARMING)
            tokens, stats, began = dict(self._tokens), self._engine.stats(), time.perf_counter()
            await anyio.sleep(seconds)
            now, then = time.perf_counter(), self._engine.stats()
            served = [self._tokens[name] - tokens[name] for name in tokens]
            counted = {
                "tokens_per_second": sum(served) / (now - began),
                "jain": sum(served) ** 2 / (len(served) * max(1, sum(each * each for each in served))),
                "preemptions": then.preemptions - stats.preemptions,
                "steps": then.steps - stats.steps,
            }
            tasks.cancel_scope.cancel()
        await anyio.sleep(_SETTLING)
        return _figures(asked, now) | counted

    async def _ask(self, asked: _Asked) -> None:
        chance, name = self._chance, next(self._names)
        length = self._scaled(chance.randint(*_PROMPT))
        prompt = [name % self._vocab, name // self._vocab % self._vocab, *self._words[:length]]
        params = SamplingParams(temperature=0.0, max_tokens=self._scaled(chance.randint(*_OUTPUT)), ignore_eos=True)
        async for _ in self._engine.stream(prompt, params, tenant=asked.tenant):
            if asked.wait is None:
                asked.wait = time.perf_counter() - asked.at
                self._tokens[asked.tenant] += len(prompt)
            self._tokens[asked.tenant] += 1

    def _scaled(self, tokens: int) -> int:
        return max(1, round(self._scale * tokens))


def _figures(asked: Sequence[_Asked], now: float) -> dict[str, Any]:
    """Return times to first token of quiet tenants, in seconds; a request without a token has waited until `now`."""
    quiet: dict[str, list[float]] = {name: [] for name in _QUIET}
    for each in asked:
        quiet[each.tenant].append(now - each.at if each.wait is None else each.wait)
    together = [wait for waits in quiet.values() for wait in waits]
    return {
        "ttft_p50": percentile(together, 0.5),
        "ttft_p99": percentile(together, 0.99),
        "ttft_p99_each": {name: percentile(waits, 0.99) for name, waits in quiet.items()},
        "requests": len(together),
    }
