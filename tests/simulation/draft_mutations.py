"""Bugs of speculation, each as a change of a new rig; the simulation must find every one of them within 500 seeds.

Each function plants one, and its name says what happens then. No tests here: test_mutations.py plays them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from simulation.mutations import planted, replace
from simulation.rig import Rig

from headrace.engine.scheduling import commit, planner
from headrace.engine.scheduling.plan import PageEntry, StepPlan, Work
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import StepResult
from headrace.engine.testing import ScriptedStep, scripted_token

__all__: list[str] = []


def during(
    owner: object, method: str, module: ModuleType | type[object], name: str, make: Callable[[Any], Any]
) -> None:
    """Put `make(old)` in the place of a function of `module` while `owner` runs a method, for this rig alone."""

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*values: Any, **named: Any) -> Any:
            old = getattr(module, name)
            setattr(module, name, make(old))
            try:
                return call(*values, **named)
            finally:
                setattr(module, name, old)

        return called

    replace(owner, method, wrap)


@planted
def a_draft_too_many_is_accepted(rig: Rig) -> None:
    runner = rig.runner

    def make(verify: Callable[[StepPlan, int, Work], int]) -> Callable[[StepPlan, int, Work], int]:
        def verifies(plan: StepPlan, index: int, work: Work) -> int:
            guesses = dict(runner._tokens[work.row])
            first = verify(plan, index, work)
            place = runner.lengths[work.row]
            if place < work.start + work.num_tokens and place in guesses:
                runner._runs[index].append(guesses[place])
                runner._tokens[work.row][place] = guesses[place]
                runner.lengths[work.row] += 1
            return first

        return verifies

    replace(runner, "_verify", make)


@planted
def tokens_behind_drafts_have_the_noise_of_the_next_position(rig: Rig) -> None:
    runner, vocab = rig.runner, rig.capacity.vocab_size

    def make(verify: Callable[[StepPlan, int, Work], int]) -> Callable[[StepPlan, int, Work], int]:
        def verifies(plan: StepPlan, index: int, work: Work) -> int:
            first = verify(plan, index, work)
            if run := runner._runs[index]:
                run[-1] = scripted_token([run[-1], runner.lengths[work.row]], vocab)
                runner._tokens[work.row][runner.lengths[work.row] - 1] = run[-1]
            return first

        return verifies

    replace(runner, "_verify", make)


@planted
def a_row_goes_on_behind_a_wrong_draft(rig: Rig) -> None:
    runner = rig.runner

    def make(verify: Callable[[StepPlan, int, Work], int]) -> Callable[[StepPlan, int, Work], int]:
        def verifies(plan: StepPlan, index: int, work: Work) -> int:
            first = verify(plan, index, work)
            if runner._drafts.get(work.row):
                runner.lengths[work.row] = work.start + work.num_tokens + 1
            return first

        return verifies

    replace(runner, "_verify", make)


@planted
def a_page_with_drafts_is_offered(rig: Rig) -> None:
    prefixes, size = rig.scheduler.prefixes, rig.capacity.page_size

    def make(offer: Callable[[Request], None]) -> Callable[[Request], None]:
        def offers(request: Request) -> None:
            offer(request)
            full = request.planned // size
            if prefixes.enabled and request.reach and request.place.registered < full:
                missing = full * size - len(request.tokens)
                guessed = [*request.tokens, *[0] * missing]
                rig.scheduler.pool.extend_keys(request.place.keys, guessed, request.asked.root)
                prefixes.remember(request, full - 1)
                request.place.registered = full

        return offers

    replace(prefixes, "offer", make)


def behind_runs(rig: Rig, change: Callable[[Request, int, int], None]) -> None:
    """Call `change` with each request that gained a run, its drafts and its number of tokens."""

    def make(accept_runs: Callable[..., Any]) -> Callable[..., Any]:
        def accepts(plan: StepPlan, result: StepResult, counts: Sequence[int], *rest: Any) -> Any:
            full, others = accept_runs(plan, result, counts, *rest)
            for request, drafts, count in zip(plan.decodes, plan.drafts, counts, strict=False):
                if request not in others:
                    change(request, drafts, count)
            return full, others

        return accepts

    during(rig.scheduler, "commit", commit, "accept_runs", make)


@planted
def bounds_are_one_short(rig: Rig) -> None:
    def shorten(request: Request, drafts: int, _: int) -> None:
        if drafts and request.in_flight:
            request.known -= 1
            request.planned -= 1

    behind_runs(rig, shorten)


@planted
def bounds_are_never_made_closer(rig: Rig) -> None:
    def widen(request: Request, drafts: int, count: int) -> None:
        request.known += drafts + 1 - count
        request.planned += drafts + 1 - count

    behind_runs(rig, widen)


@planted
def the_depth_of_a_launched_step_changes(rig: Rig) -> None:
    def make(launch: Callable[[StepPlan], ScriptedStep]) -> Callable[[StepPlan], ScriptedStep]:
        def launches(plan: StepPlan) -> ScriptedStep:
            step = launch(plan)
            if plan.depth:
                plan.depth -= 1
                plan.drafts = [max(0, drafts - 1) for drafts in plan.drafts]
            return step

        return launches

    replace(rig.runner, "launch", make)


@planted
def further_tokens_are_for_nothing(rig: Rig) -> None:
    rig.scheduler.roster.charge = lambda further: None  # type: ignore[method-assign]


@planted
def drafts_are_charged_whether_they_are_right_or_not(rig: Rig) -> None:
    def charge(request: Request, drafts: int, count: int) -> None:
        rig.scheduler.roster.charge([(request, drafts + 1 - count)])

    behind_runs(rig, charge)


@planted
def drafts_pass_the_limit(rig: Rig) -> None:
    size = rig.capacity.page_size

    def make(plan_drafts: Callable[..., None]) -> Callable[..., None]:
        def plans(plan: StepPlan, *rest: Any) -> None:
            plan_drafts(plan, *rest)
            for index, request in enumerate(plan.decodes if plan.drafts else ()):
                if plan.drafts[index] and request.known == request.limit and request.room(size) > request.planned:
                    plan.drafts[index] += 1
                    plan.tokens += 1
                    request.reach += 1
                    request.planned += 1
                    request.known += 1

        return plans

    during(rig.scheduler, "plan", planner, "plan_drafts", make)


@planted
def drafts_are_planned_without_pages(rig: Rig) -> None:
    def make(plan_drafts: Callable[..., None]) -> Callable[..., None]:
        def plans(plan: StepPlan, *rest: Any) -> None:
            plan_drafts(plan, *rest)
            if plan.drafts:
                pages = {(entry.row, entry.place) for entry in plan.entries}
                plan.entries = [entry for entry in plan.entries if not _is_last(entry, plan, pages)]

        return plans

    during(rig.scheduler, "plan", planner, "plan_drafts", make)


def _is_last(entry: PageEntry, plan: StepPlan, pages: set[tuple[int, int]]) -> bool:
    drafts = dict(zip(plan.rows, plan.drafts, strict=True))
    return bool(drafts.get(entry.row)) and (entry.row, entry.place + 1) not in pages


@planted
def reach_outlives_a_preemption(rig: Rig) -> None:
    suspension = rig.scheduler.suspension

    def make(requeue: Callable[[Request], None]) -> Callable[[Request], None]:
        def requeues(request: Request) -> None:
            reach = request.reach
            requeue(request)
            request.reach = reach or int(request.asked.speculates and request.preemptions > 1)

        return requeues

    replace(suspension, "_requeue", make)


@planted
def a_turn_keeps_what_drafts_might_have_written(rig: Rig) -> None:
    turns = rig.scheduler.prefixes.turns

    def make(keep: Callable[[Request], None]) -> Callable[[Request], None]:
        def keeps(request: Request) -> None:
            request.reach = -1 if request.asked.speculates else 0
            keep(request)
            request.reach = 0

        return keeps

    replace(turns, "keep", make)


@planted
def a_late_row_keeps_its_reach(rig: Rig) -> None:
    def make(go_back: Callable[[Request, int], None]) -> Callable[[Request, int], None]:
        def goes_back(request: Request, place: int) -> None:
            reach = request.reach
            go_back(request, place)
            request.reach = reach

        return goes_back

    during(rig.scheduler, "commit", Request, "go_back", make)


@planted
def forced_tokens_are_sent_before_it_is_known_where_they_begin(rig: Rig) -> None:
    def make(_: object) -> property:
        return property(lambda request: request.state is State.RUNNING and not request.leaving)

    during(rig.scheduler, "plan", Request, "is_plannable", make)


@planted
def forced_tokens_that_a_run_does_not_reach_are_never_sent(rig: Rig) -> None:
    def make(settle: Callable[[Request, int, int], None]) -> Callable[[Request, int, int], None]:
        def settles(request: Request, drafts: int, tokens: int) -> None:
            unsent = request.unsent
            settle(request, drafts, tokens)
            request.unsent = unsent

        return settles

    during(rig.scheduler, "commit", Request, "settle", make)
