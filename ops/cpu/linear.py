"""Kernels of linear layers on the CPU: each packs a weight in the layout that its product needs, and multiplies by it.

`y_NO = x_NI W^T (+ bias_O)`. This module owns the layouts and what each kernel needs; it never chooses between kernels,
which products.py does.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
from gguf import GGMLQuantizationType as Kind
from torch.nn import functional

from headrace.ops.formats import Dense, Int4Groups, row_blocks
from headrace.ops.gguf_formats import GgufBlocks, as_int4_groups
from headrace.ops.sizes import padded_size

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.formats import Stored

__all__ = [
    "ALIKE_ROWS",
    "ANY_ROWS",
    "CpuLinear",
    "Int4Kernel",
    "KeptWeight",
    "OneDnnKernel",
    "TorchKernel",
    "not_a_matrix",
]

# Measured with oneDNN 3.12 on a CPU with AMX: bfloat16 products of more than 32 rows all sum in one order, and those of
# fewer rows in another. 40 is the next number of rows that linear layers multiply (see sizes.py).
ALIKE_ROWS: Final = 40
"""Number of rows from which on products of bfloat16 sum in one order."""
ANY_ROWS = range(1, sys.maxsize)
"""Numbers of rows where a kernel pays that pays for all of them."""
# Measured on two cores with AVX-512: the 4-bit kernel works in blocks of four tokens, and its second block loses.
_INT4_ROWS = range(1, 5)
_INT4_OUT_MULTIPLE = 16
_INT4_GROUPS = (32, 64, 128, 256)
_INT4_ZERO = 8
_BLOCK_OUTS = 64  # outputs in one block of the packed 4-bit layout; blocks lie one after the other
_ONEDNN_BLOCK = 64  # outputs and inputs that its layouts pad to, at most
_ONEDNN_FEW = 4096  # outputs of a weight that is packed to see how it is padded, at most
_STEPS = 4  # of numbers of tokens between powers of two: at most a fifth of the tokens is padding


class CpuLinear(Protocol):
    """A linear layer ready to multiply: takes `x_NI`, returns `y_NO`, both in the dtype it was packed for."""

    def __call__(self, x_NI: Tensor, /) -> Tensor: ...


class KeptWeight(NamedTuple):
    """What a kernel keeps of a weight, or of a piece of one, once it is packed."""

    format: str
    """Name of the format of the packed numbers."""
    nbytes: int
    is_shared: bool = False
    """Whether it is the memory of the weight that was packed, not a copy."""


class OneDnnKernel:
    """Product with the dense weight in oneDNN's own blocked layout, which halves the time of small products."""

    name = "onednn"

    def refuses(self, weight: Stored, dtype: torch.dtype) -> str | None:
        """Return why oneDNN cannot multiply in `dtype` here, None if it can."""
        if len(weight.shape) != 2:
            return not_a_matrix(weight)
        if not torch.backends.mkldnn.is_available():
            return "this build of torch has no oneDNN"
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "oneDNN has no bfloat16 on this processor"
        return None if dtype in (torch.bfloat16, torch.float32) else f"packs bfloat16 and float32, not {dtype}"

    def rows(self, _weight: Stored) -> range:
        """Return all numbers of rows."""
        return ANY_ROWS

    def pack(self, weight: Stored, bias_O: Tensor | None, dtype: torch.dtype) -> CpuLinear:
        """Copy the dense weight into oneDNN's layout."""
        return _OneDnn(weight.dense(dtype), bias_O)

    def kept(self, weight: Stored, dtype: torch.dtype) -> list[KeptWeight]:
        """Return the bytes of oneDNN's layout, which may be padded."""
        return [KeptWeight(Dense(dtype).name, _padded_bytes(*weight.shape, dtype))]


class TorchKernel:
    """Torch's own product with the dense weight, for machines on which oneDNN cannot pack it."""

    name = "torch"

    def refuses(self, weight: Stored, _dtype: torch.dtype) -> str | None:
        """Return None for every matrix."""
        return None if len(weight.shape) == 2 else not_a_matrix(weight)

    def rows(self, _weight: Stored) -> range:
        """Return all numbers of rows."""
        return ANY_ROWS

    def pack(self, weight: Stored, bias_O: Tensor | None, dtype: torch.dtype) -> CpuLinear:
        """Keep the dense weight."""
        return _Torch(weight.dense(dtype), bias_O)

    def kept(self, weight: Stored, dtype: torch.dtype) -> list[KeptWeight]:
        """Return the bytes of the dense weight, which is not copied if it has the dtype already."""
        dense = Dense(dtype)
        nbytes = sum(part.nbytes for part in dense.parts(weight.shape).values())
        return [KeptWeight(dense.name, nbytes, is_shared=weight.format == dense)]


