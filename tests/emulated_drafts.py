"""The GPU kernels of `ops/cuda/drafts/`, in slow, obvious torch and Python, by their names; no tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from emulated_kernels import demand, prepare

from headrace.engine.model.drafting.ngram import NgramDrafter

__all__ = ["DRAFT_KERNELS"]


def prepare_lines(at: SimpleNamespace) -> None:
    """Each line is a row of its own to what comes next: fill in its row and position, and prepare it as a decode."""
    rows, lines = at.rows.tolist(), at.LINES
    chosen, starts = [], []
    for place, row in enumerate(rows):
        drafts, start = min(int(at.counts[place]), int(at.most[row])), int(at.lengths[row])
        for ahead in range(lines):
            real = ahead == 0 or (ahead <= drafts and row != at.padding_row and start + ahead < at.context)
            chosen.append(row if real else at.padding_row)
            starts.append(start + ahead if real else 0)
    demand(len(at.line_rows) == len(at.tokens) == len(chosen), "lines that are not those of the batch")
    at.line_rows.copy_(torch.tensor(chosen))
    one_by_one = SimpleNamespace(**vars(at))
    one_by_one.rows = torch.arange(len(chosen))
    one_by_one.lengths, one_by_one.table = torch.tensor(starts), at.table[chosen]
    one_by_one.pool = at.pool[chosen]
    prepare(one_by_one)


def ngram(at: SimpleNamespace) -> None:
    drafter = NgramDrafter(at.LONGEST)
    for place, row in enumerate(at.rows.tolist()):
        end = int(at.lengths[row]) + 1
        known = at.pool[row, :end].numpy().astype(np.int64)
        drafts = [] if row == at.padding_row else drafter.draft(known, at.DEPTH)
        at.counts[place] = len(drafts)
        for ahead, draft in enumerate(drafts):
            if end + ahead < at.context:
                at.pool[row, end + ahead] = draft


def accept(at: SimpleNamespace) -> None:
    real = [row for row in at.rows.tolist() if row != at.padding_row]
    demand(len(set(real)) == len(real), "a row comes twice in one batch")
    demand((at.rates is not None) == at.RATES, "rates that the kernel was not compiled for")
    runs = at.runs.view(len(at.rows), -1)
    for place, row in enumerate(at.rows.tolist()):
        first = place * at.LINES
        there = [int(each) != at.padding_row for each in at.line_rows[first : first + at.LINES]]
        found: list[int] = []
        stopped = False
        for ahead in range(at.LINES):
            score, best = at.scores[first + ahead].max(0)
            token = int(at.ids[first + ahead, best]) if bool(score.isfinite()) else -1
            found.append(token)
            stopped = token >= 0 and token in at.stops[row].tolist()
            if stopped or token < 0 or ahead + 1 == at.LINES or not there[ahead + 1]:
                break
            right = int(at.tokens[first + ahead + 1]) == token
            if at.RATES:
                here = int(at.positions[first]) + 1 + ahead
                right = random.Random(f"{int(at.seeds[row])} {here}").random() < float(at.rates[ahead])
            if not right:
                break
        runs[place, 0], runs[place, 1] = sum(there[1:]), len(found)
        runs[place, at.HEAD : at.HEAD + len(found)] = torch.tensor(found)
        if row != at.padding_row:
            start = int(at.positions[first]) + 1
            kept = torch.tensor([max(token, 0) for token in found])[: at.context - start]
            at.pool[row, start : start + len(kept)] = kept.int()
            at.lengths[row], at.stopped[row] = start + len(found) - 1, int(stopped)


def turn(at: SimpleNamespace) -> None:
    runs, firsts = at.runs.view(len(at.rows), -1), torch.arange(len(at.rows)) * at.LINES
    if at.AHEAD == 0:
        runs[:, 0] = (at.line_rows.view(-1, at.LINES)[:, 1:] != at.padding_row).sum(1)
        runs[:, 1] = 0
        at.going.copy_(at.rows)
        at.places.copy_(at.positions[firsts])
        return
    counts = (at.going != at.padding_row) | (at.AHEAD == 1)
    runs[counts, at.HEAD + at.AHEAD - 1] = at.ids[counts]
    runs[counts, 1] = at.AHEAD
    if at.AHEAD < at.LINES:
        line = firsts + at.AHEAD
        goes = (at.line_rows[line] != at.padding_row) & (at.tokens[line] == at.ids) & (at.going != at.padding_row)
        goes &= at.stopped[at.going.long()] == 0
        at.going.copy_(torch.where(goes, at.going, at.padding_row))
        at.places.add_(1)


def choose(at: SimpleNamespace) -> None:
    """By the scores that `score_tokens` left."""
    for place, row in enumerate(at.rows.tolist()):
        token = max(int(at.ids[place, at.scores[place].argmax()]), 0)
        at.positions[place] += 1
        at.out[place] = token
        if at.counts[place] > 0 and at.positions[place] < at.context:
            at.pool[row, at.positions[place]] = token


def keep(at: SimpleNamespace) -> None:
    for place, (row, position) in enumerate(zip(at.rows.tolist(), at.positions.tolist(), strict=True)):
        at.ring[row, position % at.LAG] = at.states[place]


DRAFT_KERNELS: dict[str, Callable[[SimpleNamespace], None]] = {
    "_prepare_lines_kernel": prepare_lines,
    "_ngram_kernel": ngram,
    "_accept_kernel": accept,
    "_turn_kernel": turn,
    "_draft_kernel": choose,
    "_keep_kernel": keep,
}
