"""Unpacks GGUF's blocks of 2 and 3 bits and of 4-bit places in a table; gguf_formats.py has the format itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from gguf import GGMLQuantizationType as Kind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SMALL_KINDS", "SmallNumbers", "signed_values", "small_numbers", "small_weights"]

SMALL_KINDS = (Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL, Kind.IQ4_XS)
"""The kinds of blocks that are unpacked here."""
# What the codes of IQ4_NL and IQ4_XS stand for, before their scale.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def small_weights(kind: Kind, codes_OBc: Tensor, constants_OBk: Tensor) -> Tensor:
    """Return the float32 weights [out, blocks, weights of a block] of one of `SMALL_KINDS`.

    Args:
        kind: The kind of the blocks.
        codes_OBc: Their codes, uint8 [out, blocks, bytes].
        constants_OBk: Their constants, float32 [out, blocks, 1], for Q2_K [out, blocks, 2].
    """
    unit_OB1 = constants_OBk[..., :1]
    if kind is Kind.Q2_K:
        return _two_bits_with_minima(codes_OBc, unit_OB1, constants_OBk[..., 1:])
    values_OBsg, factors_OBs = signed_values(kind, codes_OBc)
    return (values_OBsg.float() * (unit_OB1 * factors_OBs.float()).unsqueeze(-1)).flatten(-2)


class SmallNumbers(NamedTuple):
    """Blocks of a small kind taken apart: 4-bit codes, and the 8-bit factors of each group."""

    codes_OBw: Tensor
    """Codes, one in a byte: of Q2_K as they are, of Q3_K 8 above their values, of the others places in a table."""
    scales_OBs: Tensor | None
    """Factors of the scale, uint8 or int8; None where a block has none."""
    minima_OBs: Tensor | None = None
    """Factors of the minimum, uint8, where there is one."""
    table_16: Tensor | None = None
    """Numbers of the places in a table, float32."""


def small_numbers(kind: Kind, codes_OBc: Tensor) -> SmallNumbers:
    """Return codes and factors of one of `SMALL_KINDS` from the codes of its blocks, uint8 [out, blocks, bytes]."""
    if kind is Kind.Q2_K:
        factors_OBs = codes_OBc[..., :16]
        return SmallNumbers(_two_bits(codes_OBc[..., 16:]), factors_OBs & 15, factors_OBs >> 4)
    if kind is Kind.Q3_K:
        values_OBsg, scales_OBs = _three_bits(codes_OBc)
        return SmallNumbers((values_OBsg + 8).to(torch.uint8).flatten(-2), scales_OBs)
    table_16 = torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=codes_OBc.device)
    if kind is Kind.IQ4_NL:
        return SmallNumbers(_places(codes_OBc), None, table_16=table_16)
    places_OB8g = _places(codes_OBc[..., 6:].unflatten(-1, (8, 16)))
    return SmallNumbers(places_OB8g.flatten(-2), _large_factors(codes_OBc), table_16=table_16)


def signed_values(kind: Kind, codes_OBc: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signed integers of blocks whose weights are `(unit * factor) * value`.

    Args:
        kind: Q3_K, IQ4_NL or IQ4_XS.
        codes_OBc: The codes of such blocks, uint8 [out, blocks, bytes].

    Returns:
        Values, int8 [out, blocks, groups, weights of a group], and factors, int8 [out, blocks, groups].
    """
    if kind is Kind.Q3_K:
        return _three_bits(codes_OBc)
    if kind is Kind.IQ4_XS:
        return _iq4_values(codes_OBc[..., 6:].unflatten(-1, (8, 16))), _large_factors(codes_OBc)
    values_OB1g = _iq4_values(codes_OBc).unsqueeze(-2)
    return values_OB1g, torch.ones_like(values_OB1g[..., 0])


def _two_bits_with_minima(codes_OBc: Tensor, unit_OB1: Tensor, minimum_OB1: Tensor) -> Tensor:
    """Unpack Q2_K: 16 bytes of 4-bit factors, of a scale and of a minimum for 16 weights each, and 64 of two bits."""
    factors_OBs = codes_OBc[..., :16]
    scale_OBs1 = (unit_OB1 * (factors_OBs & 15).float()).unsqueeze(-1)
    minimum_OBs1 = (minimum_OB1 * (factors_OBs >> 4).float()).unsqueeze(-1)
    values_OBsg = _two_bits(codes_OBc[..., 16:]).unflatten(-1, (16, 16)).float()
    weights_OBsg: Tensor = scale_OBs1 * values_OBsg - minimum_OBs1
    return weights_OBsg.flatten(-2)


def _three_bits(codes_OBc: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack Q3_K: 32 bytes of third bits, 64 of two bits, and 12 of 6-bit factors for 16 weights each."""
    third_OBw = _shifted(codes_OBc[..., :32].unsqueeze(-2), 1).flatten(-2)
    values_OBw = (_two_bits(codes_OBc[..., 32:96]) | third_OBw << 2).to(torch.int8) - 4
    low_OBs = torch.cat((codes_OBc[..., 96:104] & 15, codes_OBc[..., 96:104] >> 4), -1)
    high_OBs = _shifted(codes_OBc[..., 104:].unsqueeze(-2), 2).flatten(-2)
    return values_OBw.unflatten(-1, (16, 16)), (low_OBs | high_OBs << 4).to(torch.int8) - 32


def _large_factors(codes_OBc: Tensor) -> Tensor:
    """Unpack the 8 factors of IQ4_XS: 2 bytes of upper bits and 4 of lower bits; 128 bytes of places follow."""
    low_OB8 = torch.stack((codes_OBc[..., 2:6] & 15, codes_OBc[..., 2:6] >> 4), -1).flatten(-2)
    high_OB8 = _shifted(codes_OBc[..., :2].unsqueeze(-1), 2, dim=-1).flatten(-2)
    return (low_OB8 | high_OB8 << 4).to(torch.int8) - 32


def _places(codes: Tensor) -> Tensor:
    """Return the places in the table that bytes [..., n] hold, of the low halves first: uint8 [..., 2 n]."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _iq4_values(codes: Tensor) -> Tensor:
    """Return the values at the places that bytes [..., n] hold: int8 [..., 2 n]."""
    table = torch.tensor(_IQ4_VALUES, dtype=torch.int8, device=codes.device)
    return table[_places(codes).int()]


def _shifted(codes: Tensor, bits: int, dim: int = -2) -> Tensor:
    """Return the codes of `bits` bits that bytes hold, lowest first, along a dimension of size 1 of the bytes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return codes >> shifts.view(-1, *[1] * (-1 - dim)) & (1 << bits) - 1


def _two_bits(codes: Tensor) -> Tensor:
    """Return the 2-bit codes of bytes [..., 64], of each 32 bytes first the lowest of all: [..., 256]."""
    return _shifted(codes.unflatten(-1, (2, 1, 32)), 2).flatten(-3)
