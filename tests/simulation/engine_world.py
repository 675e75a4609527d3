"""`EngineWorld`: one seeded life of a whole engine - loop, streams, adapters and threads - in virtual time.

Sends callers, breaks things, and asserts what must hold after every event; never leaves anything to but the seed.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from simulation.bounds import Bounds
from simulation.callers import Callers
from simulation.engine_device import CHANGE_HANGS, Disk, Faults, SimulatedEngine, SimulatedRunner
from simulation.grammar import LONGEST_RUN
from simulation.lot import HANG, NAMES, Lot
from simulation.machine import Machine
from simulation.rig import say_commit, say_plan
from simulation.router import Pages, Router
from simulation.told import Told
from simulation.watch import StepWatch
from simulation.world import Broken

from headrace.engine.delivery import kv_events
from headrace.engine.delivery.generation import Generation
from headrace.engine.errors import (
    DeviceUnavailable,
    EngineCrashed,
    EngineStopped,
    HeadraceError,
    HookFailed,
    InvalidParams,
    LoadFailed,
    NonFiniteLogits,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    UnknownAdapter,
)
from headrace.engine.intake import prompts
from headrace.engine.steps.loop import StepLoop

__all__ = ["EngineWorld", "live"]

_TRACE = 40
_OF_BAD_ROWS = ("sampled token", "leave no token")  # the second where a grammar forced another
_PATIENCE = 1e5  # seconds: a hundred hung steps
_SHORT = 12  # characters of a prompt beyond which a thread tokenises it
_UNREAD = 12  # KV events that a router may leave unread
_MOST_AHEAD = 8  # steps, where the engine decides
_SAMPLES = 60  # of a long life


def live(seed: int, tamper: Callable[[EngineWorld], None] | None = None, seconds: float = 0.0) -> EngineWorld:
    """Live the life of `seed` to its end and check that nothing is left.

    Args:
        seed: Decides everything.
        tamper: Called with the world once its engine is open: breaks something there.
        seconds: How long callers come, in virtual time; 0 leaves it to the seed.

    Raises:
        Broken: Something did not hold.
    """
    short, prompts._SHORT = prompts._SHORT, _SHORT
    unread, kv_events._ROOM = kv_events._ROOM, _UNREAD
    collecting = gc.isenabled()
    gc.disable()  # when it comes depends on what ran before: a seed would not replay
    gc.freeze()
    world = EngineWorld(seed, seconds)
    try:
        with world.machine.running() as loop:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(world.run(tamper))
            world.check_over()
    except Exception as error:
        what = f"engine seed {seed}, {world.machine.loop.now:.3f} s: {_told(error)}"
        raise Broken(
            f"{what}\n{world.describe()}\nlast events:\n{world.trace()}\nreplay: HEADRACE_SEEDS={seed}:{seed + 1}"
        ) from error
    finally:
        asyncio.set_event_loop(None)
        prompts._SHORT, kv_events._ROOM = short, unread
        gc.unfreeze()
        if collecting:
            gc.enable()
    return world


def _seconds(name: str, chance: random.Random) -> float:
    """What a call in the thread of that name takes, where nothing else says so."""
    return chance.choice([0.01, 2.0] if name == "headrace-grammar" else [0.0, 0.001, 0.05]) * chance.random()


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


class EngineWorld:
    """An engine of random size and options, its callers, and how often what goes wrong."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.seed = seed
        self.lot = lot = Lot(seed, seconds)
        self.machine = Machine(seed, _seconds)
        self.machine.loop.most_turns += int(seconds * 5000)
        self.runner = SimulatedRunner(lot.capacity, self.machine, replace(lot.faults), random.Random(f"device {seed}"))
        self.runner.may_be_given_up = lot.options["hang_seconds"] is not None
        if seconds:
            self.runner.step_seconds = 0.01
        disk = self.disk = Disk(self.runner.rates, random.Random(f"disk {seed}"))
        self.engine = SimulatedEngine(self.machine, self.runner, disk, lot.slots, **lot.options)
        self.capacity = lot.capacity
        self.least_pages = lot.capacity.num_pages
        self.least_pool = (lambda: self.least_pages * lot.capacity.page_size) if lot.elastic else None
        if lot.elastic:
            self.capacity = replace(lot.capacity, num_pages=2 * lot.capacity.num_pages)
        self.may_give_up = lot.options["policy"]["name"] == "deadlines"
        self.callers = Callers(self, lot.settings)
        self.closing = False
        self.sampled: list[tuple[float, int]] | None = [] if seconds else None
        """Of a long life: (seconds, Python objects that it holds), again and again."""
        self.reached: Counter[str] = Counter()
        self.routers: list[Router] = []
        self._drained = anyio.Event()
        self._pending: set[int] = set()
        """Callers that have not gone."""
        self._gone = anyio.Event()
        self._met: list[tuple[Told, Generation]] = []
        self._stood: list[dict[str, int]] = [{}]
        """What stood under each name, change by change."""
        self._events: deque[tuple[float, Callable[..., str], tuple[object, ...]]] = deque(maxlen=_TRACE)
        self._nested = False

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self, tamper: Callable[[EngineWorld], None] | None) -> None:
        """Open the engine, let everybody come and go, and close it."""
        self.machine.loop.each_turn(self._look)
        async with anyio.create_task_group() as everybody:
            with suppress(EngineCrashed):
                async with self.engine:
                    self._watch(tamper)
                    for number in range(self.lot.routers):
                        everybody.start_soon(self._guarded, self._route(number))
                    await self._host(everybody)
                    self._close_begins()
            self._close_begins()
        await self._settle()

    async def _routers_know(self) -> None:
        """Whoever has been told of everything knows how things stand, however slowly it reads."""
        for _ in range(200):  # a change may hang meanwhile
            if self._loop().crashed is not None or all(router.is_up_to_date for router in self.routers[:1]):
                return
            await anyio.sleep(CHANGE_HANGS / 100)
        raise AssertionError("a router waits, and is not told what has changed")

    async def _settle(self) -> None:
        """Let go of what only failed tasks still hold: an error's frames hold the stream that it came from."""
        self._forget()
        for _ in range(3):
            await checkpoint()
            gc.collect()
        await checkpoint()

    async def _host(self, everybody: Any) -> None:
        """Callers come one after another; then all of them are waited for, or the engine is closed under them."""
        chance = random.Random(f"host {self.seed}")
        async with anyio.create_task_group() as helpers:
            for task in self._helpers():
                helpers.start_soon(self._guarded, task)
            apart = 4 * self.lot.seconds / self.lot.callers
            for number in range(self.lot.callers):
                await anyio.sleep(chance.choice([0.0, apart]) * chance.random())
                if number == self.lot.drains_at:
                    helpers.start_soon(self._guarded, self._drain())
                self._pending.add(number)
                everybody.start_soon(self._guarded, self._call(number))
            if self.sampled is not None:
                await anyio.sleep(max(0.0, self.lot.seconds - self.machine.loop.now))
            if self.lot.closes == "at the end":
                await self._wait_for_all()
            elif self.lot.closes != "at once" and self._loop().crashed is None:
                await self._drained.wait()
            helpers.cancel_scope.cancel()

    def _helpers(self) -> list[Any]:
        """Who else is there, as coroutines."""
        found: list[Any] = [self._observe(random.Random(f"observer {self.seed}"))]
        operators = range(2 if self.lot.slots else 0)
        found += [self._operate(random.Random(f"operator {self.seed} {number}")) for number in operators]
        if self.sampled is not None:
            found.append(self._sample(self.sampled))
        if self.least_pool is not None:
            found.append(self._stretch(random.Random(f"memory {self.seed}")))
        if self.lot.jumps:
            found.append(self._jump(random.Random(f"clock {self.seed}")))
        return found

    async def _wait_for_all(self) -> None:
        """Wait until all callers have gone and all has come back."""
        with anyio.move_on_after(_PATIENCE):
            while self._pending and self._loop().crashed is None:
                self._gone = anyio.Event()
                await self._gone.wait()
        if self._loop().crashed is None:
            self.machine.require(not self._pending, f"callers {sorted(self._pending)} wait for ever")
            self.runner.rates = Faults()
            with suppress(EngineCrashed):  # at last: a step had hung
                await self._idle()
                await self._routers_know()

    async def _drain(self) -> None:
        """Close the engine while callers are at it."""
        vain = self.lot.closes == "drains in vain"
        self.note(lambda how: f"{'engine':10} {how}", self.lot.closes)
        self.reached["streams that were drained"] += sum(not generation.finished for _, generation in self._met)
        if vain:
            self._close_begins()
        with suppress(EngineCrashed):
            await self.engine.aclose(drain=0.05 if vain else _PATIENCE)
        self.closing = True
        self._drained.set()

    async def _call(self, number: int) -> None:
        try:
            await self.callers.call(f"c{number}", random.Random(f"caller {self.seed} {number}"))
        finally:
            self._pending.discard(number)
            self._gone.set()

    async def _guarded(self, task: Any) -> None:
        """What goes wrong in a task ends the run, and is not only seen by whoever waits for it."""
        try:
            await task
        except Exception as error:
            self.machine.breaks(error)
            raise

    def _close_begins(self) -> None:
        """From now on whatever runs may be cancelled."""
        self.closing = True
        for told, _ in self._met:
            told.cancelled = True

    async def _idle(self) -> None:
        """Nobody asks for anything: all must come back."""
        loop = self._loop()
        for turn in range(40):
            await self._settle()
            if loop.crashed is not None or not (loop.scheduler.roster.requests or self.engine.stats().steps_in_flight):
                break
            await anyio.sleep(min(0.01 * 2**turn, 600.0))
        assert not loop._generations, "streams are kept that nobody has"
        stats = self.engine.stats()
        assert not (stats.waiting or stats.running or stats.paused or stats.swapped), "something waits for nobody"
        assert not stats.pages_held and not stats.live_tokens, "pages are held for nobody"
        assert not stats.steps_in_flight, "a step is in flight for nobody"
        for info in self.engine.adapters.list():
            assert not info.requests, f"adapter {info.name} is used by nobody, and {info.requests} times"
        assert all(not version.holders for version in loop.scheduler.slots._placed), (
            "a row that is free wears something"
        )

    # -- who else is there --------------------------------------------------------------------------------------------

    async def _operate(self, chance: random.Random) -> None:
        """Load, replace, pin and unload adapters, and change their files; first of all load them."""
        for turn in self.lot.changes:
            name = chance.choice(NAMES) if turn >= len(NAMES) else NAMES[turn]
            what = chance.choice(["load", "load", "load", "unload", "pin", "unpin", "list", "files"])
            what = "load" if turn < len(NAMES) else what
            self.note(lambda name, what: f"{'operator':10} {what} {name}", name, what)
            with suppress(LoadFailed, UnknownAdapter, InvalidParams, EngineStopped, EngineCrashed):
                with anyio.move_on_after(chance.choice([0.001, 10.0])):
                    await self._do(what, name, chance)
            self._remember()
            if turn >= len(NAMES):
                await anyio.sleep(self.lot.pace * chance.choice([0.1, 0.5]) * chance.random())

    async def _do(self, what: str, name: str, chance: random.Random) -> None:
        adapters = self.engine.adapters
        if what == "load":
            await adapters.load(name, chance.choice(sorted(self.disk.folders)))
            self.reached["adapters loaded"] += 1
        elif what == "unload":
            await adapters.unload(name)
        elif what == "files":
            self.disk.folders[f"/a{chance.randint(1, 6)}"] = chance.randint(0, 6)
        elif what == "list":
            assert [info.name for info in adapters.list()] == sorted(adapters.versions)
        else:
            adapters.pin(name, what == "pin")

    async def _stretch(self, chance: random.Random) -> None:
        """Give back memory, and take it again."""
        with suppress(EngineStopped, EngineCrashed):
            for _ in self.lot.changes:
                await anyio.sleep(self.lot.pace * chance.choice([0.1, 0.5]) * chance.random())
                began, given_up = self.machine.loop.now, self.lot.options["hang_seconds"] is not None
                if chance.random() < 0.6:
                    pages = chance.randint(1, self.capacity.num_pages)
                    await self._resize(pages)
                else:
                    await self._sleep(chance)
                spent = self.machine.loop.now - began
                assert not given_up or self.lot.jumps or spent < CHANGE_HANGS, "a change that hangs is not given up"

    async def _resize(self, pages: int) -> None:
        before, self.least_pages = self.least_pages, min(self.least_pages, pages)
        self.note(lambda pages: f"{'operator':10} {pages} pages", pages)
        try:
            await self.engine.resize_kv(pages * self.capacity.page_size)
            self.reached["resized"] += 1
        except InvalidParams:
            self.least_pages = before

    async def _sleep(self, chance: random.Random) -> None:
        self.note(lambda: f"{'operator':10} puts the engine to sleep")
        await self.engine.sleep(chance.choice([1, 2]))
        self.reached["slept"] += 1
        while self.engine.sleep_level:
            await anyio.sleep(chance.choice([0.01, 1.0]) * chance.random())
            with suppress(DeviceUnavailable):
                await self.engine.wake()
        self.note(lambda: f"{'operator':10} has woken the engine")

    async def _route(self, number: int) -> None:
        """Follow the prefix cache from outside, again after having left; the first router reads until the end."""
        chance = random.Random(f"router {self.seed} {number}")
        router = Router(self.pages, self.machine)
        self.routers.append(router)
        with suppress(EngineStopped, EngineCrashed):
            while True:
                await router.follow(self.engine, chance, self.lot.route_stalls, leaves=number > 0)
                self.reached["pages that a router knew of"] += len(router.known)
                router.known.clear()
                await anyio.sleep(chance.random())

    def _remember(self) -> None:
        """Keep what stands under each name now, if it has changed."""
        assert self.engine._life.adapters is not None
        stands = {name: int(version.digest.split()[1]) for name, version in self.engine._life.adapters.versions.items()}
        if stands != self._stood[-1]:
            self._stood.append(stands)

    async def _observe(self, chance: random.Random) -> None:
        """Look at statistics, and end everything where a step hangs, as a watchdog does."""
        with suppress(EngineStopped, EngineCrashed):
            while True:
                stats, age = self.engine.stats(), self.engine.step_age
                assert stats.running <= self.capacity.max_rows + stats.steps_in_flight
                assert age >= 0.0 and (not age or stats.steps_in_flight)
                given_up = self.lot.options["hang_seconds"] is not None and not self.lot.jumps
                assert not given_up or age < HANG + 1.0, "a step that hangs is not given up"
                if age > 60.0 and not self.lot.jumps and self._loop()._generations and chance.random() < 0.5:
                    assert "a step hangs" in self.reached, "a hang that nobody made"
                    self._abort()
                await anyio.sleep(chance.choice([0.1, 1.0, 30.0]))

    def _abort(self) -> None:
        self.note(lambda: f"{'watchdog':10} ends all")
        self.reached["ended by the watchdog"] += 1
        for told, generation in self._met:
            if not generation.finished:
                told.cancelled = True
                generation.cancel()
                assert generation.finished, f"{told.name} waits for a device that hangs"

    async def _sample(self, sampled: list[tuple[float, int]]) -> None:
        """Collect garbage, and count what is left."""
        while True:
            await anyio.sleep(self.lot.seconds / _SAMPLES)
            gc.collect()
            sampled.append((self.machine.loop.now, len(gc.get_objects())))

    async def _jump(self, chance: random.Random) -> None:
        """The machine sleeps, and its clocks do not agree about it."""
        for _ in range(10):
            await anyio.sleep(self.lot.seconds * chance.random())
            seconds = chance.choice([0.1, 10.0, 3600.0])
            self.note(lambda seconds: f"{'clock':10} {seconds} s later", seconds)
            if chance.random() < 0.5:
                self.machine.loop.jump(seconds)
            else:
                self.machine.ahead += seconds

    # -- what callers know of it --------------------------------------------------------------------------------------

    def meet(self, told: Told, generation: Generation) -> None:
        """As `House`."""
        told.cancelled = told.cancelled or self.closing
        self._forget()
        self._met.append((told, generation))

    def mark(self) -> int:
        """As `House`."""
        return len(self._stood) - 1

    def worn_since(self, name: str | None, since: int) -> list[int]:
        """As `House`."""
        if name is None:
            return [0]
        self._remember()
        return sorted({stood[name] for stood in self._stood[since:] if name in stood})

    def expects(self, error: HeadraceError) -> bool:
        """As `House`."""
        rates = self.lot.faults
        if isinstance(error, EngineCrashed):
            given_up = "the device hangs" in str(error) and self.lot.options["hang_seconds"] is not None
            return "scripted" in str(error) or given_up
        if isinstance(error, PromptTooLong):
            return bool(error.value > error.limit)  # type: ignore[operator]
        expected: dict[type[HeadraceError], object] = {
            EngineStopped: self.closing or self.lot.closes.startswith("drain"),
            Overloaded: True,
            UnknownAdapter: self.lot.slots,
            HookFailed: True,
            NonFiniteLogits: rates.row,
            OutOfMemory: rates.memory + rates.launch,
            InvalidParams: "virtual tokens" in str(error),
        }
        if type(error) in expected:
            return bool(expected[type(error)])
        assert isinstance(error, RequestFailed)
        cause = repr(error.__cause__)
        return (
            "scripted" in cause
            or "AdapterRejected" in cause
            or (rates.row > 0 and any(bad in str(error) for bad in _OF_BAD_ROWS))
        )

    def note(self, say: Callable[..., str], *values: object) -> None:
        """As `House`."""
        self._events.append((self.machine.loop.now, say, values))

    def count(self, what: str) -> None:
        """As `House`."""
        self.reached[what] += 1

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _loop(self) -> StepLoop:
        assert self.engine._life.loop is not None
        return self.engine._life.loop

    def _watch(self, tamper: Callable[[EngineWorld], None] | None) -> None:
        """Look at everything that happens to the scheduler, once what `tamper` does is done."""
        if tamper is not None:
            tamper(self)
        scheduler = self._loop().scheduler
        self.pages = Pages(scheduler)
        self.watch = StepWatch(scheduler, ended=(), lengths={})
        Bounds(scheduler)
        plan, commit, fail = scheduler.plan, scheduler.commit, scheduler.failures.fail_step

        def plans(now: float = 0.0) -> Any:
            owed = self.watch.owed()
            made = plan(now)
            if made is not None:
                self.note(say_plan, made, "")
                self.watch.planned(made, owed, now)
                self._check_readers(made)
            return made

        def commits(made: Any, result: Any) -> Any:
            assert self.watch.flights.popleft().plan is made, "steps are committed out of order"
            self.note(say_commit, made, result)
            return commit(made, result)

        def fails(made: Any, error: Any) -> Any:
            assert self.watch.flights.popleft().plan is made, "steps are committed out of order"
            self.note(lambda step, error: f"fail       step {step}: {error}", made.step, str(error))
            return fail(made, error)

        def moves(change: Callable[[int], Any], to: int) -> Any:
            made = change(to)
            self.watch.moved(made)
            return made

        for name in ("resize", "fall_asleep"):
            self._event(scheduler.resizing, name, partial(moves, getattr(scheduler.resizing, name)))
        self._event(scheduler, "plan", plans)
        self._event(scheduler, "commit", commits)
        self._event(scheduler.failures, "fail_step", fails)
        for owner, names in (
            (scheduler, ("submit", "finish", "pause", "resume", "drop_stream")),
            (scheduler.commits, ("supply",)),
            (scheduler.failures, ("fail_adapter",)),
        ):
            for name in names:
                self._event(owner, name, getattr(owner, name), noted=True)
        for name in ("arrived", "failed", "retire"):
            self._event(scheduler.slots, name, getattr(scheduler.slots, name), noted=True)

    def _event(self, owner: object, name: str, call: Callable[..., Any], noted: bool = False) -> None:
        """Check everything after each outermost `call`, and end the run if something does not hold."""

        def called(*values: Any, **named: Any) -> Any:
            if self._nested:
                return call(*values, **named)
            self._nested = True
            try:
                if noted:
                    self.note(_say_call, name, values[0])
                if name == "submit":
                    self.pages.arrived(values[0].asked.root)
                result = call(*values, **named)
                self.watch.settled()
                self.pages.settled()
                return result
            except (HeadraceError, EngineCrashed):
                raise
            except Exception as error:
                self.machine.breaks(error)
                raise
            finally:
                self._nested = False

        setattr(owner, name, called)

    def _check_readers(self, plan: Any) -> None:
        """Nothing is planned for a stream that has ended, or that nobody reads."""
        generations = self._loop()._generations
        for work in plan.works:
            generation = generations.get(work.request.id)
            assert generation is not None, f"r{work.request.id} is planned for no stream"
            assert not generation.finished, f"r{work.request.id} is planned for a stream that has ended"

    def _look(self) -> None:
        """Between any two turns of the event loop."""
        for fault in self.runner.happened:
            self.reached[fault] += 1
            self.note(lambda fault: f"{'device':10} {fault}", fault)
        self.runner.happened.clear()
        ahead = (self.lot.options["launch_ahead"] or _MOST_AHEAD) + 2
        for told, generation in self._met:
            assert generation._unfinished >= 0, f"{told.name} has ended more than once"
            most = self.lot.options["max_unread_tokens"] + ahead * told.params.n
            if told.params.response_format is not None:
                most += LONGEST_RUN * told.params.n
            assert len(generation.mailbox) + generation.held <= most, f"{told.name} does not read, and it goes on"

    def _forget(self) -> None:
        self._met = [(told, generation) for told, generation in self._met if not self._is_over(told, generation)]

    def _is_over(self, told: Told, generation: Generation) -> bool:
        """Whether nothing will come of it any more; then its reader was told of one end, or could still be."""
        if not generation.finished:
            return False
        unread = [item.choice for item in generation.mailbox._items if item.finish_reason is not None]
        for choice, end in enumerate(told.ends):
            ends = (end is not None) + unread.count(choice)
            assert ends <= 1, f"{told.name}[{choice}] has ended more than once"
        return generation.mailbox._closed

    def check_over(self) -> None:
        """After the engine was closed: nobody waits, no thread is left, nothing is held."""
        assert not asyncio.all_tasks(self.machine.loop), "tasks were left behind"
        assert not self.machine.loop.complaints, self.machine.loop.complaints[0]
        crashed = self._loop().crashed
        assert crashed is None or self.expects(crashed), f"nothing accounts for the crash: {crashed!r}"
        if not self._loop().hung:
            self.machine.check_still()
            assert self.runner.closed, "the device was not closed"
        for told, generation in self._met:
            assert self._is_over(told, generation), f"{told.name} has no end"
        if crashed is None:
            self.watch.check_empty(())

    # -- what is told of it -------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Sizes and options, on one line."""
        options = ", ".join(f"{name}={value}" for name, value in self.lot.options.items() if value not in (None, 0))
        return f"{self.capacity}, {self.lot.closes}, {self.lot.faults}, {options}"

    @property
    def requests(self) -> int:
        """How many the scheduler was given."""
        return self._loop().scheduler.roster._arrivals

    def trace(self) -> str:
        """The last events, oldest first, one a line."""
        return "\n".join(f"  {now:9.3f} {say(*values)}" for now, say, values in self._events)


def _say_call(name: str, first: object) -> str:
    identity = getattr(first, "id", None)
    return f"{name:10} {'' if identity is None else f'r{identity}'}"
