"""`Request`: one choice of one generation as the scheduler sees it; holds progress, never decides anything.

Next to read: plan.py, what the scheduler tells a runner about its requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from headrace.adapters.slots import AdapterVersion
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.shaping import Grammar, LogitsProcessor, Report, Reporting, Shaping

__all__ = ["Request", "Sampling", "State", "branch", "goes_on"]


class State(Enum):
    """Where a request stands. Preemption returns RUNNING to WAITING; FINISHED is final."""

    WAITING = auto()
    """Queued; holds neither row nor pages."""
    RUNNING = auto()
    """Holds a row and pages and is planned."""
    PAUSED = auto()
    """The reader is behind: the request is not planned, and keeps row and pages unless preempted, which it is first."""
    FINISHED = auto()
    """Has its finish reason; row and pages go when its last launched step is committed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row chooses its next token: what a runner needs of `SamplingParams`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Noise depends on this and the token's position alone."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One choice of a generation: its tokens, its place on the device and how far it has come.

    Progress obeys `computed <= planned <= known` and `len(tokens) <= known <= limit`. A request owes
    `known - planned` tokens; prefill, decode, resuming after preemption and prefix hits are all this one difference.
    """

    tokens: list[int]
    """Prompt, then every committed token."""
    prompt_len: int
    limit: int
    """`len(tokens)` at which the request ends with `length`."""
    asked: int = 0
    """What `limit` was before the context and the pool lowered it."""
    sampling: Sampling
    shaping: Shaping | None = None
    reporting: Reporting | None = None
    grammar: Grammar | None = None
    alone: bool = False
    """Computed in steps of its own, which depend on its tokens alone (alone.py), from its first token on."""
    jumps: bool = False
    """Tokens that `grammar` forces are taken at once, and computed together."""
    processor: LogitsProcessor | None = None
    """Needs the host between any two tokens: the next is planned only when the last is known."""
    pooling: Pooling | None = None
    """What it wants of its hidden states; it then samples nothing and ends when its tokens are computed."""
    stop_ids: frozenset[int] = frozenset()
    wears: AdapterVersion | None = None
    """What its row wears: the version of `adapter` that was loaded when it arrived."""
    root: bytes = b""
    """First link of the prefix hash chain: adapter and tenant salt."""
    priority: int = 0
    """Lower is served first."""
    tenant: str | None = None
    adapter: str | None = None
    arrived: float = 0.0
    """Seconds on the step loop's clock."""
    deadline: float | None = None
    """When it ends at the latest, on the same clock."""
    leader: Request | None = None
    """The choice of the same prompt (`n > 1`), or the request branched from, whose pages this one forks."""
    forked: bool = False
    """Some page of this request may be shared and only partly written."""
    before: Request | None = None
    """Until it has started: the turn of a conversation that it goes on after, whose tokens it begins with."""
    keepers: int = 0
    """Who may go on after it: while there are any, its pages are kept once it has ended, as far as there is room."""
    holds: bool = False
    """At its limit it pauses, holding its pages for others to fork, until someone ends it."""
    elder: int = -1
    """Id of the request for which this one goes on, in whose place it is served; -1 for none."""

    id: int = -1
    """Given when the scheduler takes the request in; later ones are larger."""
    state: State = State.WAITING
    row: int = -1
    pages: list[int] = field(default_factory=list)
    """The page table: page `i` holds positions `i * page_size ..`."""
    known: int = 0
    """Tokens that exist: those in `tokens`, and those a launched step is sampling."""
    planned: int = 0
    """Tokens whose keys and values are written by the steps planned so far."""
    computed: int = 0
    """Tokens whose keys and values are written by the steps committed so far."""
    in_flight: int = 0
    """Planned steps that are not committed."""
    discard: int = 0
    """Steps in flight whose result must be dropped: they read pages of a failed step."""
    ready: int = 0
    """`planned` before the latest step that planned this request."""
    latest_step: int = -1
    smooth: int = 0
    """The token of each position before this one may be planned, and the next one taken, without another look: there
    are pages up to here, the limit is further on, and nothing about the request is out of the ordinary."""
    keys: list[bytes] = field(default_factory=list)
    """Prefix hash of each full page of `tokens`."""
    registered: int = 0
    """Leading pages whose hash was offered to the page pool."""
    found: int = 0
    """Leading tokens in the pages that were last found for it, the last of them perhaps only partly full."""
    kept: list[bytes] = field(default_factory=list)
    """Keys of the pages that are kept for what goes on after it."""
    cached: int = 0
    """Prompt tokens found in the prefix cache or forked when the request was first admitted."""
    prompt_reports: list[Report] = field(default_factory=list)
    """On the tokens of the prompt from position 1, as far as they are computed, where `reporting` wants them."""
    awaited: int = -1
    """The step after which the host still chooses its token; -1 for none."""
    unsent: int = 0
    """Trailing `tokens` that the host chose and the device does not know yet."""
    is_held: bool = False
    """Whether the row was `LATE`, so that the device leaves it alone until it is told to go on."""
    copied: int = -1
    """The latest step that copies or fetches a page for it, which only later ones may copy."""
    stored: int = 0
    """Leading tokens whose keys and values the host pool holds, since the request was swapped out."""
    places: list[int] = field(default_factory=list)
    """Where: place `i` holds page `i`."""
    spoilt: bool = False
    """Some of its pages were written by a failed step, or from such pages."""
    preemptions: int = 0
    leaving: bool = False
    """Chosen as a victim while in flight: returns to WAITING at its last commit."""
    finish_reason: FinishReason | None = None
    failed: bool = False

    def __post_init__(self) -> None:
        """Count the prompt as known."""
        self.known = len(self.tokens)

    @property
    def order(self) -> tuple[int, int, int]:
        """Service order: lower first; the largest is the first victim."""
        return (self.priority, self.id if self.elder < 0 else self.elder, self.id)

    @property
    def has_options(self) -> bool:
        """Whether it asks for more than its sampling."""
        asked = (self.shaping, self.reporting, self.grammar, self.pooling, self.processor)
        return any(each is not None for each in asked)

    @property
    def slot(self) -> int:
        """The slot of what its row wears; -1 for none."""
        return -1 if self.wears is None else self.wears.slot

    @property
    def virtual_tokens(self) -> int:
        """Leading tokens that are not of the prompt but of what its row wears."""
        return 0 if self.wears is None else self.wears.virtual_tokens

    @property
    def plannable(self) -> bool:
        """Running and staying so: preemption in the middle of planning makes this False."""
        return self.state is State.RUNNING and not self.leaving

    @property
    def is_decodable(self) -> bool:
        """Whether the step of its next token may be planned."""
        return self.plannable and (self.processor is None or self.known == len(self.tokens))

    @property
    def can_go_on(self) -> bool:
        """Whether a step could compute something of it now, if there are pages."""
        owed = self.known - self.planned
        decodes = self.is_decodable and (self.known < self.limit or self.pooling is not None)
        return self.plannable and (owed > 1 or (owed == 1 and decodes))

    @property
    def cacheable(self) -> int:
        """Leading tokens that may come from the prefix cache: it holds no logits, so none that are yet to be reported.

        Nor does it hold hidden states, so none that are pooled. Nor does it say in steps of which shapes its pages were
        computed. The last token is always computed, for its logits.
        """
        if self.alone or (self.pooling is not None and not self.pooling.spares):
            return 0
        if self.reporting is not None and self.reporting.prompt is not None:
            if len(self.prompt_reports) < self.prompt_len - 1:
                return len(self.prompt_reports)
        return len(self.tokens) - 1

    def take_prompt_reports(self, start: int, reports: list[Report]) -> None:
        """Keep reports on the tokens from position `start + 1`; those known from before a preemption stay."""
        self.prompt_reports += reports[len(self.prompt_reports) - start :]

    def go_back(self, place: int) -> None:
        """A step that is committed chose no token at `place`, and those in flight have left the row alone.

        The token before it is computed again, for its logits, unless a grammar has forced the one at `place` meanwhile.
        A request that has ended may know fewer.
        """
        self.known = len(self.tokens)
        self.unsent = max(0, self.known - place)
        self.computed = self.planned = min(self.known, place if self.unsent else place - 1)
        self.discard = self.in_flight
        self.smooth = 0
        self.is_held = True

    def launched_before(self, step: int) -> int:
        """Tokens planned by steps before `step`, which that step may therefore read."""
        return self.ready if self.latest_step == step else self.planned


def goes_on(held: Request, token: int) -> Request:
    """A request that forks the pages of a held one and goes on with `token` in place of the one that it sampled."""
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
