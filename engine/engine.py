"""`Engine` turns prompts into streams within the caller's event loop; the public interface of headrace.

It only hands each call to the part that serves it: intake/intake.py takes in requests, life/lifespan.py opens and
closes what they need. Methods that open, close and generate are here, all others in public/: texts that are pooled,
looking in, and memory. It never plans a step and never touches a tensor. Next to read: stream.py and intake/intake.py.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self, Unpack, overload

from headrace.engine.adapters import Adapters
from headrace.engine.config import EngineConfig
from headrace.engine.delivery.collect import collect, streamed_params
from headrace.engine.errors import DeviceUnavailable, HeadraceError
from headrace.engine.events import Completion
from headrace.engine.intake.abilities import check_abilities
from headrace.engine.intake.intake import Intake
from headrace.engine.intake.messages import Message
from headrace.engine.intake.prompts import Charge, Prompt, charge_nobody
from headrace.engine.intake.requests import Asking
from headrace.engine.life.lifespan import Lifespan
from headrace.engine.life.opened import Opened
from headrace.engine.life.progress import Watcher
from headrace.engine.life.serving import Serving
from headrace.engine.many.generate import KeepingErrors, ManyOptions, ManyParams, Prompts, run_many
from headrace.engine.options import EngineOptions
from headrace.engine.params import SamplingParams
from headrace.engine.public.inspection import InspectionCalls
from headrace.engine.public.memory import MemoryCalls
from headrace.engine.public.pooling import PoolingCalls
from headrace.engine.scheduling.shaping import LogitsProcessor
from headrace.engine.steps.hooks import StopWhen
from headrace.engine.stream import TokenStream

__all__ = ["Engine", "Message", "Prompt"]

_DEFAULT_PARAMS = SamplingParams()


class Engine(PoolingCalls, InspectionCalls, MemoryCalls):
    """An inference engine that lives in the caller's event loop: `async with Engine("path/to/model") as engine`.

    All methods are called on that event loop, by any of its tasks, and raise `RuntimeError` elsewhere.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        """Check the options; nothing is loaded before `async with`.

        Args:
            model: A model folder, a `.gguf` file or a hub id.
            options: The fields of `EngineConfig`, which `EngineOptions` (options.py) describes.

        Raises:
            InvalidParams: An option is unknown or out of its range.
        """
        self.config = EngineConfig(model=model, **options)
        self.on_weights: Watcher | None = None
        """Function that is called in a thread while the weights are read, with the bytes done and the bytes in all."""
        self._serving = Serving()
        self._life = Lifespan(self.config, self._serving)
        self._intake = Intake(self._serving, self.config)

    # -- opening and closing ----------------------------------------------------------------------------------------

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
        await self._life.open(self._open, self.on_weights)
        return self

    def _open(self) -> Opened:
        """Load the model; called in a thread. A stand-in for a model overrides this."""
        try:
            from headrace.engine.life.build import open_engine  # the one module that sees every ring
        except ModuleNotFoundError as error:
            raise DeviceUnavailable(f"device: no model can be opened here: {error}") from error
        return open_engine(self.config)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the running requests, release all memory and join all threads.

        Raises:
            EngineCrashed: The step loop died, and the block itself did not raise.
        """
        await self.aclose()
        if error is None and self._life.crashed is not None:
            raise self._life.crashed

    async def aclose(self, drain: float = 0.0) -> None:
        """Refuse new requests, wait up to `drain` seconds for running ones, cancel the rest and release all memory.

        It may be called more than once, before `async with` ends, and from another task than the one that opened it.

        Raises:
            InvalidParams: `drain` is negative or NaN; the engine stays open.
            RuntimeError: The call comes from another event loop or thread; the engine stays open.
        """
        await self._life.aclose(drain)

    # -- generation -------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = _DEFAULT_PARAMS,
        *,
        adapter: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        stop_when: StopWhen | None = None,
        logits_processor: LogitsProcessor | None = None,
        charge: Charge = charge_nobody,
    ) -> TokenStream:
        """Start a generation; return at once, without I/O.

        Args:
            prompt: Raw text, token ids, or a chat.
            params: Options for choosing tokens and for stopping.
            adapter: Name of a loaded adapter.
            tenant: Tenant of the request; tenants do not share prefix pages.
            cache_salt: Share prefix pages with requests of the same salt instead.
            priority: Priority of service; lower is served first.
            deadline: Seconds from now after which generation stops, with `deadline` as the finish reason.
            stop_when: Called with each token after which its choice would go on; True ends the choice, with `stop`.
            logits_processor: Called with the tokens so far and the next one's logits, a float32 array [vocabulary] that
                it may write to; returns the logits to choose from. Runs in a thread.
            charge: Called on the event loop with the cost, in tokens, of the request's work besides steps, even after
                its end: the tokens made from text, and 1,000 for a second of compiling a format or failing to tokenise.

        Returns:
            A stream; a `Rejected` request raises in its `admitted()` or first read.

        Raises:
            InvalidParams: `params` are not `SamplingParams`, or ask for `best_of`, which cannot be streamed.
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        parts = self._serving.parts()
        since = parts.loop.now
        asking = Asking(
            params, adapter, tenant, cache_salt, priority, stop_when, logits_processor, deadline, since, charge
        )
        return TokenStream(self._intake.start(asking, prompt, parts), self._intake, parts.post)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = _DEFAULT_PARAMS,
        *,
        adapter: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        stop_when: StopWhen | None = None,
        logits_processor: LogitsProcessor | None = None,
    ) -> Completion:
        """Run a generation to its end; arguments and errors are those of `stream`.

        Raises:
            Rejected: The request can never run.
            RequestFailed: The request ended early.
        """
        streamed = streamed_params(params)
        if streamed is not params:  # the stream would reject other fields
            check_abilities(params, self._serving.parts().opened.abilities)
        stream = self.stream(
            prompt,
            streamed,
            adapter=adapter,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            deadline=deadline,
            stop_when=stop_when,
            logits_processor=logits_processor,
        )
        return await collect(stream, params)

    @overload
    async def generate_many(
        self, prompts: Prompts, params: ManyParams = ..., **options: Unpack[ManyOptions]
    ) -> list[Completion]: ...
    @overload
    async def generate_many(
        self, prompts: Prompts, params: ManyParams = ..., **options: Unpack[KeepingErrors]
    ) -> list[Completion | HeadraceError]: ...
    async def generate_many(
        self,
        prompts: Prompts,
        params: ManyParams = _DEFAULT_PARAMS,
        *,
        progress: bool = False,
        return_errors: bool = False,
        **asked: Any,
    ) -> list[Any]:
        """Run a generation for each prompt, at most two for each row at a time.

        Args:
            prompts: Iterable, sync or async, of prompts as in `stream`; each is taken when there is room for it.
            params: Parameters of all prompts, or a sequence with one for each.
            progress: Show a bar on stderr with prompts done and tokens per second of the whole engine.
            return_errors: Return the error of a request that fails in place of its answer, and go on.
            asked: `adapter`, `tenant`, `cache_salt`, `priority`, `deadline` and hooks, as in `stream`.

        Returns:
            The answers in the order of the prompts.

        Raises:
            InvalidParams: `prompts` are not prompts, or `params` are not one `SamplingParams` for each.
            HeadraceError: The first request that failed, its message naming `prompts[index]`; the others are cancelled.
        """
        return await run_many(self, prompts, params, progress=progress, return_errors=return_errors, **asked)

    @property
    def adapters(self) -> Adapters:
        """Adapters of this engine, with `load`, `unload`, `list` and `pin`, while it serves.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        return self._serving.parts(draining=True).adapters
