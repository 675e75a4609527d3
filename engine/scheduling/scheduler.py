"""`Scheduler` decides which requests compute how many tokens in the next step; others apply what finished steps gave.

Changes state only in its own synchronous methods and returns work for others; roster.py keeps the books, and a policy
defines the order. Never waits, never reads a clock, never sees a tensor. Next to read: roster.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.adapters.slots import SlotTable
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.admission import Admission
from headrace.engine.scheduling.commit import Commits
from headrace.engine.scheduling.failures import Failures
from headrace.engine.scheduling.memory.host_pages import HostPages
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.resizing import Resizing
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.memory.window import Window, slid_entries
from headrace.engine.scheduling.options.at_commit import at_commit_of
from headrace.engine.scheduling.order.alone import Alternation
from headrace.engine.scheduling.order.deadlines import DeadlineQueue
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import (
    Capacity,
    Committed,
    NewRow,
    PageEntry,
    RowOptions,
    StepPlan,
)
from headrace.engine.scheduling.planner import Planner
from headrace.engine.scheduling.policy import FirstCome, Policy
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.roster import Roster
from headrace.engine.scheduling.speculation.counts import Speculation
from headrace.engine.scheduling.suspension import Suspension

__all__ = ["Scheduler"]


class Scheduler:
    """A scheduler of continuous batches over paged memory.

    One rule: a request owes `known - planned` tokens. Decodes, which owe one token, are planned first, then running
    prefills, then waiting requests. Each group is in the order of the policy, and all share one token budget.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        secret: bytes,
        prefix_cache: bool = True,
        policy: Policy | None = None,
        slots: SlotTable | None = None,
        host: HostPages | None = None,
        itl_target: float | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """Start with no requests.

        Args:
            capacity: Limits of the device.
            secret: Key of the prefix hash, up to 64 bytes.
            prefix_cache: False computes every prompt in full.
            policy: Order of service; None is `FirstCome`.
            slots: LoRA slots of the device; None if it takes no adapters.
            host: Host memory for pages that do not fit on the device; None for none.
            itl_target: Seconds that a step with decodes should take at most; prompts get the time that decodes leave.
            speculation: Chooses how many drafts a step verifies; None verifies none.
        """
        self.pool = PagePool(capacity.num_pages, capacity.page_size, secret=secret, remember=prefix_cache)
        self.prompt_tokens = 0
        """Number of prompt tokens of all requests admitted so far."""
        self.cached_tokens = 0
        """Number of prompt tokens that the prefix cache spared."""
        window = Window(capacity.window, capacity.page_size)
        self.prefixes = Prefixes(self.pool, window, enabled=prefix_cache)
        self._policy = FirstCome() if policy is None else policy
        self.pace = Pace()
        """Measured step times, which the step loop updates."""
        self.slots = SlotTable() if slots is None else slots
        self.swaps = Swaps(host or HostPages(0), self.pool, self.prefixes, self.pace, window)
        self.roster = Roster(capacity, self.pool, self.prefixes, self._policy, self.swaps, self.slots)
        """Books of all requests, for others to read; only the scheduler changes them."""
        self.suspension = Suspension(self.roster, self.prefixes, self.swaps, self._policy)
        self._admission = Admission(
            self.roster,
            self.suspension,
            self.pool,
            self.prefixes,
            self._policy,
            self.swaps,
            self.pace,
            self.slots,
            window,
        )
        self._planner = Planner(self.roster, self.suspension, self.pool, self.prefixes, window)
        self.commits = Commits(self.roster, self.suspension, self.pool, self.prefixes, self.pace, capacity.vocab_size)
        self.deadlines = DeadlineQueue(self.roster, self._policy, self.pace)
        self._alternation = Alternation(
            self.roster, self._admission, self._planner, self.deadlines, capacity.max_batched_tokens
        )
        self.failures = Failures(capacity, self.roster, self.suspension, self.pool, self.swaps)
        self.resizing = Resizing(self.roster, self.suspension, self.pool, self.swaps, window)
        self._itl_target = itl_target
        self.speculation = speculation

    @property
    def capacity(self) -> Capacity:
        """Limits of the device; the number of pages may change."""
        return self.roster.capacity

    # -- intake ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue `request`, lowering its `limit` to what the context and the pool can hold.

        Raises:
            PromptTooLong: The prompt never leaves room for one token; a pooled request needs none.
            Overloaded: The policy expects the request to miss its deadline.
        """
        asked = request.asked
        room = 1 if asked.pooling is None else 0
        if asked.holds or RowOptions.needed(asked):
            request.at_commit = at_commit_of(asked)
        most = self.capacity.check_length(request.prompt_len, room, whole=asked.alone)
        request.limit = min(asked.limit, most + 1 - room)
        if asked.deadline is not None:
            self.deadlines.check(request, asked.deadline)
        if request.leader is not None:
            request.leader.forked = True  # its next page may be shared from now on
            request.leader.plain_until = 0
        self.roster.add(request)
        if asked.alone:
            self._alternation.any = True
        if asked.deadline is not None:
            self.deadlines.add(request, asked.deadline)

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End `request` now, in any state; return False if it has already ended."""
        if request.state is State.FINISHED:
            return False
        self.roster.finish(request, reason)
        return True

    def drop_stream(self, request: Request) -> None:
        """Count one stream fewer that may continue `request`."""
        self.prefixes.turns.drop_stream(request)

    def pause(self, request: Request) -> None:
        """Stop planning `request` until `resume`; it keeps its pages while nobody needs them."""
        self.suspension.pause(request)

    def resume(self, request: Request) -> None:
        """Undo `pause`; do nothing in any other state."""
        self.suspension.resume(request)

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Decide the next step and count it as launched; return None if nothing may run now.

        Args:
            now: Seconds, on the clock of `Request.arrived`. Deadlines that have passed end their requests.
        """
        roster, alternation = self.roster, self._alternation
        roster.now = now
        if self.deadlines.any:
            self.deadlines.end_overdue(now)
        if self.resizing.sleep_level:
            return None
        if roster.waiting:
            self._admission.share_rows()
        plan = StepPlan(roster.step)
        if alternation.any:
            alternation.plan(plan, now, self._plan_together, self._give_row)
        else:
            self._plan_together(plan)
        if not plan.size:
            return None
        for work in plan.others:
            if work.num_tokens > 1:
                self.prefixes.offer(work.request)
        plan.left_rows = roster.left_rows
        roster.left_rows = []
        self._policy.served(plan.each_work())
        if self.swaps.is_on:
            self.swaps.host.load(plan)
        if alternation.any:
            alternation.planned(plan, roster.requests.values())
        roster.step += 1
        return plan

    def _plan_together(self, plan: StepPlan) -> None:
        """Plan a step of requests that do not compute alone."""
        running, complete = self.roster.running, True
        if self._alternation.any:
            running = self._alternation.together(running)
        if self.failures.is_cautious:
            running, complete = self.failures.limit(running)
        if self.speculation is not None:
            plan.depth = self.speculation.depth(running, self.failures.most_tokens)
        prefills = self._planner.plan_decodes(plan, running)
        if prefills or self.roster.waiting:
            self._plan_prefills(plan, prefills, may_start=complete)

    def _plan_prefills(self, plan: StepPlan, prefills: Sequence[Request], *, may_start: bool) -> None:
        """Plan prompts with the budget that decodes leave: those that have begun, then new ones if they may start."""
        budget = min(self.failures.most_tokens, self.pace.budget(plan.tokens, self.capacity, self._itl_target))
        for request in sorted(prefills, key=lambda each: self._policy.standing(each, self.roster.now)):
            if may_start and self._has_room(plan, budget) and self.roster.waiting:
                self._admit(plan, budget, before=request)
            if self._has_room(plan, budget) and request.is_plannable:
                self._planner.plan_tokens(plan, request, budget - plan.tokens)
        if plan.new_rows:  # new requests that overtook others go to the end of the plan
            new = {row.row for row in plan.new_rows}
            plan.others.sort(key=lambda work: work.row in new)
        if may_start and self._has_room(plan, budget) and self.roster.waiting:
            self._admit(plan, budget)

    def _has_room(self, plan: StepPlan, budget: int) -> bool:
        return plan.tokens < budget and plan.size < self.failures.most_rows

    def _admit(self, plan: StepPlan, budget: int, before: Request | None = None) -> None:
        """Give rows to waiting requests and plan their first chunks.

        Args:
            plan: Plan to fill up to `budget` tokens.
            budget: Largest number of tokens in the step.
            before: Admit only requests that overtake this one, whose prompt has begun.
        """
        for request, pages in self._admission.candidates(plan, self.roster.now, before):
            self._give_row(plan, request, pages)
            self._planner.plan_tokens(plan, request, budget - plan.tokens)
            if not self._has_room(plan, budget):
                break
        if self._admission.missed:
            self.deadlines.end_missed(self._admission.missed)

    def _give_row(self, plan: StepPlan, request: Request, pages: Sequence[int]) -> None:
        """Move `request` from the queue to a row that starts with `pages`."""
        self.roster.start(request, pages)
        if len(request.place.pages) > len(pages):
            request.place.copied = plan.step
        row = request.row
        if not request.preemptions and request.origin < 0:
            request.cached = request.planned
            self.prompt_tokens += len(request.tokens)
            self.cached_tokens += request.cached
        asked = request.asked
        start = 0 if asked.speculates else request.planned  # drafts follow from all tokens, those of a prefix hit, too
        slot = -1 if asked.version is None else asked.version.slot
        tokens = request.tokens[start:]
        new = NewRow(row, start, tokens, asked.sampling, slot, asked.stop_ids, asked.speculates)
        plan.new_rows.append(new)
        if self.speculation is not None and asked.speculates:
            self.speculation.rule.note_request()
        if RowOptions.needed(asked):
            plan.options.append(RowOptions.of(request))
        if request.place.first_page:
            plan.entries += slid_entries(request)
        placed = enumerate(request.place.pages, request.place.first_page)
        plan.entries.extend(PageEntry(row, index, page) for index, page in placed)

    # -- results --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Apply the result of a finished step; commit plans in the order in which they were made.

        Args:
            plan: A plan of this scheduler.
            result: Result of `Step.wait`.

        Returns:
            The token, end or failure of each request; tokens of requests that had already ended are dropped.

        Raises:
            ValueError: The result does not have one token for each work item, which is a defect of the runner.
        """
        if self.swaps.is_on:
            self.swaps.host.settled(plan)
        if self.failures.is_cautious:
            self.failures.went_well()
        return self.commits.commit(plan, result)
