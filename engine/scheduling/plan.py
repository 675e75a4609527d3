"""`StepPlan`, which the scheduler hands to a runner, and the protocols of both sides; it has no behaviour of its own.

It never holds a tensor. Next to read: scheduler.py, which makes plans and commits results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

from headrace.engine.errors import PromptTooLong, RequestFailed
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.asked import Asked, Sampling
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.shaping import Grammar, LogitsProcessor, Report, Reporting, Shaping

__all__ = [
    "Ability",
    "Capacity",
    "Emission",
    "GivenTokens",
    "NewRow",
    "Committed",
    "PageEntry",
    "RowOptions",
    "Runner",
    "Step",
    "StepPlan",
    "Work",
]

Ability: TypeAlias = Literal["hooks", "shaping", "logprobs", "grammar", "pooling"]
"""Optional features of a runner; each corresponds to parts of `RowOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Limits of a device, measured or configured once before the first request."""

    num_pages: int
    page_size: int
    max_rows: int
    """Maximum number of requests in one step."""
    max_batched_tokens: int
    """Maximum number of tokens in one step, prefill and decode together; at least `max_rows`, so that every decode
    fits."""
    max_context: int
    """Maximum number of tokens of prompt and completion together."""
    vocab_size: int
    """Width of the logits."""
    window: int | None = None
    """Longest attention window of the layers, in tokens; None if some layer attends to all tokens."""

    def check_length(self, prompt_len: int, room: int = 1, *, whole: bool = False) -> int:
        """Return the length in tokens to which a prompt of `prompt_len` tokens may grow, which leaves at least `room`.

        Args:
            prompt_len: Tokens of the prompt.
            room: Tokens that must fit behind the prompt.
            whole: Whether the pages of all tokens are held at once, although a window would let some go.

        Raises:
            PromptTooLong: The context or the page pool never has room for `room` more tokens.
        """
        pool_tokens = self.num_pages * self.page_size + room  # the last token is never written
        if self.window is not None and not whole and self.num_pages > -(-self.window // self.page_size):
            pool_tokens = self.max_context  # pages that slide out of the window are used again
        most = min(self.max_context, pool_tokens)
        if prompt_len > most - room:
            what = "context" if most == self.max_context else "page pool"
            why = "leave no room for one more in" if room else "are more than fit"
            error = PromptTooLong(
                f"prompt: {prompt_len} tokens {why} the {what} of {most}",
                field="prompt",
                value=prompt_len,
                limit=most - room,
            )
            error.context = most
            error.tokens = prompt_len
            error.room = room
            raise error
        return most


class Work(NamedTuple):
    """A request's share of a step: compute `num_tokens` tokens from position `start`."""

    request: Request
    row: int
    start: int
    num_tokens: int
    samples: bool
    """Whether a new token is sampled at `start + num_tokens`, because the last computed token is the last known one.
    False for a pooled request."""


class NewRow(NamedTuple):
    """A row that a request takes, with what the device must know of the request from now on."""

    row: int
    start: int
    """Position of `tokens[0]`; the tokens before it are already in the row's pages, and so may be some behind it."""
    tokens: list[int]
    sampling: Sampling
    slot: int = -1
    """Slot of the row's adapter for as long as the request holds the row; -1 for none."""
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the request; after sampling one, the device may skip the row in steps launched ahead."""
    speculates: bool = False
    """Whether steps may verify drafts for the row. The device then knows how many tokens the row has, and positions in
    `StepPlan.starts` are upper bounds, by which pages were made ready."""


class RowOptions(NamedTuple):
    """Options of a new row beyond its sampling; a row without such options has no entry."""

    row: int
    tokens: list[int]
    """All known tokens from position 0, cached ones included, since penalties count them."""
    prompt_len: int
    shaping: Shaping | None
    reporting: Reporting | None
    grammar: Grammar | None
    pooling: Pooling | None = None
    processor: LogitsProcessor | None = None
    """Caller's hook that processes the logits; the host then chooses the row's tokens from its result."""
    jumps: bool = False
    """Whether steps report the tokens that `grammar` forces after the one that they choose."""

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return the options of a request that has just been given its row."""
        asked = request.asked
        return cls(
            request.row, list(request.tokens), request.prompt_len,
            asked.shaping, asked.reporting, asked.grammar, asked.pooling, asked.processor, asked.jumps,
        )  # fmt: skip

    @staticmethod
    def needed(asked: Asked) -> bool:
        """Return whether more than the sampling is asked of the device."""
        options = (asked.shaping, asked.reporting, asked.grammar, asked.pooling, asked.processor)
        return any(each is not None for each in options)


class GivenTokens(NamedTuple):
    """Tokens of a row that the host chose; an empty list only lets a row go on that was `NoToken.LATE`."""

    row: int
    start: int
    """Position of the first token."""
    tokens: list[int]


class PageEntry(NamedTuple):
    """Assignment of `page` to entry `place` of a row's block table."""

    row: int
    place: int
    page: int


@dataclass(slots=True)
class StepPlan:
    """One step, in this order: spills, left rows, new rows, given tokens, page entries, copies, fetches, work items.

    Running requests come before newly admitted ones, and among running requests decodes before prefill chunks. If two
    page entries set the same place, the last one wins. A plan is not changed after `plan()` has returned it.
    """

    step: int
    left_rows: list[int] = field(default_factory=list)
    """Rows that requests with options have left since the last plan; the device may forget their options."""
    new_rows: list[NewRow] = field(default_factory=list)
    options: list[RowOptions] = field(default_factory=list)
    """Options of new rows that need more than sampling; only sent to runners with the abilities that they need."""
    given: list[GivenTokens] = field(default_factory=list)
    entries: list[PageEntry] = field(default_factory=list)
    spills: list[tuple[int, int]] = field(default_factory=list)
    """(page, host place) pairs to copy to host memory; only for runners that swap."""
    fetches: list[tuple[int, int]] = field(default_factory=list)
    """(host place, page) pairs to copy back to the device."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source page, destination page) pairs, copied before this step writes anything."""
    decodes: list[Request] = field(default_factory=list)
    """Requests that compute one token and sample the next, which are the first work items. Nearly all work items are
    decodes, so they are kept in columns and turned into `Work` values only on request."""
    rows: list[int] = field(default_factory=list)
    """Rows of `decodes`, in order."""
    starts: list[int] = field(default_factory=list)
    """Positions of the tokens that `decodes` compute, in order; upper bounds of rows that speculate."""
    drafts: list[int] = field(default_factory=list)
    """Most drafts that the step may verify for each of `decodes`, in order, for whose keys and values there are pages;
    empty if it verifies none. A row yields one token and another for each draft that was right."""
    others: list[Work] = field(default_factory=list)
    """Work items that follow `decodes`."""
    depth: int = 0
    """Largest number of drafts that a row of the step may verify."""
    tokens: int = 0
    """Number of tokens that the work items compute, drafts included."""
    alone: bool = False
    """Whether the only work item is of a deterministic request; one token is then computed as a decode."""
    _works: list[Work] | None = None

    @property
    def works(self) -> list[Work]:
        """All work items of a finished plan, as a list."""
        if not self.decodes:
            return self.others
        if self._works is None:
            self._works = list(self.each_work())
        return self._works

    @property
    def is_bare(self) -> bool:
        """Whether the plan has only decodes and page entries, as most plans do."""
        of_prompts = self.others or self.new_rows or self.options or self.left_rows
        of_pages = self.copies or self.spills or self.fetches
        return bool(self.decodes) and not (of_prompts or of_pages or self.given)

    @property
    def size(self) -> int:
        """Number of work items."""
        return len(self.decodes) + len(self.others)

    def each_work(self) -> Iterator[Work]:
        """Yield the work items in order."""
        for request, row, start in zip(self.decodes, self.rows, self.starts, strict=True):
            yield Work(request, row, start, 1, True)
        yield from self.others

    def shares(self) -> Iterator[tuple[Request, int, int, bool]]:
        """Yield (request, start, number of tokens, whether it samples) of each work item."""
        decodes = zip(self.decodes, self.starts, itertools.repeat(1), itertools.repeat(True), strict=False)
        others = ((work.request, work.start, work.num_tokens, work.samples) for work in self.others)
        return itertools.chain(decodes, others)


class Emission(NamedTuple):
    """Event of one request: a token, an end or a failure."""

    request: Request
    token: int | None
    finish_reason: FinishReason | None
    error: RequestFailed | None = None
    """Error with which the request failed; it then has no finish reason."""
    report: Report | None = None
    """Log-probabilities at the token, if the request asked for them."""
    pooled: Any = None
    """Result of pooling, with which the request ended: an array or tensor of the runner."""


class Committed(NamedTuple):
    """Result of committing a step: a token, an end or a failure for each of its requests."""

    requests: Sequence[Request]
    """Requests that gained one token and go on. They are the majority, so they are kept in columns."""
    tokens: Sequence[int]
    """Tokens that `requests` gained, in order."""
    others: list[Emission]

    def pieces(self, size: int) -> Iterator[Committed]:
        """Yield the result in parts of at most `size` requests."""
        for start in range(0, len(self.requests), size):
            yield Committed(self.requests[start : start + size], self.tokens[start : start + size], [])
        for start in range(0, len(self.others), size):
            yield Committed((), (), self.others[start : start + size])

    def each(self) -> Iterator[Emission]:
        """Yield all emissions, one for each request."""
        for request, token in zip(self.requests, self.tokens, strict=True):
            yield Emission(request, token, None)
        yield from self.others


class Step(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block the calling thread until the step is done, and return its result.

        Raises:
            Exception: The step failed; what it wrote is undefined.
        """
        ...


class Runner(Protocol):
    """A device that carries out plans, in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> Step:
        """Enqueue `plan` without waiting for it."""
        ...

    def close(self) -> None:
        """Return the device's memory and join its threads; every launched step has been waited for."""
        ...
