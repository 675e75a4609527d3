"""`Engine`: opens a model inside the caller's event loop and turns prompts into streams; the public face of headrace.

Owns the lifetime of everything else; never plans a step and never touches a tensor. Next to read: stream.py.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack, overload

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from headrace.engine.collect import check_streamed, collect, streamed_params
from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineStopped, HeadraceError, InvalidParams
from headrace.engine.events import Completion
from headrace.engine.generation import Generation, as_headrace
from headrace.engine.grammars import CompiledGrammar, Grammars
from headrace.engine.loop import StepLoop
from headrace.engine.many import KeepingErrors, ManyOptions, ManyParams, Prompts, run_many
from headrace.engine.messages import Message
from headrace.engine.opened import Opened
from headrace.engine.params import SamplingParams
from headrace.engine.prompts import check_text_size, check_token_ids, is_short, to_token_ids, tokenizing_cost
from headrace.engine.requests import Asking, check_abilities, make_generation, make_requests
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.stats import EngineInfo, EngineStats
from headrace.engine.stream import TokenStream
from headrace.engine.text import Detokenizer
from headrace.engine.threads import Poster, Worker, outlast

__all__ = ["Engine", "Message", "Prompt"]

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Raw text, token ids, or a chat of `{"role", "content"}` messages."""

_DEFAULT_PARAMS = SamplingParams()


