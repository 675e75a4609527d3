"""`in_codes`: packs a stored weight into the layout of the GPU; never chooses the kind (held.py) or multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from headrace.ops.cuda.codes.held import kind_of, kinds_of_pieces
from headrace.ops.cuda.codes.kinds import INT8, LINES_OF_SCALE, LINES_OF_TABLE, TABLE, Kind
from headrace.ops.cuda.codes.layout import EIGHT_BITS, FOUR_BITS, CodeLayout
from headrace.ops.formats import Stored, joins
from headrace.ops.gguf_formats import GgufBlocks
from headrace.ops.quantised import Fp8, unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.formats import PartSpec

__all__ = ["in_codes"]

_SLICE: Final = 1 << 24
"""Elements of a weight that are packed at a time, about: their codes lie one in a byte, or in more, meanwhile."""
_WHOLE_BLOCKS: Final = 1024
"""Outputs to whose multiple slices are cut, so that they have whole blocks of 8-bit floats."""


class _Constants(NamedTuple):
    """What a weight has beside its codes; G groups, L outputs or eights of outputs, S spans."""

    scales: Tensor
    """[L, G] or [O]."""
    zeros: Tensor | None = None
    """Zero points or minima, like `scales`."""
    factors: Tensor | None = None
    """[L, S], with those of minima after each, or [O]."""
    table: Tensor | None = None
    """Table of each `LINES_OF_TABLE` outputs, or one of all."""
    order_I: Tensor | None = None


def in_codes(weight: Stored, dtype: torch.dtype) -> Stored:
    """Return a weight as the GPU keeps it: in codes if there is a kind for its format, else dense in `dtype`.

    Weights one above the other for which there is no common kind become one weight in codes each.
    """
    kind = kind_of(weight.format, weight.shape)
    if isinstance(kind, Kind):
        return _packed(weight, kind)
    kinds = kinds_of_pieces(weight.format, weight.shape)
    if not kinds:
        return Stored.from_dense(weight.dense(dtype))
    pieces = iter(weight.pieces())
    return Stored.stack([_packed(Stored.stack([next(pieces) for _ in range(count)]), kind) for kind, count in kinds])


def _packed(weight: Stored, kind: Kind) -> Stored:
    codes: list[Tensor] = []
    high: list[Tensor] = []
    constants: list[_Constants] = []
    for piece in weight.pieces():
        for some in _slices(piece):
            codes_OI, of_piece = _taken_apart(some, kind)
            codes.append(_in_chunks(codes_OI, kind))
            high += [_high_words(codes_OI, kind)] if kind.high else []
            constants.append(of_piece)
    layout = CodeLayout(kind, constants[0].scales.dtype)
    specs = layout.parts(weight.shape)
    parts = {"codes": torch.cat(codes)}
    if kind.high:
        parts["high"] = torch.cat(high)
    parts["scales"] = _joined([each.scales for each in constants], specs["scales"])
    of_lines = {"zeros": [each.zeros for each in constants], "factors": [each.factors for each in constants]}
    for name, numbers in of_lines.items():
        if name in specs:
            parts[name] = _joined([each for each in numbers if each is not None], specs[name])
    if kind.codes == TABLE:
        tables = ((each.table, len(rows) // LINES_OF_TABLE) for each, rows in zip(constants, codes, strict=True))
        parts["table"] = torch.cat([table.expand(eights, 16) for table, eights in tables if table is not None])
    if constants[0].order_I is not None:
        parts["order"] = constants[0].order_I
    return Stored(layout, weight.shape, parts)


def _slices(weight: Stored) -> list[Stored]:
    """Return a weight in slices of some outputs, or whole where it is small or outputs share what cannot be cut."""
    outs, ins = weight.shape
    rows = max(_SLICE // ins // _WHOLE_BLOCKS, 1) * _WHOLE_BLOCKS
    sizes = [min(rows, outs - first) for first in range(0, outs, rows)]
    return weight.split(sizes) if len(sizes) > 1 and joins(weight.format, weight.shape, sizes) else [weight]


def _taken_apart(weight: Stored, kind: Kind) -> tuple[Tensor, _Constants]:
    """Return the codes of a weight, one in a byte and of integers those above zero, and what it has besides."""
    format, parts, ins = weight.format, weight.parts, weight.shape[-1]
    if isinstance(format, GgufBlocks):
        codes_OI, scales_OG, minima_OG, factors_OS, table_16 = format.taken_apart(parts, weight.shape)
        return codes_OI, _Constants(scales_OG, minima_OG, factors_OS, table_16)
    values, scales = parts["values"], parts["scale"]
    codes_OI = values.view(torch.uint8) if kind.bits == 8 else unpack_nibbles(values, ins)
    if isinstance(format, Fp8) and format.block is not None:
        lines = weight.shape[-2] // LINES_OF_SCALE
        scales = scales.repeat_interleave(format.block[0] // LINES_OF_SCALE, 0)[:lines]
    if scales.dtype == torch.float8_e4m3fn:
        scales = scales.view(torch.uint8)
    zeros = parts.get("zero")
    if not kind.group:
        scales, zeros = scales.view(-1).float(), None if zeros is None else zeros.view(-1)
    return codes_OI, _Constants(scales, zeros, parts.get("factor"), parts.get("table"), parts.get("order"))


def _in_chunks(codes_OI: Tensor, kind: Kind) -> Tensor:
    """Return the codes of a weight, or their lower four bits, in the order in which threads read them."""
    outs, ins = codes_OI.shape
    if kind.bits == 8:
        ordered_OI = codes_OI.view(outs, -1, 16)[..., _places(EIGHT_BITS, codes_OI)].view(outs, ins)
        return ordered_OI ^ 0x80 if kind.codes == INT8 else ordered_OI.contiguous()
    codes_ON2 = codes_OI.view(outs, -1, 32)[..., _places(FOUR_BITS, codes_OI)].view(outs, -1, 2)
    return (codes_ON2[..., 0] & 15 | codes_ON2[..., 1] << 4).contiguous()


def _high_words(codes_OI: Tensor, kind: Kind) -> Tensor:
    """Return the bits above the first four, int32 [O, chunks * bits]."""
    outs = len(codes_OI)
    pairs_OC162 = (codes_OI >> 4).view(outs, -1, 16, 2).int()
    both_OC16 = pairs_OC162[..., 0] | pairs_OC162[..., 1] << 16
    shifts_16 = torch.arange(16, dtype=torch.int32, device=codes_OI.device)
    bits = [((both_OC16 >> bit & 0x00010001) << shifts_16).sum(-1, dtype=torch.int32) for bit in range(kind.high)]
    return torch.stack(bits, -1).flatten(1)


def _joined(numbers: Sequence[Tensor], spec: PartSpec) -> Tensor:
    """Return the numbers of pieces, of outputs [O], or of groups [L, G] as [G, L] with zeros up to whole tiles."""
    joined = torch.cat(list(numbers))
    if joined.dim() == 1:
        return joined
    lines, groups = joined.shape
    padded_GL = joined.new_zeros(spec.shape)
    padded_GL[:groups, :lines] = joined.T
    return padded_GL


def _places(order: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(order, device=like.device)
