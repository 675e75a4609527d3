"""Bugs that other engines had, each as a change of a new rig's scheduler; the simulation must find every one of them.

Each function plants one, and its first line says what happens then. No tests here: test_mutations.py plays them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from simulation.rig import Rig

from headrace.engine.scheduling.memory.window import Window
from headrace.engine.scheduling.order.background import BackgroundLast
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.policies import Ageing, Deadlines, FairShare, SizeClasses
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import NoToken, StepResult

__all__ = ["MUTATIONS", "planted", "replace"]

MUTATIONS: dict[str, Callable[[Rig], None]] = {}
"""Name of a bug -> what plants it."""


def planted(plant: Callable[[Rig], None]) -> Callable[[Rig], None]:
    MUTATIONS[plant.__name__] = plant
    return plant


def replace(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(old)` in the place of a method."""
    setattr(owner, name, make(getattr(owner, name)))


# -- pages ------------------------------------------------------------------------------------------------------------


@planted
def pages_are_released_twice_when_a_request_is_cancelled(rig: Rig) -> None:
    roster, pool = rig.scheduler.roster, rig.scheduler.pool

    def make(end: Callable[[Request], None]) -> Callable[[Request], None]:
        def ends(request: Request) -> None:
            pages = list(request.place.pages)
            end(request)
            if not request.place.pages and pages:
                pool.release(pages[-1:])

        return ends

    replace(roster, "end", make)


@planted
def pages_of_a_cancelled_request_are_reused_while_a_step_writes_them(rig: Rig) -> None:
    roster = rig.scheduler.roster

    def make(end: Callable[[Request], None]) -> Callable[[Request], None]:
        def ends(request: Request) -> None:
            end(request)
            rig.scheduler.pool.release(request.place.pages)
            request.place.pages = []

        return ends

    replace(roster, "end", make)


@planted
def pages_of_a_victim_are_reused_while_a_step_writes_them(rig: Rig) -> None:
    def make(preempt: Callable[[Request], bool]) -> Callable[[Request], bool]:
        def preempts(victim: Request) -> bool:
            now = preempt(victim)
            rig.scheduler.pool.release(victim.place.pages)
            victim.place.pages = []
            return now

        return preempts

    replace(rig.scheduler.suspension, "preempt", make)


@planted
def a_prefix_hit_takes_no_reference(rig: Rig) -> None:
    pool = rig.scheduler.pool

    def share(page: int) -> None:
        if pool.refs[page] == 0:
            del pool._place_of(page)[page]
            pool.refs[page] = 1

    pool.share = share  # type: ignore[method-assign]


@planted
def the_prefix_is_keyed_without_tenant_and_adapter(rig: Rig) -> None:
    replace(rig.scheduler.pool, "extend_keys", lambda old: lambda keys, tokens, root: old(keys, tokens, b""))


@planted
def a_page_is_keyed_without_what_comes_before_it(rig: Rig) -> None:
    pool = rig.scheduler.pool

    def make(extend: Callable[..., None]) -> Callable[..., None]:
        def extends(keys: list[bytes], tokens: Sequence[int], root: bytes) -> None:
            size = pool.page_size
            for start in range(len(keys) * size, len(tokens) - size + 1, size):
                own: list[bytes] = []
                extend(own, tokens[start : start + size], root)
                keys += own

        return extends

    replace(pool, "extend_keys", make)


@planted
def a_shared_page_is_written_without_a_copy(rig: Rig) -> None:
    rig.scheduler.pool.is_writable = lambda page: True  # type: ignore[method-assign]


@planted
def an_evicted_page_is_still_offered(rig: Rig) -> None:
    rig.scheduler.pool.forget = lambda page: None  # type: ignore[method-assign]


# -- queues -----------------------------------------------------------------------------------------------------------


@planted
def the_budget_is_exceeded_by_one(rig: Rig) -> None:
    replace(rig.scheduler, "_admit", lambda old: lambda plan, most, *rest, **more: old(plan, most + 1, *rest, **more))


@planted
def a_cancelled_request_stays_in_the_running_queue(rig: Rig) -> None:
    roster = rig.scheduler.roster

    def make(end: Callable[[Request], None]) -> Callable[[Request], None]:
        def ends(request: Request) -> None:
            ran = request.state is State.RUNNING and not request.leaving
            end(request)
            if ran:
                roster.running.append(request)

        return ends

    replace(roster, "end", make)


@planted
def a_request_is_preempted_twice(rig: Rig) -> None:
    roster = rig.scheduler.roster

    def make(preempt: Callable[[Request], bool]) -> Callable[[Request], bool]:
        def preempts(victim: Request) -> bool:
            if victim.in_flight and victim.state is State.RUNNING:
                preempt(victim)
                roster.running.append(victim)
                return preempt(victim)
            return preempt(victim)

        return preempts

    replace(rig.scheduler.suspension, "preempt", make)


