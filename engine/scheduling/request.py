"""`Request`: one choice of one generation as the scheduler sees it; holds progress, never decides anything.

Next to read: plan.py, which the scheduler fills with work for its requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from headrace.adapters.slots import AdapterVersion
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.shaping import Grammar, LogitsProcessor, Report, Reporting, Shaping

__all__ = ["Request", "Sampling", "State", "branch", "goes_on"]


class State(Enum):
    """State of a request in the scheduler. Preemption returns RUNNING to WAITING; FINISHED is final."""

    WAITING = auto()
    """The request is queued and holds neither row nor pages."""
    RUNNING = auto()
    """The request holds a row and pages and is planned."""
    PAUSED = auto()
    """The reader is behind: the request is not planned, and keeps row and pages unless preempted; it is preempted
    first."""
    FINISHED = auto()
    """The request has its finish reason; row and pages are released when its last launched step is committed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rules by which a row chooses its next token: the part of `SamplingParams` that a runner needs."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Seed of the noise, which depends on this and the token's position alone."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One choice of a generation: its tokens, its place on the device and its progress.

    Progress obeys `computed <= planned <= known` and `len(tokens) <= known <= limit`. A request owes
    `known - planned` tokens; prefill, decode, resuming after preemption and prefix hits are all this one difference.
    """

    tokens: list[int]
    """Token ids of the prompt, then of every committed token."""
    prompt_len: int
    limit: int
    """Value of `len(tokens)` at which the request ends with `length`."""
    asked: int = 0
    """Value of `limit` before the context and the pool lowered it."""
    sampling: Sampling
    shaping: Shaping | None = None
    reporting: Reporting | None = None
    grammar: Grammar | None = None
    alone: bool = False
    """Whether the request is computed in steps of its own, which depend on its tokens alone (alone.py)."""
    jumps: bool = False
    """Whether tokens that `grammar` forces are accepted at once and computed together."""
    processor: LogitsProcessor | None = None
    """Caller's hook, which runs on the host between any two tokens: the next is planned only when the last is known."""
    pooling: Pooling | None = None
    """Kind of result wanted of the hidden states; the request then samples nothing and ends when its tokens are
    computed."""
    stop_ids: frozenset[int] = frozenset()
    wears: AdapterVersion | None = None
    """Version of `adapter` that the row uses: the one that was loaded when the request arrived."""
    root: bytes = b""
    """First link of the prefix hash chain: adapter and tenant salt."""
    priority: int = 0
    """Priority of service; lower is served first."""
    tenant: str | None = None
    adapter: str | None = None
    arrived: float = 0.0
    """Time of arrival in seconds, on the step loop's clock."""
    deadline: float | None = None
    """Latest end of the request, in seconds on the step loop's clock; None for no deadline."""
    leader: Request | None = None
    """The choice of the same prompt (`n > 1`), or the request branched from, whose pages this one forks."""
    forked: bool = False
    """Whether some page of this request may be shared and only partly written."""
    before: Request | None = None
    """Previous turn of the conversation, whose tokens this one begins with; None once this request has ended."""
    keepers: int = 0
    """Number of streams that may continue this request: while there are any, its pages are kept after its end if
    possible."""
    holds: bool = False
    """Whether the request pauses at its limit, holding its pages for others to fork, until it is ended."""
    elder: int = -1
    """Id of the request that this one continues and whose place in the order it has; -1 for none."""

    id: int = -1
    """Id given when the scheduler takes the request in; later ones are larger."""
    state: State = State.WAITING
    row: int = -1
    pages: list[int] = field(default_factory=list)
    """Block table: page `i` holds the tokens from position `(first_page + i) * page_size`."""
    first_page: int = 0
    """Number of leading pages that the request does not hold, because they slid out of the attention window."""
    known: int = 0
    """Number of tokens that exist: those in `tokens`, and those that a launched step is sampling."""
    planned: int = 0
    """Number of tokens whose keys and values are written by the steps planned so far."""
    computed: int = 0
    """Number of tokens whose keys and values are written by the steps committed so far."""
    in_flight: int = 0
    """Number of planned steps that are not committed."""
    discard: int = 0
    """Number of steps in flight whose result must be dropped, because they read pages of a failed step."""
    ready: int = 0
    """Value of `planned` before the latest step that planned this request."""
    latest_step: int = -1
    smooth: int = 0
    """Position before which tokens may be planned and accepted without further checks: pages exist up to here, the
    limit is further on, and the request has no special options."""
    keys: list[bytes] = field(default_factory=list)
    """Prefix hash of each full page of `tokens`."""
    registered: int = 0
    """Number of leading pages whose hash was offered to the page pool."""
    found: int = 0
    """Number of leading tokens in the cached pages last found for the request; the last page may be partly full."""
    kept: list[bytes] = field(default_factory=list)
    """Keys of the pages that are kept for the next turn of the conversation."""
    cached: int = 0
    """Number of prompt tokens found in the prefix cache or forked when the request was first admitted."""
    prompt_reports: list[Report] = field(default_factory=list)
    """Reports on the prompt tokens computed so far, from position 1, if `reporting` wants them."""
    awaited: int = -1
    """Step after which the host still has to choose the request's token; -1 for none."""
    unsent: int = 0
    """Number of trailing `tokens` that the host chose and the device does not know yet."""
    is_held: bool = False
    """Whether the row was `NoToken.LATE`, so that the device skips it until it is told to go on."""
    copied: int = -1
    """Latest step that copies or fetches a page for the request; only later steps may copy that page."""
    stored: int = 0
    """Number of leading tokens whose keys and values are in host memory, since the request was swapped out."""
    places: list[int] = field(default_factory=list)
    """Places in host memory: place `i` holds page `i`."""
    spoilt: bool = False
    """Whether some of the request's pages were written by a failed step, or computed from such pages."""
    preemptions: int = 0
    leaving: bool = False
    """Whether the request was preempted while in flight, so that it returns to WAITING at its last commit."""
    finish_reason: FinishReason | None = None
    failed: bool = False

    def __post_init__(self) -> None:
        """Count the prompt as known."""
        self.known = len(self.tokens)

    @property
    def order(self) -> tuple[int, int, int]:
        """Service order, lowest first; the largest is preempted first."""
        return (self.priority, self.id if self.elder < 0 else self.elder, self.id)

    @property
    def has_options(self) -> bool:
        """Whether the request asks for more than its sampling."""
        asked = (self.shaping, self.reporting, self.grammar, self.pooling, self.processor)
        return any(each is not None for each in asked)

    @property
    def slot(self) -> int:
        """LoRA slot that the row uses; -1 for none."""
        return -1 if self.wears is None else self.wears.slot

    @property
    def virtual_tokens(self) -> int:
        """Number of leading tokens that belong to the adapter and not to the prompt."""
        return 0 if self.wears is None else self.wears.virtual_tokens

    @property
    def plannable(self) -> bool:
        """Whether the request runs and was not preempted, which may also happen while a step is planned."""
        return self.state is State.RUNNING and not self.leaving

    @property
    def is_decodable(self) -> bool:
        """Whether the step of the request's next token may be planned."""
        return self.plannable and (self.processor is None or self.known == len(self.tokens))

    @property
    def can_go_on(self) -> bool:
        """Whether a step could compute some of the request's tokens now, if pages are available."""
        owed = self.known - self.planned
        decodes = self.is_decodable and (self.known < self.limit or self.pooling is not None)
        return self.plannable and (owed > 1 or (owed == 1 and decodes))

    @property
    def cacheable(self) -> int:
        """Number of leading tokens that may come from the prefix cache, which holds neither logits nor hidden states.

        Tokens that are still to be reported or pooled must be computed, and so must all tokens of a request that
        computes alone, since the cache does not tell the shapes of its steps. The last token is always computed.
        """
        if self.alone or (self.pooling is not None and not self.pooling.spares):
            return 0
        if self.reporting is not None and self.reporting.prompt is not None:
            if len(self.prompt_reports) < self.prompt_len - 1:
                return len(self.prompt_reports)
        return len(self.tokens) - 1

    def take_prompt_reports(self, start: int, reports: Sequence[Report]) -> None:
        """Keep reports on the tokens from position `start + 1`; those known from before a preemption stay."""
        self.prompt_reports += reports[len(self.prompt_reports) - start :]

    def go_back(self, place: int) -> None:
        """Take back planned tokens after a committed step chose none at `place` and those in flight skipped the row.

        The token before it is computed again, for its logits, unless a grammar has forced the one at `place` meanwhile.
        A request that has ended may know fewer tokens than `place`.
        """
        self.known = len(self.tokens)
        self.unsent = max(0, self.known - place)
        self.computed = self.planned = min(self.known, place if self.unsent else place - 1)
        self.discard = self.in_flight
        self.smooth = 0
        self.is_held = True

    def room(self, page_size: int) -> int:
        """Return the position up to which the request has pages of `page_size` tokens."""
        return (self.first_page + len(self.pages)) * page_size

    def launched_before(self, step: int) -> int:
        """Return the number of tokens planned by steps before `step`, which that step may therefore read."""
        return self.ready if self.latest_step == step else self.planned


