"""`Engine.generate_many`: many prompts through one engine, answers in order; bounds the queue, never plans a step.

Uses `Engine.generate`, `Engine.info`, `Engine.stats` and `Engine.tokenize` alone.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence, Sized
from enum import Enum
from itertools import count
from operator import length_hint
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from headrace.engine.errors import HeadraceError, InvalidParams
from headrace.engine.events import Completion
from headrace.engine.intake.prompt_ids import ChatOptions
from headrace.engine.intake.prompts import Prompt
from headrace.engine.many.bars import ManyBar
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.shaping import LogitsProcessor
from headrace.engine.stats import EngineInfo, EngineStats
from headrace.engine.steps.hooks import StopWhen

__all__ = [
    "KeepingErrors",
    "Many",
    "ManyOptions",
    "ManyParams",
    "Prompts",
    "RequestOptions",
    "check_many",
    "run_many",
]

Prompts: TypeAlias = Iterable[Prompt] | AsyncIterable[Prompt]
ManyParams: TypeAlias = SamplingParams | Sequence[SamplingParams]

ErrorT = TypeVar("ErrorT", bound=HeadraceError)

_AHEAD = 2  # requests submitted for each row: one waits while another runs, so that no row stays empty


class RequestOptions(TypedDict, total=False):
    """Keywords of `Engine.generate`."""

    adapter: str | None
    tenant: str | None
    cache_salt: str | None
    priority: int
    deadline: float | None
    stop_when: StopWhen | None
    logits_processor: LogitsProcessor | None


class _Options(RequestOptions, total=False):
    progress: bool


class ManyOptions(_Options, total=False):
    """Keywords of `Engine.generate_many` that let it raise errors."""

    return_errors: Literal[False]


class KeepingErrors(_Options):
    """Keywords of `Engine.generate_many` that put errors in the places of answers."""

    return_errors: Literal[True]


class _Generating(Protocol):
    """The part of `Engine` that `run_many` calls."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def generate(self) -> Callable[..., Awaitable[Completion]]: ...

    @property
    def tokenize(self) -> Callable[..., Awaitable[list[int]]]: ...

    def stats(self) -> EngineStats: ...


class _Mark(Enum):
    END = "end"


async def run_many(
    engine: _Generating,
    prompts: Prompts,
    params: ManyParams,
    *,
    progress: bool,
    return_errors: bool,
    written: ChatOptions | None = None,
    **asked: Any,
) -> list[Any]:
    """Generate for every prompt; arguments, result and errors are those of `Engine.generate_many`.

    With `written`, every prompt is a chat, and `written` holds the options of its template.
    """
    check_many(prompts, params)
    limit = _AHEAD * engine.info.max_rows

    async def generate(prompt: Any, each: SamplingParams) -> Completion:
        if written:
            prompt = await engine.tokenize(prompt, tenant=asked.get("tenant"), **written)
        return await engine.generate(prompt, each, **asked)

    many = Many(generate, prompts, params, limit, return_errors=return_errors)
    if not progress:
        return await many.run()
    with ManyBar(lambda: many.ended, lambda: engine.stats().generated_tokens, length_hint(prompts, -1)) as bar:
        return await many.run(bar.keep_drawing)


