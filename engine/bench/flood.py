"""`headrace bench flood`: what a tenant with ten times its share does to three quiet ones, on the real engine.

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

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.opening import Subject, Target, opened
from headrace.engine.bench.report import percentile, save, table

__all__ = ["run"]

_QUIET = ("b", "c", "d")
_PROMPT, _OUTPUT = (300, 700), (100, 200)
_FLOOD = 10
_MEASURING = 10.0
"""Seconds of the closed loop."""
_SETTLING = 1.0
"""Seconds for what was cancelled to leave the engine."""


@dataclass(slots=True)
class _Asked:
    tenant: str
    at: float
    first: float | None = None
    """Seconds from asking to the first token."""
    tokens: int = 0
    """Of the answer, read so far."""
    prompt: int = 0


def run(
    target: Target, *, rows: int, seconds: float, loads: Sequence[float], scale: float, json_path: str | None
) -> None:
    """Measure under `first_come` and `fair_share`, with the quiet tenants at each of `loads` of their fair share."""
    figures: dict[str, Any] = {}
    fair = replace(target, more={**target.more, "policy": "fair_share"})
    figures["conditions"], rate, calm, flood = anyio.run(_measure, fair, rows, seconds, tuple(loads), scale, None)
    first = replace(target, more={**target.more, "policy": "first_come"})
    _, _, _, beside = anyio.run(_measure, first, rows, seconds, (max(loads),), scale, rate)
    figures |= {"requests_per_second": rate, "all alike": calm, "fair_share": flood, "first_come": beside}
    cells = []
    for load in loads:
        ratio = flood[load]["ttft_p99"] / calm[load]["ttft_p99"]
        cells += [
            _row(load, "fair_share", "all alike", calm[load], ""),
            _row(load, "fair_share", f"one at {_FLOOD} times", flood[load], f"{ratio:.2f}"),
        ]
    cells.append(_row(max(loads), "first_come", f"one at {_FLOOD} times", beside[max(loads)], ""))
    table(f"four tenants, {rate:.1f} requests a second in a closed loop; TTFT of the three quiet ones", _COLUMNS, cells)
    save(figures, json_path)


_COLUMNS = ("share asked for", "policy", "load", "TTFT p50, s", "p99, s", "ratio", "tokens/s", "requests")


def _row(load: float, policy: str, name: str, found: dict[str, float], ratio: str) -> list[str]:
    seconds = [f"{found[key]:.3f}" for key in ("ttft_p50", "ttft_p99")]
    counts = [f"{found[key]:,.0f}" for key in ("tokens_per_second", "requests")]
    return [f"{load:g}", policy, name, *seconds, ratio, *counts]


async def _measure(
    target: Target, rows: int, seconds: float, loads: Sequence[float], scale: float, rate: float | None
) -> tuple[dict[str, object], float, dict[float, Any], dict[float, Any]]:
    """The conditions, the rate of a closed loop unless one is given, and the figures of all alike and of the flood."""
    calm, flood = {}, {}
    async with opened(target, rows=rows) as subject:
        load = _Load(subject, rows, scale)
        if rate is None:
            await load.closed(_MEASURING)
            rate = await load.closed(_MEASURING)
            for share in loads:
                calm[share] = await load.open(share * rate / 4, share * rate / 4, seconds)
        else:
            await load.closed(_MEASURING)
        for share in loads:
            flood[share] = await load.open(_FLOOD * share * rate / 4, share * rate / 4, seconds)
        return subject.conditions(target, rows=rows, seconds=seconds, scale=scale), rate, calm, flood


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

    async def closed(self, seconds: float) -> float:
        """Requests a second with twice as many clients as rows, each asking anew when it is answered."""
        answered = 0

        async def client(number: int) -> None:
            nonlocal answered
            while True:
                await self._ask(_Asked("abcd"[number % 4], time.perf_counter()))
                answered += 1

        async with anyio.create_task_group() as tasks:
            for number in range(2 * self._rows):
                tasks.start_soon(client, number)
            await anyio.sleep(seconds / 2)  # until rows start and end evenly
            before, started = answered, time.perf_counter()
            await anyio.sleep(seconds / 2)
            rate = (answered - before) / (time.perf_counter() - started)
            tasks.cancel_scope.cancel()
        await anyio.sleep(_SETTLING)
        return rate

    async def open(self, loud: float, quiet: float, seconds: float) -> dict[str, Any]:
        """Figures of the quiet tenants with these rates, in requests a second of each tenant."""
        asked: list[_Asked] = []
        ended = time.perf_counter() + seconds

        async def tenant(name: str, rate: float, chance: random.Random) -> None:
            at = time.perf_counter()
            while (at := at + chance.expovariate(rate)) < ended:
                await anyio.sleep(max(0.0, at - time.perf_counter()))
                asked.append(_Asked(name, at))
                tasks.start_soon(self._ask, asked[-1])

        async with anyio.create_task_group() as tasks:
            for name, rate in (("a", loud), *((name, quiet) for name in _QUIET)):
                tasks.start_soon(tenant, name, rate, random.Random(f"{name} {rate}"))
            await anyio.sleep(seconds)
            now = time.perf_counter()
            tasks.cancel_scope.cancel()
        found = _figures(asked, now, seconds)
        await anyio.sleep(_SETTLING)
        return found

    async def _ask(self, asked: _Asked) -> None:
        chance, name = self._chance, next(self._names)
        length = self._scaled(chance.randint(*_PROMPT))
        prompt = [name % self._vocab, name // self._vocab, *self._words[:length]]
        params = SamplingParams(temperature=0.0, max_tokens=self._scaled(chance.randint(*_OUTPUT)), ignore_eos=True)
        async for _ in self._engine.stream(prompt, params, tenant=asked.tenant):
            if asked.first is None:
                asked.first, asked.prompt = time.perf_counter() - asked.at, len(prompt)
            asked.tokens += 1

    def _scaled(self, tokens: int) -> int:
        return max(1, round(self._scale * tokens))


def _figures(asked: Sequence[_Asked], now: float, seconds: float) -> dict[str, Any]:
    """Who has no token yet has waited until now."""
    quiet: dict[str, list[float]] = {name: [] for name in _QUIET}
    for each in asked:
        if each.tenant in quiet:
            quiet[each.tenant].append(now - each.at if each.first is None else each.first)
    together = [wait for waits in quiet.values() for wait in waits]
    return {
        "ttft_p50": percentile(together, 0.5),
        "ttft_p99": percentile(together, 0.99),
        "ttft_p99_each": {name: percentile(waits, 0.99) for name, waits in quiet.items()},
        "tokens_per_second": sum(each.prompt + each.tokens for each in asked) / seconds,
        "requests": len(together),
    }
