"""The way of one text through the step loop where nothing is generated: a request that is prefilled and pooled.

Owns the wait for its end; never plans a step and never touches a tensor. embeddings.py and scoring.py stand on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import anyio

from headrace.engine.adapters import Adapters
from headrace.engine.asking import Asking
from headrace.engine.errors import EngineStopped, InvalidParams, PromptTooLong
from headrace.engine.events import Usage
from headrace.engine.fair_worker import FairWorker
from headrace.engine.generation import Control, Generation
from headrace.engine.loop import StepLoop
from headrace.engine.opened import Opened
from headrace.engine.params import SamplingParams
from headrace.engine.prompts import (
    TokenizerLike,
    check_text_size,
    check_token_ids,
    is_short,
    note_work,
    to_token_ids,
    tokenizing_cost,
)
from headrace.engine.requests import make_pooling_request
from headrace.engine.scheduling.plan import Emission
from headrace.engine.scheduling.pooling import Pooling

__all__ = ["Pair", "PoolingIntake", "Text", "Who"]

_NO_PARAMS = SamplingParams()
_SPACE: Final = re.compile(r"[ \t\n\r]{2,}")
_SPARSE: Final = 32


class Who(NamedTuple):
    """On whose behalf something is asked: arguments of `Engine.stream`."""

    adapter: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    priority: int = 0


class Pooled(NamedTuple):
    """What a text comes to as token ids."""

    ids: list[int]
    pooling: Pooling


class _Asked(Protocol):
    """A text, or several that make one."""

    @property
    def is_short(self) -> bool:
        """Whether tokenising it is quick enough for the event loop's own thread."""
        ...

    @property
    def text(self) -> Any:
        """The prompt, of several the one that may be too long."""
        ...

    @property
    def cost(self) -> float:
        """The work of tokenising, in characters, roughly."""
        ...

    def check(self, opened: Opened) -> None:
        """Refuse what is too long however it is tokenised."""
        ...

    def tokenize(self, opened: Opened) -> Pooled:
        """Return the token ids and how they are pooled."""
        ...


class Text(NamedTuple):
    """One prompt."""

    prompt: Any
    pooling: Pooling
    truncate: bool = False

    @property
    def text(self) -> Any:
        """The text that may be too long."""
        return self.prompt

    @property
    def is_short(self) -> bool:
        """Whether tokenising is quick enough for the event loop's own thread."""
        return is_short(self.prompt)

    @property
    def cost(self) -> float:
        """The work of tokenising, in characters, roughly."""
        return tokenizing_cost(self.prompt)

    def check(self, opened: Opened) -> None:
        """Refuse what is too long however it is tokenised.

        Raises:
            PromptTooLong: It has too many characters.
        """
        if not self.truncate:
            check_text_size(_dense(self.prompt, opened), opened.tokenizer.table, opened.info.max_context)

    def tokenize(self, opened: Opened) -> Pooled:
        """Return the token ids and how they are pooled.

        Raises:
            InvalidParams: It is malformed.
        """
        tokenizer, most = opened.tokenizer, opened.info.max_context
        if not self.truncate:
            return Pooled(to_token_ids(self.prompt, tokenizer), self.pooling)
        prompt = _dense(self.prompt, opened)[: _enough(opened)] if isinstance(self.prompt, str) else self.prompt
        return Pooled(_truncated(to_token_ids(prompt, tokenizer), tokenizer, most), self.pooling)


class Pair(NamedTuple):
    """A query and a document, for a model that reads them together."""

    query: str
    document: str
    truncate: bool = False

    @property
    def text(self) -> str:
        """The text that may be too long."""
        return self.document

    @property
    def is_short(self) -> bool:
        """Whether tokenising is quick enough for the event loop's own thread."""
        return is_short(self.query) and is_short(self.document)

    @property
    def cost(self) -> float:
        """The work of tokenising, in characters, roughly."""
        return tokenizing_cost(self.query) + tokenizing_cost(self.document)

    def check(self, opened: Opened) -> None:
        """Refuse what is too long however it is tokenised.

        Raises:
            PromptTooLong: One of both has too many characters.
        """
        table, most = opened.tokenizer.table, opened.info.max_context
        check_text_size(_dense(self.query, opened), table, most, "query")
        if not self.truncate:
            check_text_size(_dense(self.document, opened), table, most)

    def tokenize(self, opened: Opened) -> Pooled:
        """Return the token ids and how they are pooled; what is too long is cut at the end of the document.

        Raises:
            InvalidParams: One of both is no text that UTF-8 can express.
            PromptTooLong: The query leaves no room for the document.
        """
        assert opened.scoring is not None
        most = opened.info.max_context
        document = _dense(self.document, opened)[: _enough(opened)] if self.truncate else self.document
        found = opened.scoring.encode_pair(self.query, document)
        ids = found.ids
        if self.truncate and len(ids) > most:
            ids = _truncated(ids, opened.tokenizer, most)
            if found.document >= most - 1:
                raise PromptTooLong(
                    f"query: its {found.document} tokens leave no room for a document in the context of {most}",
                    field="query",
                    value=found.document,
                    limit=most,
                )
        return Pooled(ids, Pooling("score", found.second))


