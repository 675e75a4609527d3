"""`StepPlan`: the one value that crosses from the scheduler to a runner, and the protocols of both sides of that line.

Owns no behaviour and never holds a tensor. Next to read: scheduler.py, which makes plans and commits results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from headrace.engine.errors import PromptTooLong, RequestFailed
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.request import Request, Sampling
from headrace.engine.scheduling.shaping import Grammar, LogitsProcessor, Report, Reporting, Shaping

__all__ = [
    "CHOSEN_LATER",
    "LATE",
    "NON_FINITE",
    "NOTHING_LEFT",
    "Ability",
    "Capacity",
    "Emission",
    "GivenTokens",
    "NewRow",
    "Outcome",
    "PageEntry",
    "Resizable",
    "RowOptions",
    "Runner",
    "Sleeping",
    "Step",
    "StepPlan",
    "Swapping",
    "Work",
]

Ability: TypeAlias = Literal["hooks", "shaping", "logprobs", "grammar", "pooling"]
"""What not every runner can do: the parts of `RowOptions`."""

NON_FINITE = -1
"""What a step returns instead of a token where the logits held NaN or infinity."""
NOTHING_LEFT = -2
"""What a step returns instead of a token where the masks of the row's shaping left none."""

CHOSEN_LATER = -3
"""What a step returns instead of a token that the host chooses from the logits; `ReportedTokens.choices` has how."""
LATE = -4
"""What a step returns instead of a token where the mask of the row's grammar was not there in time. Nothing was chosen,
and the device leaves the row alone until it is given tokens, or none, from that place on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a device can hold; measured or configured once, before the first request."""

    num_pages: int
    page_size: int
    max_rows: int
    """Requests in one step."""
    max_batched_tokens: int
    """Tokens in one step, prefill and decode together; at least `max_rows`, so that every decode fits."""
    max_context: int
    """Tokens of prompt and completion together."""
    vocab_size: int
    """Width of the logits."""

    def check_length(self, prompt_len: int, room: int = 1) -> int:
        """The most tokens that a prompt of so many tokens may grow to, which is at least by `room`.

        Raises:
            PromptTooLong: It leaves no room for so many tokens, ever.
        """
        pool_tokens = self.num_pages * self.page_size + room  # the last token is never written
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
            error.context, error.tokens, error.room = most, prompt_len, room
            raise error
        return most


class Work(NamedTuple):
    """One request's share of a step: compute `num_tokens` tokens from position `start`."""

    request: Request
    row: int
    start: int
    num_tokens: int
    samples: bool
    """The last computed position is the last known one, so a new token is sampled at `start + num_tokens`.

    Never where the request is pooled.
    """


class NewRow(NamedTuple):
    """A request takes a row: what the device must know of it from now on."""

    row: int
    start: int
    """Position of `tokens[0]`; what lies before it is already in the row's pages."""
    tokens: list[int]
    sampling: Sampling
    slot: int = -1
    """Slot of the adapter that the row has for as long as the request holds it; -1 for none."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the request: once the device has sampled one, steps launched ahead may leave the row alone."""


class RowOptions(NamedTuple):
    """What a new row asks beyond its sampling; rows that ask nothing more have no such entry."""

    row: int
    tokens: list[int]
    """All known tokens from position 0, those that the cache spared included: penalties count them."""
    prompt_len: int
    shaping: Shaping | None
    reporting: Reporting | None
    grammar: Grammar | None
    pooling: Pooling | None = None
    processor: LogitsProcessor | None = None
    """The host then chooses the row's tokens, from what this makes of the logits."""
    jumps: bool = False
    """Steps tell which tokens `grammar` forces behind the one that they choose."""

    @classmethod
    def of(cls, request: Request) -> Self:
        """What a request that has just got its row asks."""
        return cls(
            request.row, list(request.tokens), request.prompt_len,
            request.shaping, request.reporting, request.grammar, request.pooling, request.processor, request.jumps,
        )  # fmt: skip


class GivenTokens(NamedTuple):
    """Tokens of a row that the host chose, not the device; none where the row only goes on after it was `LATE`."""

    row: int
    start: int
    """Position of the first."""
    tokens: list[int]


class PageEntry(NamedTuple):
    """Entry `place` of a row's page table becomes `page`."""

    row: int
    place: int
    page: int


