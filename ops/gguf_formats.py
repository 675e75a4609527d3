"""`GgufBlocks`: the block formats of GGUF files as stored formats, on any device; never reads a file.

A block holds 32 weights, or 256 in the K formats. Its codes and its float16 constants (a scale, perhaps a minimum) are
parts of their own; together they are the file's bytes. `GgufBlocks.dense` gives the numbers of the `gguf` package, bit
for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from gguf import GGMLQuantizationType as Kind

from headrace.ops.formats import Int4Groups, PartSpec, Stored, row_blocks
from headrace.ops.gguf_small import SMALL_KINDS, small_weights
from headrace.ops.quantised import IntGroups, pack_nibbles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from headrace.ops.formats import Format

__all__ = ["BLOCK_KINDS", "GgufBlocks", "as_int4_groups", "as_int_groups", "int_groups_of"]


class _Block(NamedTuple):
    """Sizes of one kind of block, and where in it the file has the constants."""

    weights: int
    codes: int
    """Bytes without the constants."""
    constants: int
    leads: bool
    """Whether the constants are the first bytes of the block, not the last."""


_BLOCKS = {
    Kind.Q4_0: _Block(32, 16, 1, True),
    Kind.Q4_1: _Block(32, 16, 2, True),
    Kind.Q5_0: _Block(32, 20, 1, True),
    Kind.Q5_1: _Block(32, 20, 2, True),
    Kind.Q8_0: _Block(32, 32, 1, True),
    Kind.IQ4_NL: _Block(32, 16, 1, True),
    Kind.IQ4_XS: _Block(256, 134, 1, True),
    Kind.Q2_K: _Block(256, 80, 2, False),
    Kind.Q3_K: _Block(256, 108, 1, False),
    Kind.Q4_K: _Block(256, 140, 2, True),
    Kind.Q5_K: _Block(256, 172, 2, True),
    Kind.Q6_K: _Block(256, 208, 1, False),
}
BLOCK_KINDS = tuple(_BLOCKS)
"""The kinds of blocks that `GgufBlocks` holds."""


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """Blocks of one kind of GGUF, as the file has them."""

    kind: Kind

    @property
    def name(self) -> str:
        """The kind's name, such as q4_k."""
        return self.kind.name.lower()

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        """Return `codes`, uint8 [..., out, blocks * bytes], and `constants`, float16 [..., out, blocks * constants].

        Raises:
            ValueError: The inputs are not whole blocks.
        """
        block = _BLOCKS[self.kind]
        *outer, ins = shape
        if not outer or ins % block.weights:
            raise ValueError(f"{self.name} needs inputs in a multiple of {block.weights}, got shape {shape}")
        blocks = ins // block.weights
        return {
            "codes": PartSpec((*outer, blocks * block.codes), torch.uint8),
            "constants": PartSpec((*outer, blocks * block.constants), torch.float16),
        }

    def dense(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the weight, computed in float32 and rounded once."""
        block, rows, ins = _BLOCKS[self.kind], math.prod(shape[:-1]), shape[-1]
        codes_OBc = parts["codes"].reshape(rows, -1, block.codes)
        constants_OBk = parts["constants"].reshape(rows, -1, block.constants)
        dense_OI = torch.empty(rows, ins, dtype=dtype, device=codes_OBc.device)
        for some in row_blocks(rows, ins):
            dense_OI[some] = self._weights(codes_OBc[some], constants_OBk[some].float()).flatten(1)
        return dense_OI.view(shape)

    def from_file(self, raw_Ob: Tensor, shape: tuple[int, ...]) -> Stored:
        """Return rows of blocks, uint8 [out, bytes], as the weight of `shape` that they hold."""
        block = _BLOCKS[self.kind]
        size = 2 * block.constants
        blocks_OBb = raw_Ob.view(len(raw_Ob), -1, block.codes + size)
        if block.leads:
            constants, codes = blocks_OBb[..., :size], blocks_OBb[..., size:]
        else:
            codes, constants = blocks_OBb[..., : block.codes], blocks_OBb[..., block.codes :]
        parts = {"codes": codes.flatten(1), "constants": constants.flatten(1).contiguous().view(torch.float16)}
        return Stored(self, shape, parts)

    def _weights(self, codes_OBc: Tensor, constants_OBk: Tensor) -> Tensor:
        """Return float32 weights [out, blocks, weights of a block]."""
        if self.kind in SMALL_KINDS:
            return small_weights(self.kind, codes_OBc, constants_OBk)
        kind, scale_OB1 = self.kind, constants_OBk[..., :1]
        if kind is Kind.Q8_0:
            return codes_OBc.view(torch.int8).float() * scale_OB1
        if kind is Kind.Q6_K:
            return _six_bits(codes_OBc, scale_OB1)
        if kind in (Kind.Q4_K, Kind.Q5_K):
            return _super_blocks(codes_OBc, constants_OBk, has_fifth=kind is Kind.Q5_K)
        has_fifth = kind in (Kind.Q5_0, Kind.Q5_1)
        values_OBg = _halves(codes_OBc[..., 4 * has_fifth :])
        if has_fifth:
            bits_8 = torch.arange(8, dtype=torch.uint8, device=codes_OBc.device)
            values_OBg |= ((codes_OBc[..., :4, None] >> bits_8) & 1).flatten(-2) << 4
        if constants_OBk.shape[-1] == 2:
            return values_OBg.float() * scale_OB1 + constants_OBk[..., 1:]
        return (values_OBg.float() - (16 if has_fifth else 8)) * scale_OB1


def as_int4_groups(weight: Stored) -> Stored:
    """Return a weight of Q4_0 or Q4_1 blocks as groups of 4-bit values with the same numbers; any other as it is."""
    format = weight.format
    if not isinstance(format, GgufBlocks) or format.kind not in (Kind.Q4_0, Kind.Q4_1):
        return weight
    has_minimum = format.kind is Kind.Q4_1
    codes = weight.parts["codes"].unflatten(-1, (-1, 16))
    constants = weight.parts["constants"].float().unflatten(-1, (-1, 1 + has_minimum))
    scale = constants[..., 0].contiguous()
    # Q4_0 stores a signed value plus 8; the products are exact in float32, so this equals (value - 8) * scale.
    minimum = constants[..., 1].contiguous() if has_minimum else scale * -8
    parts = {"values": _halves(codes).flatten(-2), "scale": scale, "minimum": minimum}
    return Stored(Int4Groups(32), weight.shape, parts)


def int_groups_of(format: Format) -> Format:
    """Return the groups of integers with the same numbers as Q8_0 or Q4_0; any other format as it is."""
    if not isinstance(format, GgufBlocks) or format.kind not in (Kind.Q8_0, Kind.Q4_0):
        return format
    return IntGroups(8 if format.kind is Kind.Q8_0 else 4, 32, scale=torch.float16)


def as_int_groups(weight: Stored) -> Stored:
    """Return a weight of Q8_0 or Q4_0 blocks as groups of integers with the same numbers; any other as it is."""
    format = int_groups_of(weight.format)
    if format is weight.format:
        return weight
    assert isinstance(format, IntGroups)
    codes = weight.parts["codes"]
    # Q8_0 has signed values, Q4_0 values plus 8; groups of 8 bits have values plus 128.
    values = codes ^ 0x80 if format.bits == 8 else pack_nibbles(_halves(codes.unflatten(-1, (-1, 16))).flatten(-2))
    return Stored(format, weight.shape, {"values": values, "scale": weight.parts["constants"]})


def _halves(codes: Tensor) -> Tensor:
    """Return the low halves of bytes [..., n], then the high halves: [..., 2 n]."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _super_blocks(codes_OBc: Tensor, constants_OBk: Tensor, *, has_fifth: bool) -> Tensor:
    """Unpack Q4_K or Q5_K: 12 bytes of 6-bit factors of scales and minima, (32 of fifth bits,) and 128 of halves."""
    first, second, third = codes_OBc[..., :12].unflatten(-1, (3, 4)).unbind(-2)
    scales_OB8 = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1)
    minima_OB8 = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), -1)
    values_OB8g = _halves(codes_OBc[..., -128:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    if has_fifth:
        bits_81 = torch.arange(8, dtype=torch.uint8, device=codes_OBc.device).unsqueeze(1)
        values_OB8g |= ((codes_OBc[..., 12:44].unsqueeze(-2) >> bits_81) & 1) << 4
    scale_OB81 = (constants_OBk[..., :1] * scales_OB8.float()).unsqueeze(-1)
    minimum_OB81 = (constants_OBk[..., 1:] * minima_OB8.float()).unsqueeze(-1)
    weights_OB8g: Tensor = scale_OB81 * values_OB8g.float() - minimum_OB81
    return weights_OB8g.flatten(-2)


def _six_bits(codes_OBc: Tensor, unit_OB1: Tensor) -> Tensor:
    """Unpack Q6_K: 128 bytes of halves, 64 of two bits more, and 16 factors of scales for 16 weights each."""
    low_OB2hg = codes_OBc[..., :128].unflatten(-1, (2, 2, 32))
    low_OB24g = torch.cat((low_OB2hg & 15, low_OB2hg >> 4), -2)
    shifts_41 = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=codes_OBc.device).unsqueeze(1)
    high_OB24g = (codes_OBc[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts_41) & 3
    values_OBw = (low_OB24g | high_OB24g << 4).flatten(-3).to(torch.int8) - 32
    scale_OBs1 = (unit_OB1 * codes_OBc[..., 192:].view(torch.int8).float()).unsqueeze(-1)
    weights_OBsg: Tensor = values_OBw.float().unflatten(-1, (16, 16)) * scale_OBs1
    return weights_OBsg.flatten(-2)