def _enough(opened: Opened) -> int | None:
    """Characters that are more than the context can hold; None where nobody knows."""
    longest = opened.tokenizer.table.longest
    return longest * opened.info.max_context if longest else None


def _dense(prompt: Any, opened: Opened) -> Any:
    """A text with one white character for several, where it may else seem to be too long and the model sees no more."""
    enough = _enough(opened)
    if not isinstance(prompt, str) or enough is None or len(prompt) <= enough or not opened.tokenizer.table.joins_space:
        return prompt
    looked_at = _SPARSE * enough  # no more, since this is on the event loop
    return _SPACE.sub(" ", prompt[:looked_at]) + prompt[looked_at:]


def _truncated(ids: list[int], tokenizer: TokenizerLike, most: int) -> list[int]:
    """The first `most` of `ids`, of which the last are what the tokenizer ends every text with."""
    if len(ids) <= most:
        return ids
    frame = tokenizer.encode("") if tokenizer.table.longest else []  # a model without a tokenizer frames nothing
    ending = next((frame[start:] for start in range(len(frame)) if ids[start - len(frame) :] == frame[start:]), [])
    return ids[: max(most - len(ending), 0)] + ending[:most]


class _Pooling(Generation):
    """A request that is pooled: one choice without a token, and what came of its hidden states."""

    def __init__(self, control: Control, started: anyio.Event | None) -> None:
        """Raises `InvalidParams` for what is no event, which the step loop would find out too late."""
        if not isinstance(started, anyio.Event | None):
            kind = type(started).__name__
            raise InvalidParams(f"started: must be an anyio.Event, got {kind}", field="started", value=started)
        super().__init__(control, 1, window=1)
        self.value: Any = None
        self._started = started

    def take_up(self, now: float) -> None:
        """Say so to whoever wants to know."""
        super().take_up(now)
        if self._started is not None:
            self._started.set()

    def deliver(self, emission: Emission) -> None:
        """Keep what came."""
        self.value = emission.pooled
        super().deliver(emission)

    async def result(self) -> tuple[Any, Usage]:
        """Wait for the end: what came, and the tokens it took.

        Raises:
            RequestFailed: The request ended early.
            EngineStopped: The engine closed meanwhile.
            EngineCrashed: The step loop died.
        """
        (end,) = await self.mailbox.take()
        if end.finish_reason != "stop":
            raise EngineStopped("the engine closed before the request was done")
        return self.value, self.usage


class PoolingIntake(NamedTuple):
    """What it takes to get a text pooled."""

    serving: Callable[[], tuple[StepLoop, Opened]]
    """Raises where the engine takes nothing more in."""
    helper: FairWorker
    """Tokenises long texts, in turns by tenant."""
    adapters: Adapters
    """What prompts may wear."""
    started: anyio.Event | None = None
    """Set when a step takes up the first text."""

    async def pool(self, asked: _Asked, who: Who) -> tuple[Any, Usage]:
        """Prefill a text: what came of its hidden states, and the tokens it took.

        Raises:
            Rejected: The request can never run, or `started` is no event.
            RequestFailed: It ended early.
            EngineStopped: The engine is not open, or closed meanwhile.
            EngineCrashed: Its step loop died.
        """
        loop, opened = self.serving()
        generation = _Pooling(loop, self.started)
        loop.expect(generation)
        try:
            asked.check(opened)
            if asked.is_short:
                ids, pooling = asked.tokenize(opened)
            else:
                tokenize = partial(asked.tokenize, opened)
                ids, pooling = await self.helper.ask_for(who.tenant, tokenize, cost=asked.cost)
            loop, opened = self.serving()
            try:
                loop.scheduler.capacity.check_length(len(ids), room=0)  # before looking at what may be millions of ids
            except PromptTooLong as error:
                note_work(error, asked.text, len(ids))
                raise
            check_token_ids(ids, opened.info.vocab_size)
            asking = Asking(_NO_PARAMS, *who)
            named = self.adapters.versions
            loop.submit(generation, ids, [make_pooling_request(ids, asking, pooling, opened.info.vocab_size, named)])
            return await generation.result()
        finally:
            generation.cancel()
