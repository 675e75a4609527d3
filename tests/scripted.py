"""The engine over a fake device, as many tests use it: right answers, brakes and leak checks; holds no tests."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import coroutine
from typing import Any

import anyio
from anyio.lowlevel import checkpoint, current_token
from leftovers import Threads

from headrace.engine import EngineStats, SamplingParams, Token, TokenStream
from headrace.engine.life.opened import Opened
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.testing import ByteTokenizer, ScriptedEngine, ScriptedRunner, scripted_token

__all__ = [
    "CAPACITY",
    "Gate",
    "Unable",
    "acting_at",
    "capacity",
    "check_serving",
    "expected_ids",
    "expected_text",
    "greedy",
    "no_leaks",
    "read",
    "returned",
    "serving",
    "until",
]

PATIENCE = 20.0
"""Seconds after which something hangs; nothing here takes a hundredth of it."""


def capacity(**changes: int) -> Capacity:
    """A small device: 128 pages of 16, 4 rows, 64 tokens a step."""
    sizes = {"num_pages": 128, "page_size": 16, "max_rows": 4, "max_batched_tokens": 64, "max_context": 1024}
    return Capacity(vocab_size=257, **(sizes | changes))


CAPACITY = capacity()


def greedy(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    """Greedy parameters that the fake device's chance end-of-sequence ids do not cut."""
    return SamplingParams(**({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | fields))


def expected_ids(prompt: str | Sequence[int], count: int) -> list[int]:
    """The ids that the fake device gives after `prompt`, worked out without an engine."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    start = len(ids)
    for _ in range(count):
        ids.append(scripted_token(ids, CAPACITY.vocab_size))
    return ids[start:]


def expected_text(prompt: str | Sequence[int], count: int) -> str:
    """The decoded text of `expected_ids`."""
    return ByteTokenizer().decode(expected_ids(prompt, count))


class Unable(ScriptedEngine):
    """An engine whose device can do nothing beyond sampling, as one that is being written may be."""

    def _open(self) -> Opened:
        return replace(super()._open(), abilities=frozenset())


class Gate:
    """A brake on the fake device, called in the waiter's thread by every step: `hold`, `release`, and `arm`."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps that were waited for, the one that is held included."""
        self.holds = False
        """A step is being held right now."""
        self._open = threading.Event()
        self._open.set()
        self._hooks: dict[int, Callable[[], None]] = {}

    def __call__(self) -> None:
        step, self.steps = self.steps, self.steps + 1
        hook = self._hooks.pop(step, None)
        if hook is not None:
            hook()
        self.holds = not self._open.is_set()
        if not self._open.wait(PATIENCE):
            raise AssertionError("a test left its gate shut")
        self.holds = False

    def hold(self) -> None:
        """Let no further step finish."""
        self._open.clear()

    def release(self) -> None:
        """Let all steps finish."""
        self._open.set()

    def arm(self, place: int, hook: Callable[[], None]) -> None:
        """Call `hook`, in the waiter's thread, while step `place` from now is waited for."""
        self._hooks = {self.steps + place: hook}

    def disarm(self) -> bool:
        """Forget the hook; whether it was called."""
        called = not self._hooks
        self._hooks = {}
        return called


@asynccontextmanager
async def serving(
    sizes: Capacity = CAPACITY,
    *,
    gate: Callable[[], None] | None = None,
    faults: Mapping[int, Exception | int] | None = None,
    eos: Mapping[int, int] | None = None,
    **options: Any,
) -> AsyncIterator[ScriptedEngine]:
    """An open engine that must leave no thread and no task behind, and whose scheduler must be sound at the end."""
    async with no_leaks():
        with anyio.fail_after(2 * PATIENCE):
            engine = ScriptedEngine(sizes, lambda: ScriptedRunner(sizes, gate=gate, faults=faults, eos=eos), **options)
            async with engine:
                try:
                    yield engine
                finally:
                    if isinstance(gate, Gate):
                        gate.release()
                assert engine._life.loop is not None
                engine._life.loop.scheduler.roster.check()
            assert not held(engine._life.loop.scheduler)


@asynccontextmanager
async def no_leaks() -> AsyncIterator[None]:
    """Fail if threads or tasks outlive the block, or if an error in one of them was never looked at."""
    for _ in range(3):  # an engine that was just opened has begun its tasks
        await checkpoint()
    threads = Threads()
    tasks = _tasks()
    complaints: list[dict[str, Any]] = []
    loop: Any = current_token().native_token
    watched = isinstance(loop, asyncio.AbstractEventLoop)
    if watched:
        handler = loop.get_exception_handler()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        yield
        gc.collect(0)
        for turn in range(20):  # what was posted or cancelled at the end has its turn; tasks of trio's take a few
            if turn >= 3 and not _tasks() - tasks:
                break
            await checkpoint()
    finally:
        if watched:
            loop.set_exception_handler(handler)
    assert not complaints
    assert not _tasks() - tasks, "tasks were left behind"
    await until(lambda: not threads.running(), f"the end of the threads {threads.running()}")


def _tasks() -> set[object]:
    """Return the tasks of this event loop, each by its identity."""
    if isinstance(current_token().native_token, asyncio.AbstractEventLoop):
        return set(asyncio.all_tasks())
    import trio

    root = trio.lowlevel.current_root_task()
    found: set[object] = set()
    waiting = [] if root is None else [root]
    while waiting:
        task = waiting.pop()
        found.add(task)
        waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return found


async def until(condition: Callable[[], object], what: str = "what the test waits for") -> None:
    """Let everything run until `condition`."""
    try:
        with anyio.fail_after(PATIENCE):
            while not condition():  # noqa: ASYNC110 - most of what tests look at has no event
                await anyio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"{what} never came") from None


