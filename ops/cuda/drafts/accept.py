"""Tells on CUDA which drafts are right, and appends the tokens that they give to their rows; runs no model.

A token is chosen behind every draft as behind any token (sampling/sample.py). A draft that equals the token chosen in
front of it was right, and the token behind it counts. What came of a row is a line of words, a `run`: the number of
drafts it had, the number of tokens it gained, and these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import triton
import triton.language as tl

from headrace.ops.cuda.sampling.sample import score_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.fused import DecodeInputs
    from headrace.ops.cuda.sampling.sample import Asks, SampleScratch

__all__ = ["HEAD", "Appended", "accept", "choose_and_accept"]

HEAD: Final = 2
"""Words of a run before its ids."""


class Appended(NamedTuple):
    """State of the rows that new tokens change; R rows, of which the last is padding."""

    pool_RC: Tensor
    """Tokens of each row, int32."""
    lengths_R: Tensor
    """Position of each row's last known token, int32."""
    stops_RS: Tensor
    """Tokens at which a row stops, then -1, int32 [R, a power of two]."""
    stopped_R: Tensor
    """Flags, int32: whether a row's last token is one of its stops."""


# fmt: off
@triton.jit
def _accept_kernel(
    scores, ids, rows, line_rows, tokens, positions, pool, lengths, stops, stopped, runs, seeds, rates,
    pool_stride, parts, padding_row, context,
    LINES: tl.constexpr, PARTS: tl.constexpr, STOPS: tl.constexpr, HEAD: tl.constexpr, RATES: tl.constexpr,
):
    at_row = tl.program_id(0)
    row = tl.load(rows + at_row).to(tl.int64)
    real = row != padding_row
    part = tl.arange(0, PARTS)
    first = at_row * LINES
    position = tl.load(positions + first).to(tl.int32)
    run = runs + at_row * (HEAD + LINES)
    drafts = 0
    count = 0
    ended = 0
    going = 1
    for ahead in range(LINES):
        line = first + ahead
        is_draft = (ahead > 0) & (tl.load(line_rows + line) != padding_row)
        drafts += is_draft.to(tl.int32)
        score = tl.load(scores + line * parts + part, mask=part < parts, other=float("-inf"))
        token = tl.load(ids + line * parts + part, mask=part < parts, other=2147483647)
        winner = tl.max(score, axis=0)
        chosen = tl.min(tl.where(score == winner, token, 2147483647), axis=0)
        finite = tl.abs(winner) < float("inf")
        here = position + 1 + ahead
        tl.store(run + HEAD + ahead, tl.where(finite, chosen, -1), mask=going > 0)
        # A row that failed continues with token 0, so that the next step reads a valid embedding.
        appends = (going > 0) & real & (here < context)
        tl.store(pool + row * pool_stride + here, tl.where(finite, chosen, 0), mask=appends)
        stop = tl.load(stops + row * STOPS + tl.arange(0, STOPS)) == chosen
        ends = (tl.max(stop.to(tl.int32), axis=0) > 0) & finite
        ended += ((going > 0) & ends).to(tl.int32)
        count += going
        if ahead + 1 < LINES:
            is_next = tl.load(line_rows + line + 1) != padding_row
            right = tl.load(tokens + line + 1) == chosen
            if RATES:
                right = tl.rand(tl.load(seeds + row), here) < tl.load(rates + ahead)
            going = going * (is_next & right & finite & (ends == 0)).to(tl.int32)
    tl.store(run, drafts)
    tl.store(run + 1, count)
    tl.store(lengths + row, position + count, mask=real)
    tl.store(stopped + row, ended, mask=real)


