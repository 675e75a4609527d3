"""`headrace bench repeat`: the same chats asked alone, asked again behind the prefix cache, and asked all at once.

Greedy answers that change show how far results depend on how a step was put together. The margin of a change is the
difference in log-probability of the two likeliest tokens where the answers part: near ties change first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import anyio

from headrace.engine import Choice, Engine, SamplingParams
from headrace.engine.bench.opening import Target
from headrace.engine.bench.report import conditions, show

__all__ = ["CHATS", "Changes", "compare", "run"]

_THINGS = ("France", "water", "a bicycle", "the Moon", "bread", "a violin", "the sea", "winter")
_QUESTIONS = (
    "What is the first thing that comes to mind about {}?",
    "Tell me three facts about {}.",
    "Write one sentence about {} for a child of six, and keep it friendly.",
    "Why do people like {}?",
    "Give me a title for a short story about {}, and then its first line.",
)
CHATS = tuple(question.format(thing) for thing, question in itertools.product(_THINGS, _QUESTIONS))
"""Messages of the users, one for each chat."""


class Changes(NamedTuple):
    """Differences between the answers of one way of asking and those of the chats alone."""

    changed: int
    """Chats whose answers differ."""
    margins: list[float]
    """Difference in log-probability of the two likeliest tokens where each pair of answers parts, in rising order."""


def run(target: Target, *, tokens: int, json_path: str | None) -> None:
    """Ask all chats in each way, and print how many answers change.

    Args:
        target: The model, which must have a tokenizer and a chat template.
        tokens: Largest number of tokens of an answer.
        json_path: File to which the figures are written as well; None for no file.

    Raises:
        HeadraceError: The engine does not open, or a request fails.
    """
    anyio.run(_run, target, tokens, json_path)


async def _run(target: Target, tokens: int, json_path: str | None) -> None:
    options = target.options(only_shape=False, rows=len(CHATS))
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=2)
    async with Engine(target.model, **options) as engine:
        alone = [await _answer(engine, chat, params, salt=chat) for chat in CHATS]
        again = [await _answer(engine, chat, params, salt=chat) for chat in CHATS]
        at_once = await _answers_at_once(engine, params)
        data: dict[str, Any] = {
            "conditions": conditions(
                **{
                    **target.describe(),
                    "model": engine.info.model,
                    "device": engine.info.device,
                    "dtype": engine.info.dtype,
                    "chats": len(CHATS),
                    "tokens": tokens,
                }
            )
        }
    rows = []
    for name, answers in (("again", again), ("all at once", at_once)):
        found = compare(alone, answers)
        data[name] = found._asdict()
        margins = f"{found.margins[0]:.3f} to {found.margins[-1]:.3f}" if found.margins else "none"
        rows.append([name, str(found.changed), margins])
    show(f"answers of {len(CHATS)} chats that change", ("asked", "changed", "margins"), rows, data, json_path)


def compare(alone: Sequence[Choice], other: Sequence[Choice]) -> Changes:
    """Find the answers that differ; all have the log-probabilities of the two likeliest tokens."""
    margins = []
    for first, second in zip(alone, other, strict=True):
        if first.token_ids == second.token_ids:
            continue
        pairs = itertools.zip_longest(first.token_ids, second.token_ids)
        place = next(at for at, (here, there) in enumerate(pairs) if here != there)
        assert first.logprobs is not None
        likeliest, runner_up = first.logprobs[min(place, len(first.logprobs) - 1)].top_logprobs[:2]
        margins.append(likeliest.logprob - runner_up.logprob)
    return Changes(len(margins), sorted(margins))


async def _answer(engine: Engine, chat: str, params: SamplingParams, *, salt: str) -> Choice:
    """Ask one chat; only chats with the same salt share keys and values."""
    return (await engine.generate([{"role": "user", "content": chat}], params, cache_salt=salt)).choices[0]


async def _answers_at_once(engine: Engine, params: SamplingParams) -> list[Choice]:
    answers: dict[str, Choice] = {}

    async def ask(chat: str) -> None:
        answers[chat] = await _answer(engine, chat, params, salt=f"at once: {chat}")

    async with anyio.create_task_group() as tasks:
        for chat in CHATS:
            tasks.start_soon(ask, chat)
    return [answers[chat] for chat in CHATS]