@planted
def a_paused_request_is_still_planned(rig: Rig) -> None:
    roster = rig.scheduler.roster

    def make(pause: Callable[[Request], None]) -> Callable[[Request], None]:
        def pauses(request: Request) -> None:
            ran = request in roster.running
            pause(request)
            if ran:
                roster.running.append(request)
                request.state = State.RUNNING

        return pauses

    replace(rig.scheduler.suspension, "pause", make)


@planted
def a_resumed_request_is_forgotten(rig: Rig) -> None:
    roster = rig.scheduler.roster

    def resume(request: Request) -> None:
        if request.state is State.PAUSED:
            roster.paused.remove(request)
            request.state = State.RUNNING if request.row >= 0 else State.WAITING

    rig.scheduler.suspension.resume = resume  # type: ignore[method-assign]


@planted
def a_promise_outlives_the_request_that_made_it(rig: Rig) -> None:
    rig.scheduler.prefixes.withdraw = lambda request: None  # type: ignore[method-assign]


@planted
def who_drains_is_never_counted_off(rig: Rig) -> None:
    roster = rig.scheduler.roster

    def make(release: Callable[[Request], None]) -> Callable[[Request], None]:
        def releases(request: Request) -> None:
            release(request)
            roster.draining += 1

        return releases

    replace(roster, "release_drained", make)


# -- steps ------------------------------------------------------------------------------------------------------------


@planted
def what_a_failed_step_wrote_stays_in_the_prefix_cache(rig: Rig) -> None:
    pool = rig.scheduler.pool

    def make(taint: Callable[..., None]) -> Callable[..., None]:
        def taints(pages: set[int], failed: set[Request]) -> None:
            forget, pool.forget = pool.forget, lambda page: None  # type: ignore[method-assign]
            taint(pages, failed)
            pool.forget = forget  # type: ignore[method-assign]

        return taints

    replace(rig.scheduler.failures, "taint", make)


@planted
def sharers_of_a_failed_step_go_on(rig: Rig) -> None:
    pool = rig.scheduler.pool

    def taint(pages: set[int], failed: set[Request]) -> None:
        for page in pages:
            pool.forget(page)

    rig.scheduler.failures.taint = taint  # type: ignore[method-assign]


@planted
def results_that_read_a_failed_step_are_kept(rig: Rig) -> None:
    def make(taint: Callable[..., None]) -> Callable[..., None]:
        def taints(pages: set[int], failed: set[Request]) -> None:
            taint(pages, failed)
            for request in rig.scheduler.roster.requests.values():
                request.discard = 0

        return taints

    replace(rig.scheduler.failures, "taint", make)


@planted
def a_token_comes_after_the_end(rig: Rig) -> None:
    def make(finish: Callable[..., None]) -> Callable[..., None]:
        def finishes(request: Request, reason: Any) -> None:
            if reason != "stop":
                finish(request, reason)

        return finishes

    replace(rig.scheduler.roster, "finish", make)


@planted
def one_token_too_many(rig: Rig) -> None:
    def make(gain: Callable[..., None]) -> Callable[..., None]:
        def gains(request: Request, *given: Any, **options: Any) -> None:
            if len(request.tokens) + 1 == request.limit and not request.asked.holds:
                request.limit += 1
            gain(request, *given, **options)

        return gains

    replace(rig.scheduler.commits, "gain", make)


@planted
def a_preempted_request_forgets_its_last_token(rig: Rig) -> None:
    def make(requeue: Callable[[Request], None]) -> Callable[[Request], None]:
        def requeues(request: Request) -> None:
            if len(request.tokens) > request.prompt_len:
                request.tokens.pop()
            requeue(request)

        return requeues

    replace(rig.scheduler.suspension, "_requeue", make)


@planted
def a_page_that_is_not_full_is_offered(rig: Rig) -> None:
    prefixes, pool = rig.scheduler.prefixes, rig.scheduler.pool

    def make(offer: Callable[[Request], None]) -> Callable[[Request], None]:
        def offers(request: Request) -> None:
            offer(request)
            place = request.place
            if place.keys and place.registered < min(len(place.keys), len(place.pages)):
                pool.register(place.pages[place.registered], place.keys[place.registered])

        return offers

    replace(prefixes, "offer", make)


# -- swapping and deadlines -------------------------------------------------------------------------------------------


@planted
def one_that_is_cancelled_while_swapped_out_keeps_its_places(rig: Rig) -> None:
    def drop(request: Request) -> None:
        request.place.host_places, request.place.stored = [], 0

    rig.scheduler.swaps.drop = drop  # type: ignore[method-assign]