@triton.jit
def _turn_kernel(
    rows, line_rows, tokens, positions, ids, going, places, stopped, runs, padding_row,
    AHEAD: tl.constexpr, LINES: tl.constexpr, HEAD: tl.constexpr,
):
    """Note what the rows that go on chose at place AHEAD - 1, and find those that choose at place AHEAD."""
    at_row = tl.program_id(0)
    run = runs + at_row * (HEAD + LINES)
    first = at_row * LINES
    if AHEAD == 0:
        row = tl.load(rows + at_row)
        drafts = 0
        for ahead in range(1, LINES):
            drafts += (tl.load(line_rows + first + ahead) != padding_row).to(tl.int32)
        tl.store(run, drafts)
        tl.store(run + 1, 0)
        tl.store(going + at_row, row)
        tl.store(places + at_row, tl.load(positions + first))
    else:
        row = tl.load(going + at_row)
        chosen = tl.load(ids + at_row)
        counts = (AHEAD == 1) | (row != padding_row)
        tl.store(run + HEAD + AHEAD - 1, chosen, mask=counts)
        tl.store(run + 1, AHEAD, mask=counts)
        if AHEAD < LINES:
            line = first + AHEAD
            goes = (tl.load(line_rows + line) != padding_row) & (tl.load(tokens + line) == chosen)
            goes = goes & (row != padding_row) & (tl.load(stopped + row) == 0)
            tl.store(going + at_row, tl.where(goes, row, padding_row))
            tl.store(places + at_row, tl.load(places + at_row) + 1)


# fmt: on
def choose_and_accept(
    logits_LV: Tensor,
    rows_B: Tensor,
    line_rows_L: Tensor,
    inputs: DecodeInputs,
    asks: Asks,
    appended: Appended,
    runs_BW: Tensor,
    scratch: SampleScratch,
    *,
    filtered: bool,
    pdl: bool = False,
    rates_K: Tensor | None = None,
) -> None:
    """Choose a token behind each line, by its logits alone, and append those that count to their rows.

    Args:
        logits_LV: Logits of B * (depth + 1) lines, bf16, fp16 or fp32, last dimension contiguous.
        rows_B: Row numbers, int32.
        line_rows_L: The row of each line, int32; the padding row for lines without a draft.
        inputs: Inputs of the lines.
        asks: What the rows ask of the choice.
        appended: State of the rows, changed.
        runs_BW: Output, int32, `HEAD` + depth + 1 words for each row; ids are -1 where logits are not finite.
        scratch: Scratch for at least as many rows as there are lines.
        filtered: Whether any row may ask for top-k, top-p or min-p.
        pdl: Whether to use programmatic dependent launch.
        rates_K: For benchmarks: at each place, the share of drafts behind right ones that count as right, float32,
            whatever was chosen.
    """
    lines, (rows, context) = len(line_rows_L) // len(rows_B), appended.pool_RC.shape
    parts = score_tokens(logits_LV, line_rows_L, inputs.positions_B, asks, scratch, filtered=filtered, pdl=pdl)
    _accept_kernel[(len(rows_B),)](
        scratch.scores_BS, scratch.ids_BS, rows_B, line_rows_L, inputs.tokens_B, inputs.positions_B, appended.pool_RC,
        appended.lengths_R, appended.stops_RS, appended.stopped_R, runs_BW, asks.seed_R, rates_K,
        appended.pool_RC.stride(0), parts, rows - 1, context,
        LINES=lines, PARTS=triton.next_power_of_2(parts), STOPS=appended.stops_RS.shape[1], HEAD=HEAD,
        RATES=rates_K is not None, num_warps=1,
    )  # fmt: skip


def accept(
    ahead: int,
    rows_B: Tensor,
    line_rows_L: Tensor,
    inputs: DecodeInputs,
    ids_B: Tensor,
    going_B: Tensor,
    places_B: Tensor,
    stopped_R: Tensor,
    runs_BW: Tensor,
) -> None:
    """Note the tokens that `sample` chose at one place of all rows, and find the rows that choose at the next.

    Args:
        ahead: The next place: 0 before the first choice, then 1 to depth + 1.
        rows_B: Row numbers, int32.
        line_rows_L: The row of each line, int32; the padding row for lines without a draft.
        inputs: Inputs of the lines.
        ids_B: Ids of the choice at place `ahead - 1`, int32.
        going_B: The rows that chose there, int32; becomes those that choose next, the padding row for others.
        places_B: Positions of the tokens behind which they chose, int32; becomes those of the next choice.
        stopped_R: Whether a row's last token is one at which it stops, int32.
        runs_BW: Output, as of `choose_and_accept`; whole once `ahead` is depth + 1.
    """
    _turn_kernel[(len(rows_B),)](
        rows_B, line_rows_L, inputs.tokens_B, inputs.positions_B, ids_B, going_B, places_B, stopped_R, runs_BW,
        len(stopped_R) - 1,
        AHEAD=ahead, LINES=len(line_rows_L) // len(rows_B), HEAD=HEAD, num_warps=1,
    )  # fmt: skip
