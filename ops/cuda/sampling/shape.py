"""Changes logits on CUDA before a token is chosen: bias, penalties, masks, bad words; never chooses one.

Sums are those of the CPU's `Shaper`, in the same order, in float32. A row's bias and masks are one line of additions,
-inf where a token may not be chosen; its counts and the tokens that would end it too early are one line of marks. Both
are dense, so that a step reads them like the logits, and a sampled token changes one word. The mask of a grammar, new
for each step, has one bit for each token; behind each of a row's drafts there is another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ADDS",
    "COLUMNS",
    "MARKS",
    "MASKED",
    "NOTHING_LEFT",
    "STOPS",
    "WORDS",
    "WORD_COLUMNS",
    "ShapeArrays",
    "count_chosen",
    "count_known",
    "shape",
]

NOTHING_LEFT = -2

ADDS, MARKS, WORDS, MASKED = 1, 2, 4, 8
"""Bits of a row's first column: it has additions; marks; bad words; a mask of bits. 0 leaves its logits unchanged."""
STOPS = 2
"""Bit of a mark: the token may not be chosen before the least length. Bit 0 says that the prompt has the token, and the
bits from 2 up count the token in the completion."""
COLUMNS = 8
"""Columns of a row: bits, least length, bad words; repetition, frequency, presence penalty as float32; two unused."""
WORD_COLUMNS = 3
"""Columns of a bad word: its last token, how many tokens are before that, and where in the row's words these are."""

_BLOCK = 4096
_COUNT_BLOCK = 1024
_WORDS_BLOCK = 128


class ShapeArrays:
    """Device memory of `shape` for up to `rows` rows and one more, which pads; all zero at first.

    Args:
        rows: Most rows of a call; there is one more.
        vocabulary: Number of logits of a row; each takes 12 bytes.
        words: Number of int32 places of a row for its bad words: `WORD_COLUMNS` for each, then the tokens but the last.
        device: The GPU.
        places: Most tokens that a step chooses for a row, one behind the other.
    """

    def __init__(self, rows: int, vocabulary: int, words: int, device: torch.device | str, places: int = 1) -> None:
        self.table_RC = torch.zeros(rows + 1, COLUMNS, dtype=torch.int32, device=device)
        self.added_RV = torch.zeros(rows + 1, vocabulary, dtype=torch.float32, device=device)
        self.marks_RV = torch.zeros(rows + 1, vocabulary, dtype=torch.int32, device=device)
        self.words_RW = torch.zeros(rows + 1, words, dtype=torch.int32, device=device)
        size = places, rows + 1, triton.cdiv(vocabulary, 32)
        self.bits_KRW = torch.zeros(size, dtype=torch.int32, device=device)
        self.out_BV = torch.empty(rows, vocabulary, dtype=torch.float32, device=device)
        self.states_BS = torch.empty(rows, triton.cdiv(vocabulary, _BLOCK), dtype=torch.int32, device=device)


