"""Opening and closing an engine in every way, cancelled ones included: no thread, task or memory may stay behind."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from leftovers import Threads
from scripted import (
    CAPACITY,
    Gate,
    acting_at,
    check_serving,
    expected_ids,
    greedy,
    no_leaks,
    read,
    returned,
    serving,
    until,
)

from headrace.engine import (
    DeviceUnavailable,
    EngineCrashed,
    EngineStopped,
    HeadraceError,
    InvalidParams,
    PromptTooLong,
    Token,
)
from headrace.engine.life.opened import Opened
from headrace.engine.testing import ByteTokenizer, ScriptedEngine, ScriptedRunner

pytestmark = pytest.mark.anyio


class Watched:
    """Engines whose runners are counted: each that was made must be closed, once."""

    def __init__(self, gate: Callable[[], None] | None = None) -> None:
        self.gate = gate
        self.made: list[ScriptedRunner] = []
        self.closed = 0

    def runner(self) -> ScriptedRunner:
        watched = self

        class Runner(ScriptedRunner):
            def close(self) -> None:
                watched.closed += 1
                super().close()

        self.made.append(Runner(CAPACITY, gate=self.gate))
        return self.made[-1]

    def engine(self, **options: Any) -> ScriptedEngine:
        return ScriptedEngine(CAPACITY, self.runner, **options)

    def check(self) -> None:
        assert self.closed == len(self.made)
        assert all(runner.closed for runner in self.made)


@asynccontextmanager
async def watched(gate: Callable[[], None] | None = None) -> AsyncIterator[Watched]:
    async with no_leaks():
        watch = Watched(gate)
        with anyio.fail_after(30):
            yield watch
        watch.check()


# -- opening -------------------------------------------------------------------------------------------------------


async def test_an_engine_that_is_not_open_says_so() -> None:
    engine = ScriptedEngine(CAPACITY)
    calls: list[Callable[[], Any]] = [
        lambda: engine.stream("x"),
        engine.stats,
        lambda: engine.info,
        lambda: engine.detokenize([1]),
    ]
    waits = [lambda: engine.generate("x"), lambda: engine.tokenize("x")]

    async def check() -> None:
        for call in calls:
            with pytest.raises(EngineStopped, match="async with"):
                call()
        for wait in waits:
            with pytest.raises(EngineStopped, match="async with"):
                await wait()

    async with no_leaks():
        await check()
        await engine.aclose()  # nothing to close, and it may still be opened
        async with engine:
            await check_serving(engine)
        await check()


async def test_an_engine_is_opened_once() -> None:
    async with watched() as watch:
        engine = watch.engine()
        async with engine:
            with pytest.raises(RuntimeError, match="opened once"):
                await engine.__aenter__()
            await check_serving(engine)
        with pytest.raises(RuntimeError, match="opened once"):
            await engine.__aenter__()


async def test_two_tasks_that_open_one_engine_at_once() -> None:
    async with watched() as watch:
        engine = watch.engine()
        refused: list[RuntimeError] = []

        async def use() -> None:
            try:
                async with engine:
                    await check_serving(engine)
            except RuntimeError as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            tasks.start_soon(use)
        assert len(refused) == 1 and len(watch.made) == 1


class OddError(Exception):
    """Nothing that headrace knows."""


@pytest.mark.parametrize("error", [DeviceUnavailable("no such device"), OddError("odd"), MemoryError()])
async def test_an_engine_that_does_not_open_leaves_nothing(error: Exception) -> None:
    class Broken(ScriptedEngine):
        def _open(self) -> Opened:
            raise error

    async with no_leaks():
        with pytest.raises(type(error)) as caught:
            async with Broken(CAPACITY):
                pytest.fail("it is not open")
        assert caught.value is error


async def test_a_cancelled_opening_closes_what_it_opened() -> None:
    async with watched() as watch:
        started, go_on = threading.Event(), threading.Event()

        class Slow(ScriptedEngine):
            def _open(self) -> Opened:
                started.set()
                go_on.wait(20)
                return super()._open()

        async def cancel(scope: anyio.CancelScope) -> None:
            await until(started.is_set)
            scope.cancel()
            await anyio.sleep(0.01)
            go_on.set()

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(cancel, scope)
                async with Slow(CAPACITY, watch.runner):
                    pytest.fail("it was cancelled")
            assert scope.cancelled_caught
        assert len(watch.made) == 1


# -- closing -------------------------------------------------------------------------------------------------------


async def test_closing_cancels_what_runs_and_what_waits() -> None:
    async with watched() as watch:
        async with watch.engine() as engine:
            streams = [engine.stream(f"number {number}", greedy(900, n=1 + number % 3)) for number in range(9)]
            await anext(streams[0])
        for number, stream in enumerate(streams):
            items = await read(stream)
            for choice in range(1 + number % 3):
                own = [item for item in items if item.index == choice]
                assert (own[-1].id, own[-1].finish_reason) == (None, "cancelled")
                ids = [item.id for item in own[:-1]]
                assert ids == expected_ids(f"number {number}", len(ids))
            assert stream.finish_reasons == ["cancelled"] * (1 + number % 3)


async def test_closing_wakes_readers_and_they_get_their_end() -> None:
    async with watched() as watch:
        ends: list[Token] = []

        async def reader(number: int) -> None:
            ends.append((await read(engine.stream(f"reader {number}", greedy(900))))[-1])

        async with anyio.create_task_group() as tasks:
            async with watch.engine() as engine:
                for number in range(6):
                    tasks.start_soon(reader, number)
                await until(lambda: engine.stats().generated_tokens > 20)
        assert [end.finish_reason for end in ends] == ["cancelled"] * 6


async def test_a_request_that_is_still_being_tokenised_is_stopped() -> None:
    async with watched() as watch:
        async with watch.engine() as engine:
            stream = engine.stream("x" * 3000)
        for way in (stream.admitted, stream.__anext__):
            with pytest.raises(HeadraceError) as caught:
                await way()
            assert isinstance(caught.value, EngineStopped)


class SlowTexts:
    """Holds every encoding of a text that a helper's thread does, until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded: list[int] = []
        self.go_on = threading.Event()
        encode = ByteTokenizer.encode

        def slowly(tokenizer: ByteTokenizer, text: str, *, framed: bool = True) -> list[int]:
            self.encoded.append(len(text))
            self.go_on.wait(20)
            return encode(tokenizer, text)

        monkeypatch.setattr(ByteTokenizer, "encode", slowly)


