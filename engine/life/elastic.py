"""`Elastic`: an open engine that can give back its memory while it serves, and take it again; `Engine` adds requests.

Owns the changes of the device and their order; scheduling/memory/resizing.py decides what happens to requests. The step
loop makes every change between two steps. Next to read: changes.py.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from headrace.engine.config import parse_bytes
from headrace.engine.delivery.generation import as_failure, as_headrace
from headrace.engine.delivery.kv_events import KvEvents
from headrace.engine.errors import DeviceUnavailable, EngineCrashed, InvalidParams, OutOfMemory
from headrace.engine.intake.wearing import root_of, worn_by
from headrace.engine.life.lifespan import Life
from headrace.engine.scheduling.plan import Resizable, Sleeping
from headrace.engine.steps.loop import StepLoop

__all__ = ["Elastic"]

_PATIENCE = 10.0  # times the limit of a step, since all weights may be page-locked or read


class Elastic(Life):
    """An open engine whose memory can change its size."""

    async def resize_kv(self, kv_memory: int | str) -> None:
        """Change the memory for keys and values; requests go on, and none loses a token.

        With less memory, prefixes that nobody uses are evicted first; then requests are preempted, the last in the
        policy's order first, as when pages run out. A request that would outgrow the new size ends there with `length`.

        Args:
            kv_memory: New size: bytes, or text such as "2GiB".

        Raises:
            InvalidParams: The size is not valid, less than a page or than a request has tokens for already, or more
                than there is; nothing has changed. Or the model is an encoder, which keeps no keys and values.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
            HeadraceError: The device failed in another way; nothing has changed.
        """
        loop, opened = self._serving()
        runner, page_bytes = opened.runner, opened.info.page_bytes
        if not isinstance(runner, Resizable) or not opened.has_pages:
            what = "this device cannot resize it" if opened.has_pages else "an encoder keeps no keys and values"
            raise InvalidParams(f"kv_memory: {what}", field="kv_memory", value=kv_memory)
        pages = _bytes(kv_memory) // page_bytes
        if pages < 1:
            raise _refused(kv_memory, {"ge": page_bytes}, f"one page takes {page_bytes} bytes")
        await loop.changes.ask(partial(self._resize, loop, runner, pages, kv_memory), loop.wake)

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give back the memory of keys and values and of the weights; `wake` takes it again.

        Streams stay open: they get no token while the engine sleeps, and go on afterwards as if it had not. New
        requests wait as well. Deadlines pass. Pages in `swap_memory` come back; the others are computed again.

        Args:
            level: 1 keeps the weights in host memory, where a CPU has them anyway. 2 drops them and all that was
                computed with them: `wake` reads the files again. An engine that sleeps as deeply stays as it is.

        Raises:
            InvalidParams: `level` is not 1 or 2, the device cannot sleep, or the host has no room for the weights; the
                engine stays awake.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
            HeadraceError: The device failed in another way; the engine is as awake as before, if it could be woken.
        """
        loop, opened = self._serving()
        if level not in (1, 2):
            raise InvalidParams(f"level: must be 1 or 2, got {level!r}", field="level", value=level, limit=[1, 2])
        runner = opened.runner
        if not isinstance(runner, Sleeping):
            raise InvalidParams("level: this model or its device cannot sleep", field="level", value=level)
        await loop.changes.ask(partial(self._fall_asleep, loop, runner, level), loop.wake)

    async def wake(self) -> None:
        """End a `sleep`: take the memory of the weights and pages again, and go on; do nothing if the engine is awake.

        Raises:
            DeviceUnavailable: The device has too little free memory; the engine sleeps on. Free some, or `resize_kv` to
                less, and wake it again.
            ModelRejected: The model's files can no longer be used; the engine sleeps on.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
            HeadraceError: The device failed in another way; the engine sleeps on.
        """
        loop, opened = self._serving(draining=True)  # a draining engine may sleep, and no stream would end
        runner = opened.runner
        if isinstance(runner, Sleeping):
            await loop.changes.ask(partial(self._wake_up, loop, runner), loop.wake)

    @property
    def sleep_level(self) -> int:
        """The level of `sleep`; 0 while the engine is awake.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        return self._serving(draining=True)[0].scheduler.sleep_level

    def kv_events(self) -> KvEvents:
        """Return an iterator of additions to and evictions from the prefix cache, and of the engine's load.

        It begins with a `KvReset`, and begins again with one after its reader was too slow. Pages that were stored
        while nobody held such an iterator are reported only once they are stored again.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        return self._serving()[0].kv.open()

    def kv_scope(self, *, adapter: str | None = None, tenant: str | None = None, cache_salt: str | None = None) -> str:
        """Return a name for all requests that share prefix pages with one of these arguments; see `PageStored.scope`.

        Raises:
            UnknownAdapter: No adapter of that name is loaded.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        loop, _ = self._serving()
        assert self._adapters is not None
        root = root_of(worn_by(adapter, self._adapters.versions), tenant if cache_salt is None else cache_salt)
        return loop.scheduler.pool.log.scope(root)

    # -- between two steps --------------------------------------------------------------------------------------------

    async def _resize(self, loop: StepLoop, runner: Resizable, pages: int, asked: int | str) -> None:
        scheduler, page_bytes = loop.scheduler, self._serving()[1].info.page_bytes
        before, least, most = scheduler.capacity.num_pages, scheduler.least_pages, runner.most_pages
        if pages < least:
            raise _refused(asked, {"ge": least * page_bytes}, f"a request needs {least * page_bytes} bytes")
        if pages > max(before, most):
            raise _refused(asked, {"le": most * page_bytes}, f"the device holds {most * page_bytes} bytes at most")
        if scheduler.sleep_level:
            scheduler.resize(pages)
            return
        if pages < before:
            await loop.carry_out_moves(scheduler.resize(pages))
        try:
            await loop.wait_for(partial(runner.resize, pages), "resize_kv")
        except Exception as error:
            scheduler.resize(before)
            if isinstance(as_failure(error), OutOfMemory):
                raise _refused(asked, None, "the device has not so much memory now") from error
            raise as_headrace(error, "kv_memory: the device could not be resized") from error
        if pages > before:
            scheduler.resize(pages)

    async def _fall_asleep(self, loop: StepLoop, runner: Sleeping, level: int) -> None:
        scheduler = loop.scheduler
        if level <= scheduler.sleep_level:
            return
        was_awake = not scheduler.sleep_level
        await loop.carry_out_moves(scheduler.fall_asleep(level))
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
        if not scheduler.sleep_level:
            return
        try:
            await loop.wait_for(partial(runner.wake, scheduler.capacity.num_pages), "wake", _PATIENCE)
        except Exception as error:
            if isinstance(as_failure(error), OutOfMemory):
                raise DeviceUnavailable("device: it has too little memory to wake up") from error
            raise as_headrace(error, "device: it could not be woken") from error
        scheduler.wake_up()


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
