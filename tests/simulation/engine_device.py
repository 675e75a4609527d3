"""The device under a simulated engine: a `RigRunner` that takes time, wears adapters and fails; decides nothing.

Whatever it computes depends on all that it reads back through the block table: the tokens, the seed of the choice and
the adapter that was worn when each was written. Anything stale, lost or of somebody else shows as a wrong token.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.device import RigRunner
from simulation.grammar import Place, picked
from simulation.machine import Machine

from headrace.adapters.bank import AdapterDevice
from headrace.engine.errors import AdapterRejected, EngineCrashed
from headrace.engine.life.lifespan import Machinery
from headrace.engine.life.opened import Opened
from headrace.engine.scheduling.plan import Capacity, StepPlan, Work
from headrace.engine.scheduling.result import Choice, Chosen, NoToken, StepResult
from headrace.engine.scheduling.shaping import Report
from headrace.engine.testing import ScriptedEngine, ScriptedStep, scripted_token

if TYPE_CHECKING:
    from headrace.adapters.loaded import LoadedAdapter

__all__ = [
    "CHANGE_HANGS",
    "FIRST",
    "LETTERS",
    "Disk",
    "Faults",
    "SimulatedEngine",
    "SimulatedRunner",
    "chosen",
    "likelihoods",
    "report",
    "written",
]

FIRST, LETTERS = 97, 26
"""All that is ever generated: small letters."""
CHANGE_HANGS = 5000.0
"""Seconds that a change of the device's memory takes where it hangs."""
_MIXED = 1000


def written(token: int, adapter: int) -> int:
    """What a cell holds of a token that was computed with an adapter; 0 for none."""
    return token + _MIXED * adapter


def chosen(seed: int, values: Sequence[int]) -> int:
    """The token of a choice of that seed after cells of those values."""
    return FIRST + scripted_token([seed, *values], LETTERS)


def likelihoods(values: Sequence[int]) -> list[tuple[int, float]]:
    """(token, log-probability) of every letter after cells of those values, the likeliest first."""
    digest = blake2b(b",".join(b"%d" % value for value in values), digest_size=2 * LETTERS).digest()
    logits = [int.from_bytes(digest[2 * place : 2 * place + 2], "little") / 8192 for place in range(LETTERS)]
    total = math.log(sum(map(math.exp, logits)))
    found = ((FIRST + place, logit - total) for place, logit in enumerate(logits))
    return sorted(found, key=lambda each: (-each[1], each[0]))


def report(values: Sequence[int], token: int, count: int) -> Report:
    """What is reported of a token that was chosen after cells of those values."""
    found = likelihoods(values)
    logprob = dict(found).get(token, -math.inf)
    return Report(logprob, 1 + sum(each > logprob for _, each in found), tuple(found[:count]))


@dataclass
class Faults:
    """How often what goes wrong: probabilities of a step, or of an adapter's move."""

    slow: float = 0.0
    hung: float = 0.0
    step: float = 0.0
    launch: float = 0.0
    memory: float = 0.0
    """Out of memory, when a step is launched or later."""
    row: float = 0.0
    """One row that is not finite."""
    move: float = 0.0
    """An adapter that does not come to the device, or is not read."""
    crash: float = 0.0


@dataclass(frozen=True, eq=False)
class _Adapter:
    """Stands for weights."""

    number: int
    virtual_tokens: int
    nbytes: int = 64
    host_bytes: int = 64
    stamp: None = None

    @property
    def digest(self) -> bytes:
        return b"adapter %d" % self.number


class Disk:
    """Adapter folders: `/a3` holds adapter 3, until it holds another."""

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        self.folders = {f"/a{number}": number for number in range(1, 7)}
        self._faults = faults
        self._chance = chance

    def read(self, path: str, root: Path | None, stamp: object) -> LoadedAdapter:
        """As `AdapterDevice.read`."""
        number = self.folders.get(path, 0)
        if not number or self._chance.random() < self._faults.move:
            raise AdapterRejected("path: cannot be read", field="path", value=path, limit="a folder")
        adapter: Any = _Adapter(number, virtual_tokens=2 if number == 6 else 0)
        return adapter  # type: ignore[no-any-return]


