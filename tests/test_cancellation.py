"""Cancels a request at every point of its life, in every way there is; rows and pages must come back within two steps.

Three walks visit the points: every await of the reader, every step of the device, and every turn of the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from scripted import Gate, acting_at, capacity, check_serving, expected_ids, greedy, read, returned, serving, until

from headrace.engine import TokenStream
from headrace.engine.concurrency.threads import Poster
from headrace.engine.testing import ScriptedEngine

pytestmark = pytest.mark.anyio

SIZES = capacity(num_pages=192, max_batched_tokens=512, max_context=3000, max_rows=3)
SMALL_STEPS = capacity(max_batched_tokens=8, max_rows=3)
fresh = itertools.count()


def new_prompt(length: int = 30) -> str:
    """A prompt that no earlier one shares a page with."""
    return f"{next(fresh):06d}".ljust(length, ".")


async def tokens(engine: ScriptedEngine) -> None:
    async for _ in engine.stream(new_prompt(), greedy(6)):
        await checkpoint()


async def chunks(engine: ScriptedEngine) -> None:
    async with engine.stream(new_prompt(), greedy(6)) as stream:
        async for _ in stream.chunks():
            await checkpoint()


async def whole(engine: ScriptedEngine) -> None:
    await engine.generate(new_prompt(), greedy(6))


async def choices(engine: ScriptedEngine) -> None:
    async for _ in engine.stream(new_prompt(), greedy(5, n=3)):
        pass


async def more_choices_than_rows(engine: ScriptedEngine) -> None:
    await engine.generate(new_prompt(), greedy(4, n=5))


async def stop_strings(engine: ScriptedEngine) -> None:
    await read(engine.stream(new_prompt(), greedy(6, stop=["never there", "\ufffd" * 9])))


async def admission(engine: ScriptedEngine) -> None:
    """Too long to tokenise on the event loop: a thread does it while the reader waits to be admitted."""
    stream = engine.stream(new_prompt(2100), greedy(3))
    await stream.admitted()
    await read(stream)


async def admission_unasked(engine: ScriptedEngine) -> None:
    async with engine.stream(new_prompt(2100), greedy(3, n=2)) as stream:
        await read(stream)


async def queue(engine: ScriptedEngine) -> None:
    """Every row is taken, so the request waits for one."""
    others = [engine.stream(new_prompt(), greedy(3)) for _ in range(SIZES.max_rows)]
    try:
        async with engine.stream(new_prompt(), greedy(3)) as stream:
            await read(stream)
    finally:
        for other in others:
            other.cancel()


async def vectors(engine: ScriptedEngine) -> None:
    """More than there are rows for."""
    await engine.embed([new_prompt() for _ in range(14)], pooling="mean")


SCENARIOS = [
    tokens,
    chunks,
    whole,
    choices,
    more_choices_than_rows,
    stop_strings,
    admission,
    admission_unasked,
    queue,
    vectors,
]
Scenario = Callable[[ScriptedEngine], Awaitable[None]]


@contextmanager
def no_cycles() -> Iterator[None]:
    """The garbage collector off: what the block leaves must go by its last reference alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def check_after(engine: ScriptedEngine, place: int) -> None:
    for _ in range(3):  # a stream that was only dropped is cancelled by what its end has posted to the loop
        await checkpoint()
    await returned(engine)
    if place % 4 == 0:
        await check_serving(engine)


# -- every await ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_scope_cancelled_at_each_await(scenario: Scenario) -> None:
    async with serving(SIZES) as engine:
        with no_cycles():
            for place in itertools.count():
                acted: list[int] = []
                with anyio.CancelScope() as scope:
                    await acting_at(place, scenario(engine), scope.cancel, acted)
                await check_after(engine, place)
                if not acted:
                    break
            assert place >= 2, "the walk has seen no await"
            await check_serving(engine)


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_task_cancelled_at_each_await(scenario: Scenario, anyio_backend_name: str) -> None:
    """`Task.cancel` of asyncio knows nothing of anyio's scopes and shields."""
    if anyio_backend_name == "trio":
        pytest.skip("trio has scopes only")
    async with serving(SIZES) as engine:
        for place in itertools.count():
            acted: list[int] = []

            async def run(place: int = place, acted: list[int] = acted) -> None:
                task = asyncio.current_task()
                assert task is not None
                await acting_at(place, scenario(engine), task.cancel, acted)

            task = asyncio.create_task(run())
            await asyncio.wait([task])
            assert task.cancelled() == bool(acted)
            del task
            await check_after(engine, place)
            if not acted:
                break
        assert place >= 2, "the walk has seen no await"
        await check_serving(engine)


