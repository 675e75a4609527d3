"""`StepLoop`: the order of a step's parts, depths of the pipeline, and a loop that dies; over a fake device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from scripted import (
    CAPACITY,
    Gate,
    capacity,
    check_serving,
    expected_ids,
    greedy,
    no_leaks,
    read,
    serving,
    until,
)

from headrace.adapters.slots import AdapterVersion
from headrace.engine import EngineCrashed, HeadraceError, RequestFailed
from headrace.engine.concurrency.threads import Poster
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.policy import FirstCome
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import StepResult
from headrace.engine.testing import ScriptedEngine, ScriptedRunner, ScriptedStep

pytestmark = pytest.mark.anyio


# -- order ---------------------------------------------------------------------------------------------------------


class Recorder(ScriptedRunner):
    """Writes down what happens to each step, and on which thread."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.events: list[tuple[str, int]] = []
        self.threads: dict[str, set[int]] = {"launch": set(), "wait": set()}

    def note(self, what: str, step: int) -> None:
        self.events.append((what, step))
        self.threads.setdefault(what, set()).add(threading.get_ident())

    def launch(self, plan: StepPlan) -> Any:
        self.note("launch", plan.step)
        step = super().launch(plan)
        recorder, number = self, plan.step

        class Waited:
            def wait(self) -> StepResult:
                recorder.note("wait", number)
                return step.wait()

        return Waited()


@pytest.mark.parametrize("ahead", [1, 2, 3])
async def test_a_step_is_launched_before_the_one_before_it_is_waited_for(ahead: int) -> None:
    async with no_leaks():
        runner = Recorder(CAPACITY)
        async with ScriptedEngine(CAPACITY, lambda: runner, launch_ahead=ahead) as engine:
            assert engine._life.loop is not None
            scheduler, commit = engine._life.loop.scheduler, engine._life.loop.scheduler.commit

            def noted_commit(plan: StepPlan, result: StepResult) -> Any:
                runner.note("commit", plan.step)
                return commit(plan, result)

            scheduler.commit = noted_commit  # type: ignore[method-assign]
            await read(engine.stream("in order", greedy(12)))
    last = max(step for _, step in runner.events)
    at = {event: place for place, event in enumerate(runner.events)}
    for what in ("launch", "wait", "commit"):
        assert [step for name, step in runner.events if name == what] == list(range(last + 1))
    for step in range(last + 1):
        assert at["launch", step] < at["wait", step] < at["commit", step]
        ahead_of_it = min(step + ahead - 1, last)
        assert at["launch", ahead_of_it] < at["wait", step], "the device idled"
        if step + ahead <= last:
            assert at["commit", step] < at["launch", step + ahead], "too far ahead"
    here = {threading.get_ident()}
    assert runner.threads["launch"] == runner.threads["commit"] == here
    assert len(runner.threads["wait"]) == 1 and runner.threads["wait"].isdisjoint(here)


@pytest.mark.parametrize("ahead", [1, 2, 4, 8])
async def test_the_depth_of_the_pipeline_changes_no_token(ahead: int) -> None:
    """The order of tokens within a stream is that of the fake device alone, whatever runs ahead."""
    sizes = capacity(num_pages=14, max_batched_tokens=12)
    async with serving(sizes, launch_ahead=ahead) as engine:
        prompts = ["a common beginning, a common beginning " + str(number) * (number % 5) for number in range(10)]
        streams = [engine.stream(prompt, greedy(6 + 3 * number)) for number, prompt in enumerate(prompts)]
        for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            assert [token.id for token in await read(stream)] == expected_ids(prompt, 6 + 3 * number)


async def test_nothing_else_runs_between_a_plan_and_its_launch() -> None:
    turns: list[str] = []

    class Runner(ScriptedRunner):
        def launch(self, plan: StepPlan) -> ScriptedStep:
            assert turns[-1] == "plan"
            turns.append("launch")
            return super().launch(plan)

    async with no_leaks(), ScriptedEngine(CAPACITY, lambda: Runner(CAPACITY)) as engine:
        assert engine._life.loop is not None
        scheduler, plan, post = engine._life.loop.scheduler, engine._life.loop.scheduler.plan, Poster()

        def noted_plan(now: float) -> StepPlan | None:
            turns.append("plan")
            post(lambda: turns.append("turn"))
            return plan(now)

        scheduler.plan = noted_plan  # type: ignore[method-assign]
        await read(engine.stream("together", greedy(6)))
    assert turns.count("launch") >= 6 and "turn" in turns


