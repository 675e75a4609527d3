"""`StepLoop` plans, launches, waits for and commits steps, and delivers their results; it alone drives a runner.

It owns the steps in flight; scheduling/scheduler.py decides what runs. It never touches a tensor.
Next to read: engine.py.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar
from weakref import WeakSet

import anyio
from anyio.lowlevel import checkpoint

from headrace.adapters.slots import AdapterVersion, Move
from headrace.engine.concurrency.stacks import stacks
from headrace.engine.concurrency.threads import Hung, Worker
from headrace.engine.delivery.generation import Generation
from headrace.engine.delivery.kv_events import KvWatch
from headrace.engine.errors import EngineCrashed, EngineStopped, HeadraceError, RequestFailed, as_failure
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.plan import Committed, Emission, Runner, Step, StepPlan
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.steps.changes import Changes
from headrace.engine.steps.choices import HostChoices
from headrace.engine.steps.flights import FailedLaunch, Flight, Flights, Meter
from headrace.engine.steps.hooks import HookThread

__all__ = ["StepLoop"]

logger = logging.getLogger("headrace.engine")

T = TypeVar("T")

_SLICE = 32  # readers woken in a row: each runs for some 10 µs before anything else does


class StepLoop:
    """The step loop of one engine.

    While step N runs, step N+1 is planned and launched, the results of step N-1 are delivered, and N is waited for and
    committed. Nothing is awaited between a plan and its launch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        waiter: Worker,
        hooks: HookThread,
        *,
        flights: Flights,
        hang_after: float = inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Drive `runner` with the plans of `scheduler`.

        Args:
            scheduler: Scheduler that makes the plans.
            runner: Device that carries out the plans.
            waiter: Thread that blocks on steps.
            hooks: Thread in which callers' hooks choose tokens.
            flights: Empty queue for the steps in flight.
            hang_after: Longest time in seconds to wait for a step; a longer wait ends the loop.
            clock: Clock, in seconds, for arrivals, deadlines and step times.
        """
        self.scheduler = scheduler
        self.meter = Meter()
        self.crashed: EngineCrashed | None = None
        self.hung = False
        """Whether the loop ended because the device did not answer, so that a step or memory change may still go on."""
        self._runner = runner
        self._waiter = waiter
        self.choices = HostChoices(hooks, scheduler.commits, self._deliver_chosen)
        """Choices of tokens by callers' hooks."""
        self._clock = clock
        self._generations: dict[int, Generation] = {}
        self._expected: WeakSet[Generation] = WeakSet()
        self._wakeup = anyio.Event()
        self._closing = False
        self._idle = anyio.Event()
        self._launched = flights
        self._hang_after = hang_after
        self.carry_out: Callable[[list[Move]], None] = _no_moves
        """Callback that fills and empties the LoRA slots."""
        self.kv = KvWatch(scheduler)
        self.changes = Changes()
        """Changes to the runner that are made as soon as no step is in flight, before the next is planned."""
        self._due: list[Committed] = []
        """Committed outcomes that are still to be delivered; a change completes several steps in a row."""

    # -- what streams call ------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the loop is closing, so that nothing more may be submitted."""
        return self._closing

    @property
    def now(self) -> float:
        """Current time in seconds, on the clock of arrivals and deadlines."""
        return self._clock()

    def expect(self, generation: Generation) -> None:
        """Make `drained` wait for `generation`, which will be submitted or abandoned."""
        self._expected.add(generation)

    def submit(self, generation: Generation, prompt: list[int], requests: Sequence[Request]) -> None:
        """Queue the choices of `generation`, all of the same `prompt`.

        Raises:
            Rejected: The requests can never run; nothing is kept.
        """
        self.add(generation, requests)  # the choices share a prompt: if the first is accepted, so are the others
        generation.start(prompt, requests)
        self._idle = anyio.Event()

    def add(self, generation: Generation, requests: Sequence[Request]) -> None:
        """Queue more requests of a generation.

        Raises:
            Rejected: The first request can never run; nothing is kept.
        """
        now = self._clock()
        for request in requests:
            if request.origin < 0:  # other requests continue an earlier one and keep its arrival
                request.arrived = now
            self.scheduler.submit(request)
            self._generations[request.id] = generation
        self._wake()

    def let_go(self, request: Request) -> None:
        """Count one stream fewer that may continue `request`."""
        self.scheduler.drop_stream(request)

    @property
    def most_tokens(self) -> int:
        """Length in tokens, prompt and completion, to which a request may grow with the present memory."""
        return self.scheduler.capacity.check_length(0)

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End a request now; return False if it has already ended. Its pages are freed after its last launched step."""
        ended = self.scheduler.finish(request, reason)
        if ended:
            self._generations.pop(request.id, None)
            self._wake()
        return ended

    def pause(self, request: Request) -> None:
        """Stop planning a request whose reader is behind."""
        self.scheduler.pause(request)

    def resume(self, request: Request) -> None:
        """Plan a paused request again."""
        self.scheduler.resume(request)
        self._wake()

    def fail_adapter(self, version: AdapterVersion, error: RequestFailed) -> None:
        """Fail waiting requests whose adapter `version` could not be copied to the device with `error`."""
        failed = self.scheduler.failures.fail_adapter(version, error)
        self._deliver(Committed((), (), failed))  # at once: the step in flight may take its time
        self.wake()

    def wake(self) -> None:
        """Wake the loop to check for work."""
        self._wakeup.set()

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive steps until `close`; an error that ends the loop reaches every stream as `EngineCrashed`."""
        try:
            with anyio.CancelScope(shield=True):  # launched steps must be waited for even if the host task is cancelled
                await self._run()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            self.crashed = EngineCrashed(f"the step loop died: {error!r}")
            self.crashed.__cause__ = error
            self._end_all()  # before waiting for the device, which may hang
            await self._let_steps_end()
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._closing = True  # also if the end of the event loop cancelled this task
            self._end_all()
            self.changes.drop(self.crashed or EngineStopped("the engine closed"))
            self._idle.set()
            self.kv.close(self.crashed)

    def close(self) -> None:
        """Cancel every request and let `run` return once nothing is in flight."""
        self._closing = True
        for generation in list(self._generations.values()):
            generation.cancel()
        self._wake()

    async def drained(self) -> None:
        """Wait until all requests have ended, including those that are still being prepared."""
        for generation in list(self._expected):
            await generation.admitted.wait()
        while self._generations:
            await self._idle.wait()

    async def carry_out_moves(self, plans: Sequence[StepPlan]) -> None:
        """Carry out plans without work items; called within a change."""
        for plan in plans:
            self._launched.append(Flight(plan, self._launch(plan)))
            await self._complete(self._launched[0])

    async def wait_for(self, call: Callable[[], T], what: str, patience: float = 1.0) -> T:
        """Call the device in the waiter's thread, and wait for up to `patience` times as long as for a step.

        Raises:
            EngineCrashed: The call takes longer; the message names it by `what`.
            Exception: The error that `call` raised.
        """
        try:
            return await self._waiter.run(call, patience * self._hang_after)
        except Hung as hung:
            logger.error("%s is %s; the stacks of all threads follow\n%s", what, hung, stacks())
            self.hung = True
            raise EngineCrashed(f"{what} is {hung}: the device hangs") from hung

    async def _run(self) -> None:
        launched = self._launched
        while True:
            self._wakeup = anyio.Event()
            plan = self._plan() if not self.changes and launched.may_grow(self.scheduler) else None
            if plan is not None:
                launched.append(Flight(plan, self._launch(plan)))
            elif self._due:
                await self._deliver_all()
            elif launched:
                await self._complete(launched[0])
            elif self._closing:
                return
            elif self.changes:
                await self.changes.carry_out_next()
            else:
                if self.kv.is_watched:
                    self.kv.tell()
                await self._sleep()

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self._clock())
        if self.scheduler.deadlines.lapsed:
            self._due.append(Committed((), (), self.scheduler.deadlines.pop_lapsed()))
        if moves := self.scheduler.slots.take_moves():
            self.carry_out(moves)
        return plan

    async def _sleep(self) -> None:
        """Wait for work or for the next deadline."""
        deadline = self.scheduler.deadlines.next
        with anyio.move_on_after(inf if deadline is None else max(0.0, deadline - self._clock())):
            await self._wakeup.wait()

    async def _let_steps_end(self) -> None:
        """Wait for launched steps after a crash: the device must be idle before its memory is freed."""
        while self._launched and not self.hung:
            step = self._launched.popleft().step
            with contextlib.suppress(Exception):
                await self._waiter.run(step.wait)

    def _launch(self, plan: StepPlan) -> Step:
        now = self._clock()
        self.meter.launched(now)
        if plan.new_rows:
            self._note_taken_up(plan, now)
        try:
            return self._runner.launch(plan)
        except EngineCrashed:
            raise
        except Exception as error:
            return FailedLaunch(error)

    def _note_taken_up(self, plan: StepPlan, now: float) -> None:
        for work in plan.works[-len(plan.new_rows) :]:  # requests that were just given their rows are planned last
            generation = self._generations.get(work.request.id)
            if generation is not None and generation.taken_up is None:
                generation.take_up(now)

    async def _complete(self, oldest: Flight) -> None:
        """Wait for a step and commit it."""
        result: StepResult | None
        try:
            try:
                result = await self.wait_for(oldest.step.wait, "a step")
            finally:
                self._launched.popleft()
        except EngineCrashed:
            raise
        except Exception as error:
            outcome = Committed((), (), self.scheduler.failures.fail_step(oldest.plan, as_failure(error)))
            result = None
        else:
            outcome = self.scheduler.commit(oldest.plan, result)
            if result.choices:
                self.choices.begin(oldest.plan, result.choices)
        generated = len(outcome.tokens) + sum(emission.token is not None for emission in outcome.others)
        seconds = self.meter.committed(self._clock(), generated)
        if oldest.plan.size:
            chunks = [work.num_tokens for work in oldest.plan.others if work.num_tokens > 1]
            self.scheduler.pace.observe(sum(chunks), seconds, len(chunks))
            if self.scheduler.speculation is not None and result is not None:
                self.scheduler.speculation.observe(oldest.plan, result, seconds)
        if self.kv.is_watched:
            self.kv.tell()
        self._due.append(outcome)

    def _deliver_chosen(self, emissions: list[Emission]) -> None:
        """Deliver what the host's choice of a token means, and go on with its request."""
        self.meter.generated_tokens += sum(emission.token is not None for emission in emissions)
        self._deliver(Committed((), (), emissions))
        self._wake()

    async def _deliver_all(self) -> None:
        """Deliver committed outcomes in slices, and let readers and other tasks run after each slice."""
        due = self._due
        self._due = []
        for number, piece in enumerate([piece for outcome in due for piece in outcome.pieces(_SLICE)]):
            if number:
                await checkpoint()
            self._deliver(piece)

    def _deliver(self, outcome: Committed) -> None:
        generations = self._generations
        for request, token in zip(outcome.requests, outcome.tokens, strict=True):
            if (generation := generations.get(request.id)) is not None:  # another choice may have ended the stream
                generation.deliver_token(request, token)
        for emission in outcome.others:
            request = emission.request
            generation = generations.get(request.id)
            if generation is None:
                continue
            if emission.finish_reason is not None or emission.error is not None:
                del generations[request.id]
            generation.deliver(emission)
        if not generations:
            self._idle.set()

    def _end_all(self) -> None:
        error: HeadraceError | None = self.crashed
        for generation in list(self._generations.values()):
            if error is not None:
                generation.abandon(error)
            else:
                generation.cancel()
        self._generations.clear()

    def _wake(self) -> None:
        self._wakeup.set()
        if not self._generations:
            self._idle.set()


def _no_moves(moves: list[Move]) -> None:
    assert not moves, "a slot is to be filled where there are none"
