"""`EXPERTS`: the declarations of the kernels that compute experts on CUDA, the preferred ones first.

Imports no compiler; the kernels run in running.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from headrace.ops.cuda.codes.kinds import E4M3
from headrace.ops.cuda.products.kernels import lacks_bfloat16, up_to
from headrace.ops.cuda.tuning.table import ANY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.codes.kinds import Kind
    from headrace.ops.cuda.experts.registry import ExpertKernel, ExpertRun, ExpertShape
    from headrace.ops.cuda.products.registry import ProductRoom

__all__ = ["EXPERTS", "DenseExperts", "RowExperts", "TileExperts", "VectorExperts"]

_LINE: Final = 64
"""Inputs in 128 bytes."""
_VECTOR_ROWS = 4
"""Most tokens of vector.py, whatever a tuning says: one program chooses for all."""


class VectorExperts:
    """Experts of few tokens without tensor cores (vector.py, coded/): each token reads its own."""

    name = "vector"

    def refuses(self, arch: Arch, shape: ExpertShape) -> str | None:
        """Return what the kernel misses: bfloat16."""
        return lacks_bfloat16(shape.dtype)

    def rows(self, arch: Arch, shape: ExpertShape) -> range:
        """Return the tokens of which hardly two choose the same expert."""
        return up_to(_VECTOR_ROWS, arch.tuning.expert_vector_rows)

    def open(self, room: ProductRoom) -> ExpertRun:
        """Return the Triton kernels."""
        from headrace.ops.cuda.experts.running import VectorExpertsRun

        return VectorExpertsRun(room)

    def builds(self, arch: Arch, kinds: Sequence[Kind]) -> Sequence[Callable[[], object]]:
        """Return nothing: Triton compiles at the first launch."""
        return ()


class RowExperts:
    """Experts in codes on Hopper (coded/rows.py), whose codes become bfloat16 once for up to 64 rows."""

    name = "rows"

    def refuses(self, arch: Arch, shape: ExpertShape) -> str | None:
        """Return what the kernel misses: codes that it knows, whole lines, bfloat16, or Hopper."""
        for kind in (shape.gate_up, shape.down):
            if kind is None:
                return "takes weights in codes"
            if (beyond := kind.beyond_expert_source) is not None:
                return beyond
        return _lacks_lines(shape) or lacks_bfloat16(shape.dtype) or arch.lacks("wgmma")

    def rows(self, arch: Arch, shape: ExpertShape) -> range:
        """Return the tokens for which no other kernel is faster; more are multiplied as 8-bit floats by such."""
        in_floats = [kind is not None and kind.codes == E4M3 for kind in (shape.gate_up, shape.down)]
        return arch.tuning.expert_float_rows if all(in_floats) else arch.tuning.expert_rows

    def open(self, room: ProductRoom) -> ExpertRun:
        """Return the kernel of csrc/ with Triton's around it."""
        from headrace.ops.cuda.experts.coded.row_run import RowExpertsRun

        return RowExpertsRun(room)

    def builds(self, arch: Arch, kinds: Sequence[Kind]) -> Sequence[Callable[[], object]]:
        """Return the functions that compile the source for those of `kinds` that it takes."""
        if arch.lacks("wgmma"):
            return ()
        return [
            functools.partial(_build, "expert_rows", kind.macros) for kind in kinds if kind.beyond_expert_source is None
        ]


class DenseExperts:
    """Dense experts on Hopper (dense.py), in tiles that take as much arithmetic as they have rows."""

    name = "dense"

    def refuses(self, arch: Arch, shape: ExpertShape) -> str | None:
        """Return what the kernel misses: dense weights, whole lines, bfloat16, or Hopper."""
        if shape.gate_up is not None or shape.down is not None:
            return "takes dense weights"
        return _lacks_lines(shape) or lacks_bfloat16(shape.dtype) or arch.lacks("wgmma")

    def rows(self, arch: Arch, shape: ExpertShape) -> range:
        """Return the tokens for which Triton's tiles are slower."""
        return arch.tuning.expert_dense_rows

    def open(self, room: ProductRoom) -> ExpertRun:
        """Return the kernel of csrc/ with Triton's around it."""
        from headrace.ops.cuda.experts.dense_run import DenseExpertsRun

        return DenseExpertsRun(room)

    def builds(self, arch: Arch, kinds: Sequence[Kind]) -> Sequence[Callable[[], object]]:
        """Return the function that compiles the source: other weights of a model may be in codes, and experts not."""
        return () if arch.lacks("wgmma") else (functools.partial(_build, "expert_dense", {}),)


class TileExperts:
    """Experts of any number of tokens by tensor cores (tiles.py, coded/): those of a tile read one together."""

    name = "tiles"

    def refuses(self, arch: Arch, shape: ExpertShape) -> str | None:
        """Return what the kernel misses: bfloat16."""
        return lacks_bfloat16(shape.dtype)

    def rows(self, arch: Arch, shape: ExpertShape) -> range:
        """Return any number of tokens: what no other kernel takes is left to this one."""
        return ANY

    def open(self, room: ProductRoom) -> ExpertRun:
        """Return the Triton kernels."""
        from headrace.ops.cuda.experts.running import TileExpertsRun

        return TileExpertsRun(room)

    def builds(self, arch: Arch, kinds: Sequence[Kind]) -> Sequence[Callable[[], object]]:
        """Return nothing: Triton compiles at the first launch."""
        return ()


def _lacks_lines(shape: ExpertShape) -> str | None:
    if shape.hidden % _LINE or shape.size % _LINE:
        return f"takes multiples of {_LINE} inputs, not {(shape.hidden, shape.size)}"
    return None


def _build(source: str, macros: Mapping[str, int]) -> None:
    from headrace.ops.cuda.compiling.source import compiled

    compiled(source, **macros)


EXPERTS: Final[tuple[ExpertKernel, ...]] = (VectorExperts(), RowExperts(), DenseExperts(), TileExperts())