class SimulatedStep:
    """A launched step, done when its time has come."""

    def __init__(self, runner: SimulatedRunner, plan: StepPlan, inner: ScriptedStep, ends: float) -> None:
        self.slots = {runner.worn[work.row] for work in plan.works}
        self._runner = runner
        self._inner = inner
        self._ends = ends

    @property
    def seconds(self) -> float:
        """Until it is done."""
        return max(0.0, self._ends - self._runner.machine.loop.now)

    def wait(self) -> StepResult:
        first = self._runner.launched_steps.popleft()
        self._runner.machine.require(first is self, "steps are waited for out of order")
        return self._inner.wait()


class SimulatedRunner(RigRunner):
    """Steps that take their time, one after another, and fail as `faults` say."""

    def __init__(self, capacity: Capacity, machine: Machine, faults: Faults, chance: random.Random) -> None:
        super().__init__(capacity, {-1: 0})
        self.machine = machine
        self.launched_steps: deque[SimulatedStep] = deque()
        self.slots: dict[int, _Adapter] = {}
        self.may_be_given_up = False
        """Whether somebody may close it while a step hangs."""
        self.happened: list[str] = []
        """Faults, since somebody looked."""
        self.step_seconds = chance.choice([0.001, 0.02])
        self.rates = faults
        self._chance = chance
        self.worn = [-1] * capacity.max_rows
        """The slot of what each row wears."""
        self._processors: dict[int, Any] = {}
        self._choices: dict[int, Choice] = {}
        self._reports: dict[int, Report] = {}
        """Reports of the step that is launched, by work."""
        self._places: dict[int, Place] = {}
        """Where rows stand in their grammars."""
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> Any:
        chance, rates = self._chance, self.rates
        self.machine.require(not self.closed, "a step is launched on a closed device")
        if chance.random() < rates.crash:
            raise self._fault(EngineCrashed("scripted"))
        if chance.random() < rates.launch:
            raise self._fault(chance.choice([RuntimeError("scripted"), MemoryError()]))
        if chance.random() < rates.step + rates.memory:
            memory = chance.random() * (rates.step + rates.memory) < rates.memory
            self._faults[plan.step] = self._fault(MemoryError() if memory else RuntimeError("scripted"))  # type: ignore[index]
        elif chance.random() < rates.row:
            self.happened.append("a bad row")
            self._faults[plan.step] = chance.choice([NoToken.NON_FINITE, self.capacity.vocab_size])  # type: ignore[index]
        for row in plan.new_rows:
            self.worn[row.row] = row.slot
        self._processors.update((options.row, options.processor) for options in plan.options)
        self._follow(plan)
        self._choices, self._reports = {}, {}
        inner = super().launch(plan)
        self._faults.pop(plan.step, None)  # type: ignore[attr-defined]  # its traceback would keep whoever waited
        step = SimulatedStep(self, plan, inner, self._takes())
        self.launched_steps.append(step)
        return step

    @property
    def seconds(self) -> float:
        """What the next change of its memory takes."""
        if self._chance.random() < 5 * self.rates.hung:  # there are few of them
            self.happened.append("a change hangs")
            return CHANGE_HANGS
        return self._chance.choice([0.0, 0.001, 0.05]) * self._chance.random()

    def open_host_pool(self, places: int) -> float:
        return self._chance.choice([0.0, 0.001, 1.0])

    def resize(self, num_pages: int) -> None:
        self.machine.require(not self.launched_steps, "the device changes its memory under a step in flight")
        if num_pages > len(self._cells) and self._chance.random() < self.rates.memory:
            raise self._fault(MemoryError())
        super().resize(num_pages)

    wake = resize

    def close(self) -> None:
        still = not self.launched_steps or self.may_be_given_up
        self.machine.require(still, "the device is closed under a step in flight")
        self.machine.require(not self.closed, "the device is closed twice")
        super().close()

    def _takes(self) -> float:
        """When the step that is launched now will be done."""
        chance, rates = self._chance, self.rates
        seconds = self.step_seconds * (0.2 + chance.random())
        if chance.random() < rates.hung:
            self.happened.append("a step hangs")
            seconds = 600.0
        elif chance.random() < rates.slow:
            seconds *= 100
        self._free_at = max(self._free_at, self.machine.loop.now) + seconds
        return self._free_at

    def _fault(self, error: Exception) -> Exception:
        self.happened.append(type(error).__name__)
        return error

    def _follow(self, plan: StepPlan) -> None:
        """Take rows to where their grammars are after the tokens that they are given."""
        for row in plan.new_rows:
            self._places.pop(row.row, None)
        for options in plan.options:
            if options.grammar is not None:
                self._places[options.row] = Place(options.grammar, options.tokens[options.prompt_len :])
        for given in self.late.take(plan):
            if given.row in self._places:
                for token in given.tokens:
                    self._places[given.row].advance(token)

    def _write(self, plan: StepPlan) -> None:
        super()._write(plan)
        for work in plan.works:
            slot = self.worn[work.row]
            if slot < 0 or work.row in self.late:
                continue
            self.machine.require(slot in self.slots, f"r{work.request.id} wears what is not on the device")
            for page, cell in self._cell_places(work)[work.start :]:
                if self._cells[page][cell] >= 0:
                    self._cells[page][cell] = written(self._cells[page][cell], self.slots[slot].number)

    def _result(self, plan: StepPlan, sampled: Sequence[int | NoToken]) -> StepResult:
        return super()._result(plan, sampled)._replace(reports=self._reports, choices=self._choices)

    def _sample(self, plan: StepPlan) -> list[int | NoToken]:
        sampled: list[int | NoToken] = []
        self._forced = {}
        for index, work in enumerate(plan.works):
            token: int | NoToken = 0
            if work.row in self.late:
                pass  # whatever it says, nobody may believe it
            elif work.samples and self._is_late(plan, work):
                token = NoToken.LATE
            elif work.samples:
                token = self._choose(index, work)
                stored = token.value if isinstance(token, NoToken) else token
                self._tokens[work.row][work.start + work.num_tokens] = stored
            sampled.append(token)
        return sampled

    def _choose(self, index: int, work: Work) -> int | NoToken:  # type: ignore[override]
        seed, values = self._seeds[work.row], self._read(work)
        place = self._places.get(work.row)
        token = chosen(seed, values) if place is None else picked(seed, values, place.allowed())
        options = self._options.get(work.row)
        reporting = None if options is None else options.reporting
        told = None
        if reporting is not None and reporting.completion is not None:
            told = report(values, token, reporting.completion)
        if work.row in self._hosted:
            self._choices[index] = partial(self._by_host, self._processors[work.row], values, token, told)
            return NoToken.CHOSEN_LATER
        if told is not None:
            self._reports[index] = told
        if place is not None:
            forced = place.advance(token)
            if forced and work.row in self._jumping:
                self._forced[index] = forced
        return token

    @staticmethod
    def _by_host(processor: Any, values: list[int], token: int | NoToken, told: Report | None) -> Chosen:
        processor([value % _MIXED for value in values], None)
        return token, told

    # -- adapters -----------------------------------------------------------------------------------------------------

    def put(self, slot: int, start: int, adapter: Any) -> None:
        """As `AdapterBank.put`."""
        self._check_unused(slot)
        self.slots.pop(slot, None)
        if self._chance.random() < self.rates.move:
            self.happened.append("an adapter does not come")
            raise RuntimeError("scripted")
        self.slots[slot] = adapter

    def take(self, slot: int) -> None:
        """As `AdapterBank.take`."""
        self._check_unused(slot)
        self.slots.pop(slot, None)

    def _check_unused(self, slot: int) -> None:
        used = any(slot in step.slots for step in self.launched_steps)
        self.machine.require(not used, f"slot {slot} is filled or emptied while a step in flight wears it")


class SimulatedEngine(ScriptedEngine):
    """An engine on a machine of virtual time."""

    def __init__(self, machine: Machine, runner: SimulatedRunner, disk: Disk, slots: int, **options: Any) -> None:
        super().__init__(runner.capacity, lambda: runner, adapter_slots=slots, **options)
        self._life.machinery = Machinery(
            machine.make_worker, machine.make_fair_worker, machine.make_hooks, machine.clock
        )
        self._device = AdapterDevice(runner, slots, 2 * slots, 48, disk.read) if slots else None

    def _open(self) -> Opened:
        opened = super()._open()
        info = replace(opened.info, device="cuda:0")  # which lets the engine decide how far ahead it launches
        return replace(
            opened, info=info, abilities=opened.abilities | {"hooks", "logprobs", "grammar"}, adapters=self._device
        )
