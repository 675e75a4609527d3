"""`CodeLayout` and `Codes`: quantised weights as the kernels of csrc/codes.cuh read them; never multiplies.

A weight keeps as many bytes as it has in its file. Only the order of the columns within each 16 bytes differs, so that
what ldmatrix hands to a thread are the elements of its wgmma fragment: thread c of four gets four bytes, whose 8-bit
codes are those of columns 2c, 2c + 8, 2c + 1 and 2c + 9, and whose 4-bit codes make pairs four places apart. Scales of
groups lie group by group, padded to whole tiles, since a tile's scales are copied in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from headrace.ops.formats import PartSpec, Stacked, Stored
from headrace.ops.gguf_formats import as_int_groups, int_groups_of
from headrace.ops.quantised import Fp8, IntGroups, unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from headrace.ops.formats import Format

__all__ = ["E4M3", "INT4", "INT8", "CodeLayout", "Codes", "Kind", "codes_of", "in_codes", "kind_of"]

E4M3, INT8, INT4 = 1, 2, 3
"""Kinds of codes, as csrc/codes.cuh numbers them."""
_EIGHT_BITS: Final = tuple(2 * thread + place for thread in range(4) for place in (0, 8, 1, 9))
_FOUR_BITS: Final = tuple(
    2 * thread + place for thread in range(4) for place in (0, 8, 16, 24, 1, 9, 17, 25)
)  # nibbles of four bytes, the low one first
_LINES_OF_SCALE = 8
"""Outputs that share a scale of a block of 8-bit floats, at least."""
_CHUNK = 256
"""Inputs to whose multiple groups are padded."""
_TILE = 128
_GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of codes that a kernel is compiled for."""

    codes: int
    group: int = 0
    """Inputs that share a scale; 0 where an output has one."""
    zeros: bool = False

    @property
    def macros(self) -> dict[str, int]:
        """Values of the macros of csrc/codes.cuh."""
        return {"CODES": self.codes, "GROUP": self.group, "ZEROS": int(self.zeros)}

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.codes == INT4 else 8

    @property
    def name(self) -> str:
        """Name in lists and messages."""
        name = {E4M3: "fp8", INT8: "int8", INT4: "int4"}[self.codes]
        return name + (f"-g{self.group}" if self.group else "") + ("-zeros" if self.zeros else "")


class Codes(NamedTuple):
    """A weight [O, I] in codes, as kernels take it."""

    kind: Kind
    shape: tuple[int, int]
    codes_OB: Tensor
    """Codes, uint8, [O, I * bits / 8]."""
    scales: Tensor
    """float32 [O], or of groups [groups, lines]: float32 for 8 outputs each, or 16 bits for each output."""
    zeros: Tensor
    """Zero points, uint8, like `scales` of groups; `scales` itself where there are none."""


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The format of a weight on the device: codes in the order in which threads read them."""

    kind: Kind
    scale: torch.dtype
    """Dtype of the scales."""

    @property
    def name(self) -> str:
        """The kind of codes."""
        return self.kind.name

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        """Return `codes`, `scales` and, where there are zero points, `zeros` of a matrix."""
        outs, ins = shape
        found = {"codes": PartSpec((outs, ins * self.kind.bits // 8), torch.uint8)}
        if not self.kind.group:
            return found | {"scales": PartSpec((outs,), self.scale)}
        share = _LINES_OF_SCALE if self.kind.codes == E4M3 else 1
        whole = (-(-ins // _CHUNK) * (_CHUNK // self.kind.group), (-(-outs // _TILE) + 1) * _TILE // share)
        found["scales"] = PartSpec(whole, self.scale, outputs=None)
        return found | ({"zeros": PartSpec(whole, torch.uint8, outputs=None)} if self.kind.zeros else {})

    def dense(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the weight, computed in float32 and rounded once."""
        (outs, ins), codes_OB = shape, parts["codes"]
        kind, device = self.kind, codes_OB.device
        if kind.codes == INT4:
            nibbles = torch.stack((codes_OB & 15, codes_OB >> 4), -1).view(outs, -1, 32)
            values_OI = nibbles[..., torch.tensor(_FOUR_BITS, device=device).argsort()].view(outs, ins).float()
            if not kind.zeros:
                values_OI -= 8
        else:
            ordered = codes_OB.view(outs, -1, 16)[..., torch.tensor(_EIGHT_BITS, device=device).argsort()]
            as_stored = torch.int8 if kind.codes == INT8 else torch.float8_e4m3fn
            values_OI = ordered.contiguous().view(as_stored).view(outs, ins).float()
        if not kind.group:
            return (values_OI * parts["scales"].float()[:, None]).to(dtype)

        def spread(numbers_GL: Tensor) -> Tensor:
            share = _LINES_OF_SCALE if kind.codes == E4M3 else 1
            of_lines = numbers_GL.float().T.repeat_interleave(share, 0)[:outs]
            return of_lines.repeat_interleave(kind.group, 1)[:, :ins]

        if kind.zeros:
            values_OI -= spread(parts["zeros"])
        return (values_OI * spread(parts["scales"])).to(dtype)


