"""The scheduler under every order of events that hypothesis can think of; what must hold is asserted by the rig."""

from __future__ import annotations

from typing import Literal

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, initialize, multiple, precondition, rule
from simulation.rig import Rig, capacity

from headrace.engine.errors import PromptTooLong
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import NoToken

VOCAB = 11


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, finish, pause, resume, plan, commit and fail in any order, up to three steps launched ahead."""

    requests: Bundle[Request] = Bundle("requests")

    @initialize(
        pages=st.integers(2, 14),
        size=st.integers(1, 4),
        rows=st.integers(1, 4),
        spare=st.integers(0, 12),
        context=st.sampled_from([6, 24, 100]),
        depth=st.integers(1, 3),
        prefix_cache=st.booleans(),
    )
    def start(self, pages: int, size: int, rows: int, spare: int, context: int, depth: int, prefix_cache: bool) -> None:
        shape = capacity(pages=pages, size=size, rows=rows, budget=rows + spare, context=context, vocab=VOCAB)
        self.rig = Rig(shape, depth=depth, prefix_cache=prefix_cache)

    @rule(
        target=requests,
        shared=st.integers(0, 16),
        own=st.lists(st.integers(0, 2), max_size=3),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(0, 1),
        root=st.sampled_from([b"", b"tenant"]),
        stop_ids=st.sampled_from([frozenset[int](), frozenset({3})]),
    )
    def submit(
        self, shared: int, own: list[int], max_tokens: int, n: int, priority: int, root: bytes, stop_ids: frozenset[int]
    ) -> MultipleResults[Request]:
        assume(len(self.rig.live()) < 12)
        prompt = [*(position % 7 for position in range(shared)), *own] or [1]
        shape = self.rig.capacity
        fits = len(prompt) < min(shape.max_context, shape.num_pages * shape.page_size + 1)
        try:
            choices = self.rig.submit(prompt, max_tokens, n=n, priority=priority, root=root, stop_ids=stop_ids)
        except PromptTooLong:
            assert not fits, "a prompt that fits was refused"
            return multiple()
        assert fits, "a prompt that never fits was taken"
        return multiple(*choices)

    @rule(target=requests, shared=st.integers(0, 16), own=st.integers(0, 2), kind=st.sampled_from(["last", "mean"]))
    def pool(self, shared: int, own: int, kind: Literal["last", "mean"]) -> MultipleResults[Request]:
        assume(len(self.rig.live()) < 12)
        prompt = [*(position % 7 for position in range(shared)), own]
        shape = self.rig.capacity
        fits = len(prompt) <= min(shape.max_context, shape.num_pages * shape.page_size)
        try:
            pooled = self.rig.submit(prompt, 1, pooling=Pooling(kind))
        except PromptTooLong:
            assert not fits, "a prompt that fits was refused"
            return multiple()
        assert fits, "a prompt that never fits was taken"
        return multiple(*pooled)

    @rule(request=requests)
    def finish(self, request: Request) -> None:
        self.rig.finish(request)

    @rule(request=requests)
    def pause(self, request: Request) -> None:
        self.rig.pause(request)

    @rule(request=requests)
    def resume(self, request: Request) -> None:
        self.rig.resume(request)

    @rule(fault=st.sampled_from(["", "", "", "", "", "step", "launch"]))
    def launch(self, fault: str) -> None:
        self.rig.launch(fault)

    @precondition(lambda self: self.rig.flights)
    @rule(bad=st.sampled_from([None, None, None, None, (0, NoToken.NON_FINITE), (1, VOCAB), (2, 10**9)]))
    def complete(self, bad: tuple[int, int] | None) -> None:
        self.rig.complete(bad)

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.rig.turn()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for request in self.rig.live(State.PAUSED):
            self.rig.resume(request)
        self.rig.run()
        self.rig.check_empty()


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)
TestScheduler = SchedulerMachine.TestCase
