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
from headrace.ops.gguf_small import SMALL_KINDS, small_numbers, small_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["BLOCK_KINDS", "BlockNumbers", "GgufBlocks", "as_int4_groups"]


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


_ZEROS = {Kind.Q4_0: 8, Kind.Q5_0: 16}
"""The codes that stand for zero, where blocks of 32 have a scale alone."""


class BlockNumbers(NamedTuple):
    """A matrix of blocks taken apart: `code * scale + minimum`, or `(code - middle) * scale`, where middle is half the
    number of codes that the code's bits can hold, or `table[code] * scale`."""

    codes_OI: Tensor
    """uint8 codes."""
    scales_OG: Tensor
    """Scales of groups, float16; in the K formats integers of 8 bits."""
    minima_OG: Tensor | None
    """Minima of groups, if the kind has them, like scales."""
    factors_OS: Tensor | None = None
    """Factors of scales for each 256 inputs, float16, and where there are minima theirs after each. None: 1."""
    table_16: Tensor | None = None
    """Numbers of the codes, float32, of kinds whose codes are places in a table."""


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

    def taken_apart(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> BlockNumbers:
        """Return the codes and constants of a matrix."""
        block, outs = _BLOCKS[self.kind], math.prod(shape[:-1])
        codes_OBc = parts["codes"].reshape(outs, -1, block.codes)
        constants_OBk = parts["constants"].reshape(outs, -1, block.constants)
        scales, minima = constants_OBk[..., 0], constants_OBk[..., 1] if block.constants == 2 else None
        if self.kind in SMALL_KINDS:
            small = small_numbers(self.kind, codes_OBc)
            codes_OI, of_groups, table = small.codes_OBw.flatten(1), small.scales_OBs, small.table_16
            if of_groups is None:
                return BlockNumbers(codes_OI, scales, None, None, table)
            if minima is None or small.minima_OBs is None:
                return BlockNumbers(codes_OI, of_groups.flatten(1), None, scales, table)
            factors_OS = torch.stack((scales, -minima), -1).flatten(1)
            return BlockNumbers(codes_OI, of_groups.flatten(1), small.minima_OBs.flatten(1), factors_OS)
        codes_OI = _codes(self.kind, codes_OBc).flatten(1)
        if block.weights == 32:
            return BlockNumbers(codes_OI, scales, minima)
        if minima is None:
            return BlockNumbers(codes_OI, codes_OBc[..., 192:].view(torch.int8).flatten(1), None, scales)
        scales_OG, minima_OG = (each.flatten(1) for each in _super_constants(codes_OBc))
        return BlockNumbers(codes_OI, scales_OG, minima_OG, torch.stack((scales, -minima), -1).flatten(1))

    def _weights(self, codes_OBc: Tensor, constants_OBk: Tensor) -> Tensor:
        """Return float32 weights [out, blocks, weights of a block]."""
        if self.kind in SMALL_KINDS:
            return small_weights(self.kind, codes_OBc, constants_OBk)
        kind, scale_OB1 = self.kind, constants_OBk[..., :1]
        if kind is Kind.Q8_0:
            return codes_OBc.view(torch.int8).float() * scale_OB1
        values_OBw = _codes(kind, codes_OBc)
        if kind is Kind.Q6_K:
            scale_OBs1 = (scale_OB1 * codes_OBc[..., 192:].view(torch.int8).float()).unsqueeze(-1)
            weights_OBsg: Tensor = (values_OBw.float() - 32).unflatten(-1, (16, 16)) * scale_OBs1
            return weights_OBsg.flatten(-2)
        if kind in (Kind.Q4_K, Kind.Q5_K):
            scales_OB8, minima_OB8 = _super_constants(codes_OBc)
            scale_OB81 = (scale_OB1 * scales_OB8.float()).unsqueeze(-1)
            minimum_OB81 = (constants_OBk[..., 1:] * minima_OB8.float()).unsqueeze(-1)
            weights_OB8g: Tensor = scale_OB81 * values_OBw.float().unflatten(-1, (8, 32)) - minimum_OB81
            return weights_OB8g.flatten(-2)
        if constants_OBk.shape[-1] == 2:
            return values_OBw.float() * scale_OB1 + constants_OBk[..., 1:]
        return (values_OBw.float() - _ZEROS[kind]) * scale_OB1


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


def _halves(codes: Tensor) -> Tensor:
    """Return the low halves of bytes [..., n], then the high halves: [..., 2 n]."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _codes(kind: Kind, codes_OBc: Tensor) -> Tensor:
    """Return the codes of weights, one in a byte and none below zero, [out, blocks, weights of a block]."""
    if kind is Kind.Q8_0:
        return codes_OBc ^ 0x80
    if kind is Kind.Q6_K:
        return _six_bits(codes_OBc)
    if kind in (Kind.Q4_K, Kind.Q5_K):
        return _super_codes(codes_OBc, has_fifth=kind is Kind.Q5_K)
    has_fifth = kind in (Kind.Q5_0, Kind.Q5_1)
    values_OBg = _halves(codes_OBc[..., 4 * has_fifth :])
    if has_fifth:
        bits_8 = torch.arange(8, dtype=torch.uint8, device=codes_OBc.device)
        values_OBg |= ((codes_OBc[..., :4, None] >> bits_8) & 1).flatten(-2) << 4
    return values_OBg


def _super_codes(codes_OBc: Tensor, *, has_fifth: bool) -> Tensor:
    """Unpack the codes of Q4_K or Q5_K: after the constants (32 bytes of fifth bits and) 128 of halves."""
    values_OB8g: Tensor = _halves(codes_OBc[..., -128:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    if has_fifth:
        bits_81 = torch.arange(8, dtype=torch.uint8, device=codes_OBc.device).unsqueeze(1)
        values_OB8g |= ((codes_OBc[..., 12:44].unsqueeze(-2) >> bits_81) & 1) << 4
    return values_OB8g.flatten(-2)


def _super_constants(codes_OBc: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the scales and minima of Q4_K or Q5_K, 6 bits each: the first 12 bytes, for 8 groups of 32 weights."""
    first, second, third = codes_OBc[..., :12].unflatten(-1, (3, 4)).unbind(-2)
    scales_OB8 = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1)
    return scales_OB8, torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), -1)


def _six_bits(codes_OBc: Tensor) -> Tensor:
    """Unpack the codes of Q6_K: 128 bytes of halves, and 64 of two bits more."""
    low_OB2hg = codes_OBc[..., :128].unflatten(-1, (2, 2, 32))
    low_OB24g = torch.cat((low_OB2hg & 15, low_OB2hg >> 4), -2)
    shifts_41 = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=codes_OBc.device).unsqueeze(1)
    high_OB24g = (codes_OBc[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts_41) & 3
    codes_OB24g: Tensor = low_OB24g | high_OB24g << 4
    return codes_OB24g.flatten(-3)