async def test_the_host_runs_while_a_step_does() -> None:
    """A step that takes for ever would stop the clock of everybody else if the event loop waited for it."""
    gate = Gate()
    async with serving(gate=gate) as engine:
        stream = engine.stream("slow device", greedy(5))
        gate.hold()
        await until(lambda: gate.holds)
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.01)
        assert gate.holds and engine.stats().running == 1
        gate.release()
        assert [token.id for token in await read(stream)] == expected_ids("slow device", 5)


async def test_an_idle_loop_plans_nothing() -> None:
    async with serving() as engine:
        await check_serving(engine)
        await until(lambda: not engine.stats().steps_in_flight)
        assert engine._life.loop is not None
        plans = 0
        plan = engine._life.loop.scheduler.plan

        def counted(now: float) -> StepPlan | None:
            nonlocal plans
            plans += 1
            return plan(now)

        engine._life.loop.scheduler.plan = counted  # type: ignore[method-assign]
        await anyio.sleep(0.05)
        assert plans == 0
        await check_serving(engine)


# -- a loop that dies ----------------------------------------------------------------------------------------------


class Lost(BaseException):
    """Not an `Exception`: what an interpreter that is being shut down may raise anywhere."""


def launch_dies(engine: ScriptedEngine) -> None:
    assert engine._life.opened is not None

    def launch(plan: StepPlan) -> ScriptedStep:
        raise EngineCrashed("the device is gone")

    engine._life.opened.runner.launch = launch  # type: ignore[method-assign]


def wait_dies(engine: ScriptedEngine) -> None:
    assert engine._life.opened is not None

    def launch(plan: StepPlan) -> ScriptedStep:
        return ScriptedStep([], EngineCrashed("the device is gone"), None)

    engine._life.opened.runner.launch = launch  # type: ignore[method-assign]


def breaking(method: str, error: type[BaseException] = ZeroDivisionError) -> Callable[[ScriptedEngine], None]:
    def break_it(engine: ScriptedEngine) -> None:
        assert engine._life.loop is not None

        def broken(*_: object) -> None:
            raise error("a defect")

        setattr(engine._life.loop.scheduler, method, broken)

    break_it.__name__ = f"{method}-raises"
    return break_it


DEATHS = [launch_dies, wait_dies, breaking("plan"), breaking("commit")]


async def get_crash(call: Callable[[], Any]) -> EngineCrashed:
    with pytest.raises(EngineCrashed, match="died") as caught:
        with anyio.fail_after(10):
            result = call()
            if hasattr(result, "__await__"):
                await result
    return caught.value


@pytest.mark.parametrize("die", DEATHS, ids=lambda die: die.__name__)
async def test_every_stream_and_every_later_call_gets_the_crash(die: Callable[[ScriptedEngine], None]) -> None:
    async with no_leaks():
        engine = ScriptedEngine(CAPACITY)
        with pytest.raises(EngineCrashed, match="died") as at_exit:
            async with engine:
                await check_serving(engine)
                streams = [engine.stream(f"stream {number}", greedy(900, n=1 + number % 2)) for number in range(7)]
                await anext(streams[0])
                die(engine)
                for stream in streams:
                    error = await get_crash(lambda stream=stream: read(stream))
                    assert error.__cause__ is not None
                    await get_crash(stream.__anext__)  # and it stays so
                    await get_crash(stream.next_chunk)
                    stream.cancel()
                    await get_crash(stream.__anext__)
                calls: list[Callable[[], Any]] = [
                    lambda: engine.stream("late"),
                    lambda: engine.generate("late"),
                    lambda: engine.tokenize("late"),
                    lambda: engine.detokenize([1]),
                    engine.stats,
                    lambda: engine.info,
                ]
                for call in calls:
                    await get_crash(call)
        assert at_exit.value.__cause__ is not None
        with anyio.fail_after(10):
            await engine.aclose()
        await get_crash(lambda: engine.stream("after the end"))


