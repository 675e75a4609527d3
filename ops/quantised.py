"""Formats of quantised weights: 8-bit floats, groups of 4- and 8-bit integers, 4-bit floats, and tables of 16 values.

Each is what the readers make of one family of checkpoints, and what product kernels repack from. `dense` computes in
float32 and rounds once. Nothing here reads files or multiplies activations.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from headrace.ops.formats import PartSpec, row_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["Float4Groups", "Fp8", "IntGroups", "Table4", "e2m1", "pack_nibbles", "unpack_nibbles"]

Shape: TypeAlias = tuple[int, ...]

_DEVICE_BLOCK_ELEMENTS = 1 << 24
_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return uint8 codes [..., in] of 4 bits as uint8 [..., ceil(in / 2)], with even inputs in the low halves."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(values: Tensor, ins: int) -> Tensor:
    """Return the uint8 codes [..., ins] that `pack_nibbles` packed."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)[..., :ins]


class _ByRows:
    """Computes the dense weight a few rows at a time, so that little memory is needed beside the result."""

    __slots__ = ()

    def dense(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., out, in], computed in float32 and rounded once to `dtype`."""
        *outer, outs, ins = shape
        device = parts["values"].device
        dense = torch.empty(shape, dtype=dtype, device=device)
        blocks = row_blocks(outs, ins) if device.type == "cpu" else _device_blocks(outs, ins)
        for index in itertools.product(*map(range, outer)):
            matrix = {name: part[index] for name, part in parts.items()}
            for rows in blocks:
                dense[index][rows].copy_(self._rows(matrix, rows, (outs, ins)))
        return dense

    def _rows(self, parts: Mapping[str, Tensor], rows: slice, shape: tuple[int, int]) -> Tensor:
        """Return some rows of a matrix of `shape` in float32."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Fp8(_ByRows):
    """8-bit floats (e4m3) with one scale for each output, or for each block of outputs and inputs.

    The weight is `values * scale`.
    """

    block: tuple[int, int] | None = None
    """Outputs and inputs of a block; the last blocks may be partial. None: one scale for each output."""

    @property
    def name(self) -> str:
        """The name of the format with the size of its blocks."""
        return "fp8" if self.block is None else "fp8-{}x{}".format(*self.block)

    def parts(self, shape: Shape) -> Mapping[str, PartSpec]:
        """Return `values` and float32 `scale`: [..., out], or one for each block.

        Raises:
            ValueError: The weight is not a matrix or a stack of matrices.
        """
        *outer, outs, ins = _matrix(shape)
        scale = PartSpec((*outer, outs), torch.float32)
        if self.block is not None:
            high, wide = self.block
            scale = PartSpec((*outer, _ceil(outs, high), _ceil(ins, wide)), torch.float32, outputs=high)
        return {"values": PartSpec(shape, torch.float8_e4m3fn), "scale": scale}

    def _rows(self, parts: Mapping[str, Tensor], rows: slice, shape: tuple[int, int]) -> Tensor:
        codes_OI = parts["values"][rows].view(torch.uint8)
        # A lookup takes a CPU a quarter of the time of a conversion.
        values_OI = _e4m3(codes_OI.device).index_select(0, codes_OI.int().flatten()).view(codes_OI.shape)
        if self.block is None:
            return values_OI.mul_(parts["scale"][rows].unsqueeze(-1))
        high, wide = self.block
        index_O = torch.arange(rows.start, rows.start + len(values_OI), device=values_OI.device) // high
        return _scaled(values_OI, parts["scale"][index_O], wide)


