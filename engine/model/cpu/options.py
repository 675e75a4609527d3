"""`CpuOptions`: what rows ask beyond plain sampling on a CPU - shaped logits and log-probabilities - step by step.

Owns the counts and masks of the rows that ask for these; other rows cost nothing. Next to read: ops/cpu/shape.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.cpu.grammars import CpuMasks
from headrace.engine.model.shared.results import LATE, NON_FINITE, NOTHING_LEFT
from headrace.engine.scheduling.plan import GivenTokens, RowOptions, StepPlan, Work
from headrace.engine.scheduling.shaping import Report
from headrace.engine.steps.shaped_logits import shaper_of
from headrace.ops.cpu.logprobs import Logprobs, logprobs
from headrace.ops.cpu.sample import Choosing, sample
from headrace.ops.cpu.shape import Shaper

__all__ = ["CpuOptions", "PromptSpan", "prompt_places"]

_POSITIONS = 32  # of a prompt whose logits are held at once: 32 rows of 128k float32 are 16 MB


class PromptSpan(NamedTuple):
    """Consecutive prompt tokens of a step for whose successors log-probabilities are wanted."""

    work: int
    first: int
    """Index of the span's first token among the N of the step."""
    next_tokens: list[int]
    """Prompt token that follows each of the span's tokens."""
    top: int


