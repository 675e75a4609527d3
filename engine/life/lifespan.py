"""`Lifespan`: opens an engine's parts, drives its step loop in a task of the caller's event loop, and releases them.

Owns the opening of the model, the threads and the shutdown; never sees a request. Any task of the event loop may open
an engine and any other may close it. Next to read: serving.py, which hands the parts out, and loop.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

import anyio
from anyio.lowlevel import checkpoint

from headrace.engine.adapters import Adapters, slots_of
from headrace.engine.concurrency.background import start_background
from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.concurrency.threads import Poster, Worker, outlast
from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineCrashed, EngineStopped, InvalidParams
from headrace.engine.grammar.compiler import Grammars
from headrace.engine.life.drafting import open_speculation
from headrace.engine.life.opened import Opened
from headrace.engine.life.progress import Watcher, watched
from headrace.engine.life.serving import Parts, Serving
from headrace.engine.scheduling.memory.host_pages import HostPages
from headrace.engine.scheduling.policies import policy_of
from headrace.engine.scheduling.runner_memory import Swapping
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.steps.flights import Flights
from headrace.engine.steps.hooks import HookThread
from headrace.engine.steps.loop import StepLoop

__all__ = ["Lifespan", "Machinery"]

_PATIENCE = 5.0  # seconds for which a closing engine waits for texts that are being tokenised


@dataclass(frozen=True, slots=True)
class Machinery:
    """The threads and the clock of an engine; the simulation has others."""

    make_worker: Callable[..., Worker] = Worker
    make_fair_worker: Callable[..., FairWorker] = FairWorker
    make_hooks: Callable[[Poster, float], HookThread] = HookThread
    clock: Callable[[], float] = time.perf_counter
    """Clock in seconds, for arrivals, deadlines and step times."""


class Lifespan:
    """One opening of a model, from `open` to the end of `aclose`."""

    def __init__(self, config: EngineConfig, serving: Serving) -> None:
        """Open nothing yet; `serving` hands out the parts while they are open."""
        self._config = config
        self._serving = serving
        self.machinery = Machinery()
        self.loop: StepLoop | None = None
        """The step loop, from the opening on and after the end."""
        self.opened: Opened | None = None
        self.adapters: Adapters | None = None
        self._entered = False
        self._teardown_error: BaseException | None = None

    async def open(self, open_model: Callable[[], Opened], on_weights: Watcher | None) -> None:
        """Call `open_model` in a thread and start the step loop.

        Args:
            open_model: Function that loads the model.
            on_weights: Function that is called in that thread with the bytes of weights read and the bytes in all.

        Raises:
            ModelRejected: The model's files cannot be used.
            DeviceUnavailable: The device is not there.
            RuntimeError: The engine is already open.
        """
        if self._entered:
            raise RuntimeError("an Engine is opened once; make another for another opening")
        self._entered = True
        machinery = self.machinery
        self.post = Poster()
        self.helper = machinery.make_fair_worker("headrace-helper", self.post, threads=2, most_of_one=1)
        self.grammars = Grammars(self.post, machinery.make_fair_worker)
        self._waiter = machinery.make_worker("headrace-waiter", self.post)
        self._hooks = machinery.make_hooks(self.post, self._config.hook_seconds)
        try:
            opened = await self.helper.run(partial(self._open_and_keep, open_model, on_weights))
            host = await self.helper.run(partial(_open_host_pool, opened, self._config.swap_memory))
            await checkpoint()
        except BaseException:
            self._entered = False
            await self._return_resources()
            raise
        self.loop = self._make_loop(opened, host)
        self.adapters = Adapters(opened.adapters, self._config, opened.info.model, self.loop, machinery.make_worker)
        self._stopped = anyio.Event()
        self._serving.start(Parts(opened, self.loop, self.adapters, self.grammars, self.helper, self.post))
        start_background(partial(self._drive, self.loop), self.loop.close, "headrace step loop")

    def _make_loop(self, opened: Opened, host: HostPages | None) -> StepLoop:
        config = self._config
        scheduler = Scheduler(
            opened.capacity,
            secret=os.urandom(32),
            prefix_cache=config.prefix_cache and opened.has_pages,
            policy=policy_of(config.policy),
            slots=slots_of(opened.adapters, config),
            host=host,
            itl_target=None if config.itl_target_ms is None else config.itl_target_ms / 1000,
            speculation=open_speculation(config, opened),
        )
        return StepLoop(
            scheduler,
            opened.runner,
            self._waiter,
            self._hooks,
            flights=Flights.of(config.launch_ahead, opened.info.device),
            hang_after=config.hang_seconds or inf,
            clock=self.machinery.clock,
        )

    @property
    def crashed(self) -> EngineCrashed | None:
        """The error that ended the step loop; None if it has not died."""
        return None if self.loop is None else self.loop.crashed

    async def aclose(self, drain: float) -> None:
        """Refuse new requests, wait up to `drain` seconds for running ones, cancel the rest and release all memory.

        Raises:
            InvalidParams: `drain` is negative or NaN; the engine stays open.
            RuntimeError: The call comes from another event loop or thread; the engine stays open.
        """
        if not drain >= 0.0:
            raise InvalidParams(
                f"drain: must be at least 0 seconds, got {drain!r}", field="drain", value=drain, limit={"ge": 0.0}
            )
        loop = self.loop
        if loop is None:
            return
        if not self._stopped.is_set():
            self.post.check_here()
        self._serving.refuse()
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

    def _open_and_keep(self, open_model: Callable[[], Opened], on_weights: Watcher | None) -> Opened:
        with watched(on_weights):
            self.opened = open_model()  # kept even if the caller is cancelled: it must be closed
        return self.opened

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
        opened, self.opened = self.opened, None
        crashed = self.crashed
        self._serving.end(crashed)
        hung = self.loop is not None and self.loop.hung
        stopped = crashed or EngineStopped("the engine closed before the adapter was loaded")
        join = None if self.adapters is None else self.adapters.close(stopped)

        def close(opened: Opened) -> None:
            self._hooks.close()
            self.grammars.close()
            if join is not None:
                join()
            opened.runner.close()

        closer = self.machinery.make_worker("headrace-closer", self.post)  # the helper may be busy with a long text
        try:
            self.helper.drop(crashed or EngineStopped("the engine closed before the prompt was tokenised"))
            self.grammars.drop(crashed or EngineStopped("the engine closed before the response format was compiled"))
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
                self.helper.close(join=False)
            else:
                await self.helper.leave(_PATIENCE)


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
