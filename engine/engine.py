"""`Engine` turns prompts into streams within the caller's event loop; the public interface of headrace.

It owns intake, from a prompt to a submitted request; it never plans a step and never touches a tensor. life/lifespan.py
opens and closes what it needs. Next to read: stream.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, overload

from anyio import Event

from headrace.engine.adapters import Adapters
from headrace.engine.config import EngineConfig
from headrace.engine.delivery.collect import collect, streamed_params
from headrace.engine.delivery.generation import Generation, as_headrace
from headrace.engine.errors import HeadraceError, InvalidParams
from headrace.engine.events import Completion
from headrace.engine.grammar.compiled import CompiledGrammar
from headrace.engine.intake.asking import Asking, check_abilities, check_generates, check_hooks
from headrace.engine.intake.messages import Message
from headrace.engine.intake.prompt_ids import TokenizeOptions, TokenizerInfo, detokenize, tokenize, tokenizer_info
from headrace.engine.intake.prompts import check_token_ids
from headrace.engine.intake.requests import make_requests
from headrace.engine.intake.tokenizing import Charge, charge_nobody
from headrace.engine.intake.turns import Prompt, Turns
from headrace.engine.life.elastic import Elastic
from headrace.engine.many.embeddings import Embeddings, EmbedOptions, embed
from headrace.engine.many.generate import KeepingErrors, ManyOptions, ManyParams, Prompts, run_many
from headrace.engine.many.pooled import PoolingIntake, Text, Who
from headrace.engine.many.scoring import Scores, score
from headrace.engine.options import EngineOptions
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.pooling import Pooling, PoolingKind
from headrace.engine.scheduling.shaping import LogitsProcessor
from headrace.engine.stats import EngineInfo, EngineStats
from headrace.engine.steps.hooks import StopWhen
from headrace.engine.stream import TokenStream

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Engine", "Message", "Prompt"]

_DEFAULT_PARAMS = SamplingParams()


class Engine(Elastic):
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
        super().__init__(EngineConfig(model=model, **options))
        self._random = random.Random(self.config.seed)

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
        loop, _ = self._serving()
        asking = Asking(
            params, adapter, tenant, cache_salt, priority, stop_when, logits_processor, deadline, loop.now, charge
        )
        turns = Turns(self._serving, self._admit, self._helper, self.config, self._random)
        return TokenStream(turns.first(asking, prompt), turns, self._post)

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
            check_abilities(params, self._serving()[1].abilities)
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

    def _admit(self, generation: Generation, asking: Asking, ids: list[int]) -> None:
        """Check a tokenised prompt and its parameters, compile its grammar, if it has one, then submit it."""
        if generation.finished:
            return
        try:
            loop, opened = self._serving(draining=True)
            check_generates(opened)
            check_abilities(asking.params, opened.abilities)
            check_hooks(asking, opened.abilities)
            loop.scheduler.capacity.check_length(len(ids))  # before checking millions of ids one by one
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
            else:  # no grammar if the request has ended meanwhile
                self._submit(generation, asking, ids, grammar)

        self._grammars.compile(
            wanted, opened, lambda: not generation.finished, compiled, tenant=asking.tenant, charge=asking.charge
        )

    def _submit(
        self, generation: Generation, asking: Asking, ids: list[int], grammar: CompiledGrammar | None = None
    ) -> None:
        """Submit a request to the step loop, unless its reader or the engine has ended meanwhile."""
        if generation.finished:
            return
        try:
            loop, opened = self._serving(draining=True)
            named = self.adapters.known_to(asking.adapter)
            made = make_requests(ids, asking, opened.tokenizer, opened.info.vocab_size, self._random, grammar, named)
            loop.submit(generation, ids, made)
        except Exception as error:  # raised in a callback, it would leave the stream waiting for ever
            generation.abandon(as_headrace(error, "the request could not be taken in"))

    @property
    def adapters(self) -> Adapters:
        """Adapters of this engine, with `load`, `unload`, `list` and `pin`, while it serves.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        self._serving(draining=True)
        assert self._adapters is not None
        return self._adapters

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
        if self._serving()[1].embedding is None:
            raise InvalidParams("prompt: this model or its device gives no hidden states", field="prompt")
        who = Who(adapter, tenant, cache_salt, priority)
        states: Tensor = (await self._pooling().pool(Text(prompt, Pooling("all")), who))[0]
        return states

    def _pooling(self, started: Event | None = None) -> PoolingIntake:
        self._serving()  # a draining engine rejects this; calls that have begun may go on
        return PoolingIntake(partial(self._serving, draining=True), self._helper, self.adapters, started)

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
        return await tokenize(prompt, options, self._serving()[1], self._helper, tenant, charge)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`.

        Raises:
            InvalidParams: An id is not in the vocabulary.
        """
        return detokenize(ids, self._serving()[1], skip_special_tokens)

    @property
    def chat_template(self) -> str:
        """Text of the model's chat template; empty if it has none."""
        return self._serving()[1].tokenizer.chat_template

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """Properties of the model's tokenizer besides its vocabulary."""
        return tokenizer_info(self._serving()[1].tokenizer)

    @property
    def step_age(self) -> float:
        """Seconds since a step last ended, or was launched after idling, while a step is in flight; 0 otherwise.

        It grows without end if the device hangs. It may be read in any thread, since the event loop may be what hangs.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        loop, _ = self._serving_anywhere()
        return loop.meter.step_age(loop.now)

    @property
    def info(self) -> EngineInfo:
        """Model and limits of the engine; may be read in any thread.

        Raises:
            EngineStopped: The engine is not open.
        """
        loop, opened = self._serving_anywhere()
        return replace(opened.info, num_pages=loop.scheduler.capacity.num_pages)

    def stats(self) -> EngineStats:
        """Return a snapshot of queues, pages, counts and rates.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        return self._serving()[0].stats()
