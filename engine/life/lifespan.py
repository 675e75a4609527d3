"""`Life`: opens the parts of an engine, drives its step loop in a task of the caller's event loop, and releases them.

Owns the opening of the model, the threads and the shutdown; never sees a request. Any task of the event loop may open
an engine and any other may close it. Next to read: loop.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from math import inf
from types import TracebackType
from typing import Self

import anyio
from anyio.lowlevel import checkpoint

from headrace.engine.adapters import Adapters, slots_of
from headrace.engine.concurrency.background import start_background
from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.concurrency.threads import Poster, Worker, outlast
from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable, EngineStopped, InvalidParams
from headrace.engine.grammar.compiler import Grammars
from headrace.engine.life.opened import Opened
from headrace.engine.life.progress import Watcher, watched
from headrace.engine.scheduling.memory.host_pages import HostPages
from headrace.engine.scheduling.plan import Swapping
from headrace.engine.scheduling.policies import policy_of
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.steps.flights import Flights
from headrace.engine.steps.hooks import HookThread
from headrace.engine.steps.loop import StepLoop

__all__ = ["Life"]

_PATIENCE = 5.0  # seconds for which a closing engine waits for texts that are being tokenised


class Life:
    """An opening of a model, from `async with` to `aclose`; `Engine` adds the calls of its users."""

    def __init__(self, config: EngineConfig) -> None:
        """Keep the configuration; open nothing yet."""
        self.config = config
        # The engine's threads, hooks and clock; the simulation replaces them.
        self._make_worker: Callable[..., Worker] = Worker
        self._make_fair_worker: Callable[..., FairWorker] = FairWorker
        self._make_hooks: Callable[[Poster, float], HookThread] = HookThread
        self._clock: Callable[[], float] = time.perf_counter
        self.on_weights: Watcher | None = None
        """Function that is called in a thread while the weights are read, with the bytes done and the bytes in all."""
        self._entered = False
        self._opened: Opened | None = None
        self._adapters: Adapters | None = None
        self._loop: StepLoop | None = None
        self._closing = False
        self._teardown_error: BaseException | None = None

    async def __aenter__(self) -> Self:
        """Open the engine as `open` does."""
        return await self.open()

    async def open(self) -> Self:
        """Load the model in a thread, start the step loop and return the engine; `async with` does this by itself.

        It is for callers who open an engine in one place and close it in another, such as two cells of a notebook:
        `aclose` closes the engine, from any task of the same event loop.

        Raises:
            ModelRejected: The model's files cannot be used.
            DeviceUnavailable: The device is not there.
            RuntimeError: The engine is already open.
        """
        if self._entered:
            raise RuntimeError("an Engine is opened once; make another for another opening")
        self._entered = True
        self._post = Poster()
        self._helper = self._make_fair_worker("headrace-helper", self._post, threads=2, most_of_one=1)
        self._waiter = self._make_worker("headrace-waiter", self._post)
        self._grammars = Grammars(self._post, self._make_fair_worker)
        self._hooks = self._make_hooks(self._post, self.config.hook_seconds)
        try:
            opened = await self._helper.run(self._open_and_keep)
            host = await self._helper.run(partial(_open_host_pool, opened, self.config.swap_memory))
            await checkpoint()
        except BaseException:
            self._entered = False
            await self._return_resources()
            raise
        scheduler = Scheduler(
            opened.capacity,
            secret=os.urandom(32),
            prefix_cache=self.config.prefix_cache and opened.has_pages,
            policy=policy_of(self.config.policy),
            slots=slots_of(opened.adapters, self.config),
            host=host,
            itl_target=None if self.config.itl_target_ms is None else self.config.itl_target_ms / 1000,
        )
        runner = opened.runner
        flights = Flights.of(self.config.launch_ahead, opened.info.device)
        self._loop = StepLoop(
            scheduler, runner, self._waiter, self._hooks, flights=flights,
            hang_after=self.config.hang_seconds or inf, clock=self._clock,
        )  # fmt: skip
        self._adapters = Adapters(opened.adapters, self.config, opened.info.model, self._loop, self._make_worker)
        self._stopped = anyio.Event()
        start_background(partial(self._drive, self._loop), self._loop.close, "headrace step loop")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the running requests, release all memory and join all threads.

        Raises:
            EngineCrashed: The step loop died, and the block itself did not raise.
        """
        await self.aclose()
        if error is None and self._loop is not None and self._loop.crashed is not None:
            raise self._loop.crashed

    async def aclose(self, drain: float = 0.0) -> None:
        """Refuse new requests, wait up to `drain` seconds for running ones, cancel the rest and release all memory.

        It may be called more than once, before `async with` ends, and from another task than the one that opened it.

        Raises:
            InvalidParams: `drain` is negative or NaN; the engine stays open.
            RuntimeError: The call comes from another event loop or thread; the engine stays open.
        """
        if not drain >= 0.0:
            raise InvalidParams(
                f"drain: must be at least 0 seconds, got {drain!r}", field="drain", value=drain, limit={"ge": 0.0}
            )
        loop = self._loop
        if loop is None:
            return
        if not self._stopped.is_set():
            self._post.check_here()
        self._closing = True
        try:
            if drain > 0.0:
                with anyio.move_on_after(drain):
                    await loop.drained()
        finally:
            loop.close()  # also ends the drain of other callers
            cancelled = await outlast(self._stopped)
        failed, self._teardown_error = self._teardown_error, None
        if (error := cancelled or failed) is not None:
            raise error

    def _open(self) -> Opened:
        try:
            from headrace.engine.life.build import (
                open_engine,  # the one place that sees every ring, imported when needed
            )
        except ModuleNotFoundError as error:
            raise DeviceUnavailable(f"device: no model can be opened here: {error}") from error
        return open_engine(self.config)

    def _open_and_keep(self) -> Opened:
        with watched(self.on_weights):
            self._opened = self._open()  # kept even if the caller is cancelled: it must be closed
        return self._opened

    async def _drive(self, loop: StepLoop) -> None:
        """Run the step loop to its end, then release the engine's parts, whoever waits for that."""
        try:
            try:
                await loop.run()
            finally:
                await self._return_resources()
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # raised again in `aclose`
            self._teardown_error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._stopped.set()

    async def _return_resources(self) -> None:
        opened, self._opened = self._opened, None
        crashed = self._loop and self._loop.crashed
        hung = self._loop is not None and self._loop.hung
        stopped = crashed or EngineStopped("the engine closed before the adapter was loaded")
        join = None if self._adapters is None else self._adapters.close(stopped)

        def close(opened: Opened) -> None:
            self._hooks.close()
            self._grammars.close()
            if join is not None:
                join()
            opened.runner.close()

        closer = self._make_worker("headrace-closer", self._post)  # the helper may be busy with a long text
        try:
            self._helper.drop(crashed or EngineStopped("the engine closed before the prompt was tokenised"))
            self._grammars.drop(crashed or EngineStopped("the engine closed before the response format was compiled"))
            if opened is not None:
                opened.tokenizer.close()  # ends the renderings in the helper's threads
            if opened is not None and hung:
                closer.submit(partial(close, opened), lambda result, error: None)  # this may take for ever
            elif opened is not None:
                await closer.run(partial(close, opened))
        finally:
            closer.close(join=not hung)
            self._waiter.close(join=not hung)
            if hung:
                self._helper.close(join=False)
            else:
                await self._helper.leave(_PATIENCE)

    def _serving(self, draining: bool = False) -> tuple[StepLoop, Opened]:
        """Return the open engine's parts to a caller on its event loop; every call of a user passes here."""
        serving = self._serving_anywhere(draining)
        self._post.check_here()
        return serving

    def _serving_anywhere(self, draining: bool = False) -> tuple[StepLoop, Opened]:
        """Return the open engine's parts to a caller in any thread, who may only look at plain values."""
        loop, opened = self._loop, self._opened
        if loop is not None and loop.crashed is not None:
            raise loop.crashed.with_traceback(None)
        if loop is None or opened is None or loop.closed or (self._closing and not draining):
            raise EngineStopped("the engine is not open: use it inside `async with Engine(...)`")
        return loop, opened


def _open_host_pool(opened: Opened, swap_memory: int) -> HostPages | None:
    """Return the host's pool of pages; None if none is wanted.

    Raises:
        InvalidParams: The device cannot swap, or the host does not have the memory.
    """
    if not swap_memory:
        return None
    runner, page_bytes = opened.runner, opened.info.page_bytes
    if not isinstance(runner, Swapping):
        raise InvalidParams(
            f"swap_memory: this device cannot swap, got {swap_memory}", field="swap_memory", value=swap_memory, limit=0
        )
    if swap_memory < page_bytes:
        raise InvalidParams(
            f"swap_memory: one page takes {page_bytes} bytes, got {swap_memory}",
            field="swap_memory",
            value=swap_memory,
            limit={"ge": page_bytes},
        )
    places = swap_memory // page_bytes
    try:
        return HostPages(places, runner.open_host_pool(places))
    except (MemoryError, RuntimeError) as error:
        raise InvalidParams(
            f"swap_memory: the host does not give {swap_memory} bytes", field="swap_memory", value=swap_memory
        ) from error
