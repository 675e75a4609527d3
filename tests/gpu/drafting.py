"""Speculation on a GPU against none, with drafts of which most are right; holds no tests."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import pytest
import torch
from gpu.driving import at_rest, draw, open_engine
from torch import Tensor

from headrace.engine import Completion, Engine, SamplingParams
from headrace.engine.speculation import Ngram

__all__ = ["ASKED", "PROMPTS", "SPECULATING", "draft_by_answers", "random_depths", "run", "same_answers", "told"]

DEPTH = 4
WRONG = 5
"""One draft in so many is wrong."""
PROMPTS: list[list[int]] = [
    draw(9, 1) * 4,
    draw(40, 2),
    [20],
    draw(3, 3) * 9 + draw(2, 4),
    draw(130, 5),
    draw(15, 6),
    draw(16, 7),
]
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.6, "seed": 6, "top_k": 8, "logprobs": 2},
    {"temperature": 0.7, "seed": 7, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 1, "prompt_logprobs": 1},
    {"logit_bias": {65: 3.0}, "min_tokens": 5, "bad_words": ["ab"], "stop_token_ids": list(range(8, 24))},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": list(range(100, 116)), "n": 2},
    {"max_tokens": 3},
    {"temperature": 1.0, "seed": 13, "speculate": False},
]
"""Options of requests of which a step may serve all at once."""


class Told:
    """Drafts what it has been told that rows will say, but for one draft in `WRONG`."""

    taps = None

    def __init__(self, table: Any, known: Sequence[Sequence[int]]) -> None:
        self._table = table
        device, width = table.pool_RC.device, max(map(len, known))
        filled = [[*each, *[0] * (width - len(each))] for each in known]
        self._known_KT = torch.tensor(filled, dtype=torch.int32).to(device)
        self._sizes_K = torch.tensor([len(each) for each in known]).to(device)
        self._place_T = torch.arange(width).to(device)
        self._ahead = torch.arange(16).to(device)

    def draft(self, rows_B: Tensor, depth: int, counts_B: Tensor) -> None:
        """Find the telling that begins with what the row has said, by torch alone."""
        table, rows = self._table, rows_B.long()
        context, width = table.pool_RC.shape[1], len(self._place_T)
        end_B = table.lengths_R[rows].long() + 1
        said_BT = table.pool_RC[rows][:, :width]
        same_BKT = said_BT[:, None] == self._known_KT[None, :, : said_BT.shape[1]]
        same_BK = (same_BKT | (self._place_T[: said_BT.shape[1]] >= end_B[:, None, None])).all(-1)
        which_B = same_BK.int().argmax(1)
        left_B = (self._sizes_K[which_B] - end_B) * same_BK.any(1) * (rows_B != len(table.lengths_R) - 1)
        at_BK = end_B[:, None] + self._ahead[:depth]
        drafts_BK = self._known_KT[which_B[:, None], at_BK.clamp(max=width - 1)]
        drafts_BK = torch.where(at_BK % WRONG == 3, (drafts_BK - 1).abs(), drafts_BK)
        places_BK = at_BK.clamp(max=context - 1)
        kept_BK = table.pool_RC[rows[:, None], places_BK]
        table.pool_RC[rows[:, None], places_BK] = torch.where(left_B[:, None] > 0, drafts_BK, kept_BK)
        counts_B.copy_(left_B.clamp(0, depth))

    def take_up(self, decoded: Any) -> None:
        """Nothing is kept."""

    def take_up_prompts(self, prefilled: Any) -> None:
        """Nothing is kept."""


def told(completions: Sequence[Completion]) -> list[list[int]]:
    """Prompts and answers, as `Told` takes them."""
    return [each.prompt_token_ids + choice.token_ids for each in completions for choice in each.choices]


def random_depths(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """Let each step speculate so deep, or deeper, at random."""
    chance = random.Random(1)
    rule = "headrace.engine.scheduling.speculation.depth.DepthRule.choose"
    monkeypatch.setattr(rule, lambda self, rows, context: chance.randint(least, DEPTH))


def draft_by_answers(monkeypatch: pytest.MonkeyPatch, known: Sequence[Sequence[int]]) -> None:
    """Let engines that open from now on draft what is known."""
    opening = importlib.import_module("headrace.engine.model.cuda.opening")

    def drafts(config: Any) -> Any:
        return None if config.speculation is None else opening.OpenDrafts(lambda table: Told(table, known), DEPTH)

    monkeypatch.setattr(opening, "_drafts", drafts)


async def ask_all(engine: Engine, asked: Sequence[dict[str, Any]], count: int) -> list[Completion]:
    """Answers to all requests at once, in order."""
    found: dict[int, Completion] = {}

    async def one(index: int) -> None:
        options = {"temperature": 0.0, "max_tokens": count} | asked[index]
        adapter = options.pop("adapter", None)
        found[index] = await engine.generate(PROMPTS[index % len(PROMPTS)], SamplingParams(**options), adapter=adapter)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for index in range(len(asked)):
                tasks.start_soon(one, index)
    return [found[index] for index in range(len(asked))]


def run(
    folder: Path,
    device: str,
    asked: Sequence[dict[str, Any]] = ASKED,
    *,
    count: int = 40,
    rounds: int = 1,
    check: Callable[[Any], None] = lambda stats: None,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    **options: Any,
) -> list[list[Completion]]:
    """The answers of an engine to the same requests, once for each round; prefixes are cached from the second on."""

    async def answers() -> list[list[Completion]]:
        async with open_engine(folder, device, **({"max_context": 256, "max_batched_tokens": 256} | options)) as engine:
            for name, worn in adapters.items():
                await engine.adapters.load(name, worn)
            found = [await ask_all(engine, asked, count) for _ in range(rounds)]
            await at_rest(engine)
            check(engine.stats())
            return found

    return anyio.run(answers)


def same_answers(ours: Sequence[Completion], theirs: Sequence[Completion], *, rounded: bool = False) -> None:
    """Assert that callers see the same; `rounded` compares no log-probabilities, which sums of other sizes move."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for one, two in zip(mine.choices, other.choices, strict=True):
            assert (one.token_ids, one.finish_reason) == (two.token_ids, two.finish_reason), index
            assert rounded or one == two, (index, ASKED[index % len(ASKED)])
        assert rounded or mine.prompt_logprobs == other.prompt_logprobs, index
        assert mine.usage.completion_tokens == other.usage.completion_tokens


SPECULATING: dict[str, Any] = {"speculation": Ngram(k=DEPTH)}