@pytest.mark.parametrize("die", DEATHS, ids=lambda die: die.__name__)
async def test_a_reader_that_waits_wakes_and_the_blocks_own_error_wins(die: Callable[[ScriptedEngine], None]) -> None:
    async with no_leaks():
        with pytest.raises(LookupError, match="of the block"):
            async with ScriptedEngine(CAPACITY) as engine:
                caught: list[BaseException] = []

                async def reader(number: int) -> None:
                    try:
                        await engine.generate(f"reader {number}", greedy(900))
                    except EngineCrashed as error:
                        caught.append(error)

                async with anyio.create_task_group() as tasks:
                    for number in range(6):
                        tasks.start_soon(reader, number)
                    await until(lambda: engine.stats().generated_tokens > 10)
                    die(engine)
                assert len(caught) == 6
                raise LookupError("of the block")


async def test_a_crash_while_nobody_reads_is_raised_at_the_end_of_the_block() -> None:
    async with no_leaks():
        with pytest.raises(EngineCrashed, match="ZeroDivisionError"):
            async with ScriptedEngine(CAPACITY) as engine:
                engine.stream("nobody reads this")
                breaking("plan")(engine)


async def test_a_request_in_the_tokenizers_thread_gets_the_crash_too() -> None:
    async with no_leaks():
        engine = ScriptedEngine(CAPACITY)
        with pytest.raises(EngineCrashed):
            async with engine:
                held = threading.Event()
                for _ in range(2):  # its threads
                    engine._life.helper.submit(lambda: held.wait(20), lambda *_: None)
                waiting = engine.stream("x" * 3000)
                breaking("plan")(engine)
                doomed = engine.stream("kills it")
                await get_crash(lambda: read(doomed))
                held.set()
                await get_crash(lambda: read(waiting))
                await get_crash(waiting.admitted)


async def test_no_step_is_left_running_under_a_runner_that_closes() -> None:
    """The runner returns the device's memory: what was launched must have been waited for, after a crash too."""
    gate = Gate()

    class Runner(ScriptedRunner):
        waited = 0
        at_close: tuple[int, int] | None = None

        def close(self) -> None:
            self.at_close = (self.launched, gate.steps)
            super().close()

    runner = Runner(CAPACITY, gate=gate)
    async with no_leaks():
        with pytest.raises(EngineCrashed):
            async with ScriptedEngine(CAPACITY, lambda: runner, launch_ahead=4) as engine:
                stream = engine.stream("several steps ahead", greedy(900))
                await anext(stream)
                breaking("commit")(engine)
                with pytest.raises(EngineCrashed):
                    await read(stream)
    assert runner.closed
    assert runner.at_close is not None
    launched, waited = runner.at_close
    assert launched == waited, f"{launched - waited} steps still ran when the runner was closed"


async def test_a_device_that_hangs_does_not_keep_the_crash_from_the_streams() -> None:
    gate, wakes_up = Gate(), threading.Event()
    async with no_leaks():
        with pytest.raises(EngineCrashed):
            async with ScriptedEngine(CAPACITY, lambda: ScriptedRunner(CAPACITY, gate=gate)) as engine:
                stream = engine.stream("the step after the fatal one hangs", greedy(900))
                gate.hold()
                await until(lambda: gate.holds and engine.stats().steps_in_flight == 2)
                breaking("commit")(engine)
                gate.arm(0, lambda: wakes_up.wait(20))
                gate.release()
                try:
                    with anyio.fail_after(5), pytest.raises(EngineCrashed):
                        await read(stream)
                finally:
                    wakes_up.set()


async def test_raising_the_crash_again_and_again_collects_nothing() -> None:
    """An exception that is raised many times grows its traceback, and with it keeps every caller's frame alive."""

    def depth(error: BaseException) -> int:
        trace, count = error.__traceback__, 0
        while trace is not None:
            trace, count = trace.tb_next, count + 1
        return count

    async with no_leaks():
        with pytest.raises(EngineCrashed):
            async with ScriptedEngine(CAPACITY) as engine:
                breaking("plan")(engine)
                await get_crash(lambda: engine.generate("x"))
                depths = [depth(await get_crash(engine.stats)) for _ in range(50)]
                assert depths[-1] == depths[0]