def held(scheduler: Any) -> int:
    """Requests and pages that a scheduler still keeps."""
    return len(scheduler.roster.requests) + scheduler.pool.held


async def returned(engine: ScriptedEngine, steps: int = 2) -> None:
    """Wait until no request holds a row or a page; fail if that takes more than `steps` committed steps."""
    first = engine.stats().steps

    def gone(now: EngineStats) -> bool:
        return not (now.pages_held or now.waiting or now.running or now.paused or now.live_tokens)

    with anyio.fail_after(PATIENCE):
        while not gone(now := engine.stats()):
            assert now.steps - first < steps, f"still held after {now.steps - first} steps: {now}"
            await anyio.sleep(0.001)  # not a busy loop: it would keep the waiter's thread from running
    assert now.steps - first <= steps, f"came back after {now.steps - first} steps"
    assert engine._life.loop is not None
    engine._life.loop.scheduler.roster.check()
    assert not engine._life.loop.scheduler.roster.requests and not engine._life.loop._generations


async def read(stream: TokenStream) -> list[Token]:
    """All tokens of a stream."""
    return [token async for token in stream]


async def check_serving(engine: ScriptedEngine) -> None:
    """A request of its own, to the end and token for token."""
    prompt = "is anybody there?"
    with anyio.fail_after(PATIENCE):
        answer = await engine.generate(prompt, greedy(4))
    assert answer.choices[0].token_ids == expected_ids(prompt, 4)
    assert answer.choices[0].text == expected_text(prompt, 4)


@coroutine
def _driven(awaited: Any, place: int, act: Callable[[], object], acted: list[int]) -> Generator[Any, Any, Any]:
    resume = partial(awaited.send, None)
    try:
        for suspended in itertools.count():
            try:
                waiting_for = resume()
            except StopIteration as done:
                return done.value
            if suspended == place:
                acted.append(place)
                act()
            try:
                value = yield waiting_for
            except BaseException as raised:
                resume = partial(awaited.throw, raised)
            else:
                resume = partial(awaited.send, value)
    finally:
        del resume  # it may hold the error whose traceback holds this frame: a cycle that keeps the stream alive


async def acting_at(place: int, awaited: Awaitable[Any], act: Callable[[], object], acted: list[int]) -> Any:
    """Await a coroutine and call `act` at the very moment it suspends for the `place`-th time, counted from 0.

    `acted` gets `place` if it came so far; counting up until it does not visits every await of the coroutine.
    """
    return await _driven(awaited, place, act, acted)
