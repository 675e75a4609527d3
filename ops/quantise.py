"""`quantise`: quantises a dense weight without data, for weights that a checkpoint does not hold quantised.

8 bits have one scale for each output, from its largest magnitude. 4 bits have groups with a scale and a zero point, for
which groups.py tries several ranges.

Scales have the eight significant bits of bfloat16, whatever dtype they are kept in: other engines keep them in the
model's dtype, and so compute with the same ones. gptq.py chooses other codes for these scales, by data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from headrace.ops.formats import Stored
from headrace.ops.groups import fitted, nearest
from headrace.ops.quantised import Fp8, IntGroups, pack_nibbles

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

__all__ = ["GROUPS", "Method", "common_group", "format_for", "quantise"]

Method: TypeAlias = Literal["fp8", "int8", "int4"]
"""Way to quantise: 8-bit floats or integers with a scale for each output, or 4-bit integers in groups."""
GROUPS: Final = (128, 64, 32)
"""Sizes of groups of 4-bit integers; the first that divides the inputs is taken."""
_BITS: Final = 8
_CPU_BLOCK_ELEMENTS = 1 << 17  # which a core caches
_DEVICE_BLOCK_ELEMENTS = 1 << 24


def quantise(
    weight: Stored,
    method: Method,
    *,
    symmetric: bool = False,
    group: int | None = None,
    importance_I: Tensor | None = None,
) -> Stored:
    """Return a dense matrix [out, in] quantised, on its own device; it stays dense if its inputs are no whole groups.

    Args:
        weight: The matrix, in the format `Dense`.
        method: The way to quantise.
        symmetric: Whether groups of 4-bit integers have no zero points.
        group: Inputs of a group of 4-bit integers; None for the first of `GROUPS` that divides the inputs.
        importance_I: How much an error in each input's column counts for the groups of 4-bit integers, float32 [in];
            None to judge by the weights alone.
    """
    values_OI = weight.parts["values"]
    format = format_for(method, weight.shape[-1], symmetric=symmetric, group=group)
    if format is None:
        return weight
    if values_OI.is_meta:  # has a format and a shape alone
        return Stored.allocate(format, weight.shape, lambda shape, dtype: values_OI.new_empty(shape, dtype=dtype))
    if isinstance(format, Fp8):
        return _fp8(values_OI, format)
    return _int8(values_OI, format) if format.bits == _BITS else _int4(values_OI, format, importance_I)


def format_for(
    method: Method, size_in: int, *, symmetric: bool = False, group: int | None = None
) -> Fp8 | IntGroups | None:
    """Return the format of a quantised matrix with `size_in` inputs; None if they are no whole groups.

    Arguments are those of `quantise`.
    """
    if method == "fp8":
        return Fp8()
    if method == "int8":
        return IntGroups(_BITS, None, scale=torch.float32)
    found = next((size for size in (GROUPS if group is None else (group,)) if size_in % size == 0), None)
    return None if found is None else IntGroups(4, found, zeros=not symmetric, scale=torch.float16)


def common_group(sizes: Collection[int]) -> int:
    """Return the largest size of groups that divides all numbers of inputs, but for those that no size divides."""
    smallest = min(GROUPS)
    whole = [size for size in sizes if size % smallest == 0]
    return next((group for group in GROUPS if all(size % group == 0 for size in whole)), smallest)


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


def _int4(values_OI: Tensor, format: IntGroups, importance_I: Tensor | None) -> Stored:
    (outs, ins), group = values_OI.shape, format.group
    assert group is not None
    whole = Stored.allocate(
        format, (outs, ins), lambda shape, dtype: torch.empty(shape, dtype=dtype, device=values_OI.device)
    )
    importance_Gg = None if importance_I is None else importance_I.view(-1, group)
    for rows in _blocks(values_OI):
        values_OGg = values_OI[rows].float().view(-1, ins // group, group)
        scale, zero = fitted(values_OGg, format.zeros, importance_Gg)
        codes_OI = nearest(values_OGg, scale, zero).to(torch.uint8).view(-1, ins)
        whole.parts["values"][rows] = pack_nibbles(codes_OI)
        whole.parts["scale"][rows] = scale.squeeze(-1)
        if format.zeros:
            whole.parts["zero"][rows] = zero.squeeze(-1)
    return whole