async def test_what_is_no_exception_still_reaches_every_stream() -> None:
    """The loop's own task may be hit by what is no `Exception`; its streams must not take that for `cancelled`."""
    async with no_leaks():
        errors: list[BaseException | None] = []
        try:
            async with ScriptedEngine(CAPACITY) as engine:
                stream = engine.stream("unlucky", greedy(900))
                await anext(stream)
                breaking("commit", Lost)(engine)
                try:
                    await read(stream)
                except HeadraceError as error:
                    errors.append(error)
                except BaseException:
                    errors.append(None)
                    raise
        except BaseExceptionGroup as group:
            assert group.subgroup(Lost) is not None
        except EngineCrashed:
            pass
        if errors[0] is None:  # the host was cancelled first; the stream knows all the same
            errors = [stream._generation.error]
        assert isinstance(errors[0], EngineCrashed)


# -- what comes between a step's wait and its commit ---------------------------------------------------------------


async def test_an_adapter_that_fails_while_a_step_runs_ends_those_that_wait_for_it() -> None:
    gate = Gate()
    async with serving(capacity(max_rows=1), gate=gate) as engine:
        busy = engine.stream("busy", greedy(20))
        assert (await anext(busy)).position == 0
        waits = engine.stream("waits", greedy(2))
        await waits.admitted()
        (request,) = waits._generation.requests
        version = AdapterVersion(digest=b"", granules=1, users=1)
        request.asked = replace(request.asked, version=version)
        gate.hold()
        await until(lambda: gate.holds)
        assert engine._life.loop is not None
        engine._life.loop.fail_adapter(version, RequestFailed("no memory for it"))
        gate.release()
        with anyio.fail_after(5), pytest.raises(RequestFailed, match="no memory"):
            await read(waits)
        assert len(await read(busy)) == 19


@pytest.mark.parametrize("prompt", ["short", "long " * 1000])
async def test_what_goes_wrong_at_intake_ends_the_stream_wherever_it_was_tokenised(prompt: str) -> None:
    class Broken(FirstCome):
        def expected_wait(self, request: Request, waiting: Iterable[Request], pace: Pace) -> float:
            raise ZeroDivisionError

    async with serving(capacity(max_context=8192, num_pages=1024), policy=Broken()) as engine:
        busy = engine.stream("busy", greedy(None))
        await anext(busy)
        with anyio.fail_after(5), pytest.raises(HeadraceError, match="taken in"):
            await engine.generate(prompt, greedy(2), deadline=9.0)
        await check_serving(engine)


@pytest.mark.parametrize(
    "ends", [{"stop": ("c",)}, {"stop_when": lambda token: True}, {}], ids=["string", "hook", "no"]
)
async def test_an_answer_that_was_whole_before_its_deadline_ends_with_stop(ends: dict[str, Any]) -> None:
    """The token is there when the deadline passes, and nobody has looked at it."""
    prompt = next(text for text in map(str, range(10_000)) if expected_ids(text, 1) == [ord("c")])
    gate = Gate()
    async with serving(gate=gate, launch_ahead=1) as engine:
        gate.hold()
        hooks = {name: hook for name, hook in ends.items() if name == "stop_when"}
        params = greedy(5, **{name: value for name, value in ends.items() if name == "stop"})
        stream = engine.stream(prompt, params, deadline=60.0, **hooks)
        await until(lambda: gate.holds)
        (request,), loop = stream._generation.requests, engine._life.loop
        assert loop is not None
        request.asked = replace(request.asked, deadline=loop.now)  # it passes here, however long it took to get here
        gate.release()
        tokens = await read(stream)
        assert stream.finish_reasons == ["stop" if ends else "deadline"]
        assert [token.id for token in tokens if token.id is not None] == [ord("c")]
        assert "".join(token.text for token in tokens) == ("" if "stop" in ends else "c")
