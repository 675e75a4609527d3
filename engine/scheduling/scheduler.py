"""`Scheduler`: which requests compute how many tokens in the next step, and what a finished step means for them.

Changes state only in its own synchronous methods and returns what others must do; roster.py keeps the books, and a
policy says who comes first. Never waits, never reads a clock, never sees a tensor. Next to read: roster.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.adapters.slots import AdapterVersion, SlotTable
from headrace.engine.errors import RequestFailed
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.admission import Admission
from headrace.engine.scheduling.decoding import plan_decodes, plan_tokens, take_tokens
from headrace.engine.scheduling.failures import Failures
from headrace.engine.scheduling.memory.growth import Growth
from headrace.engine.scheduling.memory.host_pages import HostPages
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.resizing import Resizing
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.order.alone import Turns
from headrace.engine.scheduling.order.deadlines import DeadlineQueue
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.overview import Overview
from headrace.engine.scheduling.plan import (
    CHOSEN_LATER,
    LATE,
    NON_FINITE,
    NOTHING_LEFT,
    Capacity,
    Emission,
    NewRow,
    Outcome,
    PageEntry,
    RowOptions,
    StepPlan,
)
from headrace.engine.scheduling.policy import FirstCome, Policy
from headrace.engine.scheduling.reports import accept_run, failure_of, forced_runs, take_prompt_reports, with_reports
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.roster import Roster
from headrace.engine.scheduling.shaping import Report, ReportedTokens

__all__ = ["Scheduler"]


class Scheduler(Overview):
    """Continuous batching over paged memory.

    One rule: a request owes `known - planned` tokens. Decodes (which owe one) are planned first, then running
    prefills, then waiting requests, each in the order of the policy, all under one token budget.
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
            capacity: What the device holds.
            secret: Key of the prefix hash, up to 64 bytes.
            prefix_cache: False computes every prompt in full.
            policy: Who comes first; None is `FirstCome`.
            slots: Where adapters are on the device; None where it takes none.
            host: Where pages are kept that the device has no room for; None keeps none.
            itl_target: Seconds that a step with decodes should take at most; prompts get what is left of it.
        """
        self.capacity = capacity
        self.pool = PagePool(capacity.num_pages, capacity.page_size, secret=secret, remember=prefix_cache)
        self.prompt_tokens = 0
        """Prompt tokens of all requests admitted so far."""
        self.cached_tokens = 0
        """Prompt tokens that the prefix cache spared."""
        self.prefixes = Prefixes(self.pool, enabled=prefix_cache)
        self._policy = FirstCome() if policy is None else policy
        self.pace = Pace()
        """What steps take; whoever runs them says so."""
        self.slots = SlotTable() if slots is None else slots
        self.swaps = Swaps(host or HostPages(0), self.pool, self.prefixes, self.pace)
        super().__init__(Roster(capacity, self.pool, self.prefixes, self._policy, self.swaps, self.slots))
        self._admission = Admission(
            self._roster, self.pool, self.prefixes, self._policy, self.swaps, self.pace, self.slots
        )
        self._growth = Growth(self._roster, self.pool, self._policy)
        self._turns = Turns(capacity.max_batched_tokens)
        self.failures = Failures(capacity, self._roster, self.swaps)
        self._resizing = Resizing(self._roster, self.pool, self.swaps, self._policy)
        self.sleep_level = 0
        """Beyond 0, it has no pages and plans nothing."""
        self._deadlines = DeadlineQueue()
        self._lapsed: list[Emission] = []
        self._itl_target, self._now, self._step = itl_target, 0.0, 0

    # -- intake ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue `request`, lowering its `limit` to what the context and the pool can hold.

        Raises:
            PromptTooLong: Its prompt leaves no room for one token, ever; one that is pooled needs none.
            Overloaded: Its deadline cannot be met, as the policy sees it.
        """
        room = 1 if request.pooling is None else 0
        request.asked = request.limit
        request.limit = min(request.limit, self.capacity.check_length(request.prompt_len, room) + 1 - room)
        self._admission.check_deadline(request)
        if request.leader is not None:
            request.leader.forked, request.leader.smooth = True, 0  # what it writes to next may be shared from now on
        self._roster.take_in(request)
        self._turns.arrived(request)
        self._deadlines.add(request)

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End `request` now, in whatever state it is; False if it has already ended."""
        if request.state is State.FINISHED:
            return False
        self._roster.end(request)
        request.finish_reason = reason
        return True

    def let_go(self, request: Request) -> None:
        """Note that one reader fewer may go on after `request`."""
        self.prefixes.let_go(request)

    def pause(self, request: Request) -> None:
        """Stop planning `request` until `resume`; it keeps its pages while nobody needs them."""
        self._roster.pause(request)

    def resume(self, request: Request) -> None:
        """Undo `pause`; nothing happens in any other state."""
        self._roster.resume(request)

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Decide the next step and count it as launched; None when nothing may run now.

        Args:
            now: Seconds, on the clock of `Request.arrived`. Deadlines that have passed end their requests.
        """
        self._now = now
        while (request := self._deadlines.overdue(now)) is not None:
            self._lapse(request)
        if self.sleep_level:
            return None
        if self._roster.waiting:
            self._admission.share_rows()
        plan = StepPlan(self._step)
        if not (self._turns.is_due and self._plan_alone(plan)):
            self._plan_together(plan)
            if self._turns.any and not plan.size:
                self._plan_alone(plan)
        if not plan.size:
            return None
        for work in plan.others:
            if work.num_tokens > 1:
                self.prefixes.offer(work.request)
        plan.left_rows, self._roster.left_rows = self._roster.left_rows, []
        self._policy.served(plan.each_work())
        self.swaps.host.load(plan)
        self._turns.planned(plan, self._roster.requests.values())
        self._step += 1
        return plan

    def _plan_alone(self, plan: StepPlan) -> bool:
        """Plan a step of one request that computes alone, if there is one that can."""
        self._admit(plan, self.capacity.max_batched_tokens, alone=True)
        if not plan.size:
            self._turns.plan_next(plan, self._roster.running, self._growth, self.capacity.page_size, self._now)
        plan.alone = plan.size == 1
        return plan.alone

    def _plan_together(self, plan: StepPlan) -> None:
        """Plan a step of all others."""
        usual, complete = self.failures.limit(self._turns.together(self._roster.running))
        prefills = plan_decodes(plan, usual, self._growth, self.capacity.page_size, self._now)
        if prefills or self._roster.waiting:
            self._plan_prefills(plan, prefills, may_start=complete)

    def _plan_prefills(self, plan: StepPlan, prefills: Sequence[Request], *, may_start: bool) -> None:
        """Plan prompts with what decodes leave of the budget: those that are begun, then new ones if they may start."""
        budget = min(self.failures.most_tokens, self.pace.budget(plan.tokens, self.capacity, self._itl_target))
        for request in sorted(prefills, key=lambda each: self._policy.standing(each, self._now)):
            if may_start and self._has_room(plan, budget) and self._roster.waiting:
                self._admit(plan, budget, before=request)
            if self._has_room(plan, budget) and request.plannable:
                plan_tokens(plan, request, budget - plan.tokens, self._growth, self._now)
        if plan.new_rows:  # some overtook: a plan ends with the rows that are new in it
            new = {row.row for row in plan.new_rows}
            plan.others.sort(key=lambda work: work.row in new)
        if may_start and self._has_room(plan, budget) and self._roster.waiting:
            self._admit(plan, budget)

    def _has_room(self, plan: StepPlan, budget: int) -> bool:
        return plan.tokens < budget and plan.size < self.failures.most_rows

    def _admit(self, plan: StepPlan, budget: int, before: Request | None = None, *, alone: bool = False) -> None:
        """Give rows to waiting requests and plan their first chunks.

        Args:
            plan: To be filled up to `budget` tokens.
            budget: Tokens.
            before: Only those that overtake this one, whose prompt is begun.
            alone: Only one, if it is next and computes alone; it gets its pages at once, so that no chunk falls short.
        """
        for request, pages in self._admission.candidates(plan, self._now, before, alone=alone):
            self._take_row(plan, request, pages)
            if alone:
                self._turns.plan_first(plan, request, self._growth, self._now)
                break
            plan_tokens(plan, request, budget - plan.tokens, self._growth, self._now)
            if not self._has_room(plan, budget):
                break
        for request in self._admission.hopeless:
            self._lapse(request)
        if self._admission.hopeless and not (self._roster.running or self._roster.waiting):
            self.pace.forget()  # no other step would tell that the device is faster by now

    def _take_row(self, plan: StepPlan, request: Request, pages: Sequence[int]) -> None:
        """Move `request` from the queue to a row that starts with `pages`."""
        self._roster.start(request, pages)
        if len(request.pages) > len(pages):
            request.copied = plan.step
        row = request.row
        if not request.preemptions and request.elder < 0:
            request.cached = request.planned
            self.prompt_tokens += len(request.tokens)
            self.cached_tokens += request.cached
        tokens = request.tokens[request.planned :]
        plan.new_rows.append(NewRow(row, request.planned, tokens, request.sampling, request.slot, request.stop_ids))
        if request.has_options:
            plan.options.append(RowOptions.of(request))
        plan.entries.extend(PageEntry(row, index, page) for index, page in enumerate(request.pages))

    @property
    def next_deadline(self) -> float | None:
        """When the next request must end."""
        first = self._deadlines.first
        return None if first is None else first.deadline

    def take_lapsed(self) -> list[Emission]:
        """The ends of requests whose deadline passed, or could no longer be met, by the latest `plan`."""
        lapsed, self._lapsed = self._lapsed, []
        return lapsed

    def _lapse(self, request: Request) -> None:
        if self.finish(request, "deadline"):
            self._lapsed.append(Emission(request, None, "deadline"))

    # -- results --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> Outcome:
        """Take in a finished step; plans must be committed in the order in which they were made.

        Args:
            plan: A plan of this scheduler.
            tokens: What `Step.wait` returned: one id for each work.

        Returns:
            What happened to each request that gained a token, ended or failed; tokens of requests that had already
            ended are dropped here.
        """
        self.swaps.host.settled(plan)
        if self.failures.is_cautious:
            self.failures.went_well()
        if isinstance(tokens, ReportedTokens):
            take_prompt_reports(plan, tokens)
        full, others = take_tokens(plan, tokens, self.capacity.vocab_size, self.capacity.page_size)
        for request in full:
            self.prefixes.offer(request)
        outcome = self._take_others(plan, tokens, others) if others else Outcome(plan.decodes, tokens, [])
        return with_reports(plan, tokens, outcome) if isinstance(tokens, ReportedTokens) else outcome

    def _take_others(self, plan: StepPlan, tokens: Sequence[int], others: set[Request]) -> Outcome:
        """Commit the works of `others`; what happened to all."""
        gained: list[tuple[Request, int]] = []
        emissions, runs = [], forced_runs(plan, tokens, self.pace)
        for (request, start, count, samples), token in zip(plan.shares(), tokens, strict=True):
            if request not in others:
                gained.append((request, token))
                continue
            request.in_flight -= 1
            if request.discard:
                request.discard -= 1
            elif token == LATE and samples:
                request.go_back(start + count)
            elif request.state is not State.FINISHED:
                request.computed = start + count
                self.prefixes.offer(request)
                if token == CHOSEN_LATER and samples:
                    request.awaited = plan.step
                elif samples and request.jumps:
                    emissions += accept_run(request, start + count, token, runs.get(request.id, ()), self._accept)
                elif samples or (request.pooling is not None and request.computed == request.prompt_len):
                    emissions.append(self._accept(request, token))
            if not request.in_flight and request.row >= 0 and (request.leaving or request.state is State.FINISHED):
                self._roster.let_go(request)
        return Outcome([request for request, _ in gained], [token for _, token in gained], emissions)

    def supply(self, request: Request, step: int, chosen: tuple[int, Report | None] | RequestFailed) -> list[Emission]:
        """Take in what the host chose for `request` after `step`, or why it could not; dropped if nobody awaits it."""
        if request.awaited != step or request.state is State.FINISHED:
            return []
        request.awaited = -1
        if isinstance(chosen, RequestFailed):
            return [self._roster.fail(request, chosen)]
        token, report = chosen
        request.unsent = 1
        return [self._accept(request, token)._replace(report=report)]

    def fail(self, plan: StepPlan, error: RequestFailed) -> list[Emission]:
        """Take in a step that raised: its requests fail with `error`, sharers of its pages start over.

        Where it found no memory, its requests start over in smaller steps instead, unless it was as small as can be.
        """
        return self.failures.take_in(plan, error)

    def fail_wearers(self, version: AdapterVersion, error: RequestFailed) -> list[Emission]:
        """Take in that the device could not be given `version`: requests that wait for it fail with `error`."""
        waiting = [request for request in self._roster.requests.values() if request.wears is version]
        return [self._roster.fail(request, error) for request in waiting if request.state is State.WAITING]

    def _accept(self, request: Request, token: int) -> Emission:
        """Append a sampled token and see whether it is the last; a pooled request ends without one."""
        if not 0 <= token < self.capacity.vocab_size or request.pooling is not None:
            return self._end_without(request, token)
        request.tokens.append(token)
        if token in request.stop_ids:
            self.finish(request, "stop")
        elif len(request.tokens) >= request.limit:
            if request.holds:
                self.pause(request)
            else:
                self.finish(request, "length")
        return Emission(request, token, request.finish_reason)

    def _end_without(self, request: Request, token: int) -> Emission:
        """The end of a request that was not given a token of the vocabulary, or was only pooled."""
        if request.pooling is not None and token not in (NON_FINITE, NOTHING_LEFT):
            self.finish(request, "stop")
            return Emission(request, None, request.finish_reason)
        if token == NON_FINITE:
            for page in request.pages:  # whoever read them would fail in the same way
                self.pool.forget(page)
        return self._roster.fail(request, failure_of(request, token, self.capacity.vocab_size))

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def least_pages(self) -> int:
        """The fewest pages for `resize` with which every request that has been taken in can go on."""
        return self._resizing.least_pages

    def resize(self, num_pages: int) -> list[StepPlan]:
        """Have so many pages; nothing is in flight. No token is lost, and limits follow what the pages can hold.

        Args:
            num_pages: At least `least_pages`. The runner has more before this is called, and fewer afterwards.

        Returns:
            Plans without works: to be carried out, in order, before pages go.
        """
        self.capacity = replace(self.capacity, num_pages=num_pages)
        self._resizing.set_limits(self.capacity)
        return [] if self.sleep_level else self._fit(num_pages)

    def fall_asleep(self, level: int) -> list[StepPlan]:
        """Give up every page and plan nothing until `wake_up`; nothing is in flight. Requests wait, new ones, too.

        Args:
            level: From 2 on, nothing is kept in host memory either: it was made with weights that may change.

        Returns:
            As `resize`.
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
