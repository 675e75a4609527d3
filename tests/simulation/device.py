"""`RigRunner`: the scripted device of a rig, made to show what plain pages would hide; never decides what runs."""

from __future__ import annotations

from headrace.engine.scheduling.plan import CHOSEN_LATER, Capacity, StepPlan, Work
from headrace.engine.testing import ScriptedRunner, ScriptedStep, scripted_token

__all__ = ["RigRunner"]

SPOILT = -7
"""What a cell holds that nobody has written, or that a failed step has."""


class RigRunner(ScriptedRunner):
    """Adds what pages can hide: choices of one prompt differ, and whatever is computed from spoilt cells is spoilt."""

    def __init__(self, capacity: Capacity, faults: dict[int, Exception | int]) -> None:
        super().__init__(capacity, faults=faults)
        self._seeds = [0] * capacity.max_rows
        self._hosted: set[int] = set()

    def launch(self, plan: StepPlan) -> ScriptedStep:
        for row in plan.new_rows:
            self._seeds[row.row] = row.sampling.seed
            self._hosted.discard(row.row)
        self._hosted.update(options.row for options in plan.options if options.processor is not None)
        return super().launch(plan)

    def _cell_places(self, work: Work) -> list[tuple[int, int]]:
        """Page and cell of every position that `work` reads or writes."""
        size, table = self.capacity.page_size, self._tables[work.row]
        return [(table[position // size], position % size) for position in range(work.start + work.num_tokens)]

    def _write(self, plan: StepPlan) -> None:
        super()._write(plan)
        for work in plan.works:
            places = self._cell_places(work)
            spoilt = next((at for at, (page, cell) in enumerate(places) if self._cells[page][cell] < 0), len(places))
            for page, cell in places[max(spoilt, work.start) :]:
                self._cells[page][cell] = SPOILT

    def _sample(self, plan: StepPlan) -> list[int]:
        sampled = []
        for work in plan.works:
            token = 0
            if work.samples and work.row in self._hosted:
                token = self._tokens[work.row][work.start + work.num_tokens] = CHOSEN_LATER
            elif work.samples:
                read = [self._cells[page][cell] for page, cell in self._cell_places(work)]
                token = scripted_token([self._seeds[work.row], *read], self.capacity.vocab_size)
                self._tokens[work.row][work.start + work.num_tokens] = token
            sampled.append(token)
        return sampled
