"""Matrix products of few rows on CUDA (Triton), for weights that are read once: never used where rows fill the GPU.

A product of up to 64 rows takes as long as reading its weight, so the kernel keeps many weight bytes in flight, and
splits the inner dimension where the outputs alone do not fill the GPU. Sums over splits are in a fixed order: results
do not vary from run to run. I input features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.products.split_sums import store_sums
from headrace.ops.cuda.tuning.chips import DEFAULT

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.tuning.table import Tuning

__all__ = ["MAX_ROWS", "LinearScratch", "Tiling", "linear", "linear_silu_mul", "tiling"]

MAX_ROWS = 64


class Tiling(NamedTuple):
    """Division of one product: output features and input features of a tile, and splits of the inner dimension."""

    block_out: int
    block_in: int
    splits: int
    warps: int
    stages: int


class LinearScratch:
    """Partial sums and counters of split products, which all products of one stream share."""

    def __init__(self, device: torch.device | str, arch: Arch, *, floats: int = 33 << 17, tiles: int = 4096) -> None:
        """Allocate on `device`, for tilings that fit `arch`."""
        self.arch = arch
        self.planes = torch.empty(floats, dtype=torch.float32, device=device)
        self.counters = torch.zeros(tiles, dtype=torch.int32, device=device)
        self._dense: Tensor | None = None

    def dense(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return room for a dense slice of a weight, [elements], which is allocated when it is first asked for."""
        if self._dense is None or len(self._dense) < elements:
            self._dense = torch.empty(elements, dtype=dtype, device=self.planes.device)
        return self._dense


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    out,
    planes,
    counters,
    rows,
    size_out,
    size_in,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    feature = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    known = feature < size_out
    steps = tl.cdiv(size_in, SPLITS * BLOCK_IN)
    first = split * steps * BLOCK_IN
    last = tl.minimum(first + steps * BLOCK_IN, size_in)
    line = weight + tl.where(known, feature, 0).to(tl.int64)[:, None] * size_in
    inner = tl.arange(0, BLOCK_IN)
    upper = line + size_out.to(tl.int64) * size_in
    if EARLY:
        # The first tile of weights depends on no kernel before this one: fetch it while that one still runs.
        ahead = (first + inner < last)[None, :]
        w = tl.load(line + (first + inner)[None, :], mask=ahead, other=0.0)
        if GATED:
            up = tl.load(upper + (first + inner)[None, :], mask=ahead, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, ROWS)
    x_line = x + row.to(tl.int64)[None, :] * x_stride
    real = (row < rows)[None, :]  # padding rows are not read, since all programs would queue for one line
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    total_up = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    if EARLY:
        part = tl.load(x_line + (first + inner)[:, None], mask=(first + inner < last)[:, None] & real, other=0.0)
        total = tl.dot(w, part)
        if GATED:
            total_up = tl.dot(up, part)
        first += BLOCK_IN
    for start in range(first, last, BLOCK_IN):
        at = start + inner
        inside = at < last
        w = tl.load(line + at[None, :], mask=inside[None, :], other=0.0)
        part = tl.load(x_line + at[:, None], mask=inside[:, None] & real, other=0.0)
        total = tl.dot(w, part, total)
        if GATED:
            up = tl.load(upper + at[None, :], mask=inside[None, :], other=0.0)
            total_up = tl.dot(up, part, total_up)
    target = out + row.to(tl.int64)[None, :] * out_stride + feature[:, None]
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    store_sums(total, target, known[:, None] & real, planes, counters, tile, split, BLOCK_OUT, ROWS, SPLITS)


def linear(
    x_NI: Tensor,
    weight_OI: Tensor,
    out_NO: Tensor,
    scratch: LinearScratch,
    *,
    pdl: bool = False,
    how: Tiling | None = None,
) -> None:
    """Compute `out = x W^T` for at most `MAX_ROWS` rows, accumulated in float32.

    Args:
        x_NI: Input, bf16 or fp16, last dimension contiguous.
        weight_OI: Weight in the same dtype, contiguous; I is a multiple of 64.
        out_NO: Output in any float dtype, last dimension contiguous; must not overlap `x_NI`.
        scratch: The scratch of the current stream.
        pdl: Whether to use programmatic dependent launch.
        how: Division of the work; None for that of `tiling`.
    """
    size_out, size_in = weight_OI.shape
    rows = x_NI.shape[0]
    how = tiling(rows, size_out, size_in, scratch.arch) if how is None else how
    _linear_kernel[(triton.cdiv(size_out, how.block_out), how.splits)](
        x_NI,
        weight_OI,
        out_NO,
        scratch.planes,
        scratch.counters,
        rows,
        size_out,
        size_in,
        x_NI.stride(0),
        out_NO.stride(0),
        ROWS=max(16, triton.next_power_of_2(rows)),
        BLOCK_OUT=how.block_out,
        BLOCK_IN=how.block_in,
        SPLITS=how.splits,
        GATED=False,
        EARLY=False,
        PDL=pdl,
        num_warps=how.warps,
        num_stages=how.stages,
        launch_pdl=pdl,
    )


def linear_silu_mul(
    x_NI: Tensor,
    weight_2FI: Tensor,
    out_NF: Tensor,
    *,
    pdl: bool = False,
    tuning: Tuning = DEFAULT,
    how: Tiling | None = None,
) -> None:
    """Compute `out = silu(x G^T) * (x U^T)` for at most `MAX_ROWS` rows; the weight holds F rows of G, then F of U.

    Gate and up stay in float32 until they are multiplied.
    """
    size_out, size_in = weight_2FI.shape[0] // 2, weight_2FI.shape[1]
    rows = x_NI.shape[0]
    how = Tiling(64, 128, 1, 4, 3) if how is None else how
    _linear_kernel[(triton.cdiv(size_out, how.block_out), 1)](
        x_NI,
        weight_2FI,
        out_NF,
        out_NF,
        out_NF,
        rows,
        size_out,
        size_in,
        x_NI.stride(0),
        out_NF.stride(0),
        ROWS=max(16, triton.next_power_of_2(rows)),
        BLOCK_OUT=how.block_out,
        BLOCK_IN=how.block_in,
        SPLITS=1,
        GATED=True,
        EARLY=rows <= tuning.few_rows_early,
        PDL=pdl,
        num_warps=how.warps,
        num_stages=how.stages,
        launch_pdl=pdl,
    )


def tiling(rows: int, size_out: int, size_in: int, arch: Arch) -> Tiling:
    """Return the division that is fastest by the GPU's tuning; a stage less where a block has less shared memory."""
    tuning = arch.tuning
    splits = tuning.splits_of(size_out, size_in)
    if rows <= tuning.few_rows_deep:
        return Tiling(64, 256, splits, 4, 3)
    return Tiling(64, 128, splits, 4, 5 if arch.shared_bytes >= tuning.few_rows_shared_bytes else 4)