async def test_a_text_longer_than_any_tokens_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = SlowTexts(monkeypatch)
    too_long = "x" * (CAPACITY.max_context * ByteTokenizer().table.longest + 1)
    async with watched() as watch, watch.engine() as engine:
        for prompt in (too_long, [{"role": "user", "content": too_long}]):
            with pytest.raises(PromptTooLong, match="characters"):
                await engine.tokenize(prompt)
            with pytest.raises(PromptTooLong, match="characters"):
                await engine.generate(prompt)
        assert texts.encoded == []


async def test_who_waits_for_ids_leaves_when_cancelled_and_closing_tokenises_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = SlowTexts(monkeypatch)
    ends: list[type[Exception]] = []
    async with watched() as watch, anyio.create_task_group() as tasks:
        async with watch.engine() as engine:

            async def ask(size: int) -> None:
                try:
                    await engine.tokenize("x" * size)
                except EngineStopped as error:
                    ends.append(type(error))

            tasks.start_soon(ask, 4000)
            await until(lambda: texts.encoded == [4000])
            for size in (4300, 4200):
                tasks.start_soon(ask, size)
            streams = [engine.stream("x" * 3000) for _ in range(2)]
            await streams[0].aclose()
            with anyio.move_on_after(0.02) as scope:
                await engine.tokenize("x" * 3500)
            assert scope.cancelled_caught
            threading.Timer(0.05, texts.go_on.set).start()
        with pytest.raises(EngineStopped):
            await streams[1].admitted()
    assert texts.encoded == [4000]
    assert ends == [EngineStopped] * 2


async def test_a_shorter_text_is_tokenised_before_longer_ones_that_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = SlowTexts(monkeypatch)
    async with watched() as watch, watch.engine() as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.tokenize, "x" * 4000)
        await until(lambda: texts.encoded == [4000])
        for size in (4500, 4400, 2500):
            tasks.start_soon(engine.tokenize, "x" * size)
            await checkpoint()
        tasks.start_soon(engine.tokenize, "x" * 2600)
        for _ in range(5):
            await checkpoint()
        texts.go_on.set()
    assert texts.encoded == [4000, 2500, 2600, 4400, 4500]


async def test_draining_waits_for_what_runs_and_takes_nothing_in() -> None:
    gate = Gate()
    async with watched(gate) as watch, watch.engine() as engine:
        streams = [engine.stream(f"drained {number}", greedy(40)) for number in range(7)]
        gate.hold()

        async def meanwhile() -> None:
            await anyio.sleep(0.01)
            with pytest.raises(EngineStopped):
                engine.stream("late")
            gate.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(meanwhile)
            await engine.aclose(drain=20)
        for number, stream in enumerate(streams):
            assert [item.id for item in await read(stream)] == expected_ids(f"drained {number}", 40)
            assert stream.finish_reasons == ["length"]
        watch.check()


