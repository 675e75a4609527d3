"""`Poster` and `Worker`: order, errors, cancellation, and an event loop that has gone; the loops take turns."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint
from scripted import until

from headrace.engine.concurrency.ask import ask
from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.concurrency.threads import Poster, Worker


@pytest.mark.anyio
async def test_what_a_thread_posts_runs_in_order_on_the_loops_thread() -> None:
    post = Poster()
    ran: list[tuple[int, int]] = []

    def thread() -> None:
        for number in range(100):
            post(lambda number=number: ran.append((number, threading.get_ident())))

    worker = threading.Thread(target=thread)
    worker.start()
    await until(lambda: len(ran) == 100)
    worker.join()
    assert sorted(ran) == [(number, threading.get_ident()) for number in range(100)]


@pytest.mark.anyio
async def test_posting_wakes_a_loop_that_sleeps() -> None:
    post = Poster()
    woken = anyio.Event()
    timer = threading.Timer(0.02, lambda: post(woken.set))
    timer.start()
    with anyio.fail_after(10):
        await woken.wait()
    timer.join()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("use_uvloop", [False, True])
def test_posting_to_a_loop_that_has_ended_is_nothing(backend: str, use_uvloop: bool) -> None:
    if backend == "trio" and use_uvloop:
        pytest.skip("uvloop is a loop of asyncio")

    async def make() -> Poster:
        return Poster()

    options = {"use_uvloop": use_uvloop} if backend == "asyncio" else {}
    post = anyio.run(make, backend=backend, backend_options=options)
    ran: list[int] = []
    post(lambda: ran.append(1))
    assert ran == []


def test_a_poster_is_made_on_a_loop_only() -> None:
    with pytest.raises(Exception, match="(?i)no running|no async|not currently running|event loop"):
        Poster()


@pytest.mark.anyio
async def test_calls_run_one_after_the_other_in_one_thread_of_that_name() -> None:
    worker = Worker("headrace-under-test", Poster())
    seen: list[tuple[int, str]] = []

    async def ask(number: int) -> None:
        def call() -> int:
            seen.append((number, threading.current_thread().name))
            return number

        assert await worker.run(call) == number

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(ask, number)
    worker.close()
    assert sorted(seen) == [(number, "headrace-under-test") for number in range(20)]


@pytest.mark.anyio
async def test_submitted_calls_keep_their_order_and_finish_before_close_returns() -> None:
    worker = Worker("headrace-under-test", Poster())
    called: list[int] = []
    done: list[tuple[object, object]] = []
    for number in range(50):
        worker.submit(lambda number=number: called.append(number), lambda *outcome: done.append(outcome))
    worker.close()
    assert called == list(range(50))
    await until(lambda: len(done) == 50)
    assert done == [(None, None)] * 50


class Odd(BaseException):
    """Nothing that anybody expects."""


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ValueError("wrong"), MemoryError(), Odd("odd"), SystemExit(3)])
async def test_an_error_is_raised_where_the_result_is_awaited_and_the_thread_lives_on(error: BaseException) -> None:
    worker = Worker("headrace-under-test", Poster())

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await worker.run(fail)
    assert caught.value is error
    assert await worker.run(lambda: 7) == 7
    worker.close()


@pytest.mark.anyio
async def test_a_cancelled_caller_still_waits_for_the_call_to_end() -> None:
    """Else what the call uses could be closed under it."""
    worker = Worker("headrace-under-test", Poster())
    ended = threading.Event()
    go_on = threading.Event()

    def call() -> None:
        go_on.wait(20)
        ended.set()

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run, call)
            for _ in range(5):
                await checkpoint()
            scope.cancel()
            threading.Timer(0.02, go_on.set).start()
    assert ended.is_set()
    worker.close()


def test_a_caller_cancelled_by_asyncio_itself_waits_too() -> None:
    """`Task.cancel` heeds no shield of anyio's."""

    async def main() -> None:
        worker = Worker("headrace-under-test", Poster())
        ended = threading.Event()
        go_on = threading.Event()

        def call() -> None:
            go_on.wait(20)
            ended.set()

        task = asyncio.create_task(worker.run(call))
        for _ in range(3):
            await asyncio.sleep(0.005)
            task.cancel()
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        worker.close()

    asyncio.run(main())


@pytest.mark.anyio
async def test_an_idle_worker_keeps_nothing_of_its_last_call_alive() -> None:
    class Big:
        pass

    worker = Worker("headrace-under-test", Poster())
    big = Big()
    seen = weakref.ref(big)
    got: list[object] = [await worker.run(lambda big=big: big)]
    del big
    got.clear()
    gc.collect()
    await until(lambda: seen() is None)
    worker.close()


@pytest.mark.anyio
async def test_who_asks_and_is_cancelled_leaves_at_once_and_its_call_never_begins() -> None:
    worker = Worker("headrace-under-test", Poster())
    go_on = threading.Event()
    ran: list[int] = []
    worker.submit(lambda: go_on.wait(20), lambda *_: None)
    with anyio.move_on_after(0.02) as scope:
        await ask(worker.submit, lambda: ran.append(1))
    assert scope.cancelled_caught
    assert not go_on.is_set()
    go_on.set()
    assert await ask(worker.submit, lambda: 7) == 7
    assert ran == []
    worker.close()


def submit_for_others(worker: Worker, call: Callable[[], int], done: Callable[..., None]) -> None:
    """Queue a call of a tenant of its own, where the worker has tenants."""
    if isinstance(worker, FairWorker):
        worker.submit_for(f"tenant {call()}", call, done)
    else:
        worker.submit(call, done)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Worker, FairWorker])
async def test_dropped_calls_end_with_the_error_and_the_running_one_ends_well(kind: type[Worker]) -> None:
    worker = kind("headrace-under-test", Poster())
    go_on, begun = threading.Event(), threading.Event()
    done: list[tuple[object, object]] = []

    def hold() -> int:
        begun.set()
        go_on.wait(20)
        return 1

    worker.submit(hold, lambda *outcome: done.append(outcome))
    begun.wait(20)
    for number in (2, 3):
        submit_for_others(worker, lambda number=number: number, lambda *outcome: done.append(outcome))  # type: ignore[misc]
    error = ValueError("closed")
    worker.drop(error)
    assert done == [(None, error)] * 2
    go_on.set()
    await until(lambda: len(done) == 3)
    assert done[2] == (1, None)
    worker.close()