@planted
def a_place_is_refilled_by_the_plan_that_fetches_from_it(rig: Rig) -> None:
    host = rig.scheduler.swaps.host

    def fetch(place: int, page: int) -> None:
        host._fetches.append((place, page))
        host._free.append(place)

    host.fetch = fetch  # type: ignore[method-assign]


@planted
def pages_are_fetched_that_a_step_in_flight_may_fail_to_spill(rig: Rig) -> None:
    host = rig.scheduler.swaps.host

    def make(load: Callable[[StepPlan], None]) -> Callable[[StepPlan], None]:
        def loads(plan: StepPlan) -> None:
            load(plan)
            host._in_flight.clear()

        return loads

    replace(host, "load", make)


@planted
def what_a_failed_step_wrote_is_swapped_out(rig: Rig) -> None:
    def make(put_out: Callable[[Request], None]) -> Callable[[Request], None]:
        def puts_out(request: Request) -> None:
            request.place.is_tainted = False
            put_out(request)

        return puts_out

    replace(rig.scheduler.swaps, "put_out", make)


@planted
def a_swapped_request_comes_back_a_token_further(rig: Rig) -> None:
    def make(bring_in: Callable[[Request], None]) -> Callable[[Request], None]:
        def brings_in(request: Request) -> None:
            place = request.place
            if place.host_places and place.stored < len(request.tokens) - 1:
                place.stored += 1
            elif place.host_places:
                place.host_places[0], place.host_places[-1] = place.host_places[-1], place.host_places[0]
            bring_in(request)

        return brings_in

    replace(rig.scheduler.swaps, "bring_in", make)


@planted
def one_whose_deadline_has_passed_is_served(rig: Rig) -> None:
    rig.scheduler.deadlines.overdue = lambda now: None  # type: ignore[method-assign]


@planted
def nobody_is_told_of_a_deadline(rig: Rig) -> None:
    def pop_lapsed() -> list[Any]:
        rig.scheduler.deadlines.lapsed.clear()
        return []

    rig.scheduler.deadlines.pop_lapsed = pop_lapsed  # type: ignore[method-assign]


@planted
def a_completion_is_computed_again_as_a_prompt_is(rig: Rig) -> None:
    def make(most: Callable[[Request], int]) -> Callable[[Request], int]:
        return lambda request: (
            most(request) if request.planned < request.prompt_len else rig.capacity.max_batched_tokens
        )

    replace(rig.scheduler._alternation, "_most", make)


