"""Bugs that engines had around their scheduler - loop, streams, adapters, ends - each as a change of an open engine.

Each function plants one, and its first line says what happens then. No tests here: test_mutations.py plays them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

from simulation.engine_world import EngineWorld
from simulation.mutations import replace

from headrace.adapters.slots import AdapterVersion, Residency
from headrace.engine.delivery import kv_events
from headrace.engine.delivery.beams import BeamGeneration
from headrace.engine.delivery.generation import Delivered, Generation
from headrace.engine.delivery.kv_events import KvEvents
from headrace.engine.grammar.jobs import Claim, GrammarJob
from headrace.engine.many.generate import run_many
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.memory.page_log import Medium, PageLog
from headrace.engine.scheduling.plan import Emission, StepPlan
from headrace.engine.scheduling.request import Request, State
from headrace.engine.steps.loop import StepLoop

__all__ = ["ENGINE_MUTATIONS"]

ENGINE_MUTATIONS: dict[str, Callable[[EngineWorld], None]] = {}
"""Name of a bug -> what plants it."""


def planted(plant: Callable[[EngineWorld], None]) -> Callable[[EngineWorld], None]:
    ENGINE_MUTATIONS[plant.__name__] = plant
    return plant


def loop_of(world: EngineWorld) -> StepLoop:
    assert world.engine._life.loop is not None
    return world.engine._life.loop


# -- streams ----------------------------------------------------------------------------------------------------------


@planted
def a_stream_is_left_open_after_its_step_failed(world: EngineWorld) -> None:
    def deliver(old: Callable[[Emission], None], generation: Generation, emission: Emission) -> None:
        if emission.error is None:
            old(emission)

    each_delivery(world, deliver)


@planted
def a_finish_is_delivered_twice(world: EngineWorld) -> None:
    def deliver(old: Callable[[Emission], None], generation: Generation, emission: Emission) -> None:
        old(emission)
        if emission.finish_reason is not None and type(generation) is Generation:
            choice = generation._choice_of[emission.request.id]
            generation.mailbox.put(Delivered(choice, emission.token, None, emission.finish_reason))

    each_delivery(world, deliver)


def each_delivery(world: EngineWorld, change: Callable[..., None]) -> None:
    """Have `change` deliver in the place of every new generation."""

    def make(submit: Callable[..., None]) -> Callable[..., None]:
        def submits(generation: Generation, prompt: list[int], requests: Sequence[Request]) -> None:
            old = generation.deliver
            generation.deliver = partial(change, old, generation)  # type: ignore[method-assign]
            submit(generation, prompt, requests)

        return submits

    replace(loop_of(world), "submit", make)


@planted
def a_token_is_delivered_to_another_choice(world: EngineWorld) -> None:
    def make(submit: Callable[..., None]) -> Callable[..., None]:
        def submits(generation: Generation, prompt: list[int], requests: Sequence[Request]) -> None:
            submit(generation, prompt, requests)
            if len(requests) > 1:
                places = generation._choice_of
                places[requests[0].id], places[requests[1].id] = places[requests[1].id], places[requests[0].id]

        return submits

    replace(loop_of(world), "submit", make)


@planted
def readers_that_are_behind_do_not_hold_back_their_requests(world: EngineWorld) -> None:
    """Back-pressure is lost: what nobody reads piles up."""
    loop_of(world).pause = lambda request: None  # type: ignore[method-assign]


@planted
def a_reader_that_caught_up_is_not_noticed(world: EngineWorld) -> None:
    loop_of(world).resume = lambda request: None  # type: ignore[method-assign]


@planted
def a_stop_string_does_not_end_the_request(world: EngineWorld) -> None:
    def make(finish: Callable[[Request, Any], bool]) -> Callable[[Request, Any], bool]:
        return lambda request, reason: reason == "stop" or finish(request, reason)

    replace(loop_of(world), "finish", make)


@planted
def a_cancelled_stream_computes_on(world: EngineWorld) -> None:
    def make(finish: Callable[[Request, Any], bool]) -> Callable[[Request, Any], bool]:
        def finishes(request: Request, reason: Any) -> bool:
            if reason != "cancelled":
                return finish(request, reason)
            return loop_of(world)._generations.pop(request.id, None) is not None

        return finishes

    replace(loop_of(world), "finish", make)


@planted
def a_dropped_stream_is_never_closed(world: EngineWorld) -> None:
    deaf: Any = type("Deaf", (), {"check_here": lambda self: None, "__call__": lambda self, call: None})()
    serving = world.engine._serving
    serving.start(dataclasses.replace(serving.parts(), post=deaf))


# -- the loop ---------------------------------------------------------------------------------------------------------


@planted
def a_request_that_comes_while_the_loop_sleeps_wakes_nobody(world: EngineWorld) -> None:
    replace(loop_of(world), "add", _without_waking(loop_of(world)))


def _without_waking(step_loop: StepLoop) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def make(add: Callable[..., None]) -> Callable[..., None]:
        def adds(generation: Generation, requests: Sequence[Request]) -> None:
            wake, step_loop._wake = step_loop._wake, lambda: None  # type: ignore[method-assign]
            try:
                add(generation, requests)
            finally:
                step_loop._wake = wake  # type: ignore[method-assign]

        return adds

    return make


@planted
def a_step_builds_on_one_that_was_never_launched(world: EngineWorld) -> None:
    flights = loop_of(world)._launched
    flights.may_grow = lambda scheduler: len(flights) < 3  # type: ignore[method-assign]


@planted
def the_device_is_closed_under_a_step_in_flight(world: EngineWorld) -> None:
    """The loop ends when it is told to, and not when its steps have."""
    step_loop = loop_of(world)

    async def complete(oldest: Any) -> None:
        if step_loop._closing:
            step_loop._launched.clear()
        else:
            await StepLoop._complete(step_loop, oldest)

    step_loop._complete = complete  # type: ignore[method-assign]


@planted
def a_step_that_hangs_is_never_given_up(world: EngineWorld) -> None:
    loop_of(world)._hang_after = inf


@planted
def what_came_after_a_crash_waits_for_ever(world: EngineWorld) -> None:
    loop_of(world)._end_all = lambda: None  # type: ignore[method-assign]


@planted
def a_drain_loses_those_that_wait(world: EngineWorld) -> None:
    """Only what runs is waited for."""
    step_loop = loop_of(world)

    async def drained() -> None:
        while step_loop.scheduler.roster.num_running:
            await step_loop._idle.wait()

    step_loop.drained = drained  # type: ignore[method-assign]


@planted
def a_drain_loses_what_is_being_tokenised(world: EngineWorld) -> None:
    loop_of(world).expect = lambda generation: None  # type: ignore[method-assign]


@planted
def a_choice_of_the_host_is_taken_after_the_request_has_gone(world: EngineWorld) -> None:
    step_loop = loop_of(world)

    def make(chosen: Callable[..., None]) -> Callable[..., None]:
        def choose(request: Request, step: int, result: Any, error: Any) -> None:
            if request.awaited != step and request.state is not State.FINISHED:
                request.awaited = step
            chosen(request, step, result, error)

        return choose

    replace(step_loop.choices, "_chosen", make)


@planted
def who_came_last_is_served_first(world: EngineWorld) -> None:
    waiting = loop_of(world).scheduler.roster.waiting
    replace(waiting, "in_order", lambda old: lambda now: reversed(list(old(now))))


# -- adapters ---------------------------------------------------------------------------------------------------------


@planted
def an_adapter_is_let_go_while_its_request_is_paused(world: EngineWorld) -> None:
    scheduler = loop_of(world).scheduler

    def make(pause: Callable[[Request], None]) -> Callable[[Request], None]:
        def pauses(request: Request) -> None:
            ran = request.state is State.RUNNING
            pause(request)
            if ran and request.asked.version is not None and request.row >= 0:
                scheduler.slots.drop(request.asked.version)

        return pauses

    replace(scheduler.suspension, "pause", make)


@planted
def a_slot_is_refilled_while_a_step_in_flight_wears_it(world: EngineWorld) -> None:
    """A request that ends gives its adapter back at once."""
    scheduler = loop_of(world).scheduler

    def make(end: Callable[[Request], None]) -> Callable[[Request], None]:
        def ends(request: Request) -> None:
            flies = request.in_flight and request.asked.version is not None and not request.leaving
            end(request)
            if flies and request.asked.version is not None:
                scheduler.slots.drop(request.asked.version)

        return ends

    replace(scheduler.roster, "end", make)


@planted
def a_row_starts_before_its_adapter_has_come(world: EngineWorld) -> None:
    slots = loop_of(world).scheduler.slots

    def make(fetch: Callable[..., bool]) -> Callable[..., bool]:
        def fetches(version: AdapterVersion, *replacing: Any) -> bool:
            found = fetch(version, *replacing)
            if version.residency is Residency.LOADING:
                version.residency = Residency.RESIDENT
            return found

        return fetches

    replace(slots, "fetch", make)


@planted
def a_replaced_adapter_takes_over_running_requests(world: EngineWorld) -> None:
    """What has a name is changed in place."""
    owner = world.engine.adapters

    def make(register: Callable[..., None]) -> Callable[..., None]:
        def registers(name: str, loaded: Any, source: Any, device: Any) -> None:
            named = owner._names.get(name)
            if named is None or named.version.residency is not Residency.RESIDENT:
                register(name, loaded, source, device)
            else:
                world.runner.slots[named.version.slot] = loaded

        return registers

    replace(owner, "_register", make)


@planted
def who_waits_for_an_adapter_that_does_not_come_waits_for_ever(world: EngineWorld) -> None:
    loop_of(world).fail_adapter = lambda version, error: None  # type: ignore[method-assign]


@planted
def a_request_cancelled_while_its_adapter_loads_still_uses_it(world: EngineWorld) -> None:
    slots = loop_of(world).scheduler.slots

    def make(leave: Callable[[AdapterVersion], None]) -> Callable[[AdapterVersion], None]:
        return lambda version: None if version.residency is Residency.LOADING else leave(version)

    replace(slots, "leave", make)


@planted
def loads_wait_for_threads_that_have_ended(world: EngineWorld) -> None:
    world.engine.adapters._check_open = lambda: None  # type: ignore[method-assign]


# -- memory -----------------------------------------------------------------------------------------------------------


@planted
def memory_is_given_back_under_a_step_in_flight(world: EngineWorld) -> None:
    step_loop = loop_of(world)

    async def ask(carry_out: Callable[[], Any], wake: Callable[[], None]) -> None:
        await carry_out()

    step_loop.changes.ask = ask  # type: ignore[method-assign]


@planted
def a_change_of_memory_that_hangs_is_never_given_up(world: EngineWorld) -> None:
    step_loop = loop_of(world)

    async def wait_for(call: Callable[[], Any], what: str, patience: float = 1.0) -> Any:
        return await StepLoop.wait_for(step_loop, call, what, patience if what == "a step" else inf)

    step_loop.wait_for = wait_for  # type: ignore[method-assign]


# -- what routers are told --------------------------------------------------------------------------------------------


def log_of(world: EngineWorld) -> PageLog:
    return loop_of(world).scheduler.pool.log


@planted
def a_router_is_not_told_what_the_host_forgets(world: EngineWorld) -> None:
    def make(removed: Callable[[bytes, Medium], None]) -> Callable[[bytes, Medium], None]:
        return lambda key, medium: None if medium == "host" else removed(key, medium)

    replace(log_of(world), "removed", make)


@planted
def a_router_takes_one_tenants_pages_for_anothers(world: EngineWorld) -> None:
    replace(log_of(world), "scope", lambda scope: lambda root: scope(b"anybody"))


@planted
def a_router_that_falls_behind_is_not_told_to_begin_anew(world: EngineWorld) -> None:
    """What has no room is dropped."""

    def make(open_events: Callable[[], KvEvents]) -> Callable[[], KvEvents]:
        def opens() -> KvEvents:
            events = open_events()
            put = events.put
            events.put = lambda event: put(event) if len(events._events) < kv_events._ROOM else None  # type: ignore[method-assign]
            return events

        return opens

    replace(world.engine, "kv_events", make)


@planted
def a_router_that_waits_is_not_woken(world: EngineWorld) -> None:
    loop_of(world).kv.tell = lambda: None  # type: ignore[method-assign]


# -- searches, grammars, many at once ---------------------------------------------------------------------------------


def each_round(world: EngineWorld, change: Callable[[list[Request]], None]) -> None:
    """Have `change` look at the beams of every round of a search before they are queued."""

    def make(add: Callable[..., None]) -> Callable[..., None]:
        def adds(generation: Generation, requests: Sequence[Request]) -> None:
            if isinstance(generation, BeamGeneration):
                change([request for request in requests if request.leader is not None])
            add(generation, requests)

        return adds

    replace(loop_of(world), "add", make)


@planted
def a_beam_goes_on_from_another_one(world: EngineWorld) -> None:
    def change(beams: list[Request]) -> None:
        leaders = [beam.leader for beam in beams]
        for beam, leader in zip(beams, leaders[1:] + leaders[:1], strict=True):
            beam.leader = leader

    each_round(world, change)


@planted
def beams_write_to_the_pages_that_they_share(world: EngineWorld) -> None:
    def change(beams: list[Request]) -> None:
        for beam in beams:
            beam.forked = False

    each_round(world, change)


@planted
def beams_of_earlier_rounds_are_never_let_go(world: EngineWorld) -> None:
    def make(finish: Callable[[Request, Any], bool]) -> Callable[[Request, Any], bool]:
        return lambda request, reason: reason == "length" or finish(request, reason)

    replace(loop_of(world), "finish", make)


@planted
def a_search_grows_beyond_what_memory_holds(world: EngineWorld) -> None:
    def make(add: Callable[..., None]) -> Callable[..., None]:
        def adds(generation: Generation, requests: Sequence[Request]) -> None:
            if isinstance(generation, BeamGeneration):
                generation._prompt_len = -(2**40)
            add(generation, requests)

        return adds

    replace(loop_of(world), "add", make)


@planted
def a_grammar_begins_anew_with_every_row(world: EngineWorld) -> None:
    """After a preemption, as if nothing had been generated."""

    def make(plan: Callable[..., StepPlan | None]) -> Callable[..., StepPlan | None]:
        def plans(now: float = 0.0) -> StepPlan | None:
            made = plan(now)
            if made is not None:
                made.options = [
                    options._replace(tokens=options.tokens[: options.prompt_len]) if options.grammar else options
                    for options in made.options
                ]
            return made

        return plans

    replace(loop_of(world).scheduler, "plan", make)


@planted
def what_a_grammar_forces_is_not_given_to_the_device(world: EngineWorld) -> None:
    def make(plan: Callable[..., StepPlan | None]) -> Callable[..., StepPlan | None]:
        def plans(now: float = 0.0) -> StepPlan | None:
            made = plan(now)
            if made is not None:
                rows = {work.row for work in made.works if work.request.asked.jumps}
                made.given = [given for given in made.given if given.row not in rows]
            return made

        return plans

    replace(loop_of(world).scheduler, "plan", make)


@planted
def who_wants_a_grammar_loses_it_with_the_one_that_asked_before(world: EngineWorld) -> None:
    """Nothing is compiled if the first of them has gone."""
    jobs = world.engine._life.grammars._jobs

    def make(claim: Callable[[GrammarJob, str | None, float], Claim]) -> Callable[..., Claim]:
        def claims(job: GrammarJob, tenant: str | None, now: float) -> Claim:
            if job.waiters and not job.waiters[0].still_wanted():
                return Claim(False, jobs.end(job), [])
            return claim(job, tenant, now)

        return claims

    replace(jobs, "claim", make)


@planted
def answers_of_many_prompts_come_as_they_end(world: EngineWorld) -> None:
    engine = world.engine

    async def generates(prompts: Any, params: Any, **options: Any) -> Any:
        ended: list[Any] = []

        async def generate(prompt: Any, params: SamplingParams, **asked: Any) -> Any:
            ended.append(await engine.generate(prompt, params, **asked))
            return ended[-1]

        shim: Any = SimpleNamespace(info=engine.info, generate=generate)
        answers = await run_many(shim, prompts, params, progress=False, **options)
        return ended if len(ended) == len(answers) else answers

    engine.generate_many = generates  # type: ignore[assignment,method-assign]