# -- every step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("sizes", [SIZES, SMALL_STEPS], ids=["one-chunk", "many-chunks"])
async def test_a_scope_cancelled_while_each_step_runs(scenario: Scenario, sizes: Any) -> None:
    if sizes is SMALL_STEPS and scenario in (admission, admission_unasked):
        pytest.skip("the prompt is longer than this context")
    gate = Gate()
    async with serving(sizes, gate=gate) as engine:
        post = Poster()
        for place in itertools.count():
            ended = threading.Event()
            with anyio.CancelScope() as scope:
                gate.arm(place, lambda scope=scope, ended=ended: (post(scope.cancel), ended.wait(20.0)))
                await scenario(engine)
            stopped = scope.cancelled_caught
            committed = engine.stats().steps
            ended.set()
            await returned(engine)
            assert engine.stats().steps - committed <= 2
            await until(lambda: not engine.stats().steps_in_flight)
            if not gate.disarm():
                break
            assert stopped or scenario is queue  # whose last steps belong to the others
        assert place >= 4, "the walk has seen too few steps"
        await check_serving(engine)


# -- every turn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", [tokens, choices, stop_strings, admission, queue])
async def test_a_scope_cancelled_after_any_number_of_turns(scenario: Scenario) -> None:
    """The points between the reader's awaits and the step loop's: a walk over time, not over places."""

    async def cancel_after(turns: int, scope: anyio.CancelScope) -> None:
        for _ in range(turns):
            await checkpoint()
        scope.cancel()

    async with serving(SIZES) as engine:
        for turns in [*range(16), *range(16, 64, 4), *range(64, 256, 32)]:
            async with anyio.create_task_group() as others:
                with anyio.CancelScope() as scope:
                    others.start_soon(cancel_after, turns, scope)
                    await scenario(engine)
                others.cancel_scope.cancel()
            await check_after(engine, turns)
        await check_serving(engine)


# -- other ways ----------------------------------------------------------------------------------------------------


async def leave_the_block(engine: ScriptedEngine, stream: TokenStream) -> None:
    async with stream:
        await anext(stream)


async def time_out(engine: ScriptedEngine, stream: TokenStream) -> None:
    with anyio.move_on_after(0.01) as scope:
        async for _ in stream:
            pass
    assert scope.cancelled_caught


async def break_and_close(engine: ScriptedEngine, stream: TokenStream) -> None:
    async for _ in stream:
        break
    await stream.aclose()


async def close_with_contextlib(engine: ScriptedEngine, stream: TokenStream) -> None:
    async with aclosing(stream):
        async for _ in stream:
            break


async def cancel_twice(engine: ScriptedEngine, stream: TokenStream) -> None:
    await anext(stream)
    stream.cancel()
    stream.cancel()
    rest = await read(stream)
    ends = [token for token in rest if token.finish_reason]
    assert sorted((token.index, token.finish_reason) for token in ends) == [
        (choice, "cancelled") for choice in range(len(stream.finish_reasons))
    ]
    assert rest[-1].finish_reason == "cancelled"
    stream.cancel()
    assert await read(stream) == []


async def cancel_unread(engine: ScriptedEngine, stream: TokenStream) -> None:
    await until(lambda: engine.stats().generated_tokens >= 3)
    stream.cancel()


async def fail_in_the_reader(engine: ScriptedEngine, stream: TokenStream) -> None:
    with pytest.raises(ZeroDivisionError):
        async with stream:
            async for _ in stream:
                raise ZeroDivisionError


WAYS = [
    leave_the_block,
    time_out,
    break_and_close,
    close_with_contextlib,
    cancel_twice,
    cancel_unread,
    fail_in_the_reader,
]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("way", WAYS)
async def test_each_way_of_leaving_returns_everything(
    way: Callable[[ScriptedEngine, TokenStream], Awaitable[None]], n: int
) -> None:
    async with serving() as engine:
        stream = engine.stream(new_prompt(), greedy(900, n=n))
        await way(engine, stream)
        await returned(engine)
        assert stream.finish_reasons == [None] * n or way is cancel_twice
        await check_serving(engine)


@pytest.mark.parametrize("length", [30, 2100], ids=["admitted", "in-the-tokenizer"])
async def test_cancelling_before_the_first_read(length: int) -> None:
    async with serving(SIZES) as engine:
        for n in (1, 3):
            stream = engine.stream(new_prompt(length), greedy(900, n=n))
            stream.cancel()
            await stream.admitted()
            await returned(engine)
            items = await read(stream)
            assert [(item.index, item.id, item.text, item.finish_reason) for item in items] == [
                (choice, None, "", "cancelled") for choice in range(n)
            ]
            assert stream.finish_reasons == ["cancelled"] * n
            assert stream.usage.completion_tokens == 0
        await check_serving(engine)
        await returned(engine)


