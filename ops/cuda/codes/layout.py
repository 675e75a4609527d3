"""`CodeLayout` and `Codes`: quantised weights as the kernels of products read them; never multiplies.

A weight keeps about as many bytes as it has in its file. Codes of 8 and 4 bits lie line by line in chunks of 16 bytes.
Only the order of the columns within each chunk differs, so that what ldmatrix hands to a thread are the elements of its
wgmma fragment (csrc/codes.cuh): thread c of four gets four bytes, whose 8-bit codes are those of columns 2c, 2c + 8,
2c + 1 and 2c + 9, and whose 4-bit codes make pairs four places apart. So pair p of word c holds columns 2n and 2n + 1
of the chunk, with n = 4p + c, 16 bits apart. Of codes of 5 and 6 bits the lower four lie so, and each bit above them in
words of their own, one for a chunk: bit n is that of column 2n, bit 16 + n that of column 2n + 1. Constants of groups
lie group by group, padded to whole tiles where csrc/ takes the kind, since it copies a tile's constants in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from headrace.ops.cuda.codes.kinds import E2M1, INT8, LINES_OF_TABLE, SPAN, TABLE, Kind
from headrace.ops.formats import PartSpec
from headrace.ops.quantised import e2m1

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from headrace.ops.formats import Stored

__all__ = ["EIGHT_BITS", "FOUR_BITS", "CodeLayout", "Codes", "codes_of"]

EIGHT_BITS: Final = tuple(2 * thread + place for thread in range(4) for place in (0, 8, 1, 9))
"""Columns of a chunk of 8-bit codes in the order of their bytes."""
FOUR_BITS: Final = tuple(2 * thread + place for thread in range(4) for place in (0, 8, 16, 24, 1, 9, 17, 25))
"""Columns of a chunk of 4-bit codes in the order of their nibbles, the low one of a byte first."""
_PADDED = 512
"""Inputs to whose multiple groups are padded."""
_TILE = 128


class Codes(NamedTuple):
    """A weight [O, I] in codes, as kernels take it; what its kind lacks is another part, which no kernel reads."""

    kind: Kind
    shape: tuple[int, int]
    codes_OB: Tensor
    """Codes, uint8, [O, I * bits / 8]."""
    scales: Tensor
    """float32 [O], or of groups [groups, lines], of 8 outputs each for 8-bit floats, in the dtype of the kind."""
    zeros: Tensor
    """Zero points, uint8, or minima, in the dtype of `scales`, in the shape of `scales`."""
    high: Tensor
    """Bits above the first four of codes, int32, [O, I / 32 * bits]."""
    factors: Tensor
    """Factors of scales: float16 [spans, lines], with those of minima after each row, or float32 [O]."""
    table: Tensor
    """Numbers of codes, float32, [O / 8, 16]."""
    order_I: Tensor
    """Input of each column, int32."""


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The format of a weight on the device: codes in the order in which threads read them."""

    kind: Kind
    scale: torch.dtype
    """Dtype of the scales, and of minima."""

    @property
    def name(self) -> str:
        """The kind of codes."""
        return self.kind.name

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        """Return `codes` and `scales` of a matrix, and of `zeros`, `high`, `factors`, `table` and `order` its own."""
        (outs, ins), kind = shape, self.kind
        found = {"codes": PartSpec((outs, ins * kind.bits // 8), torch.uint8)}
        found["scales"] = constants = self._constants(shape)
        if kind.zeros:
            found["zeros"] = PartSpec(constants.shape, torch.uint8, outputs=constants.outputs)
        if kind.minima:
            found["zeros"] = constants
        if kind.high:
            found["high"] = PartSpec((outs, ins // kind.chunk * kind.high), torch.int32)
        if kind.factors:
            rows = -(-ins // SPAN) * kind.factors
            found["factors"] = PartSpec((rows, constants.shape[1]), torch.float16, outputs=None)
        elif kind.scales in ("e4m3 times", "e4m3 over"):
            found["factors"] = PartSpec((outs,), torch.float32)
        if kind.codes == TABLE:
            found["table"] = PartSpec((outs // LINES_OF_TABLE, 16), torch.float32, outputs=LINES_OF_TABLE)
        if kind.ordered:
            found["order"] = PartSpec((ins,), torch.int32, outputs=None)
        return found

    def _constants(self, shape: tuple[int, ...]) -> PartSpec:
        (outs, ins), kind = shape, self.kind
        if not kind.group:
            return PartSpec((outs,), self.scale)
        groups = -(-(-(-ins // _PADDED) * _PADDED) // kind.group)
        lines = -(-outs // 16) * 16
        if kind.in_order.beyond_source is None:
            lines = (-(-outs // _TILE) + 1) * _TILE // kind.share
        return PartSpec((groups, lines), self.scale, outputs=None)

    def dense(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the weight, computed in float32 and rounded once."""
        (outs, ins), kind = shape, self.kind

        def spread(numbers: Tensor, group: int) -> Tensor:
            """Return the numbers of lines, or of groups and lines, for each weight."""
            if numbers.dim() == 1:
                return numbers.float()[:, None]
            of_lines = numbers.float().T.repeat_interleave(kind.share, 0)[:outs]
            return of_lines.repeat_interleave(group, 1)[:, :ins]

        values_OI = self._values(parts, (outs, ins))
        scales_OI, offsets_OI = self._scales(parts, spread), None
        if kind.zeros or kind.minima:
            offsets_OI = spread(parts["zeros"], kind.group)
        if kind.zeros and offsets_OI is not None:
            values_OI -= offsets_OI
        values_OI *= scales_OI
        if kind.minima and offsets_OI is not None:
            if kind.factors:
                offsets_OI = offsets_OI * spread(parts["factors"][1::2], SPAN)
            values_OI += offsets_OI
        return (values_OI[:, parts["order"].argsort()] if kind.ordered else values_OI).to(dtype)

    def _values(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        """Return the numbers of codes in float32, without zero points that groups have."""
        (outs, _), codes_OB, kind = shape, parts["codes"], self.kind
        if kind.bits == 8:
            ordered = codes_OB.view(outs, -1, 16)[..., _back(EIGHT_BITS, codes_OB)].contiguous()
            if kind.codes == INT8:
                return (ordered ^ 0x80).view(shape).float() - kind.middle
            return ordered.view(torch.float8_e4m3fn).view(shape).float()
        nibbles = torch.stack((codes_OB & 15, codes_OB >> 4), -1).view(outs, -1, 32)
        codes_OCc = nibbles[..., _back(FOUR_BITS, codes_OB)]
        if kind.codes == E2M1:
            return e2m1(codes_OB.device)[codes_OCc.int()].view(shape)
        if kind.codes == TABLE:
            tables_O16 = parts["table"].repeat_interleave(LINES_OF_TABLE, 0)
            return tables_O16.gather(1, codes_OCc.view(shape).long())
        if kind.high:
            codes_OCc = codes_OCc | _high_bits(parts["high"].view(outs, -1, kind.high))
        return codes_OCc.view(shape).float() - kind.middle

    def _scales(self, parts: Mapping[str, Tensor], spread: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return the float32 scales of weights, factors included."""
        kind, scales = self.kind, parts["scales"]
        if kind.scales == "e8m0":
            return spread(scales.view(torch.float8_e8m0fnu), kind.group)
        if kind.factors:
            return spread(scales, kind.group) * spread(parts["factors"][:: kind.factors], SPAN)
        if kind.scales in ("e4m3 times", "e4m3 over"):
            scales_OI, factors_O1 = spread(scales.view(torch.float8_e4m3fn), kind.group), parts["factors"][:, None]
            return scales_OI / factors_O1 if kind.scales == "e4m3 over" else scales_OI * factors_O1
        return spread(scales, kind.group)


def codes_of(weight: Stored) -> Codes:
    """Return the codes of a weight of format `CodeLayout`, which share its memory."""
    assert isinstance(weight.format, CodeLayout)
    (outs, ins), parts = weight.shape, weight.parts
    scales = parts["scales"]
    return Codes(
        weight.format.kind, (outs, ins), parts["codes"], scales, parts.get("zeros", scales),
        parts.get("high", parts["codes"]), parts.get("factors", scales), parts.get("table", scales),
        parts.get("order", scales),
    )  # fmt: skip


def _back(order: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the places of the columns that lie in an order."""
    return torch.tensor(order, device=like.device).argsort()


def _high_bits(words_OCh: Tensor) -> Tensor:
    """Return the bits above the first four of the codes in chunks of 32, uint8 [O, chunks, 32]."""
    bits_16 = torch.arange(16, dtype=torch.int32, device=words_OCh.device)
    both_OCh16 = words_OCh[..., None] >> bits_16
    pairs_OCh32 = torch.stack((both_OCh16 & 1, both_OCh16 >> 16 & 1), -1).flatten(-2)
    codes_OC32 = pairs_OCh32[:, :, 0] << 4
    if words_OCh.shape[-1] > 1:
        codes_OC32 |= pairs_OCh32[:, :, 1] << 5
    return codes_OC32.to(torch.uint8)
