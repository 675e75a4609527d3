"""`CpuDrafts`: drafts of a CPU's rows, and which of them are right; the device knows here how long its rows are.

Plans are made before the tokens of the steps before them are known, so they hold upper bounds of rows that speculate.
Owns the true lengths of these rows; never runs the model. Next to read: runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.cpu.draft_model import CpuDraftModel
from headrace.engine.model.cpu.heads import CpuDraftHead, DraftAsk
from headrace.engine.model.drafting.ngram import Drafter
from headrace.engine.model.shared.runs import Verified
from headrace.engine.scheduling.plan import Capacity, GivenTokens, StepPlan, Work
from headrace.engine.scheduling.shaping import Report

__all__ = ["Choose", "CpuDrafts", "verify"]

Choose: TypeAlias = Callable[[Tensor, Sequence[Work]], tuple[list[int], dict[int, Report]]]
"""Chooses, stores and counts the token behind each of some works by its logits, float [works, vocabulary]; returns the
ids, or codes in place of ids, and reports by index."""


class CpuDrafts:
    """Rows that speculate, and their drafts."""

    def __init__(self, capacity: Capacity, drafter: Drafter | CpuDraftHead | CpuDraftModel) -> None:
        """Start without rows; `drafter` guesses for those to come."""
        self.drafter: Drafter | CpuDraftHead | CpuDraftModel | None = drafter
        """Guesses by a row's tokens, from what the model has computed of them, or by another model; None of a head
        whose weights are released."""
        self._lengths = [0] * capacity.max_rows
        """Number of tokens of each row that speculates, with those that it has just chosen; 0 for other rows."""

    def update(self, plan: StepPlan, accepted: Sequence[GivenTokens]) -> None:
        """Apply the plan's new rows, and the given tokens that rows accept."""
        for new in plan.new_rows:
            self._lengths[new.row] = new.start + len(new.tokens) if new.speculates else 0
        for given in accepted:
            self.reach(given.row, given.start + len(given.tokens))

    def place(
        self,
        plan: StepPlan,
        tokens_RN: NDArray[np.int64],
        goes_on: Callable[[int], bool],
        allowed: Callable[[int, list[int], int], list[int]],
    ) -> tuple[list[Work], list[int]]:
        """Return the works of `plan` where they truly are, their drafts included, and the number of drafts of each.

        Args:
            plan: A plan that has been applied.
            tokens_RN: int64 [rows, positions], where drafts are put behind the tokens of their rows.
            goes_on: Returns whether a row has not ended; one that has needs no drafts.
            allowed: Returns what a row's grammar makes of drafts, given their largest number.
        """
        works = list(plan.each_work())
        drafted = [0] * len(works)
        rows = [(index, row) for index, row in enumerate(plan.rows) if self._lengths[row]]
        most = [plan.drafts[index] if plan.drafts and goes_on(row) else 0 for index, row in rows]
        for index, row in rows:
            works[index] = works[index]._replace(start=self._lengths[row] - 1)
        asked = [
            DraftAsk(works[index], self._lengths[row], each) for (index, row), each in zip(rows, most, strict=True)
        ]
        if isinstance(self.drafter, CpuDraftModel):
            asked += self._begin(self.drafter, works, asked, len(plan.decodes))
        guesses = self._guess(asked, tokens_RN)[: len(rows)]
        for (index, row), each, guessed in zip(rows, most, guesses, strict=True):
            drafts = allowed(row, guessed, each)
            if isinstance(self.drafter, CpuDraftModel):
                self.drafter.replace(works[index], guessed, drafts)
            length = self._lengths[row]
            tokens_RN[row, length : length + len(drafts)] = drafts
            works[index] = works[index]._replace(num_tokens=1 + len(drafts))
            drafted[index] = len(drafts)
        return works, drafted

    def _begin(
        self, model: CpuDraftModel, works: Sequence[Work], asked: Sequence[DraftAsk], decodes: int
    ) -> list[DraftAsk]:
        """Tell a draft model what the target is about to compute; return what it should read beside the decodes.

        Args:
            model: The draft model.
            works: The works of the step where they truly are, without drafts; the first `decodes` of them are decodes.
            asked: What is asked for the decodes of rows that speculate.
            decodes: Number of decodes.
        """
        written = {ask.work.row: ask.work._replace(num_tokens=1 + ask.most) for ask in asked}
        model.begin([written.get(work.row, work) for work in works])
        prompts = (work for work in works[decodes:] if self._lengths[work.row])
        return [DraftAsk(work, work.start + work.num_tokens, 0) for work in prompts]

    def _guess(self, asked: Sequence[DraftAsk], tokens_RN: NDArray[np.int64]) -> list[list[int]]:
        """Return drafts for each of some rows, in order."""
        if isinstance(self.drafter, CpuDraftHead | CpuDraftModel):
            return self.drafter.drafts(asked)
        assert self.drafter is not None, "no step runs while weights are released"
        found = []
        for ask in asked:
            known = tokens_RN[ask.work.row, : ask.length]
            found.append(self.drafter.draft(known, ask.most) if ask.most else [])
        return found

    def reach(self, row: int, length: int) -> None:
        """Take note that `row` has `length` tokens, the one just chosen included."""
        if self._lengths[row]:
            self._lengths[row] = length


def verify(
    logits_SV: Tensor,
    works: Sequence[Work],
    drafted: Sequence[int],
    tokens_RN: NDArray[np.int64],
    goes_on: Callable[[int], bool],
    choose: Choose,
) -> list[Verified]:
    """Choose the token behind each work, and one behind each draft as long as the drafts are what was chosen.

    A token is chosen by the same logits, noise, counts and masks as if the tokens before it had been computed one by
    one, so drafts decide how many tokens a step gives and never which (Daliri, Musco and Suresh, 2024).

    Args:
        logits_SV: float [positions, vocabulary]: for each work those of its drafts and the token before them, in order.
        works: The works that sample; a work's drafts are its last tokens.
        drafted: Number of drafts of each work.
        tokens_RN: int64 [rows, positions], with the drafts.
        goes_on: Returns whether a row has not ended with the token just chosen.
        choose: Chooses tokens.
    """
    counts = np.array(drafted, np.int64) + 1
    firsts = np.cumsum(counts) - counts
    found = [Verified([], {}) for _ in works]
    going = list(range(len(works)))
    ahead = 0
    while going:
        parts = [works[at]._replace(num_tokens=works[at].num_tokens - drafted[at] + ahead) for at in going]
        guesses = [
            int(tokens_RN[part.row, part.start + part.num_tokens]) if ahead < drafted[at] else -1
            for at, part in zip(going, parts, strict=True)
        ]
        chosen, reports = choose(logits_SV[firsts[going] + ahead], parts)
        for place, report in reports.items():
            found[going[place]].reports[ahead] = report
        for at, token in zip(going, chosen, strict=True):
            found[at].tokens.append(token)
        going = [
            at
            for at, token, guess, part in zip(going, chosen, guesses, parts, strict=True)
            if token == guess >= 0 and goes_on(part.row)
        ]
        ahead += 1
    return found
