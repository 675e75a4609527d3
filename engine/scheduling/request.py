"""`Request`: how far one choice of one generation got and where it lies; it holds progress and never decides anything.

What was asked of it is a frozen value beside it (asked.py). Next to read: plan.py, which the scheduler fills with work
for its requests.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto

from headrace.engine.events import FinishReason
from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.options.committing import AtCommit
from headrace.engine.scheduling.shaping import Report

__all__ = ["Placement", "Request", "State"]


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


@dataclass(slots=True)
class Placement:
    """Where the keys and values of a request lie: its pages on the device and in host memory, and their hashes."""

    pages: list[int] = field(default_factory=list)
    """Block table: page `i` holds the tokens from position `(first_page + i) * page_size`."""
    first_page: int = 0
    """Number of leading pages that the request does not hold, because they slid out of the attention window."""
    keys: list[bytes] = field(default_factory=list)
    """Prefix hash of each full page of the request's tokens."""
    registered: int = 0
    """Number of leading pages whose hash was offered to the page pool."""
    found: int = 0
    """Number of leading tokens in the cached pages last found for the request; the last page may be partly full."""
    kept: list[bytes] = field(default_factory=list)
    """Keys of the pages that are kept for the next turn of the conversation."""
    copied: int = -1
    """Latest step that copies or fetches a page for the request; only later steps may copy that page."""
    stored: int = 0
    """Number of leading tokens whose keys and values are in host memory, since the request was swapped out."""
    host_places: list[int] = field(default_factory=list)
    """Places in host memory: place `i` holds the page with index `first_page + i`."""
    is_tainted: bool = False
    """Whether some of the pages were written by a failed step, or computed from such pages."""

    def slide_to(self, first: int) -> list[int]:
        """Drop the pages before the one with index `first` in the sequence, and return them for release."""
        count = max(0, first - self.first_page)
        dropped = self.pages[:count]
        del self.pages[:count]
        self.first_page += count
        return dropped


