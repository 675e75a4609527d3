"""`Scheduler`: which requests compute how many tokens in the next step, and what a finished step means for them.

Owns the queues, the rows and the page tables; changes state only in its own synchronous methods and returns what
others must do. Never waits, never reads a clock, never sees a tensor. Next to read: pages.py.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from headrace.engine.errors import NonFiniteLogits, PromptTooLong, RequestFailed
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.invariants import check_scheduler
from headrace.engine.scheduling.pages import PagePool
from headrace.engine.scheduling.plan import (
    NON_FINITE,
    NOTHING_LEFT,
    Capacity,
    Emission,
    NewRow,
    PageEntry,
    RowOptions,
    StepPlan,
    Work,
)
from headrace.engine.scheduling.prefix import Prefixes
from headrace.engine.scheduling.reports import take_prompt_reports, with_reports
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.shaping import ReportedTokens

__all__ = ["Scheduler"]


def _order(request: Request) -> tuple[int, int, int]:
    return request.order


class Scheduler:
    """Continuous batching over paged memory.

    One rule: a request owes `known - planned` tokens. Decodes (which owe one) are planned first, then running
    prefills, then waiting requests, oldest first within a priority, all under one token budget.
    """

    def __init__(self, capacity: Capacity, *, secret: bytes, prefix_cache: bool = True) -> None:
        """Start with no requests.

        Args:
            capacity: What the device holds.
            secret: Key of the prefix hash, up to 64 bytes.
            prefix_cache: False computes every prompt in full.
        """
        self.capacity = capacity
        self.pool = PagePool(capacity.num_pages, capacity.page_size, secret=secret, remember=prefix_cache)
        self.requests: dict[int, Request] = {}
        """Every request that still holds something or waits."""
        self.preemptions = 0
        self.prompt_tokens = 0
        """Prompt tokens of all requests admitted so far."""
        self.cached_tokens = 0
        """Those of them that the prefix cache spared."""
        self.prefixes = Prefixes(self.pool, enabled=prefix_cache)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._paused: list[Request] = []
        self._free_rows = list(range(capacity.max_rows - 1, -1, -1))
        self._draining = 0
        self._arrivals = 0
        self._step = 0

    # -- intake ---------------------------------------------------------------------------------------------------

    def check_length(self, prompt_len: int) -> int:
        """The most tokens that a prompt of so many tokens may grow to.

        Raises:
            PromptTooLong: It leaves no room for one token, ever.
        """
        capacity = self.capacity
        pool_tokens = capacity.num_pages * capacity.page_size + 1  # the last token is never written
        most = min(capacity.max_context, pool_tokens)
        if prompt_len >= most:
            what = "context" if most == capacity.max_context else "page pool"
            raise PromptTooLong(
                f"prompt: {prompt_len} tokens leave no room for one more in the {what} of {most}",
                field="prompt",
                value=prompt_len,
                limit=most - 1,
            )
        return most

    def submit(self, request: Request) -> None:
        """Queue `request`, lowering its `limit` to what the context and the pool can hold.

        Raises:
            PromptTooLong: Its prompt leaves no room for one token, ever.
        """
        request.limit = min(request.limit, self.check_length(request.prompt_len))
        request.id = self._arrivals
        self._arrivals += 1
        self.requests[request.id] = request
        insort(self._waiting, request, key=_order)

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End `request` now, in whatever state it is; False if it has already ended."""
        if request.state is State.FINISHED:
            return False
        self._end(request)
        request.finish_reason = reason
        return True

    def pause(self, request: Request) -> None:
        """Stop planning `request` until `resume`; it keeps its pages while nobody needs them."""
        if request.state is State.WAITING:
            self._waiting.remove(request)
        elif request.state is State.RUNNING:
            if not request.leaving:
                self._running.remove(request)
            self.prefixes.withdraw(request)
        else:
            return
        request.state = State.PAUSED
        self._paused.append(request)

    def resume(self, request: Request) -> None:
        """Undo `pause`; nothing happens in any other state."""
        if request.state is not State.PAUSED:
            return
        self._paused.remove(request)
        if request.row < 0:
            request.state = State.WAITING
            insort(self._waiting, request, key=_order)
            return
        request.state = State.RUNNING
        if not request.leaving:
            insort(self._running, request, key=_order)
            self.prefixes.promise(request)

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decide the next step and count it as launched; None when nothing may run now."""
        plan = StepPlan(self._step)
        budget = self.capacity.max_batched_tokens
        for request in list(self._running):
            if request.known - request.planned == 1 and request.known != request.limit and request.plannable:
                budget -= self._plan_tokens(plan, request, 1)
        for request in list(self._running):
            if budget and request.known - request.planned > 1 and request.plannable:
                budget -= self._plan_tokens(plan, request, budget)
        if budget and self._waiting:
            budget -= self._admit(plan, budget)
        if not plan.works:
            return None
        for work in plan.works:
            if work.num_tokens > 1:
                self.prefixes.offer(work.request)
        plan.tokens = self.capacity.max_batched_tokens - budget
        self._step += 1
        return plan

    def _plan_tokens(self, plan: StepPlan, request: Request, most: int) -> int:
        """Plan up to `most` of what `request` owes, as far as pages can be had; how many were planned."""
        start = request.planned
        count = min(request.known - start, most)
        if start + count > len(request.pages) * self.capacity.page_size or request.forked:
            count = self._grow(plan, request, count)
            if not count:
                return 0
        samples = start + count == request.known
        plan.works.append(Work(request, request.row, start, count, samples))
        request.ready = start
        request.latest_step = plan.step
        request.planned = start + count
        request.in_flight += 1
        if samples:
            request.known += 1
        return count

    def _grow(self, plan: StepPlan, request: Request, count: int) -> int:
        """Make pages writable for `count` tokens from `request.planned`; how many of them have room."""
        size = self.capacity.page_size
        pages = request.pages
        index = request.planned // size
        if request.forked and index < len(pages) and self.pool.refs[pages[index]] > 1:
            page = self._obtain(request)
            if page is None:
                return 0
            plan.copies.append((pages[index], page))
            self.pool.release(pages[index : index + 1])
            pages[index] = page
            plan.entries.append(PageEntry(request.row, index, page))
        while len(pages) * size < request.planned + count:
            page = self._obtain(request)
            if page is None:
                break
            plan.entries.append(PageEntry(request.row, len(pages), page))
            pages.append(page)
        return min(count, len(pages) * size - request.planned)

    def _obtain(self, request: Request) -> int | None:
        """A page for `request`, preempting whoever comes after it; None if it must wait for one."""
        page = self.pool.allocate()
        while page is None and self._preempt_after(request):
            page = self.pool.allocate()
        return page

    def _preempt_after(self, request: Request) -> bool:
        """Preempt the last in order behind `request`; True if its pages came back at once."""
        if self._draining:  # pages are on their way back: taking more than is needed would thrash
            return False
        victim = max(self._paused_holders() or self._running, key=_order)
        if victim is request:
            return False
        return self._preempt(victim)

    def _preempt(self, victim: Request) -> bool:
        """Send `victim` back to wait, now or at its last commit; True if now."""
        self.preemptions += 1
        victim.preemptions += 1
        self.prefixes.withdraw(victim)
        if victim.state is State.RUNNING:
            self._running.remove(victim)
        if victim.in_flight:
            victim.leaving = True
            self._draining += 1
            return False
        self._requeue(victim)
        return True

    # -- admission ------------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: int) -> int:
        """Give rows to waiting requests, oldest first, and plan their first chunks; the tokens planned."""
        spent = 0
        looked_past = 0
        for request in list(self._waiting):
            if spent == budget or looked_past > self.capacity.max_rows or not self._row_is_free():
                break
            pages = self.prefixes.find(request, self._step)
            if pages is None:  # another computes its prefix: waiting is cheaper than computing it twice
                looked_past += 1
                continue
            pages = self._find_room(request, pages)
            if pages is None:
                break
            self._take_row(plan, request, pages)
            spent += self._plan_tokens(plan, request, budget - spent)
        return spent

    def _row_is_free(self) -> bool:
        if not self._free_rows and not self._draining:
            self._preempt_paused()
        return bool(self._free_rows)

    def _preempt_paused(self) -> bool:
        """Preempt the last paused request that holds a row; True if its row and pages came back at once."""
        holders = self._paused_holders()
        return bool(holders) and self._preempt(max(holders, key=_order))

    def _paused_holders(self) -> list[Request]:
        return [request for request in self._paused if request.row >= 0 and not request.leaving]

    def _find_room(self, request: Request, pages: list[int]) -> list[int] | None:
        """The pages `request` may start with once it fits, preempting paused requests; None if it does not fit now."""
        found: list[int] | None = pages
        while found is not None and not self._fits(request, found):
            if self._draining or not self._preempt_paused():
                return None
            found = self.prefixes.find(request, self._step)  # the paused request may have held them
        return found

    def _fits(self, request: Request, pages: Sequence[int]) -> bool:
        """Whether all known tokens of `request` find room, and one more page for every running request."""
        size = self.capacity.page_size
        needed = -(-request.known // size) - len(pages)
        if len(pages) * size > len(request.tokens) - 1:
            needed += 1  # the last page is shared and only partly filled: it is copied when it is written
        refs = self.pool.refs
        needed += sum(1 for page in pages if refs[page] == 0)  # available now, but about to be held
        return needed + len(self._running) <= self.pool.available

    def _take_row(self, plan: StepPlan, request: Request, pages: Sequence[int]) -> None:
        """Move `request` from the queue to a row that starts with `pages`."""
        size = self.capacity.page_size
        self._waiting.remove(request)
        insort(self._running, request, key=_order)
        for page in pages:
            self.pool.share(page)
        request.state = State.RUNNING
        request.row = row = self._free_rows.pop()
        request.pages = list(pages)
        request.planned = request.computed = request.ready = min(len(pages) * size, len(request.tokens) - 1)
        request.registered = request.planned // size
        if not request.preemptions and request.elder < 0:
            request.cached = request.planned
            self.prompt_tokens += request.prompt_len
            self.cached_tokens += request.cached
        plan.new_rows.append(NewRow(row, request.planned, request.tokens[request.planned :], request.sampling))
        if request.has_options:
            asked = (request.shaping, request.reporting, request.grammar)
            plan.options.append(RowOptions(row, list(request.tokens), request.prompt_len, *asked))
        plan.entries.extend(PageEntry(row, index, page) for index, page in enumerate(pages))
        self.prefixes.promise(request)

    # -- results --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[Emission]:
        """Take in a finished step; plans must be committed in the order in which they were made.

        Args:
            plan: A plan of this scheduler.
            tokens: What `Step.wait` returned: one id for each work.

        Returns:
            One emission for each request that gained a token, ended or failed; tokens of requests that had already
            ended are dropped here.
        """
        size = self.capacity.page_size
        emissions: list[Emission] = []
        if isinstance(tokens, ReportedTokens):
            take_prompt_reports(plan, tokens)
        for work, token in zip(plan.works, tokens, strict=True):
            request = work.request
            request.in_flight -= 1
            if request.discard:
                request.discard -= 1
            elif request.state is not State.FINISHED:
                request.computed = work.start + work.num_tokens
                if min(request.planned, len(request.tokens)) >= (request.registered + 1) * size:
                    self.prefixes.offer(request)
                if work.samples:
                    emissions.append(self._accept(request, token))
            if not request.in_flight and request.row >= 0 and (request.leaving or request.state is State.FINISHED):
                self._let_go(request)
        return with_reports(plan, tokens, emissions) if isinstance(tokens, ReportedTokens) else emissions

    def fail(self, plan: StepPlan, error: RequestFailed) -> list[Emission]:
        """Take in a step that raised: its requests fail with `error`, sharers of its pages start over."""
        size = self.capacity.page_size
        emissions = []
        spoilt: set[int] = set()
        failed = set()
        for work in plan.works:
            request = work.request
            spoilt.update(request.pages[work.start // size :])
            request.in_flight -= 1
            request.discard = max(request.discard - 1, 0)
            failed.add(request.leader or request)
            if request.state is not State.FINISHED:
                emissions.append(self._fail_one(request, error))
            elif not request.in_flight:
                self._let_go(request)
        for request in list(self.requests.values()):
            first = next((index for index, page in enumerate(request.pages) if page in spoilt), None)
            if first is None and (request.leader not in failed or not request.pages):
                continue
            spoilt.update(request.pages[first or 0 :])
            if request.state is not State.FINISHED:
                request.discard = request.in_flight
                if not request.leaving:
                    self._preempt(request)
        for page in spoilt:
            self.pool.forget(page)
        return emissions

    def _accept(self, request: Request, token: int) -> Emission:
        """Append a sampled token and see whether it is the last."""
        if token == NON_FINITE:
            for page in request.pages:  # whoever read them would fail in the same way
                self.pool.forget(page)
            return self._fail_one(request, NonFiniteLogits("the logits of this request were not finite"))
        if token == NOTHING_LEFT:
            return self._fail_one(request, RequestFailed("masks or grammar of this request leave no token to choose"))
        if not 0 <= token < self.capacity.vocab_size:
            what = f"the device sampled token {token} of a vocabulary of {self.capacity.vocab_size}"
            return self._fail_one(request, RequestFailed(what))
        request.tokens.append(token)
        if token in request.stop_ids:
            self.finish(request, "stop")
        elif len(request.tokens) >= request.limit:
            if request.holds:
                self.pause(request)
            else:
                self.finish(request, "length")
        return Emission(request, token, request.finish_reason)

    def _fail_one(self, request: Request, error: RequestFailed) -> Emission:
        request.failed = True
        self._end(request)
        return Emission(request, None, None, error)

    def _end(self, request: Request) -> None:
        """Take `request` out of every queue; pages and row follow when nothing of it is in flight."""
        self.prefixes.withdraw(request)
        if request.state is State.WAITING:
            self._waiting.remove(request)
        elif request.state is State.PAUSED:
            self._paused.remove(request)
        elif not request.leaving:
            self._running.remove(request)
        request.state = State.FINISHED
        if request.in_flight and not request.leaving:
            self._draining += 1
        elif not request.in_flight:
            self._draining -= request.leaving
            self._release(request)

    def _let_go(self, request: Request) -> None:
        """The last launched step of a request that ended or was preempted is committed."""
        self._draining -= 1
        if request.state is State.FINISHED:
            self._release(request)
        else:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Forget all progress of a preempted request but its tokens, and wait again."""
        self._give_back(request)
        request.leaving = False
        request.known = len(request.tokens)
        request.planned = request.computed = request.ready = request.registered = 0
        if request.state is State.RUNNING:
            request.state = State.WAITING
            insort(self._waiting, request, key=_order)

    def _release(self, request: Request) -> None:
        self._give_back(request)
        request.leader = None  # one that goes on for another would keep all that went before it
        del self.requests[request.id]

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []
        if request.row >= 0:
            self._free_rows.append(request.row)
            request.row = -1

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that hold neither row nor pages and are not paused."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that are planned."""
        return len(self._running)

    @property
    def num_paused(self) -> int:
        """Requests whose reader is behind."""
        return len(self._paused)

    def live_tokens(self) -> int:
        """Distinct tokens whose keys and values requests hold now; a page that several share counts once."""
        size = self.capacity.page_size
        filled: dict[int, int] = {}
        for request in self.requests.values():
            for index, page in enumerate(request.pages):
                filled[page] = max(filled.get(page, 0), min(size, request.planned - index * size))
        return sum(filled.values())

    def check(self) -> None:
        """Assert every invariant of the scheduler and its pool (invariants.py lists them).

        Raises:
            AssertionError: One does not hold: a defect of headrace.
        """
        check_scheduler(
            self.pool,
            self.requests.values(),
            waiting=self._waiting,
            running=self._running,
            paused=self._paused,
            free_rows=self._free_rows,
            max_rows=self.capacity.max_rows,
            draining=self._draining,
            promises=self.prefixes.promises,
        )