class Engine:
    """An inference engine that lives in the caller's event loop: `async with Engine("path/to/model") as engine`.

    All methods are called on that event loop's thread. Several engines may be open at once.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        """Check the options; nothing is loaded before `async with`.

        Args:
            model: A model folder, a `.gguf` file or a hub id.
            options: The fields of `EngineConfig`.

        Raises:
            InvalidParams: An option is unknown or out of its range.
        """
        self.config = EngineConfig(model=model, **options)
        self._random = random.Random(self.config.seed)
        self._entered = False
        self._opened: Opened | None = None
        self._loop: StepLoop | None = None
        self._closing = False
        self._teardown_error: Exception | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Load the model in a thread and start the step loop.

        Raises:
            ModelRejected: The model's files cannot be used.
            DeviceUnavailable: The device is not there.
            RuntimeError: The engine is already open.
        """
        if self._entered:
            raise RuntimeError("an Engine is opened once; make another for another opening")
        self._entered = True
        self._post = Poster()
        self._helper = Worker("headrace-helper", self._post, cheapest_first=True)
        self._waiter = Worker("headrace-waiter", self._post)
        self._grammars = Grammars(self._post)
        try:
            opened = await self._helper.run(self._open_and_keep)
            await checkpoint()
        except BaseException:
            self._entered = False
            await self._return_resources()
            raise
        scheduler = Scheduler(opened.capacity, secret=os.urandom(32), prefix_cache=self.config.prefix_cache)
        runner = opened.runner
        self._loop = StepLoop(scheduler, runner, self._waiter, launch_ahead=self.config.launch_ahead)
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._stopped = anyio.Event()
        self._tasks.start_soon(self._drive, self._loop, name="headrace step loop")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what runs, return all memory and join all threads.

        Raises:
            EngineCrashed: The step loop died, and the block did not raise anything itself.
        """
        try:
            await self.aclose()
        finally:
            await self._tasks.__aexit__(None, None, None)
        if error is None and self._loop is not None and self._loop.crashed is not None:
            raise self._loop.crashed

    async def aclose(self, drain: float = 0.0) -> None:
        """Take nothing new in, wait up to `drain` seconds for what runs, cancel the rest and return all memory.

        May be called more than once, and before `async with` ends.

        Raises:
            InvalidParams: `drain` is negative or NaN; the engine stays open.
        """
        if not drain >= 0.0:
            raise InvalidParams(
                f"drain: must be at least 0 seconds, got {drain!r}", field="drain", value=drain, limit={"ge": 0.0}
            )
        loop = self._loop
        if loop is None:
            return
        self._closing = True
        try:
            if drain > 0.0:
                with anyio.move_on_after(drain):
                    await loop.drained()
        finally:
            loop.close()  # which also ends the drain of whoever else is closing
            cancelled = await outlast(self._stopped)
        failed, self._teardown_error = self._teardown_error, None
        if (error := cancelled or failed) is not None:
            raise error

    def _open(self) -> Opened:
        from headrace.engine.build import open_engine  # the one place that sees every ring, imported when needed

        return open_engine(self.config)

    def _open_and_keep(self) -> Opened:
        self._opened = self._open()  # kept even if whoever waits for it is cancelled: it must be closed
        return self._opened

    async def _drive(self, loop: StepLoop) -> None:
        """The step loop's task: runs it to its end, then returns what the engine holds, whoever waits for that."""
        try:
            try:
                await loop.run()
            finally:
                await self._return_resources()
        except Exception as error:  # told to whoever closes the engine, rather than by cancelling the host's task
            self._teardown_error = error
        finally:
            self._stopped.set()

    async def _return_resources(self) -> None:
        opened, self._opened = self._opened, None
        crashed = self._loop and self._loop.crashed

        def close(opened: Opened) -> None:
            self._grammars.close()
            opened.runner.close()

        try:
            self._helper.drop(crashed or EngineStopped("the engine closed before the prompt was tokenised"))
            if opened is not None:
                await self._helper.run(partial(close, opened))
        finally:
            self._helper.close()
            self._waiter.close()

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
    ) -> TokenStream:
        """Start a generation; returns at once and does no I/O.

        Args:
            prompt: Raw text, token ids, or a chat.
            params: How to choose tokens and when to stop.
            adapter: Name of a loaded adapter.
            tenant: Whom the request belongs to; tenants do not share prefix pages.
            cache_salt: Shares prefix pages with requests of the same salt instead.
            priority: Lower is served first.

        Returns:
            A stream; a `Rejected` request raises in its `admitted()` or first read.

        Raises:
            InvalidParams: `params` are not `SamplingParams`, or ask for `best_of`, which is known at the end alone.
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        loop, opened = self._serving()
        check_streamed(params)
        asking = Asking(params, adapter, tenant, cache_salt, priority)
        generation = make_generation(asking, loop, opened.tokenizer, self.config.max_unread_tokens)
        loop.expect(generation)

        def tokenize() -> list[int]:  # nothing where nobody wants it any more
            return [] if generation.finished else to_token_ids(prompt, opened.tokenizer)

        def tokenized(ids: list[int] | None, error: BaseException | None) -> None:
            if ids is not None:
                self._admit(generation, asking, ids)
            else:
                generation.abandon(as_headrace(error, "the tokenizer failed"))

        try:
            check_text_size(prompt, opened.tokenizer.table.longest, opened.info.max_context)
            if is_short(prompt):
                tokenized(tokenize(), None)
            else:
                self._helper.submit(tokenize, tokenized, cost=tokenizing_cost(prompt))
        except Exception as error:
            tokenized(None, error)
        return TokenStream(generation, opened.tokenizer.table, self._post, params)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = _DEFAULT_PARAMS,
        *,
        adapter: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Completion:
        """Run a generation to its end; arguments and errors as `stream`.

        Raises:
            Rejected: The request can never run.
            RequestFailed: It ended early.
        """
        streamed = streamed_params(params)
        if streamed is not params:  # the stream would be refused by another name
            check_abilities(params, self._serving()[1].abilities)
        stream = self.stream(prompt, streamed, adapter=adapter, tenant=tenant, cache_salt=cache_salt, priority=priority)
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
            prompts: Any iterable, async ones too; each is taken when there is room for it. Each prompt as in `stream`.
            params: For all prompts, or a sequence of as many.
            progress: Show a bar on stderr: prompts done, and the tokens a second of the whole engine.
            return_errors: Put the error of a request that fails in the place of its answer, and go on.
            asked: `adapter`, `tenant`, `cache_salt` and `priority`, as in `stream`.

        Returns:
            The answers in the order of the prompts.

        Raises:
            InvalidParams: Not prompts, or not one `SamplingParams` for each.
            HeadraceError: The first request that failed, its message naming `prompts[index]`; the others are cancelled.
        """
        return await run_many(self, prompts, params, progress=progress, return_errors=return_errors, **asked)

    def _admit(self, generation: Generation, asking: Asking, ids: list[int]) -> None:
        """Check a tokenised prompt and what is asked of it; compile its grammar, if it has one, then submit it."""
        if generation.finished:
            return
        try:
            loop, opened = self._serving(draining=True)
            check_abilities(asking.params, opened.abilities)
            loop.scheduler.check_length(len(ids))  # before looking at each of what may be millions of ids
            check_token_ids(ids, opened.info.vocab_size)
        except HeadraceError as error:
            generation.abandon(error)
            return
        wanted = asking.params.response_format
        if wanted is None:
            self._submit(generation, asking, ids)
            return

        def compiled(grammar: CompiledGrammar | None, error: BaseException | None) -> None:
            if error is not None:
                generation.abandon(as_headrace(error, "the grammar's compiler failed"))
            else:  # a grammar, or none because nobody wants it any more
                self._submit(generation, asking, ids, grammar)

        self._grammars.compile(wanted, opened, lambda: not generation.finished, compiled)

    def _submit(
        self, generation: Generation, asking: Asking, ids: list[int], grammar: CompiledGrammar | None = None
    ) -> None:
        """Hand a request to the step loop, unless its reader or the engine has gone meanwhile."""
        if generation.finished:
            return
        try:
            loop, opened = self._serving(draining=True)
            made = make_requests(ids, asking, opened.tokenizer, opened.info.vocab_size, self._random, grammar)
            loop.submit(generation, ids, made)
        except HeadraceError as error:
            generation.abandon(error)

    def _serving(self, draining: bool = False) -> tuple[StepLoop, Opened]:
        if self._loop is not None and self._loop.crashed is not None:
            raise self._loop.crashed.with_traceback(None)
        if self._loop is None or self._opened is None or (self._loop.closed if draining else self._closing):
            raise EngineStopped("the engine is not open: use it inside `async with Engine(...)`")
        return self._loop, self._opened

    # -- looking in -------------------------------------------------------------------------------------------------

    async def tokenize(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The token ids of `prompt`, as a request would see them; `tools` are offered in a chat.

        Raises:
            InvalidParams: The prompt is malformed.
            PromptTooLong: Its text is too long for the context, however it is tokenised.
        """
        _, opened = self._serving()
        check_text_size(prompt, opened.tokenizer.table.longest, opened.info.max_context)
        if is_short(prompt) and not tools:
            return to_token_ids(prompt, opened.tokenizer)
        ids = partial(to_token_ids, prompt, opened.tokenizer, tools)
        return await self._helper.ask(ids, cost=tokenizing_cost(prompt, tools))

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`.

        Raises:
            InvalidParams: An id is not in the vocabulary.
        """
        _, opened = self._serving()
        check_token_ids(ids, opened.info.vocab_size)
        detokenizer = Detokenizer(opened.tokenizer.table, skip_special_tokens)
        return "".join([*map(detokenizer.feed, ids), detokenizer.flush()])

    @property
    def chat_template(self) -> str:
        """Text of the model's chat template; empty where it has none."""
        return self._serving()[1].tokenizer.chat_template

    @property
    def step_age(self) -> float:
        """Seconds since a step ended, or was launched after idling, while one is in flight; 0 otherwise.

        Grows without end if the device hangs.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        return self._serving()[0].meter.step_age(time.perf_counter())

    @property
    def info(self) -> EngineInfo:
        """What the engine runs and what it can hold.

        Raises:
            EngineStopped: The engine is not open.
        """
        return self._serving()[1].info

    def stats(self) -> EngineStats:
        """One snapshot of queues, pages, counts and rates.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        return self._serving()[0].stats()
