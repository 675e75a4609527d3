"""Layer norms, and activations of feeds without a gate, on CUDA: one Triton kernel each; never allocates.

They run on the current stream and can be captured in a CUDA graph. `pdl` is as in fused.py, which has the RMS norms.
Shape letters as in `ops/paged.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.stream import PlainActivation

__all__ = ["activate_plain", "layer_norm"]

_BLOCK = 1024


@triton.jit
def _layer_norm_kernel(
    x, weight, bias, out, x_stride, out_stride, size, eps, BLOCK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    at += tl.program_id(1) * size
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    shift = scale
    if BIAS:
        shift = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value - tl.sum(value, axis=0) / size, 0.0)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / size + eps) * scale
    if BIAS:
        normed += shift
    tl.store(out + row * out_stride + at, normed.to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x_NE: Tensor,
    weight_E: Tensor,
    bias_E: Tensor | None,
    eps: float,
    out: Tensor,
    *,
    parts: int = 1,
    pdl: bool = False,
) -> None:
    """Compute `out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, in float32 inside; `out` may be `x_NE`.

    Args:
        x_NE: Rows, the last dimension contiguous.
        weight_E: Weight of the norm, or of those of all parts, one after the other.
        bias_E: Bias of the same shape, or None.
        eps: Epsilon.
        out: The result.
        parts: Number of parts of the last dimension, each of which is normed by itself.
        pdl: Whether to use programmatic dependent launch.
    """
    size = x_NE.shape[1] // parts
    _layer_norm_kernel[(x_NE.shape[0], parts)](
        x_NE,
        weight_E,
        bias_E,
        out,
        x_NE.stride(0),
        out.stride(0),
        size,
        eps,
        BLOCK=triton.next_power_of_2(size),
        BIAS=bias_E is not None,
        PDL=pdl,
        num_warps=4 if size <= 2048 else 8 if size <= 8192 else 16,
        launch_pdl=pdl,
    )


@triton.jit
def _activate_kernel(x, x_stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    place = x + tl.program_id(0).to(tl.int64) * x_stride + at
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if KIND == "relu":
        value = tl.maximum(value, 0.0)
    elif KIND == "relu2":
        value = tl.maximum(value, 0.0) * value
    elif KIND == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    else:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(place, value.to(x.dtype.element_ty), mask=inside)


def activate_plain(x_NF: Tensor, activation: PlainActivation, *, pdl: bool = False) -> None:
    """Compute `x = activation(x)` in place, in float32 inside; rows are contiguous."""
    rows, size = x_NF.shape
    _activate_kernel[(rows, triton.cdiv(size, _BLOCK))](
        x_NF, x_NF.stride(0), size, KIND=activation, BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
