"""`Mailbox`: order, one reader, the end and the error at it; the loops take turns."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from headrace.engine.concurrency.mailbox import Mailbox

pytestmark = pytest.mark.anyio


async def test_a_reader_takes_all_there_is_in_order() -> None:
    box: Mailbox[int] = Mailbox()
    for item in range(3):
        box.put(item)
    assert len(box) == 3
    assert await box.take() == [0, 1, 2]
    assert len(box) == 0


async def test_a_waiting_reader_wakes_and_gets_what_came_until_its_turn() -> None:
    box: Mailbox[int] = Mailbox()
    got: list[list[int]] = []

    async def reader() -> None:
        while items := await box.take():
            got.append(items)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        for start in (0, 10):
            for _ in range(5):
                await checkpoint()
            box.put(start)
            box.put(start + 1)
        for _ in range(5):
            await checkpoint()
        box.close()
    assert got == [[0, 1], [10, 11]]


async def test_after_the_end_there_is_nothing_ever() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.close()
    assert await box.take() == [1]
    assert await box.take() == []
    assert await box.take() == []


async def test_what_came_before_an_error_is_read_first_and_the_error_stays() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.close(ValueError("first"))
    box.close(ValueError("second"))
    box.close()
    assert await box.take() == [1]
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await box.take()


async def test_closing_wakes_a_waiting_reader() -> None:
    box: Mailbox[int] = Mailbox()
    async with anyio.create_task_group() as tasks:

        async def reader() -> None:
            with pytest.raises(ValueError, match="the end"):
                await box.take()

        tasks.start_soon(reader)
        for _ in range(5):
            await checkpoint()
        box.close(ValueError("the end"))


async def test_a_second_reader_is_refused_until_the_first_has_left() -> None:
    box: Mailbox[int] = Mailbox()
    got: list[int] = []

    async def reader() -> None:
        got.extend(await box.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        for _ in range(5):
            await checkpoint()
        with pytest.raises(RuntimeError, match="two tasks"):
            await box.take()
        box.put(1)
        with pytest.raises(RuntimeError, match="two tasks"):  # woken, but it has not had its turn
            await box.take()
    assert got == [1]
    box.put(2)
    assert await box.take() == [2]


@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_a_cancelled_reader_loses_nothing_and_makes_room_for_another(cancelled_first: bool) -> None:
    box: Mailbox[int] = Mailbox()
    got: list[int] = []

    async def reader() -> None:
        got.extend(await box.take())

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader)
            for _ in range(5):
                await checkpoint()
            for act in [scope.cancel, lambda: box.put(1)][:: 1 if cancelled_first else -1]:
                act()
    box.put(2)
    assert got + await box.take() == [1, 2]
