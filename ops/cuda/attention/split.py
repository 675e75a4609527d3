"""Decode attention of heads of any size in Triton, each row's keys split among programs; never writes keys or values.

It takes what no other kernel takes: scores with a bound, sinks, head sizes and groups of any number, on any GPU. A row
and key head are shared by programs that each see consecutive tiles of keys; the last of them to finish adds their sums,
in the order of the keys. A row may have several lines, which then attend to each tile together, as far as a program has
room for them, and whose sums are added by a launch of their own. The host plans nothing. Shape letters as in
`ops/paged.py`; B rows, or lines of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.attention.scores import factors_of, first_weights, scores_of
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.fused import DecodeInputs

__all__ = ["SplitDecode", "SplitTiling", "lines_together", "split_tiling"]

_PROGRAMS: Final = 4
"""Programs for each multiprocessor, up to which rows are split; not measured."""
_MOST_SPLITS: Final = 64
_RESERVED: Final = 8 << 10
"""Bytes of shared memory left for what a program needs besides keys and values."""
_TILE_BYTES: Final = 16 << 10
_MOST_STAGES: Final = 5
_OTHER_STAGES: Final = 2
"""Stages without keys and values in shared memory."""
_BLOCK: Final = 128
"""Elements of a head whose parts are added at once."""
_UNROLLED: Final = 16
"""Most such sums of a key head that are computed side by side: more take minutes to compile."""
_SUMS: Final = 64 * 32
"""Sums of weighted values that each warp of a program has for several lines: 64 in each thread; not measured."""


class SplitTiling(NamedTuple):
    """The work of a program."""

    tile: int
    """Keys that are read at once, a power of two from 16 on."""
    warps: int
    stages: int
    """Steps of the pipeline: a page's number, its keys and values in shared memory, and arithmetic."""