async def test_cancelling_after_the_end_changes_nothing() -> None:
    async with serving() as engine:
        stream = engine.stream("over", greedy(3))
        await read(stream)
        before = stream.usage
        stream.cancel()
        await stream.aclose()
        assert (stream.finish_reasons, stream.usage) == (["length"], before)
        assert await read(stream) == []


async def test_cancelling_what_ended_unread_keeps_its_end() -> None:
    async with serving() as engine:
        stream = engine.stream("over", greedy(3))
        await until(lambda: engine.stats().generated_tokens == 3)
        stream.cancel()
        assert [token.id for token in await read(stream)] == expected_ids("over", 3)
        assert stream.finish_reasons == ["length"]


@pytest.mark.parametrize("collector", [True, False], ids=["gc", "no-gc"])
@pytest.mark.parametrize("when", ["unread", "read", "in chunks", "in the tokenizer", "paused"])
async def test_dropping_the_last_reference(collector: bool, when: str) -> None:
    gate = Gate()
    window = 4 if when == "paused" else 512
    async with serving(SIZES, gate=gate, max_unread_tokens=window) as engine:
        if not collector:
            gc.disable()
        try:
            stream = engine.stream(new_prompt(2100 if when == "in the tokenizer" else 30), greedy(900))
            if when == "read":
                async for _ in stream:
                    break
            elif when == "in chunks":
                async for _ in stream.chunks():
                    break
            elif when == "paused":
                await until(lambda: engine.stats().paused)
            if when in ("unread", "read", "in chunks"):
                gate.hold()
                await until(lambda: gate.holds and engine.stats().steps_in_flight == 2)
            before = engine.stats().steps
            del stream
            await until(lambda: not engine.stats().running and not engine.stats().paused)
            gate.release()
            await returned(engine)
            assert engine.stats().steps - before <= 2
        finally:
            gc.enable()
            gate.release()
        await check_serving(engine)


@pytest.mark.parametrize("chunked", [False, True], ids=["tokens", "chunks"])
@pytest.mark.parametrize("first", [False, True], ids=["unread", "reading"])
async def test_a_reader_cancelled_between_two_reads(chunked: bool, first: bool) -> None:
    """asyncio keeps the frames of a cancelled task, and with them the stream, until the garbage collector comes."""
    gc.collect()
    gc.disable()
    try:
        async with serving() as engine:

            async def reader() -> None:
                stream = engine.stream("nobody waits for the end", greedy(900))
                if not first:
                    await stream.admitted()
                    await anyio.sleep(60)
                async for _ in stream.chunks() if chunked else stream:
                    await anyio.sleep(60)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reader)
                await until(lambda: engine.stats().generated_tokens > 3)
                tasks.cancel_scope.cancel()
            for _ in range(3):  # on trio the stream is dropped, and cancelled by what its end has posted to the loop
                await checkpoint()
            await returned(engine, steps=4)  # which takes a turn or two of the loop
    finally:
        gc.enable()


async def test_dropping_in_another_thread() -> None:
    async with serving() as engine:
        box = [engine.stream(new_prompt(), greedy(900))]
        await anext(box[0])
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        await until(lambda: not engine.stats().running)
        await returned(engine)
        await check_serving(engine)


async def test_the_neighbours_of_a_cancelled_request_do_not_notice() -> None:
    gate = Gate()
    async with serving(gate=gate) as engine:
        shared = "the same beginning of more than a page, "
        kept = [engine.stream(shared + name, greedy(40)) for name in "ab"]
        for turn in range(6):
            async with engine.stream(shared + "c" * turn, greedy(900, n=2)) as stream:
                await anext(stream)
        for name, stream in zip("ab", kept, strict=True):
            assert [token.id for token in await read(stream)] == expected_ids(shared + name, 40)
        await returned(engine)


async def test_a_second_reader_that_is_cancelled_leaves_the_first_alone() -> None:
    gate = Gate()
    async with serving(gate=gate) as engine:
        gate.hold()
        stream = engine.stream("one reader", greedy(5))
        got: list[int | None] = []

        async def first() -> None:
            got.extend([token.id for token in await read(stream)])

        async with anyio.create_task_group() as readers:
            readers.start_soon(first)
            await until(lambda: stream._generation.mailbox.awaited)
            with anyio.move_on_after(0.01):
                with pytest.raises(RuntimeError, match="two tasks"):
                    await anext(stream)
                await anyio.sleep(1)
            gate.release()
        assert got == expected_ids("one reader", 5)