def check_many(prompts: Prompts, params: ManyParams) -> None:
    """Refuse arguments at once whose fault would otherwise show only after many answers.

    Raises:
        InvalidParams: `prompts` is not an iterable of prompts, or `params` not one `SamplingParams` for each.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable | AsyncIterable):
        raise InvalidParams(
            f"prompts: must be an iterable of prompts, got {type(prompts).__name__}", field="prompts", value=prompts
        )
    if isinstance(params, SamplingParams):
        return
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise InvalidParams(
            f"params: must be SamplingParams or a sequence of them, got {type(params).__name__}",
            field="params",
            value=params,
        )
    for index, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            field = f"params[{index}]"
            raise InvalidParams(f"{field}: must be SamplingParams, got {type(each).__name__}", field=field, value=each)
    if isinstance(prompts, Sized) and len(prompts) != len(params):
        raise _unequal(len(params), str(len(prompts)))


def _unequal(num_params: int, num_prompts: str) -> InvalidParams:
    return InvalidParams(
        f"params: must be one, or as many as there are prompts: got {num_params} for {num_prompts}",
        field="params",
        value=num_params,
    )


class Many:
    """One call: submits prompts as earlier ones end, and keeps the answers in order."""

    def __init__(
        self,
        generate: Callable[[Any, SamplingParams], Awaitable[Any]],
        prompts: Iterable[Any] | AsyncIterable[Any],
        params: ManyParams,
        limit: int,
        *,
        return_errors: bool,
        naming: str = "prompts",
    ) -> None:
        self.answers: list[Any] = []
        self.ended = 0
        self._generate = generate
        self._prompts = prompts
        self._params = params
        self._limit = limit
        self._return_errors = return_errors
        self._naming = naming
        self._in_flight = 0
        """Rows that the submitted requests that have not ended may take."""
        self._freed = anyio.Event()
        self._failure: BaseException | None = None
        self._tasks: TaskGroup = anyio.create_task_group()

    async def run(self, meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None) -> list[Any]:
        """Answer every prompt; `meanwhile` runs at the same time and is cancelled at the end."""
        async with self._tasks as tasks:
            if meanwhile is not None:
                tasks.start_soon(meanwhile)
            try:
                await self._feed()
                await self._room(self._limit)
                tasks.cancel_scope.cancel()
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:  # raised by the prompts' iterator, or for the arguments
                self._fail(error)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self.answers

    async def _feed(self) -> None:
        pull = _puller(self._prompts)
        params = self._params
        num_params = None if isinstance(params, SamplingParams) else len(params)
        for index in count():
            past_end = index == num_params
            each = params if isinstance(params, SamplingParams) else SamplingParams() if past_end else params[index]
            rows = _rows_of(each)
            await self._room(rows)  # before the prompt is taken, so that the caller keeps all that is not submitted
            prompt = await pull()
            if num_params is not None and past_end != (prompt is _Mark.END):
                raise _unequal(num_params, "more" if past_end else str(index))
            if prompt is _Mark.END:
                return
            self.answers.append(None)
            self._in_flight += rows
            self._tasks.start_soon(self._answer, index, prompt, each)
            await checkpoint()  # submission tokenises: at most one prompt in each turn of the event loop

    async def _room(self, rows: int) -> None:
        """Wait until `rows` more rows keep the limit, or nothing is in flight."""
        while self._in_flight and self._in_flight + rows > self._limit:
            self._freed = anyio.Event()
            await self._freed.wait()

    async def _answer(self, index: int, prompt: Prompt, params: SamplingParams) -> None:
        try:
            self.answers[index] = await self._generate(prompt, params)
        except HeadraceError as error:
            if self._return_errors:
                self.answers[index] = error.with_traceback(None)  # a kept traceback would keep all its frames alive
            else:
                self._fail(_named(error, f"{self._naming}[{index}]"))
        except Exception as error:  # concerns every request, such as an unknown keyword
            self._fail(error)
        self.ended += 1
        self._in_flight -= _rows_of(params)
        self._freed.set()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._tasks.cancel_scope.cancel()


def _rows_of(params: SamplingParams) -> int:
    """Return the rows that a generation may hold at a time: a beam search holds those of two rounds."""
    return 2 * params.beam_width if params.beam_width is not None else params.best_of or params.n


def _puller(prompts: Prompts) -> Callable[[], Awaitable[Prompt | _Mark]]:
    """Return the function that takes the next prompt, or the mark of the end."""
    if isinstance(prompts, AsyncIterable):
        later = aiter(prompts)

        async def pull_later() -> Prompt | _Mark:
            return await anext(later, _Mark.END)

        return pull_later
    now = iter(prompts)

    async def pull_now() -> Prompt | _Mark:
        return next(now, _Mark.END)

    return pull_now


def _named(error: ErrorT, name: str) -> ErrorT:
    """Return a copy of `error` that names the prompt; the original may belong to other streams too."""
    named = copy.copy(error)
    named.args = (f"{name}: {error}",)
    named.__cause__ = error.__cause__
    return named
