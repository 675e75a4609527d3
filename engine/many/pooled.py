"""Runs a text through the step loop without generating: as a request that is prefilled and pooled.

Owns the wait for the result; never plans a step and never touches a tensor. embeddings.py and scoring.py build on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import anyio

from headrace.adapters.slots import AdapterVersion
from headrace.engine.delivery.generation import Control, Generation
from headrace.engine.errors import EngineStopped, InvalidParams, PromptTooLong
from headrace.engine.events import Usage
from headrace.engine.intake.adapter_names import version_of
from headrace.engine.intake.by_turns import ask, tokenizing_cost
from headrace.engine.intake.intake import check_prompt
from headrace.engine.intake.prompts import (
    Charge,
    Tokenizing,
    charge_nobody,
    check_fewest_tokens,
    check_text_size,
    is_short,
    is_text,
    to_token_ids,
)
from headrace.engine.intake.requests import Asking, check_asking
from headrace.engine.life.opened import Opened
from headrace.engine.life.serving import Serving
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.plan import Emission
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.request import Request
from headrace.engine.tokens.interface import TokenizerLike
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["Pair", "PoolingIntake", "Text", "Who"]

_NO_PARAMS = SamplingParams()
_SPACE: Final = re.compile(r"[ \t\n\r]{2,}")
_SPARSE: Final = 32


class Who(NamedTuple):
    """The caller on whose behalf something is asked: arguments of `Engine.stream`."""

    adapter: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    charge: Charge = charge_nobody


class Pooled(NamedTuple):
    """Token ids of a text and their pooling."""

    ids: list[int]
    pooling: Pooling
    made: int
    """Number of tokens that were made from text, those that were cut off included."""


class _Asked(Protocol):
    """A text, or a pair of texts, to be pooled."""

    def is_short(self, table: TokenTable) -> bool:
        """Return whether tokenising the text is quick enough for the event loop's own thread."""
        ...

    @property
    def cost(self) -> float:
        """The work of tokenising, in characters, roughly."""
        ...

    def check(self, opened: Opened) -> None:
        """Refuse a text that is too long however it is tokenised."""
        ...

    def tokenize(self, opened: Opened) -> Pooled:
        """Return the token ids and their pooling."""
        ...


class Text(NamedTuple):
    """One prompt."""

    prompt: Any
    pooling: Pooling
    truncate: bool = False

    def is_short(self, table: TokenTable) -> bool:
        """Return whether tokenising the prompt is quick enough for the event loop's own thread."""
        return is_short(self.prompt, table)

    @property
    def cost(self) -> float:
        """The work of tokenising, in characters, roughly."""
        return tokenizing_cost(self.prompt)

    def check(self, opened: Opened) -> None:
        """Refuse a prompt that is too long however it is tokenised.

        Raises:
            PromptTooLong: The prompt has too many characters, or its bytes need too many tokens.
        """
        if not self.truncate:
            _check(self.prompt, opened)

    def tokenize(self, opened: Opened) -> Pooled:
        """Return the token ids and their pooling.

        Raises:
            InvalidParams: The prompt is malformed.
            PromptTooLong: The part of the prompt that the tokenizer can take at once does not fill the context.
        """
        prompt, tokenizer, most = self.prompt, opened.tokenizer, opened.info.max_context
        if self.truncate and isinstance(prompt, str):
            prompt = _cut(prompt, opened)
        ids = to_token_ids(prompt, tokenizer)
        made = len(ids) if is_text(prompt) else 0
        if self.truncate:
            _check_cut(self.prompt, prompt, len(ids), opened)
            ids = _truncated(ids, tokenizer, most)
        return Pooled(ids, self.pooling, made)


class Pair(NamedTuple):
    """A query and a document, for a model that reads them together."""

    query: str
    document: str
    truncate: bool = False

    def is_short(self, table: TokenTable) -> bool:
        """Return whether tokenising both texts is quick enough for the event loop's own thread."""
        return is_short(self.query, table) and is_short(self.document, table)

    @property
    def cost(self) -> float:
        """The work of tokenising, in characters, roughly."""
        return tokenizing_cost(self.query) + tokenizing_cost(self.document)

    def check(self, opened: Opened) -> None:
        """Refuse a pair that is too long however it is tokenised.

        Raises:
            PromptTooLong: One of the texts has too many characters, or its bytes need too many tokens.
        """
        _check(self.query, opened, "query")
        if not self.truncate:
            _check(self.document, opened)

    def tokenize(self, opened: Opened) -> Pooled:
        """Return the token ids and their pooling; a pair that is too long is cut at the end of the document.

        Raises:
            InvalidParams: One of the texts is not one that UTF-8 can express.
            PromptTooLong: The query leaves no room for the document, or the parts of both that the tokenizer can take
                at once do not fill the context.
        """
        assert opened.scoring is not None
        most = opened.info.max_context
        document = _cut(self.document, opened, len(self.query)) if self.truncate else self.document
        found = opened.scoring.encode_pair(self.query, document)
        ids, made = found.ids, len(found.ids)
        if self.truncate:
            _check_cut(self.document, document, made, opened)
        if self.truncate and len(ids) > most:
            ids = _truncated(ids, opened.tokenizer, most)
            if found.document >= most - 1:
                raise PromptTooLong(
                    f"query: its {found.document} tokens leave no room for a document in the context of {most}",
                    field="query",
                    value=found.document,
                    limit=most,
                )
        return Pooled(ids, Pooling("score", found.second), made)


def _check(prompt: Any, opened: Opened, name: str = "prompt") -> None:
    """Refuse a prompt that is too long however it is tokenised."""
    table, most = opened.tokenizer.table, opened.info.max_context
    dense = _dense(prompt, opened)
    check_text_size(dense, table, most, name)
    check_fewest_tokens(dense, table, most, name)


