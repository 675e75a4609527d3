"""`RigRunner`: the scripted device of a rig, made to show what plain pages would hide; never decides what runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

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
        self.late = LateRows()
        self.left_out = 0
        self._forced: dict[int, list[int]] = {}
        """Tokens that grammars force behind those of the step that is launched, by work."""
        self.lengths: dict[int, int] = {}
        """Row that speculates -> number of its tokens, those of launched steps included."""
        self.rate = 0.5
        """How many of the drafts are right."""
        self._stops: dict[int, frozenset[int]] = {}
        self._drafts: dict[int, int] = {}
        """Row -> number of drafts that the step which is launched verifies for it."""
        self._runs: dict[int, list[int | NoToken]] = {}
        """Work of that step -> its tokens behind the first; the last may be late."""

    def launch(self, plan: StepPlan) -> ScriptedStep:
        plan = replace(plan, given=self.late.take(plan))
        for row in plan.new_rows:
            self._seeds[row.row] = row.sampling.seed
            self._hosted.discard(row.row)
            self._jumping.discard(row.row)
            self._masked.discard(row.row)
            self.lengths.pop(row.row, None)
            if row.speculates:
                self.lengths[row.row] = row.start + len(row.tokens)
                self._stops[row.row] = row.stop_ids
        for given in plan.given:
            if given.row in self.lengths:
                self.lengths[given.row] = given.start + len(given.tokens)
        self._jumping.update(options.row for options in plan.options if options.jumps)
        self._hosted.update(options.row for options in plan.options if options.processor is not None)
        self._masked.update(options.row for options in plan.options if options.grammar is not None)
        self._masked -= self._hosted
        return super().launch(self._located(plan))

    def _located(self, plan: StepPlan) -> StepPlan:
        """The plan with true positions in place of the upper bounds of rows that speculate, and with their drafts."""
        self._drafts = {}
        works = list(plan.each_work())
        for index, row in enumerate(plan.rows):
            if row in self.lengths:
                most = plan.drafts[index] if plan.drafts else 0
                start = self.lengths[row] - 1
                assert start <= works[index].start, "a row is longer than its bound"
                self._drafts[row] = drafts = scripted_token([plan.step, row, 1], most + 1) if most else 0
                works[index] = works[index]._replace(start=start, num_tokens=1 + drafts)
        return replace(plan, decodes=[], rows=[], starts=[], others=works, _works=None)

    def _draft(self, plan: StepPlan, work: Work) -> None:
        """Write the row's tokens to come, some of them wrong, where the tokens of the step are read."""
        tokens, table, size = self._tokens[work.row], self._tables[work.row], self.capacity.page_size
        for ahead in range(work.num_tokens - 1):
            position = work.start + ahead
            self._cells[table[position // size]][position % size] = tokens[position]
            read = self._read(work._replace(num_tokens=ahead + 1))
            token = scripted_token([self._seeds[work.row], *read], self.capacity.vocab_size)
            is_right = scripted_token([plan.step, work.row, ahead], 1000) < 1000 * self.rate
            tokens[position + 1] = token if is_right else (token + 1) % self.capacity.vocab_size

    def _verify(self, plan: StepPlan, index: int, work: Work) -> int | NoToken:
        """Choose the tokens of a row for as long as drafts are right and no mask is late; return the first of them."""
        tokens, run = self._tokens[work.row], list[int | NoToken]()
        drafts = self._drafts.get(work.row, 0)
        for count in range(work.num_tokens - drafts, work.num_tokens + 1):
            part = work._replace(num_tokens=count)
            if self._is_late(plan, part, len(run)):
                run.append(NoToken.LATE)
                break
            read = self._read(part)
            token = scripted_token([self._seeds[work.row], *read], self.capacity.vocab_size)
            run.append(token)
            place = work.start + count
            self.lengths[work.row] = place + 1
            is_right = count < work.num_tokens and tokens[place] == token
            tokens[place] = token
            if not is_right or token in self._stops[work.row]:
                self._force(index, work, [*read, token])
                break
        self._runs[index] = run[1:]
        return run[0]

    def _force(self, index: int, work: Work, known: list[int]) -> None:
        """Note what a grammar forces behind a row's last token, now and then."""
        if work.row in self._jumping and known[-1] % 3 == 0:
            self._forced[index] = self._following(self._seeds[work.row], known, known[-1] % 6)

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
        going = [work for work in plan.works if work.row not in self.late]
        for work in going:
            if self._drafts.get(work.row):
                self._draft(plan, work)
        super()._write(replace(plan, decodes=[], others=going))
        for work in going:
            places = self._cell_places(work)
            spoilt = next((at for at, (page, cell) in enumerate(places) if self._cells[page][cell] < 0), len(places))
            for page, cell in places[max(spoilt, work.start - self._first_read(work.start)) :]:
                self._cells[page][cell] = SPOILT

    def _result(self, plan: StepPlan, sampled: Sequence[int | NoToken]) -> StepResult:
        result = super()._result(plan, sampled)._replace(forced=self._forced)
        if not any(self._drafts.values()):
            return result
        runs = [[sampled[index], *self._runs.get(index, ())] for index in range(len(sampled))]
        ends = np.cumsum([len(run) for run in runs]) - 1
        ids = [token for run in runs for token in run]
        return result._replace(
            ids=[0 if isinstance(token, NoToken) else token for token in ids],
            counts=list(map(len, runs)),
            instead={place: token for place, token in enumerate(ids) if isinstance(token, NoToken)},
            forced={int(ends[index]): tokens for index, tokens in self._forced.items()},
            drafted=[self._drafts.get(work.row, 0) for work in plan.works],
        )

    def _sample(self, plan: StepPlan) -> list[int | NoToken]:
        sampled: list[int | NoToken] = []
        self._forced, self._runs = {}, {}
        for index, work in enumerate(plan.works):
            token: int | NoToken = 0
            if work.row in self.late:
                pass  # whatever it says, nobody may believe it
            elif work.samples and work.row not in self.lengths and self._is_late(plan, work):
                token = NoToken.LATE
            elif work.samples and work.row in self._hosted:
                token = NoToken.CHOSEN_LATER
                self._tokens[work.row][work.start + work.num_tokens] = token.value
            elif work.samples and work.row in self.lengths:
                token = self._verify(plan, index, work)
            elif work.samples:
                read = self._read(work)
                token = scripted_token([self._seeds[work.row], *read], self.capacity.vocab_size)
                self._tokens[work.row][work.start + work.num_tokens] = token
                self._force(index, work, [*read, token])
            sampled.append(token)
        return sampled

    def _is_late(self, plan: StepPlan, work: Work, ahead: int = 0) -> bool:
        """Whether a row is left out, behind so many right drafts; a step of one row waits for it."""
        may_be = work.row in self._masked and not plan.alone
        late = may_be and scripted_token([plan.step, work.row, *[ahead] * bool(ahead)], _LATE_IN) == 0
        if late:
            self.late.hold(work.row, work.start + work.num_tokens)
            self.left_out += 1
        return late

    def _following(self, seed: int, known: list[int], count: int) -> list[int]:
        """What would be sampled next anyway: the script's grammar forces it."""
        for _ in range(count):
            seen = known[-(self.capacity.window or len(known)) :]
            known.append(scripted_token([seed, *seen], self.capacity.vocab_size))
        return known[len(known) - count :]
