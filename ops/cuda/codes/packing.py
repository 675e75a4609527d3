"""`in_codes`: packs a stored weight into the layout of the GPU; never chooses the kind (held.py) or multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.ops.cuda.codes.held import kind_of, kinds_of_pieces
from headrace.ops.cuda.codes.kinds import INT8, LINES_OF_SCALE, LINES_OF_TABLE, Kind
from headrace.ops.cuda.codes.layout import EIGHT_BITS, FOUR_BITS, CodeLayout
from headrace.ops.formats import Stored
from headrace.ops.gguf_formats import GgufBlocks
from headrace.ops.quantised import Fp8, unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.formats import PartSpec

__all__ = ["in_codes"]


class _Piece(NamedTuple):
    """A weight taken apart; G groups, L outputs or eights of outputs, S spans."""

    codes_OI: Tensor
    """Codes, one in a byte; of integers those above zero."""
    scales: Tensor
    """[L, G] or [O]."""
    zeros: Tensor | None = None
    """Zero points or minima, like `scales`."""
    factors: Tensor | None = None
    """[L, S], with those of minima after each, or [O]."""
    table: Tensor | None = None
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
    pieces = [_taken_apart(piece, kind) for piece in weight.pieces()]
    layout = CodeLayout(kind, pieces[0].scales.dtype)
    specs = layout.parts(weight.shape)
    parts = {"codes": torch.cat([_in_chunks(piece.codes_OI, kind) for piece in pieces])}
    if kind.high:
        parts["high"] = torch.cat([_high_words(piece.codes_OI, kind) for piece in pieces])
    parts["scales"] = _joined([piece.scales for piece in pieces], specs["scales"])
    of_lines = {"zeros": [piece.zeros for piece in pieces], "factors": [piece.factors for piece in pieces]}
    for name, numbers in of_lines.items():
        if name in specs:
            parts[name] = _joined([each for each in numbers if each is not None], specs[name])
    if pieces[0].table is not None:
        parts["table"] = torch.cat(
            [each.table.expand(len(each.codes_OI) // LINES_OF_TABLE, 16) for each in pieces if each.table is not None]
        )
    if pieces[0].order_I is not None:
        parts["order"] = pieces[0].order_I
    return Stored(layout, weight.shape, parts)


def _taken_apart(weight: Stored, kind: Kind) -> _Piece:
    format, parts, ins = weight.format, weight.parts, weight.shape[-1]
    if isinstance(format, GgufBlocks):
        codes_OI, scales_OG, minima_OG, factors_OS = format.taken_apart(parts, weight.shape)
        return _Piece(codes_OI, scales_OG, minima_OG, factors_OS)
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
    return _Piece(codes_OI, scales, zeros, parts.get("factor"), parts.get("table"), parts.get("order"))


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