class Int4Kernel:
    """Product with 4-bit groups for a few rows, where reading the weight is all the work.

    For more rows, unpacking would cost more than it saves.
    """

    name = "int4"

    def refuses(self, weight: Stored, dtype: torch.dtype) -> str | None:
        """Return why the 4-bit product cannot take a weight, None if it can."""
        group = _group_of(weight)
        if group is None:
            return f"multiplies by 4-bit groups, not by {weight.format.name}"
        if len(weight.shape) != 2:
            return not_a_matrix(weight)
        if dtype is not torch.bfloat16:
            return f"multiplies in bfloat16, not in {str(dtype).removeprefix('torch.')}"
        if group not in _INT4_GROUPS:
            return f"takes groups of {', '.join(map(str, _INT4_GROUPS))} inputs, not of {group}"
        if weight.shape[0] % _INT4_OUT_MULTIPLE:
            return f"takes outputs in a multiple of {_INT4_OUT_MULTIPLE}, not {weight.shape[0]}"
        return None

    def rows(self, _weight: Stored) -> range:
        """Return the numbers of rows that one block of the kernel holds."""
        return _INT4_ROWS

    def pack(self, weight: Stored, bias_O: Tensor | None, _dtype: torch.dtype) -> CpuLinear:
        """Copy values, scales and minima into the layout of torch's product."""
        return _Int4(as_int4_groups(weight), bias_O)

    def kept(self, weight: Stored, _dtype: torch.dtype) -> list[KeptWeight]:
        """Return the bytes of the values in half a byte each, and of two 16-bit numbers for each group."""
        (outs, ins), group = weight.shape, _group_of(weight)
        assert group is not None
        return [KeptWeight(f"int4-g{group}", outs * ins // 2 + 4 * (outs * ins // group))]


def _group_of(weight: Stored) -> int | None:
    """Return the size of a weight's groups of 4-bit values; None if it has none."""
    if isinstance(weight.format, Int4Groups):
        return weight.format.group
    return 32 if weight.format in (GgufBlocks(Kind.Q4_0), GgufBlocks(Kind.Q4_1)) else None


def not_a_matrix(weight: Stored) -> str:
    """Return in words that a kernel takes matrices, and what `weight` is."""
    return f"multiplies by a matrix, not by a weight of shape {list(weight.shape)}"


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
    halves_B2oI = values_OI.view(-1, 2, _BLOCK_OUTS // 2, ins)
    bytes_BoI = torch.bitwise_left_shift(halves_B2oI[:, 1], 4).bitwise_or_(halves_B2oI[:, 0])
    return bytes_BoI.transpose(1, 2).reshape(outs, ins // 2)


@cache
def _packs_blocks() -> bool:
    """Return whether `_pack_blocks` gives this processor's layout, which torch does not document."""
    numbers = torch.arange(2 * _BLOCK_OUTS * 32)
    values_OI = (numbers * 2654435761 >> 16).bitwise_and_(15).to(torch.uint8).view(-1, 32)
    return torch.equal(_pack_blocks(values_OI), _pack_by_torch(values_OI))


@cache
def _padded_bytes(outs: int, ins: int, dtype: torch.dtype) -> int:
    """Return the bytes of a weight in oneDNN's layout, which pads sizes that are no multiples of its blocks.

    What a large weight takes follows from two small ones, since its bytes grow evenly from block to block.
    """
    if outs % _ONEDNN_BLOCK == 0 and ins % _ONEDNN_BLOCK == 0:
        return outs * ins * dtype.itemsize
    if outs > _ONEDNN_FEW:
        few = _ONEDNN_FEW // 2 + outs % _ONEDNN_BLOCK
        least, more = (_padded_bytes(few + added, ins, dtype) for added in (0, _ONEDNN_BLOCK))
        return least + (outs - few) // _ONEDNN_BLOCK * (more - least)
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.empty(outs, ins, dtype=dtype), None)
    return int(torch.ops.mkldnn._nbytes(packed))


class _Torch:
    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, self._bias_O = weight_OI, bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return functional.linear(x_NI, self._weight_OI, self._bias_O)


class _OneDnn:
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
    def __init__(self, weight: Stored, bias_O: Tensor | None) -> None:
        assert isinstance(weight.format, Int4Groups)
        values_OI, scale_OG, minimum_OG = (weight.parts[name] for name in ("values", "scale", "minimum"))
        pack = _pack_blocks if _packs_blocks() and len(values_OI) % _BLOCK_OUTS == 0 else _pack_by_torch
        outs, ins = values_OI.shape
        self._packed = torch.cat([pack(values_OI[rows]) for rows in row_blocks(outs, ins, _BLOCK_OUTS)])
        # The kernel computes (q - 8) * scale + zero.
        zero_OG = minimum_OG + _INT4_ZERO * scale_OG
        pairs_GO2 = torch.stack((scale_OG, zero_OG), dim=-1).transpose(0, 1)
        self._scale_and_zero_GO2 = pairs_GO2.to(torch.bfloat16).contiguous()
        self._group, self._bias_O = weight.format.group, bias_O
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x_NI: Tensor) -> Tensor:
        y_NO: Tensor = self._multiply(x_NI, self._packed, self._group, self._scale_and_zero_GO2)
        return y_NO if self._bias_O is None else y_NO.add_(self._bias_O)