@dataclass(slots=True, eq=False)
class Request:
    """One choice of a generation: its tokens, its progress and its place on the device.

    Progress obeys `computed <= planned <= known` and `len(tokens) <= known <= limit`. A request owes
    `known - planned` tokens; prefill, decode, resuming after preemption and prefix hits are all this one difference.

    Steps in flight that verify drafts may yield fewer tokens than they have room for. Until they are committed, `known`
    and `planned` are upper bounds, which are too large by at most `reach`, and lie below the limit like exact values.

    Progress, row, limit and stop ids are fields of the request itself, not of a part of it: two loops read them for
    every row of every step, where one more attribute would cost some percent.
    """

    asked: Asked
    tokens: list[int]
    """Token ids of the prompt, then of every committed token."""
    _: KW_ONLY
    prompt_len: int = -1
    """Number of leading `tokens` that are the prompt; all of the first tokens if not given."""
    arrived: float = 0.0
    """Time of arrival in seconds, on the step loop's clock."""

    # What the request has to do with others.
    leader: Request | None = None
    """The choice of the same prompt (`n > 1`), or the request branched from, whose pages this one forks."""
    forked: bool = False
    """Whether some page of this request may be shared and only partly written."""
    before: Request | None = None
    """Previous turn of the conversation, whose tokens this one begins with; None once this request has ended."""
    streams: int = 0
    """Number of streams that may continue this request: while there are any, its pages are kept after its end if
    possible."""
    origin: int = -1
    """Id of the request that this one continues and whose place in the order it has; -1 for none."""

    # What the scheduler gives it.
    id: int = -1
    """Id given when the scheduler takes the request in; later ones are larger."""
    state: State = State.WAITING
    at_commit: AtCommit[Request] | None = None
    """What the request does with a committed step, if that is more than to gain a token."""
    limit: int = field(init=False)
    """Value of `len(tokens)` at which the request ends: `asked.limit`, or what the context and the pool can hold."""
    stop_ids: frozenset[int] = field(init=False)
    """Token ids that end the request: `asked.stop_ids`."""
    row: int = -1
    """Row on the device; -1 for none."""
    place: Placement = field(default_factory=Placement)

    # How far it got.
    known: int = field(init=False)
    """Number of tokens that exist: those in `tokens`, and those that a launched step is sampling."""
    planned: int = 0
    """Number of tokens whose keys and values are written by the steps planned so far."""
    computed: int = 0
    """Number of tokens whose keys and values are written by the steps committed so far."""
    reach: int = 0
    """Number of drafts that steps in flight verify, and so the most by which `known` and `planned` are too large."""
    in_flight: int = 0
    """Number of planned steps that are not committed."""
    discard: int = 0
    """Number of steps in flight whose result must be dropped, because they read pages of a failed step."""
    ready: int = 0
    """Value of `sure` before the latest step that planned this request."""
    latest_step: int = -1
    """Latest step that planned this request; -1 for none."""
    plain_until: int = 0
    """Position before which tokens may be planned and accepted without further checks: pages exist up to here, the
    limit is further on, and the request takes no part in the commit of every step."""
    cached: int = 0
    """Number of prompt tokens found in the prefix cache or forked when the request was first admitted."""
    prompt_reports: list[Report] = field(default_factory=list)
    """Reports on the prompt tokens computed so far, from position 1, if `asked.reporting` wants them."""
    awaited: int = -1
    """Step after which the host still has to choose the request's token; -1 for none."""
    unsent: int = 0
    """Number of trailing `tokens` that the host chose and the device does not know yet."""
    is_held: bool = False
    """Whether the row was `NoToken.LATE`, so that the device skips it until it is told to go on."""
    preemptions: int = 0
    """Number of times that the request lost its row and pages to another one."""
    leaving: bool = False
    """Whether the request was preempted while in flight, so that it returns to WAITING at its last commit."""
    finish_reason: FinishReason | None = None
    failed: bool = False
    """Whether the request ended with an error."""

    def __post_init__(self) -> None:
        """Count the first tokens as known, and copy from `asked` what is read for every row of every step."""
        self.known = len(self.tokens)
        self.limit = self.asked.limit
        self.stop_ids = self.asked.stop_ids
        if self.prompt_len < 0:
            self.prompt_len = len(self.tokens)

    @property
    def order(self) -> tuple[int, int, int]:
        """Service order, lowest first; the largest is preempted first."""
        return (self.asked.priority, self.id if self.origin < 0 else self.origin, self.id)

    @property
    def virtual_tokens(self) -> int:
        """Number of leading tokens that belong to the adapter and not to the prompt."""
        version = self.asked.version
        return 0 if version is None else version.virtual_tokens

    @property
    def is_plain(self) -> bool:
        """Whether steps that give the request a token may be planned and committed without further checks."""
        if self.forked or self.discard or self.asked.processor is not None:
            return False
        return self.at_commit is None or not self.at_commit.every_step

    @property
    def sure(self) -> int:
        """Number of leading tokens whose keys and values the steps planned so far write, whichever drafts are right."""
        return self.planned - self.reach

    @property
    def is_plannable(self) -> bool:
        """Whether the request runs, was not preempted, which may also happen while a step is planned, and is in order.

        Tokens that the device does not know yet are sent only once it is known where they begin.
        """
        return self.state is State.RUNNING and not self.leaving and not (self.unsent and self.reach)

    @property
    def is_decodable(self) -> bool:
        """Whether the step of the request's next token may be planned."""
        return self.is_plannable and (self.asked.processor is None or self.known == len(self.tokens))

    @property
    def cacheable(self) -> int:
        """Number of leading tokens that may come from the prefix cache, which holds neither logits nor hidden states.

        Tokens that are still to be reported or pooled must be computed, and so must all tokens of a request that
        computes alone, since the cache does not tell the shapes of its steps. The last token is always computed.
        """
        asked = self.asked
        if asked.alone or (asked.pooling is not None and not asked.pooling.spares):
            return 0
        if asked.reporting is not None and asked.reporting.prompt is not None:
            if len(self.prompt_reports) < self.prompt_len - 1:
                return len(self.prompt_reports)
        return len(self.tokens) - 1

    def go_back(self, place: int) -> None:
        """Forget what was planned since a committed step was late to choose the token at `place` (`NoToken.LATE`).

        Steps in flight skip the row, so their results are dropped. The token before `place` is computed again, for its
        logits, unless a grammar has forced the one at `place` meanwhile. A request that has ended may know fewer tokens
        than `place`.
        """
        self.known = len(self.tokens)
        self.unsent = max(0, self.known - place)
        self.computed = self.planned = min(self.known, place if self.unsent else place - 1)
        self.discard = self.in_flight
        self.reach = 0
        self.plain_until = 0
        self.is_held = True

    def settle(self, drafts: int, tokens: int) -> None:
        """Make bounds closer: a step that verified `drafts` drafts yielded `tokens` tokens, at least one."""
        missed = drafts + 1 - tokens
        self.reach -= drafts
        self.planned -= missed
        self.known -= missed
        if (ahead := len(self.tokens) - self.known) > 0:  # tokens that a grammar forced, which the step did not reach
            self.unsent += ahead
            self.known += ahead

    def room(self, page_size: int) -> int:
        """Return the position up to which the request has pages of `page_size` tokens."""
        return (self.place.first_page + len(self.place.pages)) * page_size

    def launched_before(self, step: int) -> int:
        """Return the number of tokens that steps before `step` surely write, which that step may therefore read."""
        return self.ready if self.latest_step == step else self.sure