@pytest.mark.parametrize("drain", [math.nan, -0.5, -math.inf])
async def test_a_drain_that_is_no_time_is_refused_and_the_engine_serves_on(drain: float) -> None:
    async with watched() as watch, watch.engine() as engine:
        with pytest.raises(InvalidParams, match="drain") as caught:
            await engine.aclose(drain=drain)
        assert (caught.value.field, caught.value.limit) == ("drain", {"ge": 0.0})
        await check_serving(engine)


async def test_draining_ends_in_time() -> None:
    async with watched() as watch, watch.engine(max_unread_tokens=2) as engine:
        stream = engine.stream("nobody reads this", greedy(900))
        before = time.monotonic()
        await engine.aclose(drain=0.05)
        assert 0.04 < time.monotonic() - before < 10
        assert (await read(stream))[-1].finish_reason == "cancelled"


async def test_draining_an_idle_engine_takes_no_time() -> None:
    async with watched() as watch, watch.engine() as engine:
        await check_serving(engine)
        with anyio.fail_after(10):
            await engine.aclose(drain=3600)


async def test_a_cancelled_drain_still_closes() -> None:
    async with watched() as watch, watch.engine(max_unread_tokens=2) as engine:
        engine_stream = engine.stream("nobody reads this", greedy(900))
        with anyio.move_on_after(0.01) as scope:
            await engine.aclose(drain=3600)
        assert scope.cancelled_caught
        with anyio.fail_after(5):
            await engine.aclose()
        assert (await read(engine_stream))[-1].finish_reason == "cancelled"


async def test_closing_again_and_at_once_from_several_tasks() -> None:
    async with watched() as watch, watch.engine() as engine:
        stream = engine.stream("cut off", greedy(900))
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(engine.aclose)
        await engine.aclose()
        assert (await read(stream))[-1].finish_reason == "cancelled"
        watch.check()
        with pytest.raises(EngineStopped):
            engine.stream("late")


async def test_leaving_the_block_does_not_wait_for_another_tasks_drain() -> None:
    async with watched() as watch:
        before = time.monotonic()
        async with anyio.create_task_group() as tasks:
            async with watch.engine(max_unread_tokens=2) as engine:
                stream = engine.stream("nobody reads this", greedy(900))
                tasks.start_soon(engine.aclose, 8.0)
                await anyio.sleep(0.01)
        assert (await read(stream))[-1].finish_reason == "cancelled"
        assert time.monotonic() - before < 6


@pytest.mark.parametrize("error", [LookupError("mine"), KeyboardInterrupt(), SystemExit(2)])
async def test_the_blocks_own_error_passes_as_it_is(error: BaseException) -> None:
    async with watched() as watch:
        with pytest.raises(type(error)) as caught:
            async with watch.engine() as engine:
                await anext(engine.stream("cut off", greedy(900)))
                raise error
        assert caught.value is error


async def test_a_runner_that_cannot_close_is_told_and_leaves_no_thread() -> None:
    class Runner(ScriptedRunner):
        def close(self) -> None:
            raise OSError("the device does not answer")

    async with no_leaks():
        engine = ScriptedEngine(CAPACITY, lambda: Runner(CAPACITY))
        with pytest.raises((EngineCrashed, OSError)) as caught:
            async with engine:
                await check_serving(engine)
        assert "does not answer" in f"{caught.value} {caught.value.__cause__}"
        with anyio.fail_after(5):
            await engine.aclose()


# -- cancelled from outside ----------------------------------------------------------------------------------------


async def use(engine: ScriptedEngine) -> None:
    """A life with a few awaits of every kind."""
    async with engine:
        async with engine.stream("the first", greedy(900)) as stream:
            async for _ in stream:
                break
        await engine.generate("the second", greedy(2))
        engine.stream("the third", greedy(900))
        await engine.aclose(drain=0.005)


async def test_a_scope_cancelled_at_each_await_of_an_engines_life() -> None:
    async with watched() as watch:
        for place in range(1000):
            acted: list[int] = []
            with anyio.CancelScope() as scope:
                await acting_at(place, use(watch.engine()), scope.cancel, acted)
            watch.check()
            if not acted:
                break
        assert place >= 6, "the walk has seen too few awaits"