@dataclass(slots=True)
class StepPlan:
    """One step, in this order: spills, left rows, new rows, given tokens, page entries, page copies, fetches, works.

    Requests that were running come before those just admitted, and among them decodes before prefill chunks. An entry
    may set a place twice: the last one holds. Once `plan()` has returned it, nobody changes it.
    """

    step: int
    left_rows: list[int] = field(default_factory=list)
    """Rows that requests with options have left since the last plan; the options may be forgotten."""
    new_rows: list[NewRow] = field(default_factory=list)
    options: list[RowOptions] = field(default_factory=list)
    """Options of the new rows that ask for more than sampling; only runners that have the abilities get any."""
    given: list[GivenTokens] = field(default_factory=list)
    entries: list[PageEntry] = field(default_factory=list)
    spills: list[tuple[int, int]] = field(default_factory=list)
    """(page, place in the host pool) to keep there; only for runners that swap."""
    fetches: list[tuple[int, int]] = field(default_factory=list)
    """(place in the host pool, page) to bring back."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source page, destination page), copied before anything of this step is written."""
    decodes: list[Request] = field(default_factory=list)
    """Requests that compute one token and sample the next: the first works. They are the most, so they stand in columns
    and become `Work` values only for whoever wants those."""
    rows: list[int] = field(default_factory=list)
    """Rows of `decodes`, in order."""
    starts: list[int] = field(default_factory=list)
    """Positions of the tokens that `decodes` compute, in order."""
    others: list[Work] = field(default_factory=list)
    """The works after them."""
    tokens: int = 0
    """Sum over the works."""
    alone: bool = False
    """Whether the one work depends on nothing else: a single token is computed as a decode is, sampled or not."""
    _works: list[Work] | None = None

    @property
    def works(self) -> list[Work]:
        """All shares of the step, of a finished plan."""
        if not self.decodes:
            return self.others
        if self._works is None:
            self._works = list(self.each_work())
        return self._works

    @property
    def is_bare(self) -> bool:
        """Whether decodes and page entries are all that it has, as most plans do."""
        of_prompts = self.others or self.new_rows or self.options or self.left_rows
        of_pages = self.copies or self.spills or self.fetches
        return bool(self.decodes) and not (of_prompts or of_pages or self.given)

    @property
    def size(self) -> int:
        """How many works there are."""
        return len(self.decodes) + len(self.others)

    def each_work(self) -> Iterator[Work]:
        """The works, one after another."""
        for request, row, start in zip(self.decodes, self.rows, self.starts, strict=True):
            yield Work(request, row, start, 1, True)
        yield from self.others

    def shares(self) -> Iterator[tuple[Request, int, int, bool]]:
        """(request, start, number of tokens, whether it samples) of each work."""
        decodes = zip(self.decodes, self.starts, itertools.repeat(1), itertools.repeat(True), strict=False)
        others = ((work.request, work.start, work.num_tokens, work.samples) for work in self.others)
        return itertools.chain(decodes, others)


class Emission(NamedTuple):
    """What happened to one request."""

    request: Request
    token: int | None
    finish_reason: FinishReason | None
    error: RequestFailed | None = None
    """Why the request failed; it then has no finish reason."""
    report: Report | None = None
    """Log-probabilities at the token, where the request wants them."""
    pooled: Any = None
    """What came of the hidden states, where the request ended with that: an array or tensor of the runner's making."""


class Outcome(NamedTuple):
    """What a commit means for the requests of its step."""

    requests: Sequence[Request]
    """Requests that gained one token and go on. They are the most, so they stand in columns."""
    tokens: Sequence[int]
    """Tokens that `requests` gained, in order."""
    others: list[Emission]

    def pieces(self, size: int) -> Iterator[Outcome]:
        """Yield the outcome in parts of at most `size` requests."""
        for start in range(0, len(self.requests), size):
            yield Outcome(self.requests[start : start + size], self.tokens[start : start + size], [])
        for start in range(0, len(self.others), size):
            yield Outcome((), (), self.others[start : start + size])

    def each(self) -> Iterator[Emission]:
        """All emissions, one after another."""
        for request, token in zip(self.requests, self.tokens, strict=True):
            yield Emission(request, token, None)
        yield from self.others


class Step(Protocol):
    """A launched step."""

    def wait(self) -> Sequence[int]:
        """Block the calling thread until the step is done.

        Returns:
            One vocabulary id for each work of the plan, in order; `NON_FINITE` where the logits were not finite,
            `NOTHING_LEFT`, `CHOSEN_LATER` or `LATE` where there is none for those reasons; any value where the work
            samples nothing, or its row is left alone since it was `LATE`. A `ReportedTokens` where a row wants more
            than a token.

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


@runtime_checkable
class Swapping(Protocol):
    """What a runner can do besides if it can keep pages in host memory: the spills and fetches of a plan."""

    def open_host_pool(self, places: int) -> float:
        """Have room for so many pages there; called once, before the first launch.

        Returns:
            Seconds that moving one page takes, one way.

        Raises:
            Exception: The host has not so much memory.
        """
        ...


@runtime_checkable
class Resizable(Protocol):
    """What a runner can do besides if its pages may become fewer or more while it lives."""

    @property
    def most_pages(self) -> int:
        """Number of pages that the runner can hold at most."""
        ...

    def resize(self, num_pages: int) -> None:
        """Have room for pages 0 .. num_pages, and give back the memory of the others; blocks for some milliseconds.

        No step is in flight, and nobody holds a page from `num_pages` on. What the pages that stay hold is kept.

        Raises:
            Exception: The device has not so much memory, as an out-of-memory error; all is as it was.
        """
        ...


@runtime_checkable
class Sleeping(Protocol):
    """What a runner can do besides if it can do without its memory for a while. No step is in flight."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Give back the memory of all pages, and that of the weights; blocks. May be called again, to keep less.

        Args:
            keep_weights: In host memory, if they are not there anyway.

        Raises:
            Exception: The host has not so much memory, as an out-of-memory error; `wake` still works.
        """
        ...

    def wake(self, num_pages: int) -> None:
        """Have the weights again, from wherever they are, and so many empty pages; blocks.

        Raises:
            ModelRejected: The model's files cannot be used any more; it sleeps on.
            Exception: The device has not so much memory, as an out-of-memory error; it sleeps on.
        """
        ...
