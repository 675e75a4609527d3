"""Random requests under launch-ahead, cancelled at random moments in a pool that is too small: right, and no page lost.

`HEADRACE_SOAK` is the number of requests, 1000 by default, shared out over launch_ahead 1 to 4.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import NamedTuple

import anyio
import pytest
from gpu.checkpoints import exact_logits, kv_bytes
from gpu.choosing import choose, random_sampling
from gpu.conftest import Zoo
from gpu.driving import PATIENCE, at_rest, draw, open_engine
from gpu.judge import Output

from headrace.engine import Engine, SamplingParams
from headrace.engine.scheduling.asked import Sampling

SOAK = int(os.environ.get("HEADRACE_SOAK", "1000"))
ROWS, PAGES, MOST = 12, 20, 160
"""Rows, pages of 16 and tokens of a context: full rows want more than twice the pages there are."""
AT_ONCE = 30
GOLDEN = 0x9E3779B97F4A7C15  # what makes the seeds of a prompt's choices differ


class Asked(NamedTuple):
    """One request of the soak."""

    prompt: list[int]
    sampling: Sampling
    count: int
    choices: int
    cancel_after: int | None
    """Tokens read before it is cancelled; -1 by a deadline instead. None reads to the end."""
    delay: float
    """Seconds from its turn to its start, or to its deadline."""


def random_request(generator: random.Random, openings: list[list[int]], seconds: float) -> Asked:
    prompt = draw(generator.randrange(1, 90), generator.random())
    if generator.random() < 0.4:  # shares a prefix with others
        prompt = generator.choice(openings)[: generator.randrange(8, 80)] + prompt[: generator.randrange(1, 30)]
    sampling = Sampling() if generator.random() < 0.6 else random_sampling(generator)
    count = generator.randrange(1, 50)
    cancel = generator.choice([-1, generator.randrange(count), generator.randrange(count)])
    return Asked(
        prompt=prompt,
        sampling=sampling,
        count=count,
        choices=generator.choice([2, 3]) if generator.random() < 0.1 else 1,
        cancel_after=cancel if generator.random() < 0.25 else None,
        delay=generator.random() * seconds,
    )


class Soak:
    """Asks everything, `AT_ONCE` requests at a time, and keeps what came."""

    def __init__(self, engine: Engine, requests: list[Asked]) -> None:
        self.requests = requests
        self.tokens: list[list[list[int]]] = [[[] for _ in range(asked.choices)] for asked in requests]
        self.ends: Counter[str] = Counter()
        self._engine = engine
        self._done = False

    async def run(self) -> None:
        """Ask, with an eye on the scheduler meanwhile."""
        with anyio.fail_after(max(PATIENCE, 0.5 * len(self.requests))):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                limiter = anyio.CapacityLimiter(AT_ONCE)
                async with anyio.create_task_group() as asking:
                    for index in range(len(self.requests)):
                        asking.start_soon(self._ask, index, limiter)
                self._done = True
        await at_rest(self._engine)

    async def _watch(self) -> None:
        assert self._engine._life.loop is not None
        while not self._done:
            self._engine._life.loop.scheduler.roster.check()
            await anyio.sleep(0.02)

    async def _ask(self, index: int, limiter: anyio.CapacityLimiter) -> None:
        asked = self.requests[index]
        sampling = asked.sampling
        fields = {name: getattr(sampling, name) for name in Sampling.__slots__}
        params = SamplingParams(**fields, max_tokens=asked.count, n=asked.choices)
        async with limiter:
            patience = asked.delay if asked.cancel_after == -1 else PATIENCE
            with anyio.move_on_after(patience) as scope:
                async with self._engine.stream(asked.prompt, params) as stream:
                    async for token in stream:
                        if token.id is not None:
                            self.tokens[index][token.index].append(token.id)
                        if asked.cancel_after == sum(map(len, self.tokens[index])):
                            stream.cancel()
            self.ends["deadline" if scope.cancelled_caught else str(stream.finish_reasons[0])] += 1
            whole = asked.cancel_after is None
            assert not whole or [len(tokens) for tokens in self.tokens[index]] == [asked.count] * asked.choices

    def greedy_outputs(self) -> list[Output]:
        """Whatever was read of greedy requests, cancelled ones included."""
        pairs = zip(self.requests, self.tokens, strict=True)
        return [
            Output(asked.prompt, tokens)
            for asked, choices in pairs
            if not asked.sampling.temperature
            for tokens in choices
            if tokens
        ]

    def check_ends(self, preemptions: int, cached_tokens: int) -> None:
        """Assert that the soak met what it is for, as far as so many requests can promise it."""
        assert self.ends["length"] > 0.6 * len(self.requests), self.ends
        if len(self.requests) >= 100:
            assert self.ends["cancelled"] and preemptions and cached_tokens, (self.ends, preemptions, cached_tokens)


async def soak(zoo: Zoo, checkpoint: str, count: int, launch_ahead: int) -> Soak:
    generator = random.Random(launch_ahead)
    openings = [draw(80, number) for number in range(3)]
    requests = [random_request(generator, openings, 0.2) for _ in range(count)]
    options = {
        "max_rows": ROWS,
        "max_batched_tokens": 64,
        "max_context": MOST,
        "kv_memory": kv_bytes(zoo.folder(checkpoint), PAGES),
        "launch_ahead": launch_ahead,
    }
    async with open_engine(zoo.folder(checkpoint), zoo.device, **options) as engine:
        made = Soak(engine, requests)
        await made.run()
        stats = engine.stats()
        made.check_ends(stats.preemptions, stats.cached_tokens)
    return made


@pytest.mark.parametrize(
    ("launch_ahead", "checkpoint"),
    [(1, "llama 3"), (2, "mistral"), (3, "qwen3"), (4, "smollm2")],
)
def test_greedy_outputs_are_right_whatever_else_goes_on(zoo: Zoo, launch_ahead: int, checkpoint: str) -> None:
    made = anyio.run(soak, zoo, checkpoint, max(20, SOAK // 5), launch_ahead)
    zoo.judge(checkpoint).check(made.greedy_outputs(), f"soak of {checkpoint}, launch_ahead {launch_ahead}")


def test_sampled_outputs_are_exactly_right_whatever_else_goes_on(zoo: Zoo) -> None:
    """With exact logits every token of every kind of request can be predicted (see test_sampler.py)."""
    made = anyio.run(soak, zoo, "exact", max(20, SOAK // 5), 3)
    known, wanted, samplings = [], [], []
    for asked, choices in zip(made.requests, made.tokens, strict=True):
        for choice, tokens in enumerate(choices):
            seed = (asked.sampling.seed + choice * GOLDEN) % 2**64
            fields = {name: getattr(asked.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            samplings.append(Sampling(**fields, seed=seed))
            known.append(list(asked.prompt))
            wanted.append([*asked.prompt, *tokens])
    table_VV = exact_logits().bfloat16()
    while any(len(ids) < len(goal) for ids, goal in zip(known, wanted, strict=True)):
        chosen = choose(zoo.device, table_VV[[ids[-1] for ids in known]], samplings, [len(ids) for ids in known])
        for ids, goal, token in zip(known, wanted, chosen, strict=True):
            if len(ids) < len(goal):
                ids.append(token)
    wrong = [index for index, (ids, goal) in enumerate(zip(known, wanted, strict=True)) if ids != goal]
    assert not wrong, f"{len(wrong)} of {len(wanted)} outputs are wrong, such as {samplings[wrong[0]]}"
