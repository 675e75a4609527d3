"""What a fault on the device costs: the requests concerned and no more, or, where the device is lost, a typed end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from gpu.checkpoints import POISON, kv_bytes
from gpu.conftest import Zoo
from gpu.driving import PATIENCE, Meddler, ask, at_rest, draw, greedy, open_engine, together
from gpu.judge import Output

from headrace.engine import Engine, HeadraceError, NonFiniteLogits, PromptTooLong, RequestFailed
from headrace.engine.scheduling.plan import StepPlan

PROMPTS = [draw(length, 70 + length) for length in (5, 18, 33, 64, 100, 40)]


async def outcomes(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[Output | HeadraceError]:
    """What becomes of requests that are submitted at once."""
    found: dict[int, Output | HeadraceError] = {}

    async def one(index: int) -> None:
        try:
            found[index] = await ask(engine, prompts[index], greedy(count))
        except HeadraceError as error:
            found[index] = error

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(one, index)
    return [found[index] for index in range(len(prompts))]


def answered(found: Sequence[Output | HeadraceError]) -> list[Output]:
    return [each for each in found if isinstance(each, Output)]


# -- rows that are not finite ---------------------------------------------------------------------------------------


def test_a_request_whose_logits_overflow_fails_alone(zoo: Zoo, device: str) -> None:
    """Beside others, and when it is asked again: cached pages must neither hide nor spread it."""
    poisoned = [*draw(30, 1), POISON]

    async def run() -> list[Output]:
        good: list[Output] = []
        async with open_engine(zoo.folder("poisoned logits"), device, max_context=256) as engine:
            for _ in range(2):
                found = await outcomes(engine, [*PROMPTS[:3], poisoned, *PROMPTS[3:]], 24)
                assert type(found[3]) is NonFiniteLogits
                good += answered(found)
                assert len(good) % len(PROMPTS) == 0
            with pytest.raises(NonFiniteLogits):
                await ask(engine, [POISON], greedy(4))
            good.append(await ask(engine, [*poisoned, 20], greedy(8)))  # finite again one token later
            await at_rest(engine)
        return good

    zoo.judge("poisoned logits").check(anyio.run(run), "beside logits that overflow")


def test_values_that_overflow_spoil_no_page_of_others(zoo: Zoo, device: str) -> None:
    """Their pages are used again, partly filled: what is masked out must not count, be it NaN or infinity."""
    poisoned = [[*draw(11, number), POISON, *draw(40, number)] for number in range(6)]

    async def run() -> list[Output]:
        good: list[Output] = []
        memory = kv_bytes(zoo.folder("poisoned values"), 40)
        async with open_engine(zoo.folder("poisoned values"), device, max_context=256, kv_memory=memory) as engine:
            for number in range(3):
                prompts = [*poisoned[2 * number : 2 * number + 2], *PROMPTS]
                found = await outcomes(engine, prompts, 24)
                assert all(type(each) is NonFiniteLogits or isinstance(each, Output) for each in found[:2])
                assert len(answered(found[2:])) == len(PROMPTS), found
                good += answered(found[2:])
            await at_rest(engine)
        return good

    zoo.judge("poisoned values").check(anyio.run(run), "on pages that held values that overflowed")


# -- steps that fail ------------------------------------------------------------------------------------------------


def failing(error: Exception, meddler: Meddler, where: str, after: int) -> list[StepPlan]:
    """Fail one step of the next ones, when it is launched or when it is waited for; its plan appears in the list."""
    hit: list[StepPlan] = []
    seen: list[int] = []

    def fail(plan: StepPlan, tokens: Any = None) -> None:
        seen.append(plan.step)
        if len(seen) == after:
            hit.append(plan)
            raise error

    if where == "launch":
        meddler.on_launch = fail
    else:
        meddler.on_result = fail
    return hit


@pytest.mark.parametrize("where", ["launch", "result"])
@pytest.mark.parametrize("after", [1, 2, 9])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("a passing fault")], ids=["out of memory", "fault"]
)
def test_a_step_that_fails_costs_its_own_requests_and_none_if_it_found_no_memory(
    zoo: Zoo, device: str, where: str, after: int, error: Exception
) -> None:
    async def run() -> list[Output]:
        options = {"max_rows": 4, "max_batched_tokens": 64, "max_context": 256}
        async with open_engine(zoo.folder("llama 3"), device, **options) as engine:
            good = await together(engine, PROMPTS[:2], greedy(8))
            meddler = Meddler(engine)
            hit = failing(error, meddler, where, after)
            found = await outcomes(engine, PROMPTS, 24)
            assert len(hit) == 1
            failed = [each for each in found if not isinstance(each, Output)]
            retried = isinstance(error, torch.OutOfMemoryError)
            assert len(failed) == (0 if retried else len({work.request.id for work in hit[0].works}))
            assert all(type(each) is RequestFailed for each in failed) and engine.stats().memory_retries == retried
            good += answered(found)
            assert len(good) > 2, "some request was not in the step that failed"
            good += await together(engine, PROMPTS, greedy(16))
            await at_rest(engine)
        return good

    zoo.judge("llama 3").check(anyio.run(run), f"after a step failed in its {where}")


def test_an_id_outside_the_vocabulary_costs_its_own_request(zoo: Zoo, device: str) -> None:
    judge = zoo.judge("llama 3")

    async def run() -> list[Output]:
        async with open_engine(zoo.folder("llama 3"), device, max_context=256) as engine:
            meddler = Meddler(engine)
            lied: list[int] = []

            def lie(plan: StepPlan, tokens: list[int]) -> None:
                if len(plan.works) > 2 and all(work.samples for work in plan.works) and not lied:
                    lied.append(plan.works[1].request.id)
                    tokens[1] = judge.vocabulary + 5

            meddler.on_result = lie
            found = await outcomes(engine, PROMPTS, 16)
            assert lied and [type(each) for each in found if not isinstance(each, Output)] == [RequestFailed]
            await at_rest(engine)
            return answered(found)

    good = anyio.run(run)
    assert len(good) == len(PROMPTS) - 1
    judge.check(good, "beside an id outside the vocabulary")


def test_a_device_that_stalls_does_not_stall_the_event_loop(zoo: Zoo, device: str) -> None:
    """Steps stop counting while anything runs, which is what a watchdog looks at; then all goes on."""

    async def run() -> list[Output]:
        async with open_engine(zoo.folder("llama 3"), device, max_context=256) as engine:
            await together(engine, PROMPTS[:1], greedy(2))
            meddler = Meddler(engine)
            holding, release = threading.Event(), threading.Event()

            def stall(plan: StepPlan, tokens: list[int]) -> None:
                if not release.is_set():
                    holding.set()
                    release.wait(PATIENCE)

            meddler.on_result = stall
            found: list[Output] = []

            async def serve() -> None:
                found.extend(await together(engine, PROMPTS, greedy(16)))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                try:
                    with anyio.fail_after(PATIENCE):
                        while not holding.is_set():  # noqa: ASYNC110 - set by a thread
                            await anyio.sleep(0.005)
                    stalled = engine.stats()
                    late = []
                    for _ in range(50):
                        start = time.perf_counter()
                        await anyio.sleep(0.002)
                        late.append(time.perf_counter() - start)
                    now = engine.stats()
                finally:
                    release.set()
            assert now.steps == stalled.steps and now.steps_in_flight and now.running
            assert sorted(late)[25] < 0.05
            await at_rest(engine)
            return found

    zoo.judge("llama 3").check(anyio.run(run), "after a stall")


def test_a_prompt_that_no_pool_can_hold_is_refused(zoo: Zoo, device: str) -> None:
    async def run() -> list[Output]:
        memory = kv_bytes(zoo.folder("llama 3"), 6)
        async with open_engine(zoo.folder("llama 3"), device, max_context=256, kv_memory=memory) as engine:
            room = engine.info.num_pages * engine.info.page_size
            with pytest.raises(PromptTooLong):
                await engine.generate(draw(room + 1, 1), greedy(1))
            outputs = [await ask(engine, draw(room, 2), greedy(1)), await ask(engine, draw(20, 3), greedy(30))]
            await at_rest(engine)
        return outputs

    zoo.judge("llama 3").check(anyio.run(run), "a pool filled to its last token")


# -- a device that is lost ------------------------------------------------------------------------------------------


def test_a_device_fault_ends_every_stream_and_every_later_call_as_engine_crashed(zoo: Zoo, device: str) -> None:
    """In a process of its own, whose CUDA context it takes with it; there the fault is a device-side assertion."""
    script = Path(__file__).with_name("crash.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(script), device, str(zoo.folder("llama 3"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    report = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    assert done.returncode == 0, done.stderr[-3000:]
    assert report == {
        "streams": ["EngineCrashed"] * 6,
        "later stream": "EngineCrashed",
        "later stats": "EngineCrashed",
        "leaving": "EngineCrashed",
        "cause": True,
        "seconds": report["seconds"],
        "threads": [],
    }
    assert report["seconds"] < 30