def _enough(opened: Opened) -> int | None:
    """Return a number of characters that is sure to fill the context; None if nobody knows one."""
    longest = opened.tokenizer.table.longest
    return longest * opened.info.max_context if longest else None


def _cut(text: str, opened: Opened, beside: int = 0) -> str:
    """Return the start of a text that is sure to fill the context, or that the tokenizer can take at once.

    Args:
        text: The text.
        opened: The model.
        beside: Characters that are tokenised together with the text.
    """
    dense, most = _dense(text, opened), opened.tokenizer.table.most_characters
    cut: str = dense[: _enough(opened)]
    return cut if most is None else cut[: max(most - beside, 0)]


def _check_cut(whole: Any, cut: Any, tokens: int, opened: Opened) -> None:
    """Refuse a text that was cut for the tokenizer to fewer tokens than the context has room for."""
    most, table = opened.info.max_context, opened.tokenizer.table
    if tokens >= most or not isinstance(whole, str) or table.most_characters is None:
        return
    if len(cut) < len(_dense(whole, opened)[: _enough(opened)]):
        raise PromptTooLong(
            f"prompt: its tokenizer takes {table.most_characters} characters at once, which do not fill the context "
            f"of {most} tokens, and it has {len(whole)}",
            field="prompt",
            value=len(whole),
            limit=table.most_characters,
        )


def _dense(prompt: Any, opened: Opened) -> Any:
    """Return a text with runs of white space as one space, if it may seem too long and the model sees no difference."""
    enough = _enough(opened)
    if not isinstance(prompt, str) or enough is None or len(prompt) <= enough or not opened.tokenizer.table.joins_space:
        return prompt
    looked_at = _SPARSE * enough
    return _SPACE.sub(" ", prompt[:looked_at]) + prompt[looked_at:]


def _truncated(ids: list[int], tokenizer: TokenizerLike, most: int) -> list[int]:
    """Return the first `most` of `ids`, with the tokens that end every text as the last of them."""
    if len(ids) <= most:
        return ids
    frame = tokenizer.encode("") if tokenizer.table.longest else []  # a model without a tokenizer frames nothing
    ending = next((frame[start:] for start in range(len(frame)) if ids[start - len(frame) :] == frame[start:]), [])
    return ids[: max(most - len(ending), 0)] + ending[:most]


class _Pooling(Generation):
    """A request that is pooled: one choice without a token, and the value made from its hidden states."""

    def __init__(self, control: Control, started: anyio.Event | None) -> None:
        """Raise `InvalidParams` if `started` is not an event, which the step loop would find out too late."""
        if not isinstance(started, anyio.Event | None):
            kind = type(started).__name__
            raise InvalidParams(f"started: must be an anyio.Event, got {kind}", field="started", value=started)
        super().__init__(control, 1, window=1)
        self.value: Any = None
        self._started = started

    def take_up(self, now: float) -> None:
        """Note the launch of the first step, and set the caller's event."""
        super().take_up(now)
        if self._started is not None:
            self._started.set()

    def deliver(self, emission: Emission) -> None:
        """Keep the pooled value."""
        self.value = emission.pooled
        super().deliver(emission)

    async def result(self) -> tuple[Any, Usage]:
        """Wait for the end; return the pooled value and its usage.

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
    """The intake of texts that are pooled, for the calls of one caller."""

    serving: Serving
    started: anyio.Event | None = None
    """Event that is set when a step takes up the first text; None if nobody waits for it."""

    async def pool(self, asked: _Asked, who: Who) -> tuple[Any, Usage]:
        """Prefill a text; return the pooled value and its usage.

        Raises:
            Rejected: The request can never run, or `started` is no event.
            RequestFailed: The request ended early.
            EngineStopped: The engine is not open, or closed meanwhile.
            EngineCrashed: The step loop died.
        """
        parts = self.serving.parts(draining=True)
        loop, opened = parts.loop, parts.opened
        generation = _Pooling(loop, self.started)
        loop.expect(generation)
        try:
            text = Tokenizing(
                partial(asked.tokenize, opened), lambda pooled: pooled.made, partial(asked.check, opened), who.charge
            )
            is_quick = asked.is_short(opened.tokenizer.table)
            found = text.run() if is_quick else await ask(text, parts.helper, tenant=who.tenant, cost=asked.cost)
            self.serving.parts(draining=True)
            check_prompt(found.ids, parts, room=0)
            asking = Asking(_NO_PARAMS, who.adapter, who.tenant, who.cache_salt, who.priority)
            named = parts.adapters.known_to(asking.adapter)
            request = _pooling_request(found, asking, opened.info.vocab_size, named)
            loop.submit(generation, found.ids, [request])
            return await generation.result()
        finally:
            generation.cancel()


def _pooling_request(
    pooled: Pooled, asking: Asking, vocab_size: int, adapters: Mapping[str, AdapterVersion]
) -> Request:
    """Return a request that generates nothing; the arguments are those of `make_requests`.

    Raises:
        InvalidParams: A keyword is of the wrong kind, or the adapter has virtual tokens.
        UnknownAdapter: No adapter is loaded under the name in `asking`.
    """
    check_asking(asking, vocab_size)
    version = version_of(asking.adapter, adapters)
    if version is not None and version.virtual_tokens:
        raise InvalidParams(
            "adapter: one with virtual tokens cannot be pooled", field="adapter", value=asking.adapter, limit=0
        )
    return Request(asking.asked(version, len(pooled.ids) + 1, pooling=pooled.pooling), list(pooled.ids))
