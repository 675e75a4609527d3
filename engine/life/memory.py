"""`DeviceMemory`: gives an open engine's memory back while it serves, and takes it again; frees no page by itself.

Owns the changes of the device and their order; scheduling/memory/resizing.py decides what happens to requests. The step
loop makes every change between two steps. Next to read: changes.py.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from headrace.engine.config import parse_bytes
from headrace.engine.errors import (
    DeviceUnavailable,
    EngineCrashed,
    InvalidParams,
    OutOfMemory,
    as_failure,
    as_headrace,
)
from headrace.engine.life.serving import Serving
from headrace.engine.scheduling.runner_memory import Resizable, Sleeping
from headrace.engine.steps.loop import StepLoop

__all__ = ["DeviceMemory"]

_PATIENCE = 10.0  # times the limit of a step, since all weights may be page-locked or read


class DeviceMemory:
    """The memory of one engine's device, whose size may change."""

    def __init__(self, serving: Serving) -> None:
        """Change the parts of `serving` while it serves."""
        self._serving = serving

    async def resize(self, kv_memory: int | str) -> None:
        """Change the memory for keys and values; argument and errors are those of `Engine.resize_kv`."""
        parts = self._serving.parts()
        loop, opened = parts.loop, parts.opened
        runner, page_bytes = opened.runner, opened.info.page_bytes
        if not isinstance(runner, Resizable) or not opened.has_pages:
            what = "this device cannot resize it" if opened.has_pages else "an encoder keeps no keys and values"
            raise InvalidParams(f"kv_memory: {what}", field="kv_memory", value=kv_memory)
        pages = _bytes(kv_memory) // page_bytes
        if pages < 1:
            raise _refused(kv_memory, {"ge": page_bytes}, f"one page takes {page_bytes} bytes")
        await loop.changes.ask(partial(self._resize, loop, runner, pages, kv_memory), loop.wake)

    async def sleep(self, level: Literal[1, 2]) -> None:
        """Give back the memory of keys, values and weights; argument and errors are those of `Engine.sleep`."""
        parts = self._serving.parts()
        if level not in (1, 2):
            raise InvalidParams(f"level: must be 1 or 2, got {level!r}", field="level", value=level, limit=[1, 2])
        loop, runner = parts.loop, parts.opened.runner
        if not isinstance(runner, Sleeping):
            raise InvalidParams("level: this model or its device cannot sleep", field="level", value=level)
        await loop.changes.ask(partial(self._fall_asleep, loop, runner, level), loop.wake)

    async def wake(self) -> None:
        """End a sleep; errors are those of `Engine.wake`."""
        parts = self._serving.parts(draining=True)  # a draining engine may sleep, and no stream would end
        loop, runner = parts.loop, parts.opened.runner
        if isinstance(runner, Sleeping):
            await loop.changes.ask(partial(self._wake_up, loop, runner), loop.wake)

    # -- between two steps --------------------------------------------------------------------------------------------

    async def _resize(self, loop: StepLoop, runner: Resizable, pages: int, asked: int | str) -> None:
        scheduler, page_bytes = loop.scheduler, self._serving.parts().opened.info.page_bytes
        before, least, most = scheduler.capacity.num_pages, scheduler.resizing.least_pages, runner.most_pages
        if pages < least:
            raise _refused(asked, {"ge": least * page_bytes}, f"a request needs {least * page_bytes} bytes")
        if pages > max(before, most):
            raise _refused(asked, {"le": most * page_bytes}, f"the device holds {most * page_bytes} bytes at most")
        if scheduler.resizing.sleep_level:
            scheduler.resizing.resize(pages)
            return
        if pages < before:
            await loop.carry_out_moves(scheduler.resizing.resize(pages))
        try:
            await loop.wait_for(partial(runner.resize, pages), "resize_kv")
        except Exception as error:
            scheduler.resizing.resize(before)
            if isinstance(as_failure(error), OutOfMemory):
                raise _refused(asked, None, "the device has not so much memory now") from error
            raise as_headrace(error, "kv_memory: the device could not be resized") from error
        if pages > before:
            scheduler.resizing.resize(pages)

    async def _fall_asleep(self, loop: StepLoop, runner: Sleeping, level: int) -> None:
        scheduler = loop.scheduler
        if level <= scheduler.resizing.sleep_level:
            return
        was_awake = not scheduler.resizing.sleep_level
        await loop.carry_out_moves(scheduler.resizing.fall_asleep(level))
        try:
            await loop.wait_for(partial(runner.sleep, keep_weights=level == 1), "sleep", _PATIENCE)
        except EngineCrashed:
            raise
        except Exception as error:
            if was_awake:
                await self._wake_up(loop, runner)
            if isinstance(as_failure(error), OutOfMemory):
                what = "the host has no room for the weights"
                raise InvalidParams(f"level: {what}, got {level}", field="level", value=level, limit=2) from error
            raise as_headrace(error, "level: the device could not be put to sleep") from error

    async def _wake_up(self, loop: StepLoop, runner: Sleeping) -> None:
        scheduler = loop.scheduler
        if not scheduler.resizing.sleep_level:
            return
        try:
            await loop.wait_for(partial(runner.wake, scheduler.capacity.num_pages), "wake", _PATIENCE)
        except Exception as error:
            if isinstance(as_failure(error), OutOfMemory):
                raise DeviceUnavailable("device: it has too little memory to wake up") from error
            raise as_headrace(error, "device: it could not be woken") from error
        scheduler.resizing.wake_up()


def _bytes(kv_memory: int | str) -> int:
    try:
        size = parse_bytes(kv_memory)
    except ValueError as error:
        raise _refused(kv_memory, None, str(error)) from None
    if isinstance(size, bool) or not isinstance(size, int):
        raise _refused(kv_memory, None, "must be bytes, or a number with KiB, MiB or GiB")
    return size


def _refused(asked: object, limit: object, why: str) -> InvalidParams:
    return InvalidParams(f"kv_memory: {why}, got {asked}", field="kv_memory", value=asked, limit=limit)
