"""`Scheduler` decides which requests compute how many tokens in the next step; others apply what finished steps gave.

Changes state only in its own synchronous methods and returns work for others; roster.py keeps the books, and a policy
defines the order. Never waits, never reads a clock, never sees a tensor. Next to read: roster.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.adapters.slots import AdapterVersion, SlotTable
from headrace.engine.errors import RequestFailed
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.admission import Admission
from headrace.engine.scheduling.at_commit import at_commit_of
from headrace.engine.scheduling.commit import Commits
from headrace.engine.scheduling.decoding import plan_decodes, plan_tokens
from headrace.engine.scheduling.failures import Failures
from headrace.engine.scheduling.memory.growth import Growth
from headrace.engine.scheduling.memory.host_pages import HostPages
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.resizing import Resizing
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.memory.window import Window
from headrace.engine.scheduling.order.alone import Alternation
from headrace.engine.scheduling.order.deadlines import DeadlineQueue
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import (
    Capacity,
    Committed,
    Emission,
    NewRow,
    PageEntry,
    RowOptions,
    StepPlan,
    slid_entries,
)
from headrace.engine.scheduling.policy import FirstCome, Policy
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import Chosen, StepResult
from headrace.engine.scheduling.roster import Roster

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
        """
        self.capacity = capacity
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
        self._admission = Admission(
            self.roster, self.pool, self.prefixes, self._policy, self.swaps, self.pace, self.slots, window
        )
        self._growth = Growth(self.roster, self.pool, self.prefixes, window, self._policy)
        self._commits = Commits(self.roster, self.pool, self.prefixes, self.pace, capacity.vocab_size)
        self._alternation = Alternation(capacity.max_batched_tokens)
        self.failures = Failures(capacity, self.roster, self.swaps)
        self._resizing = Resizing(self.roster, self.pool, self.swaps, self._policy, window)
        self.sleep_level = 0
        """Level of sleep: above 0, the scheduler has no pages and plans nothing."""
        self._deadlines = DeadlineQueue()
        self._lapsed: list[Emission] = []
        self._itl_target = itl_target
        self._now = 0.0
        self._step = 0

    # -- intake ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue `request`, lowering its `limit` to what the context and the pool can hold.

        Raises:
            PromptTooLong: The prompt never leaves room for one token; a pooled request needs none.
            Overloaded: The policy expects the request to miss its deadline.
        """
        asked = request.asked
        room = 1 if asked.pooling is None else 0
        if asked.has_options or asked.holds:
            request.at_commit = at_commit_of(asked)
        most = self.capacity.check_length(request.prompt_len, room, whole=asked.alone)
        request.limit = min(asked.limit, most + 1 - room)
        self._admission.check_deadline(request)
        if request.leader is not None:
            request.leader.forked = True  # its next page may be shared from now on
            request.leader.plain_until = 0
        self.roster.add(request)
        if asked.alone:
            self._alternation.any = True
        if asked.deadline is not None:
            self._deadlines.add(request, asked.deadline)

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End `request` now, in any state; return False if it has already ended."""
        if request.state is State.FINISHED:
            return False
        self.roster.finish(request, reason)
        return True

    def drop_stream(self, request: Request) -> None:
        """Count one stream fewer that may continue `request`."""
        self.prefixes.drop_stream(request)

    def pause(self, request: Request) -> None:
        """Stop planning `request` until `resume`; it keeps its pages while nobody needs them."""
        self.roster.pause(request)

    def resume(self, request: Request) -> None:
        """Undo `pause`; do nothing in any other state."""
        self.roster.resume(request)

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Decide the next step and count it as launched; return None if nothing may run now.

        Args:
            now: Seconds, on the clock of `Request.arrived`. Deadlines that have passed end their requests.
        """
        self._now = now
        while self._deadlines.any and (request := self._deadlines.overdue(now)) is not None:
            self._lapse(request)
        if self.sleep_level:
            return None
        if self.roster.waiting:
            self._admission.share_rows()
        plan = StepPlan(self._step)
        if not (self._alternation.is_due and self._plan_alone(plan)):
            self._plan_together(plan)
            if self._alternation.any and not plan.size:
                self._plan_alone(plan)
        if not plan.size:
            return None
        for work in plan.others:
            if work.num_tokens > 1:
                self.prefixes.offer(work.request)
        plan.left_rows = self.roster.left_rows
        self.roster.left_rows = []
        self._policy.served(plan.each_work())
        if self.swaps.is_on:
            self.swaps.host.load(plan)
        if self._alternation.any:
            self._alternation.planned(plan, self.roster.requests.values())
        self._step += 1
        return plan

    def _plan_alone(self, plan: StepPlan) -> bool:
        """Plan a step of one request that computes alone; return whether one could go on."""
        self._admit(plan, self.capacity.max_batched_tokens, alone=True)
        if not plan.size:
            self._alternation.plan_next(plan, self.roster.running, self._growth, self.capacity.page_size, self._now)
        plan.alone = plan.size == 1
        return plan.alone

    def _plan_together(self, plan: StepPlan) -> None:
        """Plan a step of requests that do not compute alone."""
        running, complete = self.roster.running, True
        if self._alternation.any:
            running = self._alternation.together(running)
        if self.failures.is_cautious:
            running, complete = self.failures.limit(running)
        prefills = plan_decodes(plan, running, self._growth, self.capacity.page_size, self._now)
        if prefills or self.roster.waiting:
            self._plan_prefills(plan, prefills, may_start=complete)

    def _plan_prefills(self, plan: StepPlan, prefills: Sequence[Request], *, may_start: bool) -> None:
        """Plan prompts with the budget that decodes leave: those that have begun, then new ones if they may start."""
        budget = min(self.failures.most_tokens, self.pace.budget(plan.tokens, self.capacity, self._itl_target))
        for request in sorted(prefills, key=lambda each: self._policy.standing(each, self._now)):
            if may_start and self._has_room(plan, budget) and self.roster.waiting:
                self._admit(plan, budget, before=request)
            if self._has_room(plan, budget) and request.is_plannable:
                plan_tokens(plan, request, budget - plan.tokens, self._growth, self._now)
        if plan.new_rows:  # new requests that overtook others go to the end of the plan
            new = {row.row for row in plan.new_rows}
            plan.others.sort(key=lambda work: work.row in new)
        if may_start and self._has_room(plan, budget) and self.roster.waiting:
            self._admit(plan, budget)

    def _has_room(self, plan: StepPlan, budget: int) -> bool:
        return plan.tokens < budget and plan.size < self.failures.most_rows

    def _admit(self, plan: StepPlan, budget: int, before: Request | None = None, *, alone: bool = False) -> None:
        """Give rows to waiting requests and plan their first chunks.

        Args:
            plan: Plan to fill up to `budget` tokens.
            budget: Largest number of tokens in the step.
            before: Admit only requests that overtake this one, whose prompt has begun.
            alone: Admit only the next request, if it computes alone, and give it all its pages at once.
        """
        for request, pages in self._admission.candidates(plan, self._now, before, alone=alone):
            self._give_row(plan, request, pages)
            if alone:
                self._alternation.plan_first(plan, request, self._growth, self._now)
                break
            plan_tokens(plan, request, budget - plan.tokens, self._growth, self._now)
            if not self._has_room(plan, budget):
                break
        for request in self._admission.missed:
            self._lapse(request)
        if self._admission.missed and not (self.roster.running or self.roster.waiting):
            self.pace.forget()  # no other step would show that the device is faster by now

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
        tokens, asked = request.tokens[request.planned :], request.asked
        plan.new_rows.append(NewRow(row, request.planned, tokens, asked.sampling, asked.slot, asked.stop_ids))
        if asked.has_options:
            plan.options.append(RowOptions.of(request))
        plan.entries += slid_entries(request)
        placed = enumerate(request.place.pages, request.place.first_page)
        plan.entries.extend(PageEntry(row, index, page) for index, page in placed)

    @property
    def next_deadline(self) -> float | None:
        """Time in seconds at which the next request must end; None if no request has a deadline."""
        first = self._deadlines.first if self._deadlines.any else None
        return None if first is None else first.asked.deadline

    def pop_lapsed(self) -> list[Emission]:
        """Return, once, the ends of requests whose deadline passed or could no longer be met in the latest `plan`."""
        lapsed = self._lapsed
        self._lapsed = []
        return lapsed

    def _lapse(self, request: Request) -> None:
        if self.finish(request, "deadline"):
            self._lapsed.append(Emission(request, None, "deadline"))

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
        return self._commits.commit(plan, result)

    def supply(self, request: Request, step: int, chosen: Chosen | RequestFailed) -> list[Emission]:
        """Accept the host's choice of a token after `step`, or its failure; ignore it if no longer awaited."""
        return self._commits.supply(request, step, chosen)

    def fail(self, plan: StepPlan, error: RequestFailed) -> list[Emission]:
        """Take in a step that raised: its requests fail with `error`, and requests that share its pages start over.

        If the step ran out of memory, its requests start over in smaller steps instead, unless it had the least size.
        """
        return self.failures.fail_step(plan, error)

    def fail_adapter(self, version: AdapterVersion, error: RequestFailed) -> list[Emission]:
        """Fail waiting requests whose adapter `version` could not be copied to the device with `error`."""
        waiting = [request for request in self.roster.requests.values() if request.asked.version is version]
        return [self.roster.fail(request, error) for request in waiting if request.state is State.WAITING]

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def least_pages(self) -> int:
        """Fewest pages for `resize` with which every accepted request can go on."""
        return self._resizing.least_pages

    def resize(self, num_pages: int) -> list[StepPlan]:
        """Change the number of pages, with nothing in flight; no token is lost, and the limits of requests follow.

        Args:
            num_pages: At least `least_pages`. The runner has more before this is called, and fewer afterwards.

        Returns:
            Plans without work items, to be carried out in order before pages are removed.
        """
        self.capacity = replace(self.capacity, num_pages=num_pages)
        self._resizing.set_limits(self.capacity)
        return [] if self.sleep_level else self._fit(num_pages)

    def fall_asleep(self, level: int) -> list[StepPlan]:
        """Give up every page and plan nothing until `wake_up`, with nothing in flight; requests wait, new ones too.

        Args:
            level: From 2 on, pages in host memory are dropped as well, since the weights may change.

        Returns:
            Plans without work items, to be carried out in order before pages are removed.
        """
        self.sleep_level = level
        return self._fit(0, forget=level > 1)

    def wake_up(self) -> None:
        """Have pages again, and plan."""
        self.sleep_level = 0
        self._fit(self.capacity.num_pages)

    def _fit(self, num_pages: int, *, forget: bool = False) -> list[StepPlan]:
        plans = self._resizing.fit(num_pages, self._step, self._now, forget=forget)
        self._step += len(plans)
        return plans