@triton.jit
def _add_parts(
    member, team, active, partial, stats, sums, v_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add what the programs of a row and key head found for one query head."""
    other = tl.arange(0, SPLITS)
    there = other < active
    spot = (team + other) * GROUP + member
    peak = tl.load(stats + spot * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(stats + spot * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    factor = tl.exp2(peak - tl.max(peak, axis=0))
    factor = factor * (v_scale / tl.sum(mass * factor, axis=0))
    for first in tl.static_range(0, PADDED, BLOCK):
        dim = first + tl.arange(0, BLOCK)
        inside = there[:, None] & (dim < DIM)[None, :]
        line = partial + spot[:, None] * DIM + dim[None, :]
        parts = tl.load(line, mask=inside, other=0.0, cache_modifier=".cg")
        result = tl.sum(parts * factor[:, None], axis=0)
        tl.store(sums + member * DIM + dim, result.to(sums.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _attend_to(
    query, kv, row_pages, start, end, oldest, lengths, most, total, head_offset,
    page_stride, part_stride, token_stride, scale, cap,
    LANES: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Return the largest score, the sum of weights and the weighted sum of values of the keys from `start` to `end`.

    Where rows have several lines, `lengths` has each lane's, and `oldest` is the first key that any of them sees.
    """
    dim = tl.arange(0, PADDED)
    summed = tl.zeros([LANES, PADDED], tl.float32)
    for begin in range(start, end, TILE):
        at = begin + tl.arange(0, TILE)
        seen = (at < end) & (at >= oldest)
        page = tl.load(row_pages + at // PAGE, mask=seen, other=0).to(tl.int64)
        line = page * page_stride + (at % PAGE) * token_stride + head_offset
        key_at = kv + line[None, :] + dim[:, None]
        key = tl.load(key_at, mask=seen[None, :] & (dim < DIM)[:, None], other=0.0)
        value_at = kv + part_stride + line[:, None] + dim[None, :]
        value = tl.load(value_at, mask=seen[:, None] & (dim < DIM)[None, :], other=0.0)
        scores = scores_of(tl.dot(query, key.to(query.dtype)), scale, cap, CAP)
        if ROOM > 1:
            own = seen[None, :] & (at[None, :] < lengths[:, None])
            if WINDOW > 0:
                own = own & (at[None, :] >= lengths[:, None] - WINDOW)
            scores = tl.where(own, scores, float("-inf"))
        else:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        ratio = tl.exp2(most - higher)
        weight = tl.exp2(scores - higher[:, None])
        total = total * ratio + tl.sum(weight, axis=1)
        summed = tl.dot(weight.to(query.dtype), value.to(query.dtype), summed * ratio[:, None])
        most = higher
    return most, total, summed


@triton.jit
def _lines_of(batch, lines, LINES: tl.constexpr):
    """Return (the first line of a batch's row, the first and the last line of the batch): LINES, or what is left."""
    batches = tl.cdiv(lines, LINES)
    row_first = batch // batches * lines
    first = row_first + batch % batches * LINES
    return row_first, first, tl.minimum(first + LINES, row_first + lines) - 1


@triton.jit
def _division(
    seq_lens, row_first, first, last, lines,
    ROOM: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return what the lines from `first` to `last` of one row see, and how programs share it.

    It is (the first key, the one behind the last, where tiles begin, the tiles of each program, the number of programs
    that have some, the line whose page numbers hold for the row).
    """
    length = tl.load(seq_lens + row_first).to(tl.int32)
    fewest = length
    longest = row_first
    if ROOM > 1:
        at = row_first + tl.arange(0, ROOM)
        lengths = tl.load(seq_lens + at, mask=at < row_first + lines, other=0).to(tl.int32)
        longest += tl.argmax(lengths, axis=0)
        lengths = tl.maximum(lengths, length)
        ours = (at >= first) & (at <= last)
        fewest = tl.min(tl.where(ours, lengths, 1 << 30), axis=0)
        length = tl.max(tl.where(ours, lengths, 0), axis=0)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(fewest - WINDOW, 0)
    origin = (oldest // TILE) * TILE
    tiles = tl.cdiv(length - origin, TILE)
    each = tl.cdiv(tiles, SPLITS)
    return oldest, length, origin, each, tl.cdiv(tiles, each), longest


@triton.jit
def _split_decode_kernel(
    q, sinks, seq_lens, pages, kv, out, partial, stats, counters,
    columns, page_stride, part_stride, token_stride, scale, cap, v_scale, lines,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, UNROLL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LINES: tl.constexpr, ROOM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # A program has a batch of lines: all of a row's, of which there is room for ROOM, or a part of them.
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    batch = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row_first, first, last = _lines_of(batch, lines, LINES)
    oldest, length, origin, each, active, longest = _division(
        seq_lens, row_first, first, last, lines, ROOM, WINDOW, TILE, SPLITS
    )  # fmt: skip
    start = origin + split * each * TILE
    if split < active:
        end = tl.minimum(start + each * TILE, length)
        lane = tl.arange(0, LANES)
        line = first + lane // GROUP
        member = lane % GROUP
        real = line <= last
        dim = tl.arange(0, PADDED)
        heads = real[:, None] & (dim < DIM)[None, :]
        place = ((line.to(tl.int64) * KV_HEADS + kv_head) * GROUP + member)[:, None] * DIM + dim[None, :]
        query = tl.load(q + place, mask=heads, other=0.0)
        lengths = lane
        if ROOM > 1:
            lengths = tl.load(seq_lens + line, mask=real, other=1).to(tl.int32)
            lengths = tl.maximum(lengths, tl.load(seq_lens + row_first).to(tl.int32))
        has_sinks = real & (split == 0)
        most, total = first_weights(sinks + kv_head * GROUP, member, has_sinks, LANES, SINKS)
        most, total, summed = _attend_to(
            query, kv, pages + longest.to(tl.int64) * columns, start, end, oldest, lengths, most, total, kv_head * DIM,
            page_stride, part_stride, token_stride, scale, cap, LANES, DIM, PADDED, PAGE, TILE, WINDOW, CAP, ROOM,
        )  # fmt: skip
        if active == 1:
            result = summed / total[:, None] * v_scale
            tl.store(out + place, result.to(out.dtype.element_ty), mask=heads)
        else:
            team = (batch * KV_HEADS + kv_head).to(tl.int64) * SPLITS
            mine = (team + split) * GROUP * LINES
            tl.store(partial + (mine + lane)[:, None] * DIM + dim[None, :], summed, mask=heads)
            tl.store(stats + (mine + lane) * 2, most, mask=real)
            tl.store(stats + (mine + lane) * 2 + 1, total, mask=real)
            if ROOM == 1:
                tl.debug_barrier()
                arrived = tl.atomic_add(counters + batch * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
                if arrived == active - 1:
                    sums = out + (batch.to(tl.int64) * KV_HEADS + kv_head) * GROUP * DIM
                    if UNROLL:
                        for head in tl.static_range(GROUP):
                            _add_parts(
                                head, team, active, partial, stats, sums, v_scale, GROUP, DIM, PADDED, BLOCK, SPLITS
                            )  # fmt: skip
                    else:
                        for head in range(GROUP):
                            _add_parts(
                                head, team, active, partial, stats, sums, v_scale, GROUP, DIM, PADDED, BLOCK, SPLITS
                            )  # fmt: skip
                    tl.store(counters + batch * KV_HEADS + kv_head, 0)


@triton.jit
def _merge_lines_kernel(
    seq_lens, out, partial, stats, v_scale, lines,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, LINES: tl.constexpr, ROOM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add what the programs of a row found for one query head of a line, where there were several of them."""
    line = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    number = line % lines
    batch = line // lines * tl.cdiv(lines, LINES) + number // LINES
    row_first, first, last = _lines_of(batch, lines, LINES)
    _, _, _, _, active, _ = _division(seq_lens, row_first, first, last, lines, ROOM, WINDOW, TILE, SPLITS)
    if active > 1:
        team = (batch * KV_HEADS + head // GROUP).to(tl.int64) * SPLITS
        member = number % LINES * GROUP + head % GROUP
        sums = out + (line.to(tl.int64) * KV_HEADS * GROUP + head) * DIM - member * DIM
        _add_parts(member, team, active, partial, stats, sums, v_scale, GROUP * LINES, DIM, PADDED, BLOCK, SPLITS)


class SplitDecode:
    """Decode attention of one batch size. No plan: splits follow the device's lengths."""

    def __init__(
        self,
        shape: HeadShape,
        device: torch.device,
        *,
        max_rows: int,
        arch: Arch,
        pdl: bool = False,
        splits: int | None = None,
        how: SplitTiling | None = None,
        lines: int = 1,
    ) -> None:
        """Allocate for `max_rows`.

        Args:
            shape: Heads, window, cache dtype.
            device: The GPU.
            max_rows: Most rows of a batch.
            arch: What the GPU can run.
            pdl: Whether to use programmatic dependent launch; nothing is read before the wait.
            splits: Most programs for a row and key head, a power of two; None for what fills the GPU.
            how: Division of the work; None for that of `split_tiling`.
            lines: Number of lines of each row.
        """
        self._how = how or split_tiling(shape, arch)
        self._lines, self._together = lines, lines_together(shape, lines, self._how.warps)
        batches = max_rows * triton.cdiv(lines, self._together)
        if splits is None:
            programs = _PROGRAMS * arch.processors // (batches * shape.kv_heads)
            splits = min(_MOST_SPLITS, 1 << max(0, programs.bit_length() - 1))
        self._shape, self._splits, self._pdl = shape, splits, pdl
        teams = batches * shape.heads * self._together * splits
        self._partial = torch.empty(teams, shape.head_dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(teams, 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(batches * shape.kv_heads, dtype=torch.int32, device=device)

    def deal(self, inputs: DecodeInputs) -> None:
        """Do nothing: each row is divided by itself."""

    def run(
        self,
        q_BHD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer; a graph can capture it. `sinks_H` is float32."""
        shape, how = self._shape, self._how
        group, padded = shape.heads // shape.kv_heads, triton.next_power_of_2(shape.head_dim)
        block, lines, together = min(_BLOCK, padded), self._lines, self._together
        batches = len(q_BHD) // lines * triton.cdiv(lines, together)
        scale, cap = factors_of(shape, scales)
        _split_decode_kernel[(shape.kv_heads, self._splits, batches)](
            q_BHD, q_BHD if sinks_H is None else sinks_H, inputs.seq_lens_B, inputs.pages_BP, kv_layer, out_BHD,
            self._partial, self._stats, self._counters, inputs.pages_BP.shape[1],
            kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), scale, cap, scales.v, lines,
            KV_HEADS=shape.kv_heads, GROUP=group, LANES=_lanes(shape, together), DIM=shape.head_dim,
            PADDED=padded, BLOCK=block, PAGE=shape.page_size, TILE=how.tile, SPLITS=self._splits,
            UNROLL=group * padded // block <= _UNROLLED, WINDOW=shape.window or 0, CAP=shape.cap is not None,
            SINKS=sinks_H is not None, LINES=together, ROOM=triton.next_power_of_2(lines), PDL=self._pdl,
            num_warps=how.warps, num_stages=how.stages, launch_pdl=self._pdl,
        )  # fmt: skip
        if lines > 1 and self._splits > 1:
            _merge_lines_kernel[(len(q_BHD), shape.heads)](
                inputs.seq_lens_B, out_BHD, self._partial, self._stats, scales.v, lines,
                KV_HEADS=shape.kv_heads, GROUP=group, DIM=shape.head_dim, PADDED=padded, BLOCK=block, TILE=how.tile,
                SPLITS=self._splits, WINDOW=shape.window or 0, LINES=together, ROOM=triton.next_power_of_2(lines),
                PDL=self._pdl, num_warps=4, launch_pdl=self._pdl,
            )  # fmt: skip


def lines_together(shape: HeadShape, lines: int, warps: int) -> int:
    """Return how many lines of a row a program of so many warps has room for, at least one."""
    most = lines
    while most > 1 and _lanes(shape, most) * triton.next_power_of_2(shape.head_dim) > _SUMS * warps:
        most -= 1
    return -(-lines // -(-lines // most))  # as many for each program


def _lanes(shape: HeadShape, lines: int) -> int:
    """Return the rows of a tile of queries, of all lines and of the query heads of a group."""
    return max(16, triton.next_power_of_2(lines * shape.heads // shape.kv_heads))


def split_tiling(shape: HeadShape, arch: Arch) -> SplitTiling:
    """Return the division of the work; not measured."""
    line = triton.next_power_of_2(shape.head_dim) * shape.dtype.itemsize
    tile = min(64, max(16, _TILE_BYTES // line))
    stages = (arch.shared_bytes - _RESERVED) // (2 * tile * line) + _OTHER_STAGES
    return SplitTiling(tile, 4 if shape.head_dim <= 256 else 8, max(1, min(_MOST_STAGES, stages)))