@dataclass(frozen=True, slots=True)
class IntGroups(_ByRows):
    """Unsigned integers of 4 or 8 bits in groups of inputs with one scale, and perhaps one zero, for each output.

    The weight is `(code - zero) * scale`.
    """

    bits: Literal[4, 8]
    group: int | None
    """Inputs that share a scale; the last group may have fewer. None: all inputs of an output do."""
    zeros: bool = False
    """Whether groups have zeros of their own; else the zero is 8 for 4 bits and 128 for 8."""
    ordered: bool = False
    """Whether the columns are stored in an order of their own."""
    scale: torch.dtype = torch.float32
    """Dtype of the scales, which is that of the checkpoint: float32, float16 or bfloat16."""

    @property
    def name(self) -> str:
        """The name of the format with its bits, the size of its groups, and what it has beside codes and scales."""
        groups = "" if self.group is None else f"-g{self.group}"
        return f"int{self.bits}{groups}{'-zeros' if self.zeros else ''}{'-ordered' if self.ordered else ''}"

    def parts(self, shape: Shape) -> Mapping[str, PartSpec]:
        """Return `values`, `scale`, and where the format has them `zero` and `order`.

        values: uint8 codes, [..., out, in] for 8 bits. For 4 bits [..., out, ceil(in / 2)], with the even columns in
            the low halves.
        scale: [..., out, groups].
        zero: uint8 codes [..., out, groups], one in a byte.
        order: int32 [..., in]: the input that each stored column belongs to.

        Raises:
            ValueError: The weight is not a matrix or a stack of matrices, or the format's fields are out of range.
        """
        *outer, outs, ins = _matrix(shape)
        if self.bits not in (4, 8) or self.scale not in _SCALE_DTYPES or (self.group is not None and self.group < 1):
            raise ValueError(f"no groups of {self.group} integers of {self.bits} bits with scales in {self.scale}")
        groups = 1 if self.group is None else _ceil(ins, self.group)
        width = ins if self.bits == 8 else _ceil(ins, 2)
        specs = {
            "values": PartSpec((*outer, outs, width), torch.uint8),
            "scale": PartSpec((*outer, outs, groups), self.scale),
        }
        if self.zeros:
            specs["zero"] = PartSpec((*outer, outs, groups), torch.uint8)
        if self.ordered:
            specs["order"] = PartSpec((*outer, ins), torch.int32, outputs=None)
        return specs

    def _rows(self, parts: Mapping[str, Tensor], rows: slice, shape: tuple[int, int]) -> Tensor:
        group = self.group or shape[1]
        values, zero = parts["values"][rows], 0 if self.zeros else 1 << (self.bits - 1)
        if self.bits == 4:
            above_OI = _looked_up(values, torch.arange(16.0, device=values.device) - zero, shape[1])
        else:
            above_OI = values.float().sub_(zero)
        if self.zeros:
            above_OI = above_OI - _spread(parts["zero"][rows].float(), group, shape[1])
        dense_OI = _scaled(above_OI, parts["scale"][rows].float(), group)
        return dense_OI if not self.ordered else dense_OI[:, parts["order"].argsort()]


