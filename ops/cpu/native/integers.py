"""GGUF's blocks of 2 and 3 bits and of tables as integers that the C kernels have a layout for; never packs them.

Q3_K, IQ4_NL and IQ4_XS are whole numbers times a scale, so that their numbers stay the same. Q2_K has a scale and a
minimum for each 16 inputs, where the kernels have them for 32. It becomes 8-bit integers, with an error of at most half
their step: about 0.2 % of the range of 32 weights, as much as the kernels round activations by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gguf import GGMLQuantizationType as Kind

from headrace.ops.formats import Stored, row_blocks
from headrace.ops.gguf_formats import GgufBlocks
from headrace.ops.gguf_small import signed_values
from headrace.ops.quantised import IntGroups

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.formats import Format

__all__ = ["as_integers", "integers_of"]

_GROUP = 32
_INTEGERS: dict[Format, Format] = {
    GgufBlocks(Kind.Q2_K): IntGroups(8, _GROUP, zeros=True),
    GgufBlocks(Kind.Q3_K): GgufBlocks(Kind.Q6_K),
    GgufBlocks(Kind.IQ4_NL): GgufBlocks(Kind.Q8_0),
    GgufBlocks(Kind.IQ4_XS): IntGroups(8, _GROUP),
}


def integers_of(format: Format) -> Format:
    """Return the format in which `as_integers` returns a weight of `format`."""
    return _INTEGERS.get(format, format)


def as_integers(weight: Stored) -> Stored:
    """Return a matrix of Q2_K, Q3_K, IQ4_NL or IQ4_XS blocks in a format of 6- or 8-bit integers; any other as it is.

    The numbers stay the same, but for Q2_K.
    """
    format = integers_of(weight.format)
    if format is weight.format:
        return weight
    assert isinstance(weight.format, GgufBlocks)
    found = Stored.allocate(format, weight.shape, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    for rows in row_blocks(*weight.shape):
        codes_Ob, constants_OB = (weight.parts[name][rows] for name in ("codes", "constants"))
        parts = _parts(weight.format.kind, codes_Ob, constants_OB, weight.shape[-1])
        for name, part in parts.items():
            found.parts[name][rows] = part
    return found


def _parts(kind: Kind, codes_Ob: Tensor, constants_OB: Tensor, ins: int) -> dict[str, Tensor]:
    """Return the parts of a few outputs in the new format."""
    if kind is Kind.Q2_K:
        blocks = Stored(GgufBlocks(kind), (len(codes_Ob), ins), {"codes": codes_Ob, "constants": constants_OB})
        return _rounded(blocks.dense(torch.float32))
    values_OBsg, factors_OBs = signed_values(kind, codes_Ob.unflatten(-1, (constants_OB.shape[-1], -1)))
    if kind is Kind.IQ4_NL:
        return {"codes": values_OBsg.view(torch.uint8).flatten(1), "constants": constants_OB}
    if kind is Kind.Q3_K:
        return {"codes": _in_six_bits(values_OBsg.flatten(-2), factors_OBs).flatten(1), "constants": constants_OB}
    scale_OBs = constants_OB.float().unsqueeze(-1) * factors_OBs.float()
    return {"values": (values_OBsg.view(torch.uint8) ^ 0x80).flatten(1), "scale": scale_OBs.flatten(1)}


def _rounded(dense_OI: Tensor) -> dict[str, Tensor]:
    """Round groups of weights to 8-bit integers from the smallest to the largest, or to zero if that is further."""
    dense_OGg = dense_OI.unflatten(-1, (-1, _GROUP))
    low_OG, high_OG = dense_OGg.amin(-1).clamp_(max=0.0), dense_OGg.amax(-1).clamp_(min=0.0)
    scale_OG = (high_OG - low_OG) / 255
    step_OG = torch.where(scale_OG > 0.0, scale_OG, 1.0)
    zero_OG = (-low_OG / step_OG).round_()
    values_OGg = (dense_OGg / step_OG.unsqueeze(-1)).round_() + zero_OG.unsqueeze(-1)
    return {"values": values_OGg.clamp_(0, 255).flatten(1), "scale": scale_OG, "zero": zero_OG}


def _in_six_bits(values_OBw: Tensor, factors_OBs: Tensor) -> Tensor:
    """Return integers from -32 to 31 and the factors of their scales as the codes of Q6_K, [out, blocks, 208]."""
    codes_OB2tg = (values_OBw + 32).view(torch.uint8).unflatten(-1, (2, 4, 32))
    low_OB2tg = codes_OB2tg & 15
    halves_OBb = (low_OB2tg[..., :2, :] | low_OB2tg[..., 2:, :] << 4).flatten(-3)
    shifts_41 = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)
    high_OBb = (codes_OB2tg >> 4 << shifts_41).sum(-2, dtype=torch.uint8).flatten(-2)
    return torch.cat((halves_OBb, high_OBb, factors_OBs.view(torch.uint8)), -1)