@planted
def a_deterministic_request_takes_what_others_computed(rig: Rig) -> None:
    def make(usable: Callable[[Request], list[bytes]]) -> Callable[[Request], list[bytes]]:
        def all_but_the_last(request: Request) -> list[bytes]:
            found = usable(request)
            return (
                request.place.keys[: (len(request.tokens) - 1) // rig.capacity.page_size]
                if request.asked.alone
                else found
            )

        return all_but_the_last

    replace(rig.scheduler.prefixes, "usable", make)


@planted
def steps_of_one_request_keep_all_others_waiting(rig: Rig) -> None:
    alternation = rig.scheduler._alternation

    def make(planned: Callable[..., None]) -> Callable[..., None]:
        def plans(plan: StepPlan, requests: Any) -> None:
            planned(plan, requests)
            alternation.is_due = alternation.any

        return plans

    replace(alternation, "planned", make)


# -- turns ------------------------------------------------------------------------------------------------------------


def replace_of(kind: type[Policy], rig: Rig, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(old)` in the place of a method of the policy, where that is a `kind`."""
    policy = rig.scheduler._policy
    if isinstance(policy, kind):
        object.__setattr__(policy, name, make(getattr(policy, name)))  # some are frozen


@planted
def background_starts_in_turn_with_users(rig: Rig) -> None:
    replace_of(BackgroundLast, rig, "urgency", lambda old: lambda request, now: old(request, now)[1])


@planted
def background_keeps_its_pages_like_users(rig: Rig) -> None:
    replace_of(BackgroundLast, rig, "standing", lambda old: lambda request, now: old(request, now)[1])


@planted
def nothing_is_gained_by_waiting(rig: Rig) -> None:
    replace_of(Ageing, rig, "urgency", lambda old: lambda request, now: old(request, request.arrived))


@planted
def short_prompts_pass_whoever_has_waited_too_long(rig: Rig) -> None:
    replace_of(SizeClasses, rig, "urgency", lambda old: lambda request, now: old(request, request.arrived))


@planted
def a_begun_prompt_waits_for_short_ones_without_end(rig: Rig) -> None:
    replace_of(SizeClasses, rig, "overtakes", lambda old: lambda waits, begun, now: old(waits, begun, begun.arrived))


@planted
def sampled_tokens_are_free(rig: Rig) -> None:
    def make(served: Callable[..., None]) -> Callable[..., None]:
        return lambda works: served(work._replace(samples=False) for work in works)

    replace_of(FairShare, rig, "served", make)


@planted
def who_was_idle_gets_its_time_back(rig: Rig) -> None:
    policy: Any = rig.scheduler._policy

    def make(arrived: Callable[[Request], None]) -> Callable[[Request], None]:
        def arrives(request: Request) -> None:
            arrived(request)
            account = policy._tenants.accounts[request.asked.tenant]
            if account.live == 1:
                account.served = 0.0

        return arrives

    replace_of(FairShare, rig, "arrived", make)


@planted
def a_row_changes_hands_without_end(rig: Rig) -> None:
    def make(displaced: Callable[..., Any]) -> Callable[..., Any]:
        def displaces(running: Sequence[Request], coming: int) -> list[Request]:
            return list(displaced(running, coming)) or [each for each in running if each.preemptions][-1:]

        return displaces

    replace_of(FairShare, rig, "displaced", make)


@planted
def an_early_deadline_comes_before_other_tenants(rig: Rig) -> None:
    policy: Any = rig.scheduler._policy
    replace_of(Deadlines, rig, "urgency", lambda old: lambda request, now: policy.place(request))


@planted
def whoever_is_given_most_is_served_first(rig: Rig) -> None:
    def make(urgency: Callable[..., Any]) -> Callable[..., Any]:
        return lambda request, now: (-urgency(request, now)[0], request.id)

    replace_of(FairShare, rig, "urgency", make)


def after_a_late_mask(rig: Rig, change: Callable[[Request], None]) -> None:
    """Have `change` happen to a request whose row was left out."""

    def make(commit_others: Callable[..., Any]) -> Callable[..., Any]:
        def commits_others(plan: StepPlan, result: StepResult, others: set[Request]) -> Any:
            outcome = commit_others(plan, result, others)
            for index, what in result.instead.items():
                if what is NoToken.LATE and plan.works[index].request.is_held:
                    change(plan.works[index].request)
            return outcome

        return commits_others

    replace(rig.scheduler.commits, "_commit_others", make)


@planted
def steps_that_left_a_row_alone_are_believed(rig: Rig) -> None:
    def believe(request: Request) -> None:
        request.discard = 0

    after_a_late_mask(rig, believe)


@planted
def a_row_that_was_left_out_is_left_alone_for_ever(rig: Rig) -> None:
    def forget(request: Request) -> None:
        request.is_held = bool(request.unsent)

    after_a_late_mask(rig, forget)


@planted
def pages_are_offered_that_a_late_row_has_not_written(rig: Rig) -> None:
    prefixes = rig.scheduler.prefixes

    def make(offer: Callable[[Request], None]) -> Callable[[Request], None]:
        def offers(request: Request) -> None:
            computed, request.computed = request.computed, request.planned
            offer(request)
            request.computed = computed

        return offers

    replace(prefixes, "offer", make)


# -- windows ----------------------------------------------------------------------------------------------------------


class _Shorter(Window):
    """A window that believes itself a page shorter than it is."""

    def first_page(self, position: int) -> int:
        return super().first_page(position + self.page_size)


def _shorter(rig: Rig) -> Window:
    return _Shorter(rig.capacity.window, rig.capacity.page_size)


@planted
def pages_are_given_back_that_attention_still_reads(rig: Rig) -> None:
    rig.scheduler._planner._window = _shorter(rig)


@planted
def a_prefix_is_shared_though_a_page_of_its_window_is_gone(rig: Rig) -> None:
    rig.scheduler.prefixes._window = _shorter(rig)


@planted
def a_fork_reads_pages_that_were_given_back(rig: Rig) -> None:
    prefixes, size = rig.scheduler.prefixes, rig.capacity.page_size

    def make(find: Callable[[Request, int], Any]) -> Callable[[Request, int], Any]:
        def finds(request: Request, step: int) -> Any:
            leader, needed = request.leader, len(request.tokens) - 1
            ready = leader is not None and leader.launched_before(step) >= needed and not request.preemptions
            if (
                ready
                and leader.place.first_page
                and leader.place.copied != step
                and not (leader.discard or leader.failed)
            ):
                request.place.found = needed
                request.place.first_page = leader.place.first_page
                return leader.place.pages[: max(0, -(-needed // size) - leader.place.first_page)]
            return find(request, step)

        return finds

    replace(prefixes, "find", make)


@planted
def pages_that_were_swapped_out_come_back_in_other_places(rig: Rig) -> None:
    def make(put_out: Callable[[Request], None]) -> Callable[[Request], None]:
        def puts_out(request: Request) -> None:
            put_out(request)
            request.place.first_page = 0

        return puts_out

    replace(rig.scheduler.swaps, "put_out", make)