@pytest.mark.parametrize("times", [1, 2])
async def test_a_task_cancelled_at_each_await_of_an_engines_life(times: int, anyio_backend_name: str) -> None:
    """`asyncio.timeout` and `Task.cancel` heed no shield, and may strike again while the engine closes."""
    if anyio_backend_name == "trio":
        pytest.skip("trio has scopes only")

    async with watched() as watch:
        for place in range(1000):
            acted: list[int] = []

            async def run(place: int = place, acted: list[int] = acted) -> None:
                task = asyncio.current_task()
                assert task is not None

                def strike() -> None:
                    task.cancel()
                    if times == 2:
                        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, task.cancel)

                await acting_at(place, use(watch.engine()), strike, acted)

            task = asyncio.create_task(run())
            await asyncio.wait([task])
            assert task.cancelled() == bool(acted)
            watch.check()
            if not acted:
                break
        assert place >= 6, "the walk has seen too few awaits"


async def test_a_timeout_around_everything() -> None:
    async with watched() as watch:
        with anyio.move_on_after(0.03) as scope:
            async with watch.engine() as engine:
                while True:
                    await engine.generate("again and again", greedy(10))
        assert scope.cancelled_caught


def test_an_event_loop_that_ends_under_an_open_engine_is_not_held_up() -> None:
    """`asyncio.run` cancels every task at its end, the engine's own among them."""
    watch = Watched(lambda: time.sleep(0.001))

    async def background() -> None:
        async with watch.engine() as engine:
            while True:
                await engine.generate("again and again", greedy(100))

    async def main() -> None:
        main.task = asyncio.create_task(background())  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)

    threads = Threads("")
    asyncio.run(main())
    threads.check_ended()
    watch.check()


# -- the host's process --------------------------------------------------------------------------------------------

UNTOUCHED = """
import asyncio, os, signal, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)

def state():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return (handlers, dict(os.environ), type(asyncio.get_event_loop_policy()), threading.active_count(),
            sys.getswitchinterval(), sys.excepthook, threading.excepthook, sys.unraisablehook, sys.getrecursionlimit(),
            warnings.filters[:], os.getcwd(), signal.pthread_sigmask(signal.SIG_BLOCK, []))

before = state()
import headrace.engine
after = state()
assert before == after, [pair for pair in zip(before, after) if pair[0] != pair[1]]
assert not {"torch", "transformers", "numpy", "trio", "uvloop"} & set(sys.modules), "heavy imports"

from headrace.engine.testing import ScriptedEngine
from headrace.engine.scheduling.plan import Capacity

sizes = Capacity(num_pages=8, page_size=4, max_rows=2, max_batched_tokens=8, max_context=32, vocab_size=257)

async def main():
    async with ScriptedEngine(sizes) as engine:
        await engine.generate("x", headrace.engine.SamplingParams(max_tokens=3))

before = state()
asyncio.run(main())
after = state()
assert before == after, [pair for pair in zip(before, after) if pair[0] != pair[1]]
"""


def test_importing_and_running_change_nothing_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


async def test_an_open_engine_changes_neither_signals_nor_environment() -> None:
    def state() -> tuple[Any, ...]:
        return {number: signal.getsignal(number) for number in signal.valid_signals()}, dict(os.environ)

    before = state()
    async with serving() as engine:
        await check_serving(engine)
        assert state() == before
        await returned(engine)
    assert state() == before


async def test_a_step_that_hangs_ends_the_engine_and_returns_what_it_held_if_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()

    def hang_here() -> None:
        release.wait(20)

    class Runner(ScriptedRunner):
        def close(self) -> None:
            """As real ones do: wait until nothing runs."""
            release.wait(20)
            super().close()

    runner, threads = Runner(CAPACITY, gate=hang_here), Threads()
    async with no_leaks():
        with pytest.raises(EngineCrashed, match="a step is not done after 0.2 seconds: the device hangs"):
            async with ScriptedEngine(CAPACITY, lambda: runner, hang_seconds=0.2) as engine:
                streams = [engine.stream(name, greedy(5)) for name in ("first", "second")]
                for stream in streams:
                    with pytest.raises(EngineCrashed, match="the device hangs"):
                        await read(stream)
                with pytest.raises(EngineCrashed):
                    engine.stats()
        assert not runner.closed
        release.set()
        await until(lambda: runner.closed)
        await until(lambda: not threads.running())
    (told,) = [record.getMessage() for record in caplog.records]
    assert "in hang_here" in told and "thread MainThread" not in told and "thread headrace-waiter" in told
