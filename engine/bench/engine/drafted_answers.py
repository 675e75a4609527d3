"""`headrace bench speculation --task ...`: a real model's answers with drafts and without, in turns.

Two engines are open at once, one of which may draft. Both are asked the same chats, as many at once as there are rows,
and none finds in the prefix cache what others left. A time is that from the first question of a round to its last
answer, prompts included. Then both answer once more, and the answers are compared token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import anyio
from rich.progress import Progress

from headrace.engine import Choice, Engine, SamplingParams
from headrace.engine.bench.engine.repeat import CHATS, compare
from headrace.engine.bench.opening import BenchmarkFailed, Target, require_room
from headrace.engine.bench.report import conditions, show, spread
from headrace.engine.speculation import Speculation

__all__ = ["TASKS", "Asked", "run"]

_TEXTS: Final = (
    "The old mill stands where the river bends. In {year} Anna Keller bought it from the town, put new stones beside "
    "the wheel and cleared the headrace, which had been dry for thirty years. Farmers from four villages brought her "
    "their wheat. On market days the carts stood all the way to the bridge, and the sound of the stones could be heard "
    "in the church. When the railway came, most farmers sold their wheat to the city. Anna Keller kept the mill, and "
    "sold flour to bakers who did not want any other.",
    "def total(prices, year={year}):\n"
    "    result = 0.0\n"
    "    for price in prices:\n"
    "        if price.year != year:\n"
    "            continue\n"
    "        amount = price.amount * price.count\n"
    "        if price.discount:\n"
    "            amount = amount * (1.0 - price.discount)\n"
    "        result = result + amount\n"
    "    return result\n\n\n"
    "def average(prices, year={year}):\n"
    "    found = [price for price in prices if price.year == year]\n"
    "    if not found:\n"
    "        return 0.0\n"
    "    return total(found, year) / len(found)",
    "Dear Mr Brown,\n\nthank you for your letter of 3 May {year}. We have looked at the bill that you sent us, and you "
    "are right: the repair of the roof was paid for in April. We are sorry for the mistake. The money will be on your "
    "account within ten days, and you need not do anything. If it has not come by the end of the month, please call "
    "Mrs Weber in our office, who knows about your case.\n\nYours sincerely,\nJohn Miller",
)


def _copied(number: int) -> str:
    text = _TEXTS[number % len(_TEXTS)].format(year=1870 + number)
    return f"Rewrite this text. Change the year {1870 + number} to {2000 + number}, and nothing else.\n\n{text}"


def _chatted(number: int) -> str:
    return CHATS[number % len(CHATS)]


TASKS: Final[Mapping[str, Callable[[int], str]]] = {"copy": _copied, "chat": _chatted}
"""What is asked, by number: to rewrite a text, code or letter with one change; or a question, free to answer."""
_FEWEST_CHATS: Final = 6
_COMPARED: Final = 64
"""Tokens of each answer that are compared."""
_NEAR_TIE: Final = 1e-3
"""Difference of the two largest log-probabilities below which rounding alone decides which token comes."""
_KV_MEMORY: Final = "1GiB"
"""Memory of keys and values of each engine, so that neither takes all that is left."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to ask, and how."""

    task: str
    """Key of `TASKS`."""
    batches: Sequence[int]
    tokens: int
    """Most tokens of an answer."""
    repeats: int
    temperature: float


def run(target: Target, speculation: Speculation, asked: Asked, json_path: str | None) -> None:
    """Measure, print and save the figures.

    Raises:
        BenchmarkFailed: There is no such task, the engines' drafts are chosen in two ways, or the rows do not fit.
        HeadraceError: An engine does not open, or a request fails.
    """
    if asked.task not in TASKS:
        raise BenchmarkFailed(f"--task {asked.task}: give one of {', '.join(TASKS)}")
    if "speculation" in target.more:
        raise BenchmarkFailed("--set speculation: this benchmark chooses it; use --drafter and --k")
    anyio.run(_run, target, speculation, asked, json_path)


async def _run(target: Target, speculation: Speculation, asked: Asked, json_path: str | None) -> None:
    target = replace(target, kv_memory=target.kv_memory or _KV_MEMORY)
    options = target.options(only_shape=False, rows=max(asked.batches))
    figures = []
    async with (
        Engine(target.model, **options) as plain,
        Engine(target.model, **options, speculation=speculation) as drafting,
    ):
        with Progress(transient=True) as progress:
            task = progress.add_task(
                "measuring", total=len(asked.batches) * 2 * (asked.repeats + (2 if asked.temperature == 0 else 1))
            )
            for rows in asked.batches:
                pair = _Pair(plain, drafting, asked, rows, partial(progress.advance, task))
                figures.append(await pair.measured())
        info = plain.info
        found = {"model": info.model, "device": info.device, "dtype": info.dtype, "task": asked.task}
        more = {"tokens": asked.tokens, "repeats": asked.repeats, "temperature": asked.temperature}
        data = {
            "conditions": conditions(**{**target.describe(), **found, "speculation": str(speculation), **more}),
            "figures": figures,
        }
    kind = "tokens a processor second" if info.device == "cpu" else "tokens a second"
    cells = [_row(each) for each in figures]
    show(f"{asked.task}, {kind}, prompts included", _COLUMNS, cells, data, json_path)


