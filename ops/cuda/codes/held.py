"""`kind_of`: the kind of codes for a stored format, or why there is none, in words; reads no weight."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import torch
from gguf import GGMLQuantizationType as Block

from headrace.ops.cuda.codes.kinds import (
    E2M1,
    E4M3,
    INT4,
    INT5,
    INT6,
    INT8,
    LINES_OF_SCALE,
    TABLE,
    CodeName,
    Kind,
    ScaleName,
)
from headrace.ops.formats import Stacked
from headrace.ops.gguf_formats import GgufBlocks
from headrace.ops.quantised import Float4Groups, Fp8, IntGroups, Table4

if TYPE_CHECKING:
    from headrace.ops.formats import Format

__all__ = ["kind_of", "kinds_of_pieces"]

_FLOAT_GROUPS: Final = (32, 64, 128)
_WHOLE_BLOCK: Final = (128, 128)
_GROUPS: Final = (16, 32, 64, 128, 256, 512, 1024)
_BLOCKS: Final = {
    Block.Q8_0: Kind(INT8, 32),
    Block.Q4_0: Kind(INT4, 32),
    Block.Q4_1: Kind(INT4, 32, minima=True),
    Block.Q5_0: Kind(INT5, 32),
    Block.Q5_1: Kind(INT5, 32, minima=True),
    Block.Q4_K: Kind(INT4, 32, minima=True, scales="factors"),
    Block.Q5_K: Kind(INT5, 32, minima=True, scales="factors"),
    Block.Q6_K: Kind(INT6, 16, scales="factors"),
    Block.Q3_K: Kind(INT4, 16, scales="factors"),
    Block.Q2_K: Kind(INT4, 16, minima=True, scales="factors"),
    Block.IQ4_NL: Kind(TABLE, 32),
    Block.IQ4_XS: Kind(TABLE, 32, scales="factors"),
}


def kind_of(format: Format, shape: tuple[int, ...]) -> Kind | str:
    """Return the kind of codes for a weight [out, in], or why there is none, in words."""
    outs, ins = shape[-2:]
    if ins % 64 or outs % LINES_OF_SCALE:
        return f"takes multiples of 8 outputs and 64 inputs, not {outs} and {ins}"
    if isinstance(format, Stacked):
        return _kind_of_pieces(format, ins)
    if isinstance(format, Fp8):
        return _kind_of_floats(format, outs, ins)
    if isinstance(format, IntGroups):
        return _kind_of_integers(format, ins)
    if isinstance(format, GgufBlocks):
        return _BLOCKS[format.kind]
    if isinstance(format, Float4Groups):
        factored: ScaleName = "e4m3 over" if format.divides else "e4m3 times"
        return Kind(E2M1, format.group, scales="e8m0" if format.scale == "e8m0" else factored)
    if isinstance(format, Table4):
        return _group_misfit(format.group, ins) or Kind(TABLE, format.group, scales="float32")
    return f"takes quantised weights, not {format.name}"


def kinds_of_pieces(format: Format, shape: tuple[int, ...]) -> list[tuple[Kind, int]]:
    """Return the kinds of weights that are no one weight in codes, each with a number of neighbours that are.

    They read the same inputs, and are multiplied one after the other. The list is empty unless all have a kind.
    """
    if not isinstance(format, Stacked):
        return []
    found: list[tuple[Kind, int]] = []
    for piece, size in format.pieces:
        kind = kind_of(piece, (size, shape[-1]))
        if isinstance(kind, str):
            return []
        both = _of_both(found[-1][0], kind) if found else None
        if isinstance(both, Kind) and not kind.ordered:
            found[-1] = (both, found[-1][1] + 1)
        else:
            found.append((kind, 1))
    return found


def _of_both(one: Kind | str | None, other: Kind | str | None) -> Kind | str | None:
    """Return the kind of two weights one above the other, or why both have none; None if these are of two kinds."""
    if one == other:
        return one
    if isinstance(one, Kind) and isinstance(other, Kind) and one.in_lines == other.in_lines:
        return one.in_lines  # one has whole blocks, the other has not
    return None


def _kind_of_pieces(format: Stacked, ins: int) -> Kind | str:
    kinds: list[Kind | str | None] = [kind_of(piece, (size, ins)) for piece, size in format.pieces]
    kind = functools.reduce(_of_both, kinds)
    if kind is None:
        return f"takes one format, not {format.name}"
    if isinstance(kind, Kind) and kind.ordered and len(format.pieces) > 1:
        return "takes one order of columns, not that of each of several weights"
    return kind


def _kind_of_floats(format: Fp8, outs: int, ins: int) -> Kind | str:
    if format.block is None:
        return Kind(E4M3)
    lines, columns = format.block
    if lines % LINES_OF_SCALE or columns not in _FLOAT_GROUPS:
        return f"takes blocks of multiples of 8 outputs and 32, 64 or 128 inputs, not {lines} x {columns}"
    is_whole = format.block == _WHOLE_BLOCK and not outs % lines and not ins % columns
    return Kind(E4M3, columns, blocks=is_whole)


def _kind_of_integers(format: IntGroups, ins: int) -> Kind | str:
    codes: CodeName = INT4 if format.bits == 4 else INT8
    is_whole = format.group is None or (format.group == ins and (ins not in _GROUPS or codes == INT8))
    if is_whole or format.group is None:
        return Kind(codes, zeros=format.zeros, ordered=format.ordered)
    scales: ScaleName = "float32" if format.scale == torch.float32 else "plain"
    why = _group_misfit(format.group, ins)
    return why or Kind(codes, format.group, format.zeros, scales=scales, ordered=format.ordered)


def _group_misfit(group: int, ins: int) -> str | None:
    """Return what is wrong with the groups of a weight."""
    if group not in _GROUPS or ins % group:
        return f"takes whole groups of a power of two from 16 to {_GROUPS[-1]} inputs, not {group} of {ins}"
    return None
