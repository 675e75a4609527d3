"""`Rig`: a scheduler and a scripted device, driven by hand, that asserts what must hold after every single action.

Owns the steps in flight and the record of what happened; never decides what happens next: tests and seeds do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simulation.bounds import Bounds
from simulation.device import RigRunner
from simulation.watch import StepWatch

from headrace.engine.errors import HeadraceError, OutOfMemory, RequestFailed
from headrace.engine.scheduling.asked import Asked, Sampling
from headrace.engine.scheduling.memory.host_pages import HostPages
from headrace.engine.scheduling.options.forks import branch, goes_on
from headrace.engine.scheduling.plan import Capacity, Emission, StepPlan
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import NoToken, StepResult
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.speculation.counts import Speculation
from headrace.engine.scheduling.speculation.runs import counts_of, runs_of
from headrace.engine.testing import scripted_token, scripted_vector

__all__ = ["Rig", "capacity", "reference", "say_commit", "say_plan"]

_TRACE = 40
_TURNS = 10_000  # of one rig: more means that it goes round in circles


def capacity(
    pages: int = 64,
    size: int = 4,
    rows: int = 8,
    budget: int = 64,
    context: int = 4096,
    vocab: int = 97,
    window: int | None = None,
) -> Capacity:
    """A small device."""
    return Capacity(
        num_pages=pages,
        page_size=size,
        max_rows=rows,
        max_batched_tokens=max(budget, rows),
        max_context=context,
        vocab_size=vocab,
        window=window,
    )


def reference(
    prompt: Sequence[int], count: int, vocab: int, key: Sequence[int] = (), window: int | None = None
) -> list[int]:
    """The first `count` tokens after `prompt`, computed alone and without pages; `key` tells choices apart."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(scripted_token([*key, *tokens[-(window or len(tokens)) :]], vocab))
    return tokens[len(prompt) :]


def _vector(request: Request) -> NDArray[np.float32]:
    """What comes of a pooled request that is computed alone."""
    assert request.asked.pooling is not None
    states = np.stack([scripted_vector(request.tokens[: end + 1]) for end in range(len(request.tokens))])
    vector: NDArray[np.float32] = states[-1] if request.asked.pooling.kind == "last" else states.mean(0)
    return vector


_SCRIPT: Any = object()
"""Stands for a grammar: what it forces is what the device's script says anyway."""


