"""`Kind`: the properties of codes that a kernel is compiled for, each of which is handled in one place; no tensors.

A weight is `(code - zero) * scale`, or `code * scale + minimum`. A kind says how a code becomes a number, how many
inputs share the constants of a group, which constants a group has, and how its scale is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

__all__ = [
    "E2M1", "E4M3", "INT4", "INT5", "INT6", "INT8", "LINES_OF_SCALE", "LINES_OF_TABLE", "SPAN", "TABLE", "CodeName",
    "Kind", "ScaleName",
]  # fmt: skip

CodeName: TypeAlias = Literal["fp8", "int8", "int4", "int5", "int6", "fp4", "table4"]
ScaleName: TypeAlias = Literal["plain", "float32", "e8m0", "factors", "e4m3 times", "e4m3 over"]
"""How scales are stored. "plain": 16 bits, but float32 for 8-bit floats and where an output has one scale. "e8m0":
exponents of 8 bits with an offset of 127. "factors": integers of 8 bits, as minima are then, times a float16 number for
each `SPAN` inputs. "e4m3 times" and "e4m3 over": 8-bit floats times or over a float32 number for each output."""

E4M3: Final = "fp8"
INT8: Final = "int8"
INT4: Final = "int4"
INT5: Final = "int5"
INT6: Final = "int6"
E2M1: Final = "fp4"
TABLE: Final = "table4"
"""A code is the index of a number in a table of 16."""
LINES_OF_SCALE: Final = 8
"""Outputs that share a scale of a block of 8-bit floats, at least."""
LINES_OF_TABLE: Final = 8
"""Outputs that share a table."""
SPAN: Final = 256
"""Inputs that share a factor of their scales."""
_RING_GROUPS: Final = (32, 64, 128)
_NUMBERS: Final = {E4M3: 1, INT8: 2, INT4: 3, E2M1: 4}
"""Kinds of codes, as csrc/codes.cuh numbers them."""
_MIDDLES: Final = {INT8: 128, INT4: 8, INT5: 16, INT6: 32}


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of codes that a kernel is compiled for."""

    codes: CodeName
    group: int = 0
    """Inputs that share a scale; 0 where an output has one."""
    zeros: bool = False
    """Whether a group has a zero point, which is subtracted from its codes."""
    minima: bool = False
    """Whether a group has a minimum, which is added to its scaled codes."""
    scales: ScaleName = "plain"
    ordered: bool = False
    """Whether columns lie in an order of their own, in which the input has to be gathered."""
    blocks: bool = False
    """Whether each 128 outputs, from the first on, share their scales of 128 inputs, and are whole."""

    @property
    def name(self) -> str:
        """Name in lists and messages."""
        scales = {"plain": "", "float32": "-float32", "e8m0": "-e8m0", "factors": "-factors"}
        return (
            self.codes
            + (f"-g{self.group}" if self.group else "")
            + ("-zeros" if self.zeros else "")
            + ("-minima" if self.minima else "")
            + scales.get(self.scales, "-e4m3")
            + ("-divided" if self.scales == "e4m3 over" else "")
            + ("-ordered" if self.ordered else "")
            + ("-blocks" if self.blocks else "")
        )

    @property
    def in_order(self) -> Kind:
        """The same kind with its columns in the order of the inputs."""
        return replace(self, ordered=False)

    @property
    def in_lines(self) -> Kind:
        """The same kind for kernels that take each line's scales as they are."""
        return replace(self, blocks=False)

    # --- codes

    @property
    def bits(self) -> int:
        """Bits of a code that lie in chunks of 16 bytes: 4 or 8."""
        return 8 if self.codes in (E4M3, INT8) else 4

    @property
    def high(self) -> int:
        """Bits of a code above its first 4, which lie in words of their own, each with one bit of 32 codes."""
        return {INT5: 1, INT6: 2}.get(self.codes, 0)

    @property
    def chunk(self) -> int:
        """Inputs whose codes lie in 16 bytes."""
        return 128 // self.bits

    @property
    def pairs(self) -> int:
        """Pairs of codes in a word of 32 bits."""
        return 16 // self.bits

    @property
    def middle(self) -> int:
        """The code that stands for zero, where groups have neither zero points nor minima."""
        return 0 if self.zeros or self.minima else _MIDDLES.get(self.codes, 0)

    # --- constants of groups

    @property
    def parts(self) -> int:
        """Groups of which a chunk has inputs."""
        return self.chunk // self.group if 0 < self.group < self.chunk else 1

    @property
    def share(self) -> int:
        """Outputs that share a scale of a group."""
        return LINES_OF_SCALE if self.codes == E4M3 else 1

    @property
    def factors(self) -> int:
        """Rows of factors for each `SPAN` inputs: one for scales, and one for minima."""
        return 0 if self.scales != "factors" else 2 if self.minima else 1

    # --- csrc/

    @property
    def beyond_source(self) -> str | None:
        """Why the kernels of csrc/ do not multiply by such codes, in words; None if they do."""
        numbered = self.codes in _NUMBERS and not self.minima and self.scales == "plain"
        grouped = self.group in _RING_GROUPS and (self.codes == INT4 or not self.zeros)
        whole = not self.group and self.codes != INT4 and not self.zeros
        if numbered and not self.ordered and (grouped or whole):
            return None
        return (
            "takes 8-bit floats, and integers of 4 and 8 bits with 16-bit scales for 32, 64 or 128 inputs, "
            f"not {self.name}"
        )

    @property
    def beyond_expert_source(self) -> str | None:
        """Why the kernel of csrc/ for experts does not multiply by such codes; None if it does, as by MXFP4."""
        return None if self == Kind(E2M1, 32, scales="e8m0") else self.beyond_source

    @property
    def macros(self) -> dict[str, int]:
        """Values of the macros of csrc/codes.cuh."""
        return {"CODES": _NUMBERS[self.codes], "GROUP": self.group, "ZEROS": int(self.zeros)}