@dataclass(frozen=True, slots=True)
class Float4Groups(_ByRows):
    """4-bit floats (e2m1) in groups of inputs with 8-bit scales: MXFP4 and NVFP4.

    The weight is `value * scale` for MXFP4, whose scales are powers of two. For NVFP4 it is `value * (scale * factor)`,
    or `value * (scale / factor)` where the format divides.
    """

    scale: Literal["e8m0", "e4m3"]
    """Kind of the scales: e8m0 for each 32 inputs (MXFP4), or e4m3 for each 16 (NVFP4)."""
    divides: bool = False
    """Whether `factor` divides the scales, as compressed-tensors means it, instead of multiplying them."""

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 32 if self.scale == "e8m0" else 16

    @property
    def name(self) -> str:
        """The name that the field gives to the format."""
        return "mxfp4" if self.scale == "e8m0" else "nvfp4"

    def parts(self, shape: Shape) -> Mapping[str, PartSpec]:
        """Return `values`, `scale` and, for NVFP4, `factor`.

        values: uint8 [..., out, in / 2], two e2m1 codes in a byte, with the even inputs in the low halves.
        scale: [..., out, in / group]: uint8 exponents with an offset of 127, or float8_e4m3fn.
        factor: float32 [..., out].

        Raises:
            ValueError: The inputs are not whole groups.
        """
        *outer, outs, ins = _matrix(shape)
        if ins % self.group:
            raise ValueError(f"groups of {self.group} need inputs in a multiple of {self.group}, got shape {shape}")
        dtype = torch.uint8 if self.scale == "e8m0" else torch.float8_e4m3fn
        specs = {
            "values": PartSpec((*outer, outs, ins // 2), torch.uint8),
            "scale": PartSpec((*outer, outs, ins // self.group), dtype),
        }
        if self.scale == "e4m3":
            specs["factor"] = PartSpec((*outer, outs), torch.float32)
        return specs

    def _rows(self, parts: Mapping[str, Tensor], rows: slice, shape: tuple[int, int]) -> Tensor:
        values, scale_OG = parts["values"][rows], parts["scale"][rows]
        values_OI = _looked_up(values, e2m1(values.device), shape[1])
        if self.scale == "e8m0":
            return _scaled(values_OI, scale_OG.view(torch.float8_e8m0fnu).float(), self.group)
        factor_O1 = parts["factor"][rows].unsqueeze(-1)
        scale_OG = scale_OG.float()
        return _scaled(values_OI, scale_OG / factor_O1 if self.divides else scale_OG * factor_O1, self.group)


@dataclass(frozen=True, slots=True)
class Table4(_ByRows):
    """4-bit indices into a table of 16 values, in groups of inputs with one scale: NF4 and FP4 of bitsandbytes.

    The weight is `table[index] * scale`.
    """

    group: int = 64
    """Inputs that share a scale."""

    @property
    def name(self) -> str:
        """The name of the format with the size of its groups."""
        return f"table4-g{self.group}"

    def parts(self, shape: Shape) -> Mapping[str, PartSpec]:
        """Return `values`, `scale` and `table`.

        values: uint8 [..., out, in / 2], two indices in a byte, with the even inputs in the low halves.
        scale: float32 [..., out, in / group].
        table: float32 [..., 16].

        Raises:
            ValueError: The inputs are not whole groups of an even size.
        """
        *outer, outs, ins = _matrix(shape)
        if ins % self.group or self.group % 2:
            raise ValueError(f"groups of {self.group} need inputs in a multiple of {self.group}, got shape {shape}")
        return {
            "values": PartSpec((*outer, outs, ins // 2), torch.uint8),
            "scale": PartSpec((*outer, outs, ins // self.group), torch.float32),
            "table": PartSpec((*outer, 16), torch.float32, outputs=None),
        }

    def _rows(self, parts: Mapping[str, Tensor], rows: slice, shape: tuple[int, int]) -> Tensor:
        values_OI = _looked_up(parts["values"][rows], parts["table"], shape[1])
        return _scaled(values_OI, parts["scale"][rows], self.group)


def _matrix(shape: Shape) -> Shape:
    if len(shape) < 2 or not math.prod(shape):
        raise ValueError(f"quantised weights are matrices with elements, got shape {shape}")
    return shape


def _ceil(size: int, group: int) -> int:
    return -(-size // group)


def _device_blocks(outs: int, ins: int) -> list[slice]:
    step = max(_DEVICE_BLOCK_ELEMENTS // ins, 1)
    return [slice(first, first + step) for first in range(0, outs, step)]


def _spread(groups_OG: Tensor, group: int, ins: int) -> Tensor:
    """Return the number of its group for each input."""
    return groups_OG.repeat_interleave(group, dim=1)[:, :ins]


def _scaled(values_OI: Tensor, scale_OG: Tensor, group: int) -> Tensor:
    """Multiply values in place by the scales of their groups, the last of which may be partial; return them."""
    outs, ins = values_OI.shape
    if ins % group:
        return values_OI.mul_(_spread(scale_OG, group, ins))
    values_OI.view(outs, -1, group).mul_(scale_OG.unsqueeze(-1))
    return values_OI


def _looked_up(values: Tensor, table: Tensor, ins: int) -> Tensor:
    """Return the float32 entries of a table of 16 for two indices in each byte of a matrix."""
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=-1)  # for each of the 256 bytes
    found = pairs.view(torch.float64).flatten().index_select(0, values.int().flatten())  # a pair is moved as one number
    return found.view(torch.float32).view(len(values), -1)[:, :ins].contiguous()


@cache
def _e4m3(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


@cache
def e2m1(device: torch.device) -> Tensor:
    """Return the float32 value of each 4-bit float, [16]."""
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=device)