class Rig:
    """One scheduler over one `RigRunner`, with up to `depth` steps launched ahead."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        depth: int = 1,
        prefix_cache: bool = True,
        policy: Policy | None = None,
        places: int = 0,
        itl_target: float | None = None,
        drafts: int = 0,
        choose: Callable[[int, int], int] | None = None,
    ) -> None:
        self.capacity = capacity
        self.depth = depth
        self.scheduler = Scheduler(
            capacity,
            secret=b"rig",
            prefix_cache=prefix_cache,
            policy=policy,
            host=HostPages(places),
            itl_target=itl_target,
            speculation=Speculation(drafts, choose) if drafts else None,
        )
        self.now = 0.0
        """Seconds; whoever drives the rig moves it on."""
        self.faults: dict[int, Exception | int | NoToken] = {-1: 0}
        """Faults by step number; not empty, or the runner would replace the mapping by its own."""
        self.runner = RigRunner(capacity, self.faults)
        self.requests: list[Request] = []
        self.prompts: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        """Request id -> its one end: a finish reason or the name of its error."""
        self._watch = StepWatch(self.scheduler, self.ends, self.runner.lengths)
        Bounds(self.scheduler)
        self.flights = self._watch.flights
        self.awaited: list[tuple[Request, int]] = []
        """Requests whose tokens the host still has to choose, and after which step."""
        self.heard: dict[int, int] = {}
        """Request id -> place of its next token."""
        self.computed_tokens = 0
        self.slid = 0
        """Work items of requests whose first pages had slid out of the window."""
        self.copies = 0
        self._turns = 0
        self._charged = 0
        """Tokens that the commit charged beyond one a row."""
        self._count_charges()
        self._events: deque[tuple[Callable[..., str], tuple[object, ...]]] = deque(maxlen=_TRACE)

    # -- actions ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        n: int = 1,
        priority: int = 0,
        root: bytes = b"",
        stop_ids: frozenset[int] = frozenset(),
        holds: bool = False,
        tenant: str | None = None,
        adapter: str | None = None,
        deadline: float | None = None,
        streams: int = 0,
        hooked: bool = False,
        jumps: bool = False,
        masked: bool = False,
        before: Request | None = None,
        pooling: Pooling | None = None,
        alone: bool = False,
        speculates: bool = False,
    ) -> list[Request]:
        """Queue the `n` choices of a prompt, as the engine does.

        Raises:
            PromptTooLong: It can never run; nothing is kept.
        """
        choices: list[Request] = []
        for _ in range(n):
            asked = Asked(
                limit=len(prompt) + max_tokens,
                sampling=Sampling(seed=len(choices)),
                stop_ids=stop_ids,
                root=root,
                priority=priority,
                tenant=tenant,
                adapter=adapter,
                deadline=None if deadline is None else self.now + deadline,
                holds=holds,
                processor=_no_hook if hooked else None,
                jumps=jumps and not hooked,
                grammar=_SCRIPT if jumps or masked else None,
                pooling=pooling,
                alone=alone,
                speculates=speculates and not (hooked or alone or holds or pooling is not None),
            )
            request = Request(
                asked,
                list(prompt),
                arrived=self.now,
                leader=choices[0] if choices else None,
                forked=n > 1 or before is not None,
                before=before,
                streams=streams,
            )
            count = len(self.scheduler.roster.requests)
            try:
                self.scheduler.submit(request)
            except HeadraceError:
                assert len(self.scheduler.roster.requests) == count, "a refused request left something behind"
                assert not choices, "a choice was refused after others of its prompt were taken"
                self._note(lambda length: f"refused    prompt of {length}", len(prompt))
                raise
            choices.append(request)
            self.prompts[request.id] = list(prompt)
        self.requests.extend(choices)
        self._note(_say_submit, [request.id for request in choices], len(prompt), choices[0].limit, priority, root)
        self._settled()
        return choices

    def go_on(self, held: Request, token: int) -> Request:
        """Fork the pages of a request that holds them, with `token` in place of the one it sampled.

        Raises:
            PromptTooLong: There is no room for another token.
        """
        request = goes_on(held, token)
        self.scheduler.submit(request)
        self.requests.append(request)
        self.prompts[request.id] = list(request.tokens)
        self._note(lambda name, of: f"go on      r{name} from r{of}", request.id, held.id)
        self._settled()
        return request

    def send(self, before: Request, more: Sequence[int], max_tokens: int) -> Request:
        """Go on after an ended request, as the next turn of a conversation.

        Raises:
            PromptTooLong: There is no room for it; nothing is kept.
        """
        (request,) = self.submit(
            [*before.tokens, *more],
            max_tokens,
            root=before.asked.root,
            priority=before.asked.priority,
            stop_ids=before.stop_ids,
            streams=1,
            before=before,
        )
        return request

    def branch(self, request: Request, count: int) -> Request:
        """Branch off `request` behind its first `count` tokens."""
        other = branch(request, count, seed=request.asked.sampling.seed + 100)
        other.arrived = self.now
        self.scheduler.submit(other)
        self.requests.append(other)
        self.prompts[other.id] = list(other.tokens)
        self._note(lambda name, of, at: f"branch     r{name} off r{of} at {at}", other.id, request.id, count)
        self._settled()
        return other

    def let_go(self, request: Request) -> None:
        """Nobody goes on after `request` any more."""
        self._note(lambda name: f"let go     r{name}", request.id)
        self.scheduler.drop_stream(request)
        self._settled()

    def finish(self, request: Request) -> None:
        """End `request` by hand; where it has ended already, see that nothing happens."""
        had_ended = request.id in self.ends
        ended = self.scheduler.finish(request, "cancelled")
        self._note(lambda name, new: f"finish     r{name}{'' if new else ' (had ended)'}", request.id, ended)
        assert ended is not had_ended, f"r{request.id}: finish said {ended} after {self.ends.get(request.id)}"
        if ended:
            self._end(request, "cancelled")
        assert self.scheduler.finish(request, "stop") is False
        assert request.finish_reason == self.ends[request.id] or request.failed
        self._settled()

    def pause(self, request: Request) -> None:
        """Pause `request`."""
        self._note(lambda name: f"pause      r{name}", request.id)
        self.scheduler.pause(request)
        self._settled()

    def resume(self, request: Request) -> None:
        """Resume `request`."""
        self._note(lambda name: f"resume     r{name}", request.id)
        self.scheduler.resume(request)
        self._settled()

    def launch(self, fault: str = "") -> StepPlan | None:
        """Plan and launch one step if there is room in the pipeline.

        Args:
            fault: "step" makes the step raise when it is waited for and leave poison; "memory" makes it find none;
                "launch" keeps it off the device.
        """
        if len(self.flights) >= self.depth or (self.flights and self.flights[-1].step is None):
            return None  # what was not launched must fail before anything is planned on top of it
        owed = self._watch.owed()
        ready = self.live(State.WAITING, State.RUNNING)
        plan = self.scheduler.plan(self.now)
        for emission in self.scheduler.deadlines.pop_lapsed():
            self._note(lambda name: f"lapse      r{name}", emission.request.id)
            self._take(emission)
        ready = [request for request in ready if request.id not in self.ends]
        if plan is None:
            self._note(lambda: "plan       nothing")
            waits = any(request.awaited == step for request, step in self.awaited)
            idle = not ready or self.scheduler.resizing.sleep_level
            assert self.flights or waits or idle, "there is work and nothing in flight, but nothing is planned"
            self._settled()
            return None
        self._note(say_plan, plan, fault)
        flight = self._watch.planned(plan, owed, self.now)
        self.computed_tokens += plan.tokens
        self.slid += sum(work.request.place.first_page > 0 for work in plan.works)
        self.copies += len(plan.copies)
        if fault != "launch":
            if fault:
                self.faults[plan.step] = MemoryError("scripted") if fault == "memory" else RuntimeError("scripted")
            flight.step = self.runner.launch(plan)
        self._settled()
        return plan

    def complete(self, bad: tuple[int, int | NoToken] | None = None) -> list[Emission]:
        """Wait for the oldest step and commit it, or fail it if it raises.

        Args:
            bad: Index of a work (taken modulo their number) and what the device shall have returned for it.
        """
        if not self.flights:
            return []
        flight = self.flights.popleft()
        plan = flight.plan
        try:
            if flight.step is None:
                raise RuntimeError("never launched")
            result = flight.step.wait()
        except MemoryError:
            self._note(lambda step: f"no memory  step {step}", plan.step)
            emissions = self.scheduler.failures.fail_step(plan, OutOfMemory("scripted"))
        except RuntimeError:
            self._note(lambda step: f"fail       step {step}", plan.step)
            emissions = self.scheduler.failures.fail_step(plan, RequestFailed("scripted"))
            assert all(work.request.state is State.FINISHED for work in plan.works), "a failed step's request goes on"
        else:
            if bad is not None:
                result = _changed(result, bad[0] % plan.size, bad[1])
            self._note(say_commit, plan, result)
            self._charged = 0
            emissions = list(self.scheduler.commit(plan, result).each())
            self._check_charges(plan, emissions)
            self.awaited += [(r, plan.step) for r, *_ in plan.works if r.awaited == plan.step]
        for emission in emissions:
            self._take(emission)
        self._settled()
        return emissions

    def supply(self, place: int = 0, *, fails: bool = False) -> None:
        """Let the host choose a token that is awaited, or fail to; what nobody awaits any more must be dropped."""
        request, step = self.awaited.pop(place)
        (token,) = reference(
            request.tokens, 1, self.capacity.vocab_size, [request.asked.sampling.seed], self.capacity.window
        )
        self._note(lambda name, token: f"supply     r{name}={token}", request.id, None if fails else token)
        for emission in self.scheduler.commits.supply(
            request, step, RequestFailed("scripted") if fails else (token, None)
        ):
            self._take(emission)
        self._settled()

    def resize(self, pages: int, *, fails: str = "") -> None:
        """Let what is in flight end, then have so many pages, or as many as requests need at least.

        Args:
            pages: How many.
            fails: What happens to every other plan that moves what would be lost, from the first on, as in `launch`.
        """
        while self.flights:
            self.complete()
        pages = max(pages, self.scheduler.resizing.least_pages)
        self._note(lambda number: f"resize     to {number} pages", pages)
        self.runner.resize(max(pages, self.scheduler.pool.num_pages))
        self._move(self.scheduler.resizing.resize(pages), fails=fails)
        self.runner.resize(self.scheduler.pool.num_pages)
        self._settled()

    def sleep(self, *, forget: bool = False) -> None:
        """Let what is in flight end, then give up all pages until `wake`."""
        while self.flights:
            self.complete()
        self._note(lambda: "sleep")
        self._move(self.scheduler.resizing.fall_asleep(1 + forget))
        self.runner.resize(0)
        self._settled()

    def wake(self) -> None:
        """Undo `sleep`."""
        self._note(lambda: "wake")
        self.runner.resize(self.scheduler.capacity.num_pages)
        self.scheduler.resizing.wake_up()
        self._settled()

    def _move(self, plans: Sequence[StepPlan], *, fails: str = "") -> None:
        for place, plan in enumerate(plans):
            fault = fails if place % 2 == 0 else ""
            self._note(say_plan, plan, fault)
            self._watch.check_roots(plan)
            if fault == "step":
                self.faults[plan.step] = RuntimeError("scripted")
            step = None if fault == "launch" else self.runner.launch(plan)
            if step is None or fault:
                assert not self.scheduler.failures.fail_step(plan, RequestFailed("scripted")), "nobody's step failed"
            else:
                self.scheduler.commit(plan, step.wait())

    def turn(self) -> bool:
        """One turn of a step loop: launch as far ahead as allowed, complete one step; False if nothing was done."""
        self._turns += 1
        assert self._turns < _TURNS, f"still busy after {_TURNS} turns"
        launched = False
        while self.awaited:
            self.supply()
        while len(self.flights) < self.depth and self.launch() is not None:
            launched = True
        if self.flights:
            self.complete()
            return True
        return launched

    def run(self, turns: int = _TURNS) -> None:
        """Turn until nothing is left to do.

        Raises:
            AssertionError: That takes more than `turns`.
        """
        for _ in range(turns):
            if not self.turn():
                return
        raise AssertionError(f"still busy after {turns} turns: {self.live()}")

    # -- looking in ---------------------------------------------------------------------------------------------------

    def live(self, *states: State) -> list[Request]:
        """Requests that have not ended; with `states`, those in one of them."""
        wanted = states or (State.WAITING, State.RUNNING, State.PAUSED)
        return [request for request in self.scheduler.roster.requests.values() if request.state in wanted]

    def output(self, request: Request) -> list[int]:
        """What `request` generated so far, by itself."""
        return request.tokens[len(self.prompts[request.id]) :]

    def check_empty(self) -> None:
        """Assert that every request has ended, rightly, and every page and row is back."""
        self._watch.check_empty(self.requests)
        for request in self.requests:
            assert request.id in self.ends, f"r{request.id} has no end"
            self.check_output(request)

    def check_output(self, request: Request) -> None:
        """Assert that what `request` generated is what it would have generated alone, and that it ended in time."""
        prompt, output = self.prompts[request.id], self.output(request)
        if request.asked.pooling is not None:
            assert not output and self.ends.get(request.id) != "length"
            return
        assert request.tokens[: len(prompt)] == prompt, f"r{request.id}: its prompt changed"
        capacity = self.capacity
        alone = reference(prompt, len(output), capacity.vocab_size, [request.asked.sampling.seed], capacity.window)
        assert output == alone, f"r{request.id}: wrong tokens"
        end = self.ends.get(request.id)
        stops = [index for index, token in enumerate(output) if token in request.stop_ids]
        assert stops == ([len(output) - 1] if end == "stop" else []), f"r{request.id}: {end} with stop ids at {stops}"
        assert (len(request.tokens) >= request.limit) <= (end in ("length", "stop") or request.asked.holds), (
            f"r{request.id}: ran past its limit"
        )

    def trace(self) -> str:
        """The last events, oldest first, one a line."""
        return "\n".join(f"  {say(*values)}" for say, values in self._events)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _check_charges(self, plan: StepPlan, emissions: Sequence[Emission]) -> None:
        """What a step gave beyond one token a row is charged at its commit."""
        gained = Counter(emission.request.id for emission in emissions if emission.token is not None)
        further = sum(
            gained[each.id] - 1
            for each in plan.decodes
            if each.asked.speculates and not each.asked.jumps and gained[each.id]
        )
        failed = any(emission.error is not None for emission in emissions)
        assert self._charged == further or failed, f"{self._charged} tokens charged, and {further} gained"

    def _check_lengths(self) -> None:
        """The number of tokens that a row has on the device lies within what the scheduler expects."""
        if self.flights and self.flights[-1].step is None:
            return
        for request in self.live(State.RUNNING, State.PAUSED):
            length = self.runner.lengths.get(request.row)
            odd = request.discard or request.leaving or request.planned < request.prompt_len
            odd = odd or request.row in self.runner.late
            if request.asked.speculates and length is not None and not odd and not self._faulty():
                assert request.sure < length <= request.known, f"r{request.id} has {length} tokens"

    def _count_charges(self) -> None:
        roster = self.scheduler.roster
        charge = roster.charge

        def charges(further: Iterable[tuple[Request, int]]) -> None:
            runs = list(further)
            self._charged += sum(tokens for request, tokens in runs if not request.asked.jumps)
            charge(runs)

        roster.charge = charges  # type: ignore[method-assign]

    def _faulty(self) -> bool:
        return any(flight.plan.step in self.faults for flight in self.flights)

    def _note(self, say: Callable[..., str], *values: object) -> None:
        self._events.append((say, values))

    def _settled(self) -> None:
        """What holds between any two actions."""
        self._watch.settled()
        self._check_lengths()

    def _take(self, emission: Emission) -> None:
        """See that an emission is right and comes before its request's end."""
        request = emission.request
        finished = self.ends.get(request.id)
        assert finished is None, f"r{request.id}: an emission after {finished}"
        ended_alone = emission.error is not None or emission.finish_reason == "deadline"
        assert (emission.token is None) == (ended_alone or request.asked.pooling is not None)
        if request.asked.pooling is not None and not ended_alone:
            assert np.allclose(emission.pooled, _vector(request)), f"r{request.id}: a wrong vector"
        assert emission.finish_reason is None or emission.error is None
        if emission.token is not None:
            place = self.heard.get(request.id, len(self.prompts[request.id]))
            self.heard[request.id] = place + 1
            assert emission.token == request.tokens[place]
            seed, window = request.asked.sampling.seed, self.capacity.window
            (want,) = reference(request.tokens[:place], 1, self.capacity.vocab_size, [seed], window)
            assert emission.token == want, f"r{request.id}: token {emission.token} at {place}, alone it would be {want}"
        if emission.finish_reason is not None:
            self._end(request, emission.finish_reason)
        elif emission.error is not None:
            self._end(request, type(emission.error).__name__)
        else:
            more = self.heard.get(request.id, 0) < len(request.tokens)
            assert request.state is not State.FINISHED or more or request.failed

    def _end(self, request: Request, end: str) -> None:
        assert request.state is State.FINISHED
        self.ends[request.id] = end


