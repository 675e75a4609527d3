"""`FairWorker`: calls of tenants take turns, the engine's own come first, and who leaves or closes does not wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import anyio
import pytest
from scripted import until

from headrace.engine.concurrency.ask import ask
from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.concurrency.threads import Poster


@contextmanager
def held(worker: FairWorker, tenant: str | None = None) -> Iterator[threading.Event]:
    """A call of `tenant` that runs until the event is set, at the latest when the block ends."""
    go_on, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(20)

    worker.submit_for(tenant, hold, lambda *_: None)
    assert begun.wait(20)
    try:
        yield go_on
    finally:
        go_on.set()


@pytest.mark.anyio
async def test_calls_take_turns_by_tenant_and_within_one_the_cheapest_is_next() -> None:
    worker = FairWorker("headrace-under-test", Poster())
    ran: list[str] = []
    with held(worker, "many"):
        for number, cost in enumerate([9.0, 1.0, 5.0, 1.0]):
            worker.submit_for("many", lambda number=number: ran.append(f"many {number}"), lambda *_: None, cost=cost)
        worker.submit_for("one", lambda: ran.append("one"), lambda *_: None, cost=1e6)
        worker.submit(lambda: ran.append("the engine's own"), lambda *_: None)
    await until(lambda: len(ran) == 6)
    assert ran == ["the engine's own", "one", "many 1", "many 3", "many 2", "many 0"]
    worker.close()


@pytest.mark.anyio
async def test_one_tenant_leaves_the_second_thread_to_others_where_it_may_have_one_call_at_a_time() -> None:
    worker = FairWorker("headrace-under-test", Poster(), threads=2, most_of_one=1)
    ran: list[str] = []
    with held(worker, "many"):
        worker.submit_for("many", lambda: ran.append("many"), lambda *_: None)
        for number in range(3):
            worker.submit_for("one", lambda number=number: ran.append(f"one {number}"), lambda *_: None)
        await until(lambda: len(ran) == 3)
        assert ran == ["one 0", "one 1", "one 2"]
    await until(lambda: ran[3:] == ["many"])
    worker.close()


@pytest.mark.anyio
async def test_who_asks_and_is_cancelled_leaves_at_once_and_its_call_never_begins() -> None:
    worker = FairWorker("headrace-under-test", Poster())
    ran: list[int] = []
    with held(worker) as go_on:
        with anyio.move_on_after(0.02) as scope:
            await ask(partial(worker.submit_for, "a"), lambda: ran.append(1))
        assert scope.cancelled_caught
        assert not go_on.is_set()
    assert await ask(partial(worker.submit_for, "a"), lambda: 7) == 7
    assert ran == []
    error = KeyError("asked")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        await ask(partial(worker.submit_for, "a"), fail)
    assert caught.value is error
    worker.close()


@pytest.mark.anyio
async def test_the_engines_own_calls_wait_for_the_call_that_runs_and_for_nothing_behind_it() -> None:
    worker = FairWorker("headrace-under-test", Poster())
    ran: list[int] = []
    error = ValueError("closed")
    dropped: list[BaseException | None] = []
    with held(worker, "a") as go_on:
        for number in range(100):
            worker.submit_for(
                str(number % 7), lambda number=number: ran.append(number), lambda _, error: dropped.append(error)
            )
        threading.Timer(0.02, go_on.set).start()
        assert await worker.run(lambda: list(ran)) == []
        assert go_on.is_set()
        worker.drop(error)
    worker.close()
    await until(lambda: len(dropped) == 100)
    assert set(dropped) <= {None, error}
