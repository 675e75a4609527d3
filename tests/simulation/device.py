"""`RigRunner`: the scripted device of a rig, made to show what plain pages would hide; never decides what runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.engine.model.shared.late_rows import LateRows
from headrace.engine.scheduling.plan import Capacity, StepPlan, Work
from headrace.engine.scheduling.result import NoToken, StepResult
from headrace.engine.testing import ScriptedRunner, ScriptedStep, scripted_token

__all__ = ["RigRunner"]

SPOILT = -7
"""What a cell holds that nobody has written, or that a failed step has."""
_LATE_IN = 5  # one of so many masks


class RigRunner(ScriptedRunner):
    """Adds what pages can hide: choices of one prompt differ, and whatever is computed from spoilt cells is spoilt."""

    def __init__(self, capacity: Capacity, faults: dict[int, Exception | int | NoToken]) -> None:
        super().__init__(capacity, faults=faults)
        self._seeds = [0] * capacity.max_rows
        self._hosted: set[int] = set()
        self._jumping: set[int] = set()
        self._masked: set[int] = set()
        self._late = LateRows()
        self.left_out = 0
        self._forced: dict[int, list[int]] = {}
        """Tokens that grammars force behind those of the step that is launched, by work."""

    def launch(self, plan: StepPlan) -> ScriptedStep:
        plan = replace(plan, given=self._late.take(plan))
        for row in plan.new_rows:
            self._seeds[row.row] = row.sampling.seed
            self._hosted.discard(row.row)
            self._jumping.discard(row.row)
            self._masked.discard(row.row)
        self._jumping.update(options.row for options in plan.options if options.jumps)
        self._hosted.update(options.row for options in plan.options if options.processor is not None)
        self._masked.update(options.row for options in plan.options if options.grammar is not None)
        self._masked -= self._hosted
        return super().launch(plan)

    def _cell_places(self, work: Work) -> list[tuple[int, int]]:
        """Page and cell of every position that `work` reads or writes."""
        size, table = self.capacity.page_size, self._tables[work.row]
        positions = range(self._first_read(work.start), work.start + work.num_tokens)
        return [(table[position // size], position % size) for position in positions]

    def _first_read(self, position: int) -> int:
        """The first position that attention reads from `position`."""
        window = self.capacity.window
        return 0 if window is None else max(0, position - window + 1)

    def _write(self, plan: StepPlan) -> None:
        going = [work for work in plan.works if work.row not in self._late]
        super()._write(replace(plan, decodes=[], others=going))
        for work in going:
            places = self._cell_places(work)
            spoilt = next((at for at, (page, cell) in enumerate(places) if self._cells[page][cell] < 0), len(places))
            for page, cell in places[max(spoilt, work.start - self._first_read(work.start)) :]:
                self._cells[page][cell] = SPOILT

    def _result(self, plan: StepPlan, sampled: Sequence[int | NoToken]) -> StepResult:
        return super()._result(plan, sampled)._replace(forced=self._forced)

    def _sample(self, plan: StepPlan) -> list[int | NoToken]:
        sampled: list[int | NoToken] = []
        self._forced = {}
        for index, work in enumerate(plan.works):
            token: int | NoToken = 0
            if work.row in self._late:
                pass  # whatever it says, nobody may believe it
            elif work.samples and self._is_late(plan, work):
                token = NoToken.LATE
            elif work.samples and work.row in self._hosted:
                token = NoToken.CHOSEN_LATER
                self._tokens[work.row][work.start + work.num_tokens] = token.value
            elif work.samples:
                read = self._read(work)
                token = scripted_token([self._seeds[work.row], *read], self.capacity.vocab_size)
                self._tokens[work.row][work.start + work.num_tokens] = token
                if work.row in self._jumping and token % 3 == 0:
                    self._forced[index] = self._following(self._seeds[work.row], [*read, token], token % 6)
            sampled.append(token)
        return sampled

    def _is_late(self, plan: StepPlan, work: Work) -> bool:
        """Whether a row is left out; a step of one row waits for it."""
        may_be = work.row in self._masked and not plan.alone
        late = may_be and scripted_token([plan.step, work.row], _LATE_IN) == 0
        if late:
            self._late.hold(work.row, work.start + work.num_tokens)
            self.left_out += 1
        return late

    def _following(self, seed: int, known: list[int], count: int) -> list[int]:
        """What would be sampled next anyway: the script's grammar forces it."""
        for _ in range(count):
            seen = known[-(self.capacity.window or len(known)) :]
            known.append(scripted_token([seed, *seen], self.capacity.vocab_size))
        return known[len(known) - count :]
