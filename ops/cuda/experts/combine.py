"""`combine`: adds the weighted results of each token's experts on CUDA (Triton), in the order of their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.choose import Choices

__all__ = ["combine"]

_BLOCK = 1024


@triton.jit
def _combine_experts_kernel(results, ids, out, size, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Padding has no experts, and nobody wrote its results.
    inside = (at < size) & (tl.load(ids + row * K) >= 0)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(K):
        total += tl.load(results + (row * K + rank) * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, total.to(out.dtype.element_ty), mask=at < size)


def combine(results_PE: Tensor, chosen: Choices, out_NE: Tensor, *, pdl: bool = False) -> None:
    """Compute the sums of the results of each token's pairs, in float32; zeros for tokens without experts.

    Args:
        results_PE: Weighted results by pair, any float dtype, contiguous.
        chosen: Choices.
        out_NE: Output, contiguous.
        pdl: Whether to use programmatic dependent launch.
    """
    rows, size = out_NE.shape
    block = min(_BLOCK, triton.next_power_of_2(size))
    _combine_experts_kernel[(rows, triton.cdiv(size, block))](
        results_PE, chosen.ids_NK, out_NE, size, K=chosen.ids_NK.shape[1], BLOCK=block, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
