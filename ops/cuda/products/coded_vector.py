"""Products of one to eight rows with weights in codes on CUDA (Triton), with the activation after in the same kernel.

Never used for more rows: without tensor cores its arithmetic grows with them. Codes become float32 in registers where
they are multiplied, and a chunk of 16 bytes is summed before its scale multiplies it. A program loads its codes before
it waits for the kernel that makes its input (programmatic dependent launch). I input features, O output features, N
rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.codes.numbers import line_scales, load_codes, memory_of, pair_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.codes.layout import Codes

__all__ = ["MAX_ROWS", "TILINGS", "VectorTiling", "coded_vector_linear", "sums_of"]

MAX_ROWS = 8


class VectorTiling(NamedTuple):
    """The work of a program; sizes are powers of two."""

    block: int
    """Chunks of 16 bytes of a line that are read at once."""
    lines: int
    """Lines of the weight, gates and ups included."""
    warps: int


TILINGS: Final = {4: VectorTiling(64, 4, 2), 8: VectorTiling(128, 8, 4)}
"""Division of the work by the bits of a code in its chunk."""


@triton.jit
def sums_of(x, word, high, table, constants, chunk, chunks, constant, KIND: tl.constexpr):
    """Return the sums [lines] of one row's inputs by numbers and scales, without the factor of the kind of codes."""
    PARTS: tl.constexpr = KIND.parts
    OF_PART: tl.constexpr = KIND.pairs // KIND.parts
    four = tl.arange(0, 4)
    inside = chunk < chunks
    of_chunks = tl.zeros_like(tl.sum(word, axis=2)).to(tl.float32)
    for part in tl.static_range(PARTS):
        sums = tl.zeros_like(word).to(tl.float32)
        x_sums = tl.zeros_like(chunk[:, None] + four[None, :]).to(tl.float32)
        for step in tl.static_range(OF_PART):
            pair = part * OF_PART + step
            pair_at = chunk[:, None] * (4 * KIND.pairs) + 4 * pair + four[None, :]
            both = tl.load(x + pair_at, mask=inside[:, None], other=0)
            x_low = (both << 16).to(tl.float32, bitcast=True)
            x_high = (both & -65536).to(tl.float32, bitcast=True)
            if KIND.zeros or KIND.minima:
                x_sums += x_low + x_high
            if KIND.codes == "fp8":  # an input takes half of 2^120, and the sum the other
                x_low *= 1.152921504606846976e18
                x_high *= 1.152921504606846976e18
            elif KIND.codes == "fp4":  # and of 2^126
                x_low *= 9.223372036854775808e18
                x_high *= 9.223372036854775808e18
            elif KIND.codes == "int4" or KIND.codes == "int8":
                x_low *= 1.0 / (1 << (KIND.bits * pair))
                x_high *= 1.0 / (1 << (KIND.bits * pair))
            low, up = pair_of(word, high, table, 4 * pair + four[None, None, :], constant, pair, KIND)
            sums += low * x_low[:, None, :]
            sums += up * x_high[:, None, :]
        scale, offset = constants[part]
        of_part = tl.sum(sums, axis=2)
        if KIND.zeros:
            of_part -= offset * tl.sum(x_sums, axis=1)[:, None]
        of_part *= scale
        if KIND.minima:
            of_part += offset * tl.sum(x_sums, axis=1)[:, None]
        of_chunks += of_part
    return tl.sum(of_chunks, axis=0)


@triton.jit
def _coded_vector_kernel(
    x,
    memory,
    out,
    size_out,
    chunks,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    HALVES: tl.constexpr = 2 if GATED else 1  # a gate's line, then its up's
    own = tl.arange(0, BLOCK_OUT * HALVES)
    known = tl.minimum(tl.program_id(0) * BLOCK_OUT + own // HALVES, size_out - 1).to(tl.int64)
    line = known + own % HALVES * size_out
    table = (memory.table + line // 8 * 16)[None, :, None]
    first = tl.arange(0, BLOCK)
    # Chunks come first, so that a thread has some chunks of all lines, and reads their inputs once.
    word, high, constants = load_codes(memory, line[None, :], first[:, None], chunks, (first < chunks)[:, None], KIND)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([BLOCK_OUT * HALVES, COLUMNS], tl.float32)
    for step in tl.static_range(STEPS):
        chunk = step * BLOCK + first
        if step + 1 < STEPS:
            after = chunk + BLOCK
            word_next, high_next, constants_next = load_codes(
                memory, line[None, :], after[:, None], chunks, (after < chunks)[:, None], KIND
            )
        for row in tl.static_range(ROWS):
            at = x + row * x_stride
            sums = sums_of(at, word, high, table, constants, chunk, chunks, memory.constant, KIND)
            total += tl.where(column == row, sums[:, None], 0.0)
        if step + 1 < STEPS:
            word, high, constants = word_next, high_next, constants_next
    if KIND.codes == "fp8":
        total *= 1.152921504606846976e18
    elif KIND.codes == "fp4":
        total *= 9.223372036854775808e18
    total *= line_scales(memory, line, KIND)[:, None]
    if GATED:
        gate, up = total.reshape(BLOCK_OUT, 2, COLUMNS).permute(0, 2, 1).split()
        total = gate * tl.sigmoid(gate) * up
    feature = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    mask = (feature < size_out) & (column < ROWS)
    tl.store(out + column * out_stride + feature, total.to(out.dtype.element_ty), mask=mask)


def coded_vector_linear(
    x_NI: Tensor,
    weight: Codes,
    out_NO: Tensor,
    *,
    gated: bool = False,
    pdl: bool = False,
    how: VectorTiling | None = None,
) -> None:
    """Compute `out = x W^T` for at most `MAX_ROWS` rows, accumulated in float32.

    Args:
        x_NI: Input, bf16, last dimension contiguous, at even addresses of 4 bytes.
        weight: Weight [O, I] in codes. With `gated`, O gate rows, then O up rows.
        out_NO: Output in any float dtype, last dimension contiguous; must not overlap the input.
        gated: Whether to compute `out = silu(gate) * up`.
        pdl: Whether to use programmatic dependent launch; kernels.py declares what is then read before the wait.
        how: Division of the work; None for that of `TILINGS`.

    Raises:
        ValueError: Too many rows.
    """
    (rows, size_in), kind = x_NI.shape, weight.kind
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows: at most {MAX_ROWS}")
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    chunks = size_in // kind.chunk
    how = how or TILINGS[kind.bits]
    block = min(how.block, triton.next_power_of_2(chunks))
    block_out = max(how.lines // (2 if gated else 1), 1)
    _coded_vector_kernel[(triton.cdiv(size_out, block_out),)](
        x_NI.view(torch.int32), memory_of(weight), out_NO, size_out, chunks, x_NI.stride(0) // 2, out_NO.stride(0),
        ROWS=rows, COLUMNS=triton.next_power_of_2(rows), BLOCK_OUT=block_out, BLOCK=block,
        STEPS=triton.cdiv(chunks, block), KIND=kind, GATED=gated, PDL=pdl, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
