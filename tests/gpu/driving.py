"""Opens engines on the device under test and asks them things; never judges what they say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
from gpu.judge import Output

from headrace.engine import Engine, SamplingParams
from headrace.engine.scheduling.plan import Runner, Step, StepPlan
from headrace.engine.scheduling.result import StepResult

__all__ = ["Meddler", "at_rest", "draw", "greedy", "one_by_one", "open_engine", "together"]

PATIENCE = 120.0
"""Seconds after which something hangs."""


def open_engine(folder: Path, device: str, **options: Any) -> Engine:
    """An engine in bfloat16, to be entered."""
    return Engine(folder, **({"device": device, "dtype": "bfloat16", "kv_memory": "64MiB", "max_rows": 16} | options))


def draw(length: int, seed: int, vocabulary: int = 500) -> list[int]:
    """A prompt of random ids that are all above the few with a meaning of their own."""
    generator = random.Random(seed)
    return [generator.randrange(8, vocabulary) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0, max_tokens=max_tokens)


async def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Output:
    """One completion, which must end by its length."""
    with anyio.fail_after(PATIENCE):
        choice = (await engine.generate(list(prompt), params)).choices[0]
    assert choice.finish_reason == "length"
    return Output(prompt, choice.token_ids)


async def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[Output]:
    """Greedy outputs, each request alone in the engine."""
    return [await ask(engine, prompt, greedy(count)) for prompt in prompts]


async def together(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Output]:
    """Outputs of requests that are submitted at once, in their order."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    outputs: dict[int, Output] = {}

    async def one(index: int) -> None:
        outputs[index] = await ask(engine, prompts[index], each[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(one, index)
    return [outputs[index] for index in range(len(prompts))]


async def at_rest(engine: Engine) -> None:
    """Assert that nothing is held once the steps in flight are done, and that the scheduler is sound."""
    with anyio.fail_after(PATIENCE):
        while (stats := engine.stats()).steps_in_flight:  # noqa: ASYNC110 - it has no event
            await anyio.sleep(0.002)
    assert engine._life.loop is not None
    engine._life.loop.scheduler.roster.check()
    assert (stats.pages_held, stats.running, stats.waiting, stats.paused) == (0, 0, 0, 0), stats
    assert not engine._life.loop.scheduler.roster.requests


class Meddler:
    """Stands between an engine's step loop and its runner: may raise, wait or lie in either's place."""

    def __init__(self, engine: Engine) -> None:
        """Take the runner's place from the next step on."""
        assert engine._life.loop is not None
        self._runner: Runner = engine._life.loop._runner
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        self.on_result: Callable[[StepPlan, list[int]], None] = lambda plan, ids: None
        """Called in the waiter's thread with the ids that the device returned, which it may change."""
        engine._life.loop._runner = self

    def launch(self, plan: StepPlan) -> Step:
        """Launch, or fail to."""
        self.on_launch(plan)
        return _MeddledStep(self, plan, self._runner.launch(plan))

    def __getattr__(self, name: str) -> Any:
        """Be the runner in every other respect."""
        return getattr(self._runner, name)


class _MeddledStep:
    def __init__(self, meddler: Meddler, plan: StepPlan, step: Step) -> None:
        self._meddler, self._plan, self._step = meddler, plan, step

    def wait(self) -> StepResult:
        result = self._step.wait()
        ids = list(result.ids)
        self._meddler.on_result(self._plan, ids)
        return result._replace(ids=ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)
