"""Linear layers on the CPU, each with its weight in the layouts that its products need.

Owns the packing of weights and the choice between packed formats; never reads files and never knows a model.

`y_NO = x_NI W^T (+ bias_O)`. A weight is a float matrix or 4-bit groups. Float weights are packed once for oneDNN,
which halves the time of small products. For bfloat16, 4-bit groups are held twice: packed 4-bit for a few tokens, where
reading weights is all the work, and packed bfloat16 for more, where unpacking would cost more than it saves. float32
always multiplies in float32.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from headrace.ops.quantised import BLOCK_OUTS, GROUP, GroupQuantised, row_blocks
from headrace.ops.sizes import padded_size

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CpuLinear", "linear"]

# Measured on two cores with AVX-512: the 4-bit kernel works in blocks of four tokens, and its second block loses.
_INT4_TOKENS = 4
_INT4_OUT_MULTIPLE = 16
_INT4_ZERO = 8
_STEPS = 4  # of numbers of tokens between powers of two: at most a fifth of the tokens is padding


class CpuLinear(Protocol):
    """A linear layer ready to multiply: takes `x_NI`, returns `y_NO`, both in the layer's dtype."""

    def __call__(self, x_NI: Tensor, /) -> Tensor: ...


def linear(weight: Tensor | GroupQuantised, bias_O: Tensor | None, *, dtype: torch.dtype) -> CpuLinear:
    """Pack a weight `[out, in]` for products with activations in `dtype` (bfloat16 or float32).

    The result keeps its own packed copies, so the caller may drop the weight.
    """
    bias_O = None if bias_O is None else bias_O.to(dtype)
    if isinstance(weight, torch.Tensor):
        return _dense(weight.to(dtype), bias_O)
    many = _dense(weight.dense(dtype), bias_O)
    if dtype is not torch.bfloat16 or weight.values_OI.shape[0] % _INT4_OUT_MULTIPLE:
        return many
    return _Int4(weight, bias_O, many)


def _pack_by_torch(values_OI: Tensor) -> Tensor:
    """Return 4-bit values in the layout of torch's product: [out, in / 2] bytes in the processor's order."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(values_OI.int(), 1)
    return packed


def _pack_blocks(values_OI: Tensor) -> Tensor:
    """Do what `_pack_by_torch` does on processors with AVX-512, in a third of its time.

    On these, each 64 outputs form a block of [in, 32] bytes. A byte holds one output in its low half and the output 32
    places further in its high half.
    """
    outs, ins = values_OI.shape
    halves_B2oI = values_OI.view(-1, 2, BLOCK_OUTS // 2, ins)
    bytes_BoI = torch.bitwise_left_shift(halves_B2oI[:, 1], 4).bitwise_or_(halves_B2oI[:, 0])
    return bytes_BoI.transpose(1, 2).reshape(outs, ins // 2)


@cache
def _packs_blocks() -> bool:
    """Return whether `_pack_blocks` gives this processor's layout, which torch does not document."""
    numbers = torch.arange(2 * BLOCK_OUTS * GROUP)
    values_OI = (numbers * 2654435761 >> 16).bitwise_and_(15).to(torch.uint8).view(-1, GROUP)
    return torch.equal(_pack_blocks(values_OI), _pack_by_torch(values_OI))


def _dense(weight_OI: Tensor, bias_O: Tensor | None) -> CpuLinear:
    onednn: bool = torch.backends.mkldnn.is_available()
    if onednn and (weight_OI.dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return _Packed(weight_OI, bias_O)
    return _Plain(weight_OI, bias_O)


class _Plain:
    """Torch's own product, for machines on which oneDNN cannot pack the weight."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, self._bias_O = weight_OI, bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return functional.linear(x_NI, self._weight_OI, self._bias_O)


class _Packed:
    """Product with a weight in oneDNN's own blocked layout, for few different numbers of tokens."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), None)
        self._bias_O = bias_O
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_NI: Tensor) -> Tensor:
        count = x_NI.shape[0]
        missing = padded_size(count, steps=_STEPS) - count
        if missing:
            x_NI = functional.pad(x_NI, (0, 0, 0, missing))
        y_NO: Tensor = self._multiply(x_NI, self._weight, self._bias_O, "none", [], None)
        return y_NO[:count] if missing else y_NO


class _Int4:
    """Product with 4-bit groups for a few tokens; more tokens go to the dense layer."""

    def __init__(self, weight: GroupQuantised, bias_O: Tensor | None, many: CpuLinear) -> None:
        values_OI = weight.values_OI
        pack = _pack_blocks if _packs_blocks() and len(values_OI) % BLOCK_OUTS == 0 else _pack_by_torch
        self._packed = torch.cat([pack(values_OI[rows]) for rows in row_blocks(values_OI)])
        # The kernel computes (q - 8) * scale + zero.
        zero_OG = weight.minimum_OG + _INT4_ZERO * weight.scale_OG
        pairs_GO2 = torch.stack((weight.scale_OG, zero_OG), dim=-1).transpose(0, 1)
        self._scale_and_zero_GO2 = pairs_GO2.to(torch.bfloat16).contiguous()
        self._bias_O, self._many = bias_O, many
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x_NI: Tensor) -> Tensor:
        if x_NI.shape[0] > _INT4_TOKENS:
            return self._many(x_NI)
        y_NO: Tensor = self._multiply(x_NI, self._packed, GROUP, self._scale_and_zero_GO2)
        return y_NO if self._bias_O is None else y_NO.add_(self._bias_O)