class CpuOptions:
    """The rows that ask for more than plain sampling."""

    def __init__(self, vocab_size: int) -> None:
        """Start without rows."""
        self._vocab_size = vocab_size
        self._options: dict[int, RowOptions] = {}
        self._shapers: dict[int, Shaper] = {}
        self._masks = CpuMasks(vocab_size)
        self.late = self._masks.late
        """Rows without a token because their masks were late; the runner skips them."""
        self._patience = 0.0
        """Seconds after the logits for which the step waits for masks."""

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's new rows and options, and forget those of rows that have left or are reused."""
        if self._options:
            for row in (*plan.left_rows, *(new.row for new in plan.new_rows)):
                self._options.pop(row, None)
                self._shapers.pop(row, None)
                self._masks.end(row)
        for options in plan.options:
            self._options[options.row] = options
            if options.shaping is not None:
                self._shapers[options.row] = shaper_of(options, options.shaping, self._vocab_size)
            if options.grammar is not None:
                self._masks.begin(
                    options.row, options.grammar, options.tokens[options.prompt_len :], jumps=options.jumps
                )
        if self._options:
            others = any(work.row not in self._masks for work in plan.each_work())
            self._patience = self.late.patience(plan, others=others)

    def give(self, given: GivenTokens) -> None:
        """Advance a row by tokens that were not chosen here."""
        if given.tokens and given.row in self._masks:
            self._masks.advance(given.row, given.tokens)

    def draft(self, row: int, drafts: list[int], most: int) -> list[int]:
        """Return drafts for `row`, at most `most`: those given, or what its grammar makes of them."""
        return self._masks.draft(row, drafts, most) if most and row in self._masks else drafts

    def prompt_span(self, index: int, work: Work, first: int) -> PromptSpan | None:
        """Return the prompt tokens of `work` to report on, or None; `first` is its first token's index in the step."""
        options = self._options.get(work.row)
        if options is None or options.reporting is None or options.reporting.prompt is None:
            return None
        following = options.tokens[work.start + 1 : min(work.start + 1 + work.num_tokens, options.prompt_len)]
        return PromptSpan(index, first, following, options.reporting.prompt) if following else None

    def choose(
        self,
        logits_SV: Tensor,
        works: Sequence[Work],
        choosing: Sequence[Choosing],
        known: Callable[[Work], NDArray[np.int64]],
    ) -> tuple[list[int], dict[int, Report], dict[int, Sequence[int]]]:
        """Choose one token for each of `works`, and count it.

        Args:
            logits_SV: float [works, vocabulary].
            works: The works that sample.
            choosing: The sampling parameters of each.
            known: Returns the tokens of a work's row before the one to be chosen.

        Returns:
            The ids, each as `sample` returns it, `NOTHING_LEFT` or `LATE`; then, by index in `works`, reports and the
            tokens that grammars force behind a chosen one.
        """
        asking = {place: options for place, work in enumerate(works) if (options := self._options.get(work.row))}
        if not asking:
            return sample(logits_SV, choosing), {}, {}
        wanted = [place for place, options in asking.items() if options.reporting and _wants(options)]
        original_TV = logits_SV[wanted]  # indexing copies: shaping below leaves these rows alone
        shaped_SV = logits_SV.float()
        late = self._hold_late([works[place] for place in asking])
        in_time = [place for place in asking if works[place].row not in late]
        stuck = [place for place in in_time if not self._shape(shaped_SV[place].numpy(), works[place], known)]
        chosen = sample(shaped_SV, choosing)
        for place in asking:
            chosen[place] = NOTHING_LEFT if place in stuck else LATE if place not in in_time else chosen[place]
        forced: dict[int, Sequence[int]] = {}
        for place in asking:
            row = works[place].row
            if chosen[place] >= 0:
                if row in self._masks and (rest := self._masks.rest(row)):
                    forced[place] = rest
                self._advance(row, chosen[place])
        return chosen, self._reports(original_TV, wanted, chosen, asking), forced

    def prompt_reports(
        self, spans: Sequence[PromptSpan], hidden_PE: Tensor, logits: Callable[[Tensor, int], Tensor]
    ) -> dict[int, list[Report]]:
        """Report on the prompts, a few positions at a time.

        Args:
            spans: The prompt positions to report on.
            hidden_PE: Hidden states of the spans' tokens, one span after the other.
            logits: Applies the output head to tokens of the plan's work with the given index.
        """
        reports: dict[int, list[Report]] = {}
        start = 0
        for span in spans:
            found: list[Logprobs] = []
            for begin in range(0, len(span.next_tokens), _POSITIONS):
                tokens = span.next_tokens[begin : begin + _POSITIONS]
                block_PE = hidden_PE[start + begin : start + begin + len(tokens)]
                found += logprobs(logits(block_PE, span.work), tokens, [span.top] * len(tokens))
            reports[span.work] = [Report(*each) for each in found]
            start += len(span.next_tokens)
        return reports

    def close(self) -> None:
        """Join the thread that finds masks."""
        self._masks.close()

    def _shape(self, logits_V: NDArray[np.float32], work: Work, known: Callable[[Work], NDArray[np.int64]]) -> bool:
        """Shape a row's logits in place; return whether a token is left to choose."""
        shaper = self._shapers.get(work.row)
        if shaper is not None and not shaper.shape(logits_V, known(work)):
            return False
        if work.row not in self._masks or not math.isfinite(logits_V.max()):  # sampling reports non-finite logits
            return True
        np.copyto(logits_V, -np.inf, where=self._masks.banned_V(work.row))
        return bool(logits_V.max() > -np.inf)

    def _hold_late(self, works: Sequence[Work]) -> list[int]:
        """Wait for masks; return the rows, now marked late, whose masks are missing."""
        place_of = {work.row: work.start + work.num_tokens for work in works if work.row in self._masks}
        late = self._masks.missing(list(place_of), self._patience) if place_of else []
        for row in late:
            self.late.hold(row, place_of[row])
        return late

    def _advance(self, row: int, token: int) -> None:
        if row in self._shapers:
            self._shapers[row].append(token)
        if row in self._masks:
            self._masks.advance(row, [token])

    @staticmethod
    def _reports(
        logits_TV: Tensor, wanted: Sequence[int], chosen: Sequence[int], asking: dict[int, RowOptions]
    ) -> dict[int, Report]:
        counts = [reporting.completion or 0 for place in wanted if (reporting := asking[place].reporting)]
        found = logprobs(logits_TV, [max(chosen[place], 0) for place in wanted], counts)
        return {
            place: Report(*each)
            for place, each in zip(wanted, found, strict=True)
            if chosen[place] not in (LATE, NON_FINITE)
        }


def _wants(options: RowOptions) -> bool:
    return options.reporting is not None and options.reporting.completion is not None


def prompt_places(spans: Sequence[PromptSpan]) -> Tensor:
    """Return int64 indices among the step's tokens of all that the spans hold, one span after the other."""
    return torch.cat([torch.arange(span.first, span.first + len(span.next_tokens)) for span in spans])
