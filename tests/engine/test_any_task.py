"""An engine that one task opens and another closes, as fixtures and notebooks do, and callers that it refuses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from anyio.lowlevel import current_token
from leftovers import Threads
from scripted import CAPACITY, check_serving, expected_ids, greedy, no_leaks, read, until

from headrace.engine import EngineCrashed, EngineStopped, Token
from headrace.engine.testing import ScriptedEngine

pytestmark = pytest.mark.anyio


async def in_a_task(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run `call` in a task of its own, and pass on what it raises."""
    errors: list[BaseException] = []

    async def run() -> None:
        try:
            await call()
        except Exception as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
    if errors:
        raise errors[0]


# -- opened in one task, closed in another -------------------------------------------------------------------------


async def test_one_task_opens_another_uses_and_a_third_closes() -> None:
    async with no_leaks():
        engine = ScriptedEngine(CAPACITY)
        await in_a_task(engine.__aenter__)
        await in_a_task(partial(check_serving, engine))
        stream = engine.stream("cut off", greedy(900))
        await anext(stream)
        await in_a_task(partial(engine.__aexit__, None, None, None))
        assert (await read(stream))[-1].finish_reason == "cancelled"


async def test_open_and_aclose_without_a_block() -> None:
    async with no_leaks():
        engine = await ScriptedEngine(CAPACITY).open()
        await check_serving(engine)
        with pytest.raises(RuntimeError, match="opened once"):
            await engine.open()
        await in_a_task(partial(engine.aclose, 5.0))
        with pytest.raises(EngineStopped):
            engine.stream("late")


async def test_the_end_of_the_opening_tasks_scope_does_not_end_the_engine() -> None:
    async with no_leaks():
        engine = ScriptedEngine(CAPACITY)
        with anyio.CancelScope() as scope:
            await engine.open()
            scope.cancel()
        await check_serving(engine)
        await engine.aclose()


async def test_a_crash_reaches_callers_and_whoever_closes() -> None:
    async with no_leaks():
        engine = ScriptedEngine(CAPACITY)
        await in_a_task(engine.open)
        assert engine._life.loop is not None
        engine._life.loop.scheduler.plan = lambda now: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(EngineCrashed, match="ZeroDivisionError"):
            await engine.generate("unlucky")
        with pytest.raises(EngineCrashed):
            await in_a_task(partial(engine.__aexit__, None, None, None))


def test_a_generator_fixture_on_asyncio() -> None:
    """Each `run_until_complete` is a task, as where pytest-asyncio sets a fixture up and where it tears it down."""

    async def fixture() -> AsyncIterator[ScriptedEngine]:
        async with ScriptedEngine(CAPACITY) as engine:
            yield engine

    threads = Threads()
    with asyncio.Runner() as runner:
        generator = fixture()
        engine = runner.run(generator.__anext__())  # type: ignore[arg-type]
        runner.run(check_serving(engine))
        with pytest.raises(StopAsyncIteration):
            runner.run(generator.__anext__())  # type: ignore[arg-type]
        threads.check_ended()


async def opened() -> ScriptedEngine:
    engine = await ScriptedEngine(CAPACITY).open()
    await anext(engine.stream("nobody closes it", greedy(900)))
    return engine


@pytest.mark.parametrize("run", [asyncio.run, lambda coroutine: trio.run(lambda: coroutine)], ids=["asyncio", "trio"])
def test_an_engine_that_nobody_closes_ends_with_its_event_loop(run: Callable[[Any], ScriptedEngine]) -> None:
    threads = Threads()
    engine = run(opened())
    threads.check_ended()
    with pytest.raises(EngineStopped):
        engine.stats()
    run(engine.aclose())  # there is nothing left to close, on whatever event loop


def leave(token: Token) -> bool:
    raise SystemExit(3)


def test_a_hook_that_ends_the_process_ends_it_on_trio_as_well() -> None:
    async def main() -> None:
        async with ScriptedEngine(CAPACITY) as engine:
            with pytest.raises(EngineCrashed):
                await engine.generate("leave", greedy(9), stop_when=leave)

    threads = Threads()
    with pytest.raises(SystemExit) as end:
        trio.run(main)
    assert end.value.code == 3
    threads.check_ended()


FIXTURE = """
import pytest, pytest_asyncio
from headrace.engine import SamplingParams
from headrace.engine.testing import Capacity, ScriptedEngine

SIZES = Capacity(num_pages=64, page_size=16, max_rows=8, max_batched_tokens=64, max_context=512, vocab_size=257)

@pytest_asyncio.fixture
async def engine():
    async with ScriptedEngine(SIZES) as engine:
        yield engine

@pytest.mark.asyncio
async def test_one(engine):
    assert (await engine.generate("Hi", SamplingParams(max_tokens=3))).usage.completion_tokens

@pytest.mark.asyncio
async def test_another(engine):
    engine.stream("Hi", SamplingParams(ignore_eos=True))  # which the fixture's end cancels
"""


