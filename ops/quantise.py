"""`quantise`: quantises a dense weight without data, for weights that a checkpoint does not hold quantised.

8 bits have one scale for each output, from its largest magnitude. 4 bits have groups with a scale and a zero point,
found by half-quadratic optimisation (Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models",
2023): errors are split into a sparse part, which a shrinkage finds, and a rest, whose squares are made small; here by
least squares for the scale and by the mean for the zero point, which is rounded to a code.

Scales have the eight significant bits of bfloat16, whatever dtype they are kept in: other engines keep them in the
model's dtype, and so compute with the same ones. gptq.py chooses other codes for these scales, by data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import torch

from headrace.ops.formats import Stored
from headrace.ops.quantised import Fp8, IntGroups, pack_nibbles

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GROUPS", "Method", "format_for", "quantise"]

Method: TypeAlias = Literal["fp8", "int8", "int4"]
"""Way to quantise: 8-bit floats or integers with a scale for each output, or 4-bit integers in groups."""
GROUPS: Final = (128, 64, 32)
"""Sizes of groups of 4-bit integers; the first that divides the inputs is taken."""
_BITS: Final = 8
_STEPS = 20
_NORM = 0.7
_SHARPNESS, _SHARPER = 10.0, 1.01
_CPU_BLOCK_ELEMENTS = 1 << 17  # which a core caches
_DEVICE_BLOCK_ELEMENTS = 1 << 24


def quantise(weight: Stored, method: Method, *, symmetric: bool = False, refine: bool = True) -> Stored:
    """Return a dense matrix [out, in] quantised, on its own device; it stays dense if its inputs are no whole groups.

    Args:
        weight: The matrix, in the format `Dense`.
        method: The way to quantise.
        symmetric: Whether groups of 4-bit integers have no zero points, which leaves nothing to refine.
        refine: Whether half-quadratic optimisation refines these groups; else their scales are those of their extremes.
    """
    values_OI, format = weight.parts["values"], format_for(method, weight.shape[-1], symmetric=symmetric)
    if format is None:
        return weight
    if values_OI.is_meta:  # has a format and a shape alone
        return Stored.allocate(format, weight.shape, lambda shape, dtype: values_OI.new_empty(shape, dtype=dtype))
    if isinstance(format, Fp8):
        return _fp8(values_OI, format)
    return (
        _int8(values_OI, format)
        if format.bits == _BITS
        else _int4(values_OI, format, _STEPS if refine and not symmetric else 0)
    )


def format_for(method: Method, size_in: int, *, symmetric: bool = False) -> Fp8 | IntGroups | None:
    """Return the format of a quantised matrix with `size_in` inputs; None if they are no whole groups."""
    if method == "fp8":
        return Fp8()
    if method == "int8":
        return IntGroups(_BITS, None, scale=torch.float32)
    group = next((size for size in GROUPS if size_in % size == 0), None)
    return None if group is None else IntGroups(4, group, zeros=not symmetric, scale=torch.float16)


def _blocks(values_OI: Tensor) -> list[slice]:
    elements = _CPU_BLOCK_ELEMENTS if values_OI.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    rows = max(elements // values_OI.shape[1], 1)
    return [slice(first, first + rows) for first in range(0, len(values_OI), rows)]


def _row_scales(values_OI: Tensor, most: float) -> Tensor:
    """Return the smallest scale for which no element of an output is above `most`; 1 where all are zero."""
    extremes_O = values_OI.abs().amax(1).float() / most
    above_O = (extremes_O.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(extremes_O > 0, above_O, 1.0)


def _fp8(values_OI: Tensor, format: Fp8) -> Stored:
    most = torch.finfo(torch.float8_e4m3fn).max
    scale_O = _row_scales(values_OI, most)
    codes_OI = torch.empty(values_OI.shape, dtype=torch.float8_e4m3fn, device=values_OI.device)
    for rows in _blocks(values_OI):
        codes_OI[rows] = (values_OI[rows].float() / scale_O[rows, None]).clamp_(-most, most).to(codes_OI.dtype)
    return Stored(format, tuple(values_OI.shape), {"values": codes_OI, "scale": scale_O})


def _int8(values_OI: Tensor, format: IntGroups) -> Stored:
    scale_O = _row_scales(values_OI, 127.0)
    codes_OI = torch.empty(values_OI.shape, dtype=torch.uint8, device=values_OI.device)
    for rows in _blocks(values_OI):
        codes_OI[rows] = (values_OI[rows].float() / scale_O[rows, None]).round_().add_(128).to(torch.uint8)
    parts = {"values": codes_OI, "scale": scale_O[:, None].contiguous()}
    return Stored(format, tuple(values_OI.shape), parts)


def _int4(values_OI: Tensor, format: IntGroups, steps: int) -> Stored:
    (outs, ins), group = values_OI.shape, format.group
    assert group is not None
    whole = Stored.allocate(
        format, (outs, ins), lambda shape, dtype: torch.empty(shape, dtype=dtype, device=values_OI.device)
    )
    for rows in _blocks(values_OI):
        codes, scale, zero = _half_quadratic(values_OI[rows].float().view(-1, ins // group, group), format.zeros, steps)
        whole.parts["values"][rows] = pack_nibbles(codes.view(-1, ins))
        whole.parts["scale"][rows] = scale
        if format.zeros:
            whole.parts["zero"][rows] = zero
    return whole


def _half_quadratic(values_OGg: Tensor, has_zeros: bool, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes uint8 [O, G, g], float16 scales [O, G], zero points uint8 [O, G]) of the smallest error found.

    All zero points are 8 unless the groups have their own.
    """
    low, high = values_OGg.amin(-1, keepdim=True).clamp_(max=0), values_OGg.amax(-1, keepdim=True).clamp_(min=0)
    widest = (high - low) / 15 if has_zeros else torch.maximum(high / 7, low / -8)
    scale = widest.clamp_(min=6.2e-5)  # the smallest normal float16
    zero = (-low / scale).round_().clamp_(0, 15) if has_zeros else torch.full_like(scale, 8.0)
    best = _rounded(values_OGg, scale, zero)
    sharpness = _SHARPNESS
    for _ in range(steps):
        codes, kept, found_zero, _ = _rounded(values_OGg, scale, zero)
        sparse = _shrunk((values_OGg - (codes - found_zero) * kept) / kept, sharpness) * kept
        wanted = values_OGg - sparse
        centred = codes - found_zero
        squares = centred.square().sum(-1, keepdim=True)
        scale = torch.where(squares > 0, (wanted * centred).sum(-1, keepdim=True) / squares, kept).clamp_(min=6.2e-5)
        zero = (codes - wanted / scale).mean(-1, keepdim=True).round_().clamp_(0, 15)
        sharpness *= _SHARPER
        tried = _rounded(values_OGg, scale, zero)
        is_better = tried.error < best.error
        best = _Rounded(*(torch.where(is_better, new, old) for new, old in zip(tried, best, strict=True)))
    codes, scale, zero, _ = best
    return codes.to(torch.uint8), scale.squeeze(-1).half(), zero.squeeze(-1).to(torch.uint8)


def _shrunk(errors: Tensor, sharpness: float) -> Tensor:
    """Return the sparse part of errors, in steps of a code (the generalised soft threshold)."""
    size = errors.abs()
    return errors.sign() * (size - size.clamp(min=1e-8).pow_(_NORM - 1) / sharpness).clamp_(min=0)


class _Rounded(NamedTuple):
    """Groups as they would be kept, [O, G, 1] but for the codes."""

    codes: Tensor
    scale: Tensor
    """Scales as bfloat16 holds them, in float32."""
    zero: Tensor
    error: Tensor
    """Sum of the errors' magnitudes, each to the power of the norm."""


def _rounded(values_OGg: Tensor, scale: Tensor, zero: Tensor) -> _Rounded:
    kept = scale.bfloat16().float()  # at least float16's smallest normal number, so that float16 holds it, too
    codes = (values_OGg / kept + zero).round_().clamp_(0, 15)
    error = (values_OGg - (codes - zero) * kept).abs_().pow_(_NORM).sum(-1, keepdim=True)
    return _Rounded(codes, kept, zero, error)