def _no_hook(tokens: list[int], logits: object) -> object:
    raise AssertionError("the host of a rig chooses by script")


def _say_submit(ids: list[int], length: int, limit: int, priority: int, root: bytes) -> str:
    names = ", ".join(f"r{name}" for name in ids)
    return f"submit     {names}: prompt of {length}, ends at {limit}, priority {priority}, root {root!r}"


def say_plan(plan: StepPlan, fault: str) -> str:
    new = {row.row for row in plan.new_rows}
    works = " ".join(
        f"{'+' if work.row in new else ''}r{work.request.id}[{work.start}:{work.start + work.num_tokens}]"
        f"{'*' if work.samples else ''}"
        for work in plan.works
    )
    moves = {"spill": plan.spills, "copy": plan.copies, "fetch": plan.fetches}
    moved = "".join(f" {name} {source}>{target}" for name, pairs in moves.items() for source, target in pairs)
    return f"plan       step {plan.step}{f' ({fault} will fail)' if fault else ''}: {works}{moved}"


def _changed(result: StepResult, index: int, token: int | NoToken) -> StepResult:
    """The result with `token` for one of its works, in place of the last that it gained."""
    if result.counts is not None:
        index = sum(result.counts[: index + 1]) - 1
    if isinstance(token, NoToken):
        return result._replace(instead={**result.instead, index: token})
    instead = {at: what for at, what in result.instead.items() if at != index}
    return result._replace(ids=[token if at == index else old for at, old in enumerate(result.ids)], instead=instead)


def say_commit(plan: StepPlan, result: StepResult) -> str:
    got = " ".join(
        f"r{work.request.id}={','.join(map(str, ids))}{result.instead.get(place + len(ids) - 1, '')}"
        for (place, ids), work in zip(runs_of(result.ids, counts_of(plan, result)), plan.works, strict=True)
        if work.samples
    )
    return f"commit     step {plan.step}: {got or 'no tokens'}"
