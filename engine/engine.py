"""`Engine` turns prompts into streams within the caller's event loop; the public interface of headrace.

It only hands each call to the part that serves it: intake/intake.py takes in requests, life/lifespan.py opens and
closes what they need, life/memory.py gives memory back. It never plans a step and never touches a tensor. Next to read:
stream.py and intake/intake.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from anyio import Event

from headrace.engine.adapters import Adapters
from headrace.engine.config import EngineConfig
from headrace.engine.delivery.collect import collect, streamed_params
from headrace.engine.delivery.kv_events import KvEvents
from headrace.engine.errors import DeviceUnavailable, HeadraceError, InvalidParams
from headrace.engine.events import Completion
from headrace.engine.intake.adapter_names import version_of
from headrace.engine.intake.asking import Asking, check_abilities
from headrace.engine.intake.intake import Intake
from headrace.engine.intake.messages import Message
from headrace.engine.intake.prompt_ids import TokenizeOptions, TokenizerInfo, detokenize, tokenize, tokenizer_info
from headrace.engine.intake.prompts import Prompt
from headrace.engine.intake.tokenizing import Charge, charge_nobody
from headrace.engine.life.lifespan import Lifespan
from headrace.engine.life.memory import DeviceMemory
from headrace.engine.life.opened import Opened
from headrace.engine.life.progress import Watcher
from headrace.engine.life.serving import Serving
from headrace.engine.many.embeddings import Embeddings, EmbedOptions, embed
from headrace.engine.many.generate import KeepingErrors, ManyOptions, ManyParams, Prompts, run_many
from headrace.engine.many.pooled import PoolingIntake, Text, Who
from headrace.engine.many.scoring import Scores, score
from headrace.engine.options import EngineOptions
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.asked import root_of
from headrace.engine.scheduling.pooling import Pooling, PoolingKind
from headrace.engine.scheduling.shaping import LogitsProcessor
from headrace.engine.stats import EngineInfo, EngineStats
from headrace.engine.steps.hooks import StopWhen
from headrace.engine.stream import TokenStream

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Engine", "Message", "Prompt"]

_DEFAULT_PARAMS = SamplingParams()


class Engine:
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
        self._memory = DeviceMemory(self._serving)
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
            charge: Called on the event loop with the tokens of work besides steps, even after the request's end:
                tokens made from text, and 1,000 for each second of compiling its format or of failed tokenising.

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
        return TokenStream(self._intake.begin(asking, prompt), self._intake, parts.post)

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

    # -- without generating -----------------------------------------------------------------------------------------

    async def embed(
        self,
        prompts: str | Iterable[Prompt],
        *,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        started: Event | None = None,
        charge: Charge = charge_nobody,
        progress: bool = False,
    ) -> Embeddings:
        """Turn texts into vectors, at most two for each row at a time; other arguments are those of `stream`.

        Args:
            prompts: A text, or any iterable of prompts, each taken when there is room for it.
            pooling: "last" token, "mean" of all or "cls" (first token); None is the choice of the model's
                files, else "last".
            normalize: Scale vectors to length 1; None is the choice of the model's files, else True.
            dimensions: Number of leading elements to keep, before normalising; None keeps all.
            truncate: Cut prompts that are longer than the context instead of rejecting them.
            adapter: Adapter of all prompts, or a sequence with one for each.
            started: Event that is set when a step computes the first prompt.
            progress: Show a bar on stderr with prompts done and tokens per second of the whole engine.

        Returns:
            Vectors, float32 [prompts, dimensions] in the order of the prompts, and the token counts of all together.

        Raises:
            InvalidParams: The model or its device does not support that, or `prompts` are not prompts.
            HeadraceError: The first prompt that failed, its message naming `prompts[index]`; the others are cancelled.
        """
        options = EmbedOptions(pooling=pooling, normalize=normalize, dimensions=dimensions, truncate=truncate)
        who = Who(None, tenant, cache_salt, priority, charge)
        return await embed(self._pooling(started), prompts, options, who, adapter, progress=progress)

    async def score(
        self,
        query: Prompt,
        documents: str | Iterable[Prompt],
        *,
        truncate: bool = False,
        adapter: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        started: Event | None = None,
        charge: Charge = charge_nobody,
    ) -> Scores:
        """Score how well documents answer a query, at most two for each row at a time.

        A cross-encoder (a sequence classifier with one label) reads the query with each document; any other model gives
        the cosine of their vectors, as `embed` makes them. Other arguments are those of `stream`.

        Args:
            query: A text; any prompt for models that embed.
            documents: A text or an iterable of texts; any prompts for models that embed.
            truncate: Cut inputs that are longer than the context, documents at their end, instead of rejecting them.
            started: Event that is set when a step computes the first text.

        Raises:
            InvalidParams: The model does neither, or an argument is of the wrong kind.
            HeadraceError: The first document that failed, its message naming `documents[index]`.
        """
        who = Who(adapter, tenant, cache_salt, priority, charge)
        return await score(self._pooling(started), query, documents, who, truncate=truncate)

    async def hidden_states(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Tensor:
        """Return the hidden states of a prompt after the final norm; arguments are those of `stream`.

        Returns:
            A tensor [tokens, hidden size] in the model's dtype on its device, made under `torch.inference_mode`. If the
            prompt took one step, it is the tensor that the model wrote, not a copy.

        Raises:
            InvalidParams: The model or its device does not support that.
            Rejected: The request can never run.
            RequestFailed: The request ended early.
        """
        if self._serving.parts().opened.embedding is None:
            raise InvalidParams("prompt: this model or its device gives no hidden states", field="prompt")
        who = Who(adapter, tenant, cache_salt, priority)
        states: Tensor = (await self._pooling().pool(Text(prompt, Pooling("all")), who))[0]
        return states

    def _pooling(self, started: Event | None = None) -> PoolingIntake:
        self._serving.parts()  # a draining engine rejects this; calls that have begun may go on
        return PoolingIntake(self._serving, started)

    # -- looking in -------------------------------------------------------------------------------------------------

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        tenant: str | None = None,
        charge: Charge = charge_nobody,
        **options: Unpack[TokenizeOptions],
    ) -> list[int]:
        """Return the token ids of `prompt`, as a request of `tenant` would have them.

        Raises:
            InvalidParams: The prompt or an option is malformed.
            PromptTooLong: The text is too long for the context, however it is tokenised.
        """
        parts = self._serving.parts()
        return await tokenize(prompt, options, parts.opened, parts.helper, tenant, charge)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`.

        Raises:
            InvalidParams: An id is not in the vocabulary.
        """
        return detokenize(ids, self._serving.parts().opened, skip_special_tokens)

    @property
    def chat_template(self) -> str:
        """Text of the model's chat template; empty if it has none."""
        return self._serving.parts().opened.tokenizer.chat_template

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """Properties of the model's tokenizer besides its vocabulary."""
        return tokenizer_info(self._serving.parts().opened.tokenizer)

    @property
    def step_age(self) -> float:
        """Seconds since a step last ended, or was launched after idling, while a step is in flight; 0 otherwise.

        It grows without end if the device hangs. It may be read in any thread, since the event loop may be what hangs.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        loop = self._serving.parts_anywhere().loop
        return loop.meter.step_age(loop.now)

    @property
    def info(self) -> EngineInfo:
        """Model and limits of the engine; may be read in any thread.

        Raises:
            EngineStopped: The engine is not open.
        """
        parts = self._serving.parts_anywhere()
        return replace(parts.opened.info, num_pages=parts.loop.scheduler.capacity.num_pages)

    def stats(self) -> EngineStats:
        """Return a snapshot of queues, pages, counts and rates.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        return self._serving.parts().loop.stats()

    def kv_events(self) -> KvEvents:
        """Return an iterator of additions to and evictions from the prefix cache, and of the engine's load.

        It begins with a `KvReset`, and begins again with one after its reader was too slow. Pages that were stored
        while nobody held such an iterator are reported only once they are stored again.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        return self._serving.parts().loop.kv.open()

    def kv_scope(self, *, adapter: str | None = None, tenant: str | None = None, cache_salt: str | None = None) -> str:
        """Return a name for all requests that share prefix pages with one of these arguments; see `PageStored.scope`.

        Raises:
            UnknownAdapter: No adapter of that name is loaded.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        parts = self._serving.parts()
        root = root_of(version_of(adapter, parts.adapters.versions), tenant if cache_salt is None else cache_salt)
        return parts.loop.scheduler.pool.log.scope(root)

    # -- memory -----------------------------------------------------------------------------------------------------

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
        await self._memory.resize(kv_memory)

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
        await self._memory.sleep(level)

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
        await self._memory.wake()

    @property
    def sleep_level(self) -> int:
        """The level of `sleep`; 0 while the engine is awake.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        return self._serving.parts(draining=True).loop.scheduler.sleep_level