def kind_of(format: Format, shape: tuple[int, ...]) -> Kind | str:
    """Return the kind of codes for a weight [out, in], or why there is none, in words."""
    outs, ins = shape[-2:]
    if ins % 64 or outs % _LINES_OF_SCALE:
        return f"takes multiples of 8 outputs and 64 inputs, not {outs} and {ins}"
    format = int_groups_of(format)
    if isinstance(format, Stacked):
        kinds = {kind_of(piece, (size, ins)) for piece, size in format.pieces}
        return kinds.pop() if len(kinds) == 1 else f"takes one format, not {format.name}"
    if isinstance(format, Fp8):
        return _kind_of_floats(format)
    if isinstance(format, IntGroups):
        return _kind_of_integers(format, ins)
    return f"takes 8-bit floats and groups of integers, not {format.name}"


def _kind_of_floats(format: Fp8) -> Kind | str:
    if format.block is None:
        return Kind(E4M3)
    lines, columns = format.block
    if lines % _LINES_OF_SCALE or columns not in _GROUPS:
        return f"takes blocks of multiples of 8 outputs and 32, 64 or 128 inputs, not {lines} x {columns}"
    return Kind(E4M3, columns)


def _kind_of_integers(format: IntGroups, ins: int) -> Kind | str:
    is_int4 = format.bits == 4
    if format.ordered:
        return "takes columns in their order, not sorted by group"
    if not is_int4 and not format.zeros and format.group in (None, ins):
        return Kind(INT8)
    if format.group is None:
        return "takes 8 bits without zero points where an output has one scale"
    if format.group not in _GROUPS or ins % format.group:
        return f"takes whole groups of 32, 64 or 128 inputs, not {format.group} of {ins}"
    if format.scale == torch.float32 or (format.zeros and not is_int4):
        return "takes groups with 16-bit scales, and zero points of 4 bits"
    return Kind(INT4 if is_int4 else INT8, format.group, format.zeros)


def in_codes(weight: Stored, dtype: torch.dtype) -> Stored:
    """Return a weight as the GPU keeps it: in codes if there is a kind for its format, else dense in `dtype`."""
    kind = kind_of(weight.format, weight.shape)
    return Stored.from_dense(weight.dense(dtype)) if isinstance(kind, str) else _packed(weight, kind)


def codes_of(weight: Stored) -> Codes:
    """Return the codes of a weight of format `CodeLayout`, which share its memory."""
    assert isinstance(weight.format, CodeLayout)
    outs, ins = weight.shape
    scales = weight.parts["scales"]
    return Codes(weight.format.kind, (outs, ins), weight.parts["codes"], scales, weight.parts.get("zeros", scales))


def _packed(weight: Stored, kind: Kind) -> Stored:
    pieces = [as_int_groups(piece) for piece in weight.pieces()]
    parts = {"codes": torch.cat([_in_order(piece, kind) for piece in pieces])}
    layout = CodeLayout(kind, torch.float32)
    if not kind.group:
        parts["scales"] = torch.cat([piece.parts["scale"].view(-1).float() for piece in pieces])
        return Stored(layout, weight.shape, parts)
    scales_LG = torch.cat([_line_scales(piece) for piece in pieces])
    layout = CodeLayout(kind, scales_LG.dtype)
    specs = layout.parts(weight.shape)
    parts["scales"] = _by_group(scales_LG, specs["scales"])
    if kind.zeros:
        parts["zeros"] = _by_group(torch.cat([piece.parts["zero"] for piece in pieces]), specs["zeros"])
    return Stored(layout, weight.shape, parts)


def _in_order(weight: Stored, kind: Kind) -> Tensor:
    """Return the codes of a weight in the order in which threads read them."""
    values, (outs, ins) = weight.parts["values"], weight.shape[-2:]
    if kind.codes == INT4:
        order = torch.tensor(_FOUR_BITS, device=values.device)
        codes_ON = unpack_nibbles(values, ins).view(outs, -1, 32)[..., order].view(outs, -1, 2)
        return (codes_ON[..., 0] | codes_ON[..., 1] << 4).contiguous()
    order = torch.tensor(_EIGHT_BITS, device=values.device)
    codes_OI = values.view(torch.uint8).view(outs, -1, 16)[..., order].view(outs, ins)
    return codes_OI ^ 0x80 if kind.codes == INT8 else codes_OI.contiguous()


def _line_scales(weight: Stored) -> Tensor:
    """Return the scales of groups, of each output or of each eight, [lines, groups]."""
    scale = weight.parts["scale"]
    if not isinstance(weight.format, Fp8):
        return scale
    assert weight.format.block is not None
    lines = weight.shape[-2] // _LINES_OF_SCALE
    return scale.repeat_interleave(weight.format.block[0] // _LINES_OF_SCALE, 0)[:lines]


def _by_group(numbers_LG: Tensor, spec: PartSpec) -> Tensor:
    """Return numbers of lines and groups as [groups, lines], with zeros up to whole chunks and tiles."""
    lines, groups = numbers_LG.shape
    padded_GL = numbers_LG.new_zeros(spec.shape)
    padded_GL[:groups, :lines] = numbers_LG.T
    return padded_GL