_COLUMNS = ("rows", "off", "with drafts", "times off", "accepted length", "equal answers", "gaps where they part")


def _row(figure: dict[str, Any]) -> list[str]:
    margins, ratios = figure["margins"], figure["ratios"]
    parts = "-"
    if margins:
        near = sum(margin < _NEAR_TIE for margin in margins)
        parts = f"{margins[0]:.4f} to {margins[-1]:.4f}, {near} below {_NEAR_TIE:g}"
    return [
        str(figure["rows"]),
        spread(figure["off"], ",.0f"),
        spread(figure["on"], ",.0f"),
        spread(ratios, ".2f"),
        f"{figure['accepted_length']:.2f}" if figure["drafted_runs"] else "-",
        f"{figure['compared'] - len(margins)} of {figure['compared']}" if figure["compared"] else "-",
        parts,
    ]


class _Pair:
    """Two engines that answer the same chats."""

    def __init__(self, plain: Engine, drafting: Engine, asked: Asked, rows: int, advance: Callable[[], None]) -> None:
        self._plain, self._drafting, self._asked, self._rows, self._advance = plain, drafting, asked, rows, advance
        rounds = -(-max(_FEWEST_CHATS, rows) // rows)
        self._chats = [TASKS[asked.task](number) for number in range(rounds * rows)]
        self._salt = 0

    async def measured(self) -> dict[str, Any]:
        """Return the rates of each round but the first, which warms both up, and how answers differ."""
        asked = self._asked
        for engine in (self._plain, self._drafting):
            require_room(engine, [max(map(len, self._chats)) + asked.tokens] * self._rows)
        rates: dict[str, list[float]] = {"off": [], "on": []}
        names = {"off": self._plain, "on": self._drafting}
        before = self._drafting.stats()
        for number in range(asked.repeats + 1):
            for name in sorted(names, reverse=bool(number % 2)):
                rates[name].append(await self._rate(names[name]))
            if not number:
                before = self._drafting.stats()
        after = self._drafting.stats()
        runs = after.draft_runs - before.draft_runs
        compared = await self._compared() if asked.temperature == 0 else None
        off, on = rates["off"][1:], rates["on"][1:]
        return {
            "rows": self._rows,
            "chats": len(self._chats),
            "off": off,
            "on": on,
            "ratios": [ours / without for ours, without in zip(on, off, strict=True)],
            "drafted_runs": runs,
            "accepted_length": 1.0 + (after.accepted_tokens - before.accepted_tokens) / max(1, runs),
            "compared": 0 if compared is None else len(self._chats),
            "margins": compared or [],
        }

    async def _compared(self) -> list[float]:
        """Return the differences of the two largest log-probabilities where answers part, without drafts."""
        alone = await self._answers(self._plain, max_tokens=_COMPARED, logprobs=2)
        self._advance()
        other = await self._answers(self._drafting, max_tokens=_COMPARED)
        self._advance()
        return compare(alone, other).margins

    async def _rate(self, engine: Engine) -> float:
        """Return the tokens a second of one round; on a CPU, of the processor's seconds."""
        clock = time.process_time if engine.info.device == "cpu" else time.perf_counter
        started = clock()
        answers = await self._answers(engine, max_tokens=self._asked.tokens)
        seconds = clock() - started
        self._advance()
        return sum(len(answer.token_ids) for answer in answers) / seconds

    async def _answers(self, engine: Engine, *, max_tokens: int, logprobs: int | None = None) -> list[Choice]:
        """Ask all chats, so many at once as there are rows; return the answers in order."""
        answers: dict[int, Choice] = {}
        self._salt += 1

        async def ask(number: int) -> None:
            chat = [{"role": "user", "content": self._chats[number]}]
            params = SamplingParams(
                temperature=self._asked.temperature, seed=number, max_tokens=max_tokens, logprobs=logprobs
            )
            completion = await engine.generate(chat, params, cache_salt=f"{self._salt} {number}")
            answers[number] = completion.choices[0]

        for first in range(0, len(self._chats), self._rows):
            async with anyio.create_task_group() as tasks:
                for number in range(first, first + self._rows):
                    tasks.start_soon(ask, number)
        return [answers[number] for number in range(len(self._chats))]