def goes_on(held: Request, token: int) -> Request:
    """Return a request that forks the pages of `held` and goes on with `token` in place of its sampled one."""
    tokens = [*held.tokens[:-1], token]
    return Request(
        tokens=tokens,
        prompt_len=len(tokens),
        limit=len(tokens) + 1,
        sampling=held.sampling,
        reporting=held.reporting,
        wears=held.wears,
        root=held.root,
        priority=held.priority,
        tenant=held.tenant,
        adapter=held.adapter,
        arrived=held.arrived,
        deadline=held.deadline,
        leader=held,
        forked=True,
        holds=True,
        elder=held.id if held.elder < 0 else held.elder,
    )


def branch(request: Request, count: int, seed: int) -> Request:
    """Return a request that starts with the first `count` tokens of `request`, forks its pages and samples anew."""
    reporting = request.reporting
    return Request(
        tokens=request.tokens[:count],
        prompt_len=request.prompt_len,
        limit=request.limit,
        sampling=replace(request.sampling, seed=seed),
        shaping=request.shaping,
        reporting=None if reporting is None or reporting.completion is None else Reporting(reporting.completion),
        grammar=request.grammar,
        alone=request.alone,
        jumps=request.jumps,
        processor=request.processor,
        stop_ids=request.stop_ids,
        wears=request.wears,
        root=request.root,
        priority=request.priority,
        tenant=request.tenant,
        adapter=request.adapter,
        deadline=request.deadline,
        leader=request,
        forked=True,
        keepers=1,
    )