# fmt: off
@triton.jit
def _shape_kernel(
    logits, rows, positions, table, factors, added, marks, bits, out, states, stride, size, parts, bits_stride,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows + at_row).to(tl.int64)
    kind = tl.load(table + row * COLUMNS)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(logits + at_row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    if kind != 0:
        early = tl.load(positions + at_row).to(tl.int32) + 1 < tl.load(table + row * COLUMNS + 1)
        repetition = tl.load(factors + row * COLUMNS + 3)
        frequency = tl.load(factors + row * COLUMNS + 4)
        presence = tl.load(factors + row * COLUMNS + 5)
        extra = tl.load(added + row * size + at, mask=inside & ((kind & 1) != 0), other=0.0)
        mark = tl.load(marks + row * size + at, mask=inside & ((kind & 2) != 0), other=0)
        word = tl.load(bits + row * bits_stride + at // 32, mask=inside & ((kind & 8) != 0), other=-1)
        banned = (extra == float("-inf")) | (early & ((mark & 2) != 0)) | (((word >> (at % 32)) & 1) == 0)
        shaped = value + tl.where(extra == float("-inf"), 0.0, extra)
        count = (mark >> 2).to(tl.float32)
        less = tl.where(shaped > 0.0, tl.div_rn(shaped, repetition), shaped * repetition)
        less = less - frequency * count - tl.where(count > 0.0, presence, 0.0)
        shaped = tl.where((mark & -3) != 0, less, shaped)
        shaped = tl.where(banned, float("-inf"), shaped)
        # NaN and infinity stay, so that sampling reports them.
        shaped = tl.where((value == value) & (value < float("inf")), shaped, value)
        broken = (shaped != shaped) | (shaped == float("inf"))
        alive = tl.max((value > float("-inf")).to(tl.int32), axis=0)
        tl.store(states + at_row * parts + part, alive + 2 * tl.max(broken.to(tl.int32), axis=0))
        value = shaped
    tl.store(out + at_row * size + at, value, mask=inside)


@triton.jit
def _words_kernel(
    rows, positions, table, words, pool, out, size, words_stride, pool_stride,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, WORD_COLUMNS: tl.constexpr, PDL: tl.constexpr,
):
    """Ban the last token of each bad word whose other tokens are at the end of the row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at_row).to(tl.int64)
    many = tl.load(table + row * COLUMNS + 2)
    known = tl.load(positions + at_row).to(tl.int32) + 1
    line = words + row * words_stride
    for start in range(0, many, BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < many
        last = tl.load(line + word * WORD_COLUMNS, mask=inside, other=0)
        before = tl.load(line + word * WORD_COLUMNS + 1, mask=inside, other=0)
        place = tl.load(line + word * WORD_COLUMNS + 2, mask=inside, other=0)
        stands = inside & (before <= known)
        for step in range(0, tl.max(tl.where(stands, before, 0), axis=0)):
            more = stands & (step < before)
            wanted = tl.load(line + place + step, mask=more, other=0)
            found = tl.load(pool + row * pool_stride + known - before + step, mask=more, other=0)
            stands = stands & (wanted == found)
        value = tl.load(out + at_row * size + last, mask=stands, other=0.0)
        whole = (value == value) & (value < float("inf"))
        tl.store(out + at_row * size + last, float("-inf"), mask=stands & whole)


@triton.jit
def _count_chosen_kernel(
    rows, ids, table, marks, states, size, parts, PARTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at_row).to(tl.int64)
    kind = tl.load(table + row * COLUMNS)
    token = tl.load(ids + at_row)
    if kind != 0:
        if token >= 0:
            if (kind & 2) != 0:
                place = marks + row * size + token
                tl.store(place, tl.load(place) + 4)
        else:
            part = tl.arange(0, PARTS)
            state = tl.load(states + at_row * parts + part, mask=part < parts, other=0)
            if (tl.max(state, axis=0) & 2) == 0:
                if tl.max(state, axis=0) > 0:
                    tl.store(ids + at_row, -2)


@triton.jit(do_not_specialize=["row", "prompt_len", "known"])
def _count_known_kernel(pool, marks, row, prompt_len, known, pool_stride, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = row.to(tl.int64)
    inside = at < known
    place = marks + row * size + tl.load(pool + row * pool_stride + at, mask=inside, other=0)
    tl.atomic_or(place, 1, mask=inside & (at < prompt_len))
    tl.atomic_add(place, 4, mask=inside & (at >= prompt_len))


# fmt: on
def shape(
    logits_BV: Tensor,
    rows_B: Tensor,
    positions_B: Tensor,
    pool_RC: Tensor,
    arrays: ShapeArrays,
    *,
    ahead: int = 0,
    pdl: bool = False,
) -> Tensor:
    """Return the logits as each row wants them, for sample.py's `sample`; rows without shaping keep theirs.

    Args:
        logits_BV: Logits, bf16, fp16 or fp32, last dimension contiguous.
        rows_B: Row numbers, int32.
        positions_B: Position of each row's input token, the last one known, int32 or int64.
        pool_RC: Tokens of each row from position 0, int32.
        arrays: Shaping of the rows.
        ahead: Number of drafts between the last known token and the choice, which decides the mask of bits.
        pdl: Whether to use programmatic dependent launch.

    Returns:
        Shaped logits, float32 [B, V], part of `arrays`: the next call overwrites them.
    """
    rows, size = logits_BV.shape
    out_BV, table, bits_RW = arrays.out_BV[:rows], arrays.table_RC, arrays.bits_KRW[ahead]
    parts = arrays.states_BS.shape[1]
    # fmt: off
    _shape_kernel[(rows, parts)](
        logits_BV, rows_B, positions_B, table, table.view(torch.float32), arrays.added_RV, arrays.marks_RV,
        bits_RW, out_BV, arrays.states_BS, logits_BV.stride(0), size, parts, bits_RW.stride(0),
        BLOCK=_BLOCK, COLUMNS=COLUMNS, PDL=pdl, num_warps=8, launch_pdl=pdl, enable_fp_fusion=False,
    )
    _words_kernel[(rows,)](
        rows_B, positions_B, table, arrays.words_RW, pool_RC, out_BV,
        size, arrays.words_RW.stride(0), pool_RC.stride(0),
        BLOCK=_WORDS_BLOCK, COLUMNS=COLUMNS, WORD_COLUMNS=WORD_COLUMNS, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    # fmt: on
    return out_BV


def count_chosen(rows_B: Tensor, ids_B: Tensor, arrays: ShapeArrays, *, pdl: bool = False) -> None:
    """Count the tokens that sample.py's `sample` chose from the last `shape`, for rows with counts.

    Args:
        rows_B: Row numbers, int32, as given to `shape`.
        ids_B: Chosen ids, int32; -1 becomes `NOTHING_LEFT` where the row's own masks left no token.
        arrays: Shaping of the rows.
        pdl: Whether to use programmatic dependent launch.
    """
    parts = arrays.states_BS.shape[1]
    _count_chosen_kernel[(len(rows_B),)](
        rows_B, ids_B, arrays.table_RC, arrays.marks_RV, arrays.states_BS, arrays.marks_RV.stride(0), parts,
        PARTS=triton.next_power_of_2(parts), COLUMNS=COLUMNS, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def count_known(pool_RC: Tensor, row: int, prompt_len: int, known: int, arrays: ShapeArrays) -> None:
    """Add a row's first `known` tokens, of which `prompt_len` are the prompt, to its marks; all must be in the pool."""
    _count_known_kernel[(triton.cdiv(known, _COUNT_BLOCK),)](
        pool_RC, arrays.marks_RV, row, prompt_len, known, pool_RC.stride(0), arrays.marks_RV.stride(0),
        BLOCK=_COUNT_BLOCK, num_warps=4,
    )  # fmt: skip