def test_a_fixture_of_pytest_asyncio(tmp_path: Path) -> None:
    (tmp_path / "test_fixture.py").write_text(FIXTURE)
    ini = "[pytest]\nfilterwarnings = error\nasyncio_default_fixture_loop_scope = function\n"
    (tmp_path / "pytest.ini").write_text(ini)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


# -- refused callers -----------------------------------------------------------------------------------------------


async def calls_on(engine: ScriptedEngine) -> dict[str, Callable[[], Any]]:
    """Every way to ask an open engine for something, each as a call that may return an awaitable."""
    prompt = "elsewhere"
    stream, ended = engine.stream(prompt, greedy(900)), engine.stream(prompt, greedy(1))
    await stream.admitted()
    await read(ended)
    adapters, events = engine.adapters, engine.kv_events()
    return {
        "stream": lambda: engine.stream(prompt),
        "generate": lambda: engine.generate(prompt),
        "generate_many": lambda: engine.generate_many([prompt]),
        "embed": lambda: engine.embed(prompt),
        "score": lambda: engine.score(prompt, prompt),
        "hidden_states": lambda: engine.hidden_states(prompt),
        "tokenize": lambda: engine.tokenize(prompt),
        "tokenize a chat": lambda: engine.tokenize([{"role": "user", "content": prompt}]),
        "detokenize": lambda: engine.detokenize([1]),
        "adapters": lambda: engine.adapters,
        "load": lambda: adapters.load("a", "nowhere"),
        "unload": lambda: adapters.unload("a"),
        "pin": lambda: adapters.pin("a"),
        "list": adapters.list,
        "resize_kv": lambda: engine.resize_kv("1MiB"),
        "sleep": engine.sleep,
        "wake": engine.wake,
        "kv_events": engine.kv_events,
        "kv_scope": engine.kv_scope,
        "stats": engine.stats,
        "aclose": engine.aclose,
        "__aexit__": lambda: engine.__aexit__(None, None, None),
        "read": stream.__anext__,
        "chunks": stream.chunks().__anext__,
        "admitted": stream.admitted,
        "send": lambda: ended.send("more"),
        "fork": stream.fork,
        "cancel": stream.cancel,
        "events": events.__anext__,
    }


async def refusal(call: Callable[[], Any]) -> str:
    """What a call is refused with, at once."""
    with pytest.raises(RuntimeError, match="event loop") as caught, anyio.fail_after(5):
        result = call()
        if hasattr(result, "__await__"):
            await result
    return str(caught.value)


async def test_every_call_from_another_event_loop_is_refused_at_once() -> None:
    async with no_leaks(), ScriptedEngine(CAPACITY) as engine:
        calls = await calls_on(engine)

        async def elsewhere() -> dict[str, str]:
            return {name: await refusal(call) for name, call in calls.items()}

        for backend in ("asyncio", "trio"):
            told = await anyio.to_thread.run_sync(partial(anyio.run, elsewhere, backend=backend))
            assert told.keys() == calls.keys()
            assert all("anyio.from_thread.run(" in message for message in told.values())
        await check_serving(engine)


async def test_calls_from_a_thread_without_an_event_loop() -> None:
    async with no_leaks(), ScriptedEngine(CAPACITY) as engine:
        stream = engine.stream("elsewhere", greedy(900))
        told: list[str] = []

        def elsewhere() -> None:
            for call in (
                engine.stats,
                stream.cancel,
                lambda: engine.stream("x"),
                lambda: engine.generate("x").send(None),
            ):
                with pytest.raises(RuntimeError) as caught:
                    call()
                told.append(str(caught.value))

            told.append(str(engine.step_age >= 0))  # which a watchdog reads in a thread of its own

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await until(lambda: not thread.is_alive())
        assert told.pop() == "True"
        assert len(told) == 4 and all("anyio.from_thread.run(" in message for message in told)
        assert (await anext(stream)).id == expected_ids("elsewhere", 1)[0]


async def test_the_ways_that_the_refusal_names_work() -> None:
    async with no_leaks(), ScriptedEngine(CAPACITY) as engine:
        token = current_token()

        def ask() -> list[list[int]]:
            call = partial(engine.generate, "from a thread", greedy(3))
            answers = [anyio.from_thread.run(call), anyio.from_thread.run(call, token=token)]
            assert anyio.from_thread.run_sync(engine.stats).running >= 0
            if isinstance(token.native_token, asyncio.AbstractEventLoop):
                answers.append(asyncio.run_coroutine_threadsafe(call(), token.native_token).result(20))
            return [answer.choices[0].token_ids for answer in answers]

        answers = await anyio.to_thread.run_sync(ask)
        assert answers == [expected_ids("from a thread", 3)] * len(answers)
