"""Product kernels in C: pack stored weights for them, and multiply; never choose between kernels.

`NativeKernel` multiplies 4- to 8-bit weights with activations in 8 bits, one scale for 32 of them. Where columns have
an order of their own, activations are put in that order before they are rounded. `NativeDenseKernel` multiplies
bfloat16 and float32 weights with activations of the same dtype. Both sum in float32, and compute every row alike,
however many there are.
"""

from __future__ import annotations

import threading
from ctypes import c_void_p
from typing import TYPE_CHECKING, NamedTuple

import torch
from gguf import GGMLQuantizationType as Kind

from headrace.ops.cpu.linear import ANY_ROWS, KeptWeight, not_a_matrix
from headrace.ops.cpu.native.integers import as_integers, integers_of
from headrace.ops.cpu.native.library import Context, LinearStruct, MatrixStruct, library
from headrace.ops.formats import Dense, Int4Groups, Stacked, Stored
from headrace.ops.gguf_formats import GgufBlocks
from headrace.ops.quantised import IntGroups, unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.cpu.linear import CpuLinear
    from headrace.ops.formats import Format

__all__ = ["NativeDenseKernel", "NativeKernel", "NativeLinear", "as_floats"]

_LANES, _GROUP, _SUPER = 16, 32, 256
_STRIP = 32  # outputs of a block of a dense matrix
_F16, _F16_MIN, _F32, _F32_MIN, _K_MIN, _K16, _DENSE_BF16, _DENSE_F32 = range(8)


class _Layout(NamedTuple):
    """Bits of a code, kind of scale (`ScaleKind` in native.h) and the code that stands for zero."""

    bits: int
    scale: int
    zero: int


_LAYOUTS = {
    Kind.Q4_0: _Layout(4, _F16, 8),
    Kind.Q4_1: _Layout(4, _F16_MIN, 0),
    Kind.Q5_0: _Layout(5, _F16, 16),
    Kind.Q5_1: _Layout(5, _F16_MIN, 0),
    Kind.Q8_0: _Layout(8, _F16, 128),
    Kind.Q4_K: _Layout(4, _K_MIN, 0),
    Kind.Q5_K: _Layout(5, _K_MIN, 0),
    Kind.Q6_K: _Layout(6, _K16, 32),
}
_READS_CODES, _READS_FLOATS, _READS_HALVES = 1, 2, 4  # as native.h has them
_READS = {_DENSE_F32: _READS_FLOATS, _DENSE_BF16: _READS_HALVES}
_DENSE = {torch.bfloat16: _Layout(16, _DENSE_BF16, 0), torch.float32: _Layout(32, _DENSE_F32, 0)}


class _Matrix(NamedTuple):
    """A packed matrix, and the tensors that its pointers refer to."""

    struct: MatrixStruct
    kept: tuple[Tensor, ...]
    order_I: Tensor | None = None
    """Input of each column, int32; None where columns are as the inputs are."""


class NativeLinear:
    """A packed weight, its bias, and what they look like to the kernels."""

    def __init__(self, matrices: Sequence[_Matrix], bias_O: Tensor | None, dtype: torch.dtype) -> None:
        """Take matrices of the same inputs, one above the other; results of `__call__` have `dtype`."""
        self._kept = [matrix.kept for matrix in matrices]
        self._bias_O = None if bias_O is None else bias_O.float().contiguous()
        self._dtype = dtype
        self._structs = (MatrixStruct * len(matrices))(*(matrix.struct for matrix in matrices))
        self.outs = sum(matrix.struct.outs for matrix in matrices)
        """Number of outputs."""
        self.ins: int = matrices[0].struct.ins
        """Number of inputs."""
        self._orders: list[Tensor | None] = []
        reads = 0
        for struct, matrix in zip(self._structs, matrices, strict=True):
            needs = _READS.get(struct.scale, _READS_CODES)
            reads |= needs
            if needs == _READS_CODES:
                struct.order = _index_in(self._orders, matrix.order_I)
        orders = (c_void_p * len(self._orders))(*(None if each is None else each.data_ptr() for each in self._orders))
        sizes = len(matrices), self.outs, self.ins, reads, len(self._orders)
        bias = None if self._bias_O is None else self._bias_O.data_ptr()
        self.struct = LinearStruct(*sizes, self._structs, orders, bias)
        """The weight as the C interface takes it."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return x W^T + b in the dtype that the weight was packed for, computed in the calling thread."""
        y_NO = torch.empty(x_NI.shape[0], self.outs)
        self.run(_own_context(), x_NI, y_NO)
        return y_NO.to(self._dtype)

    def run(self, context: Context, x_NI: Tensor, y_NO: Tensor, *, adds: bool = False) -> None:
        """Write x W^T + b into `y_NO`, float32, or add it to what lies there.

        Raises:
            MemoryError: There is no memory for the activations.
        """
        x_NI = as_floats(x_NI)
        kernels = context.kernels
        if kernels.headrace_linear(context.handle, self.struct, x_NI.data_ptr(), x_NI.shape[0], y_NO.data_ptr(), adds):
            raise MemoryError(f"no memory for the activations of {x_NI.shape[0]} tokens")

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, without the bias."""
        return sum(tensor.nbytes for kept in self._kept for tensor in kept)

    def read_rows(self, ids_N: Tensor) -> Tensor:
        """Return the rows `ids_N` (int32 or int64) of a weight of one matrix, float32 [N, in]."""
        assert len(self._kept) == 1
        ids_N = ids_N.long().contiguous()
        rows_NI = torch.empty(len(ids_N), self.ins)
        kernels = library()
        assert kernels is not None
        kernels.headrace_read_rows(self._structs, ids_N.data_ptr(), len(ids_N), rows_NI.data_ptr())
        order_I = self._orders[0] if self._orders else None
        return rows_NI if order_I is None else rows_NI[:, order_I.argsort()]


class NativeKernel:
    """Product of 4- to 8-bit weights with 8-bit activations, in C."""

    name = "native"

    def refuses(self, weight: Stored, dtype: torch.dtype) -> str | None:
        """Return why the kernels cannot multiply by a weight here; None if they can."""
        reason = _refuses(weight)
        if reason is not None:
            return reason
        if dtype is not torch.bfloat16:
            return f"rounds activations to 8 bits, which is for bfloat16, not for {str(dtype).removeprefix('torch.')}"
        return None if library() is not None else "there are no compiled kernels"

    def rows(self, _weight: Stored) -> range:
        """Return all numbers of rows."""
        return ANY_ROWS

    def pack(self, weight: Stored, bias_O: Tensor | None, dtype: torch.dtype) -> CpuLinear:
        """Copy the codes into blocks of 16 outputs; the bytes stay about those of the format."""
        return NativeLinear([_packed(piece) for piece in weight.pieces()], bias_O, dtype)

    def kept(self, weight: Stored, _dtype: torch.dtype) -> list[KeptWeight]:
        """Return the bytes of each piece's blocks."""
        return [_kept(piece) for piece in weight.pieces()]


class NativeDenseKernel:
    """Product of any weight, dense in the dtype of the arithmetic, with activations rounded to that dtype, in C.

    In bfloat16, the matrices of a weight of several formats that have codes keep their codes.
    """

    name = "native dense"

    def refuses(self, weight: Stored, dtype: torch.dtype) -> str | None:
        """Return why the kernel cannot multiply by a weight here; None if it can."""
        if len(weight.shape) != 2:
            return not_a_matrix(weight)
        if dtype not in _DENSE:
            return f"multiplies in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
        return None if library() is not None else "there are no compiled kernels"

    def rows(self, _weight: Stored) -> range:
        """Return all numbers of rows."""
        return ANY_ROWS

    def pack(self, weight: Stored, bias_O: Tensor | None, dtype: torch.dtype) -> CpuLinear:
        """Copy each matrix into blocks of 32 outputs, or of 16 with its codes."""
        pieces = [_packed(piece) if _keeps_codes(piece, dtype) else _dense(piece, dtype) for piece in weight.pieces()]
        return NativeLinear(pieces, bias_O, dtype)

    def kept(self, weight: Stored, dtype: torch.dtype) -> list[KeptWeight]:
        """Return the bytes of each piece's blocks."""
        return [
            _kept(piece)
            if _keeps_codes(piece, dtype)
            else KeptWeight(Dense(dtype).name, sum(_sizes(piece, _DENSE[dtype])))
            for piece in weight.pieces()
        ]


def as_floats(x: Tensor) -> Tensor:
    """Return a tensor's numbers in float32 and in order, the very tensor if they are."""
    if x.dtype is not torch.float32:
        x = x.float()
    return x if x.is_contiguous() else x.contiguous()


_own = threading.local()


def _own_context() -> Context:
    """Return the calling thread's context, of one thread."""
    if not hasattr(_own, "context"):
        _own.context = Context(1)
    context: Context = _own.context
    return context


def _refuses(weight: Stored) -> str | None:
    if len(weight.shape) != 2:
        return not_a_matrix(weight)
    if isinstance(weight.format, Stacked):
        reasons = (_refuses(piece) for piece in weight.pieces())
        return next((reason for reason in reasons if reason is not None), None)
    reason, ins = _refuses_format(weight.format), weight.shape[-1]
    if reason is not None:
        return reason
    return f"takes inputs in a multiple of {_GROUP}, not {ins}" if ins % _GROUP else None


def _refuses_format(format: Format) -> str | None:
    """Return why the kernels multiply by no matrix of a format as it is stored; None if they do."""
    if not isinstance(format, GgufBlocks | Int4Groups | IntGroups):
        return f"multiplies by blocks of GGUF and by groups of integers, not by {format.name}"
    if isinstance(format, Int4Groups | IntGroups) and (format.group or 0) % _GROUP:
        return f"takes groups of a multiple of {_GROUP} inputs, not of {format.group}"
    return None


def _sizes(weight: Stored, layout: _Layout, shared: int = 1) -> tuple[int, ...]:
    """Return the bytes of the three tensors of a packed matrix: codes, and two for scales and what goes with them."""
    outs, ins = weight.shape
    if layout.scale >= _DENSE_BF16:
        return -(-outs // _STRIP) * _STRIP * -(-ins // 2) * 2 * layout.bits // 8, 0, 0
    blocks, groups = -(-outs // _LANES), ins // _GROUP
    many = -(-groups // shared)
    sizes = {
        _F16: (groups * 32, 0),
        _F16_MIN: (groups * 64, 0),
        _F32: (many * 64, 0),
        _F32_MIN: (many * 128, 0),
        _K_MIN: (groups * 32, ins // _SUPER * 64),
        _K16: (groups * 32, ins // _SUPER * 32),
    }
    return tuple(blocks * size for size in (groups * 64 * layout.bits, *sizes[layout.scale]))


def _allocate(weight: Stored, layout: _Layout, shared: int = 1) -> _Matrix:
    """Return a matrix of zeros, or of anything where packing writes every byte."""
    outs, ins = weight.shape
    is_filled = layout.scale >= _DENSE_BF16 and outs % _STRIP == 0 and ins % 2 == 0
    make = torch.empty if is_filled else torch.zeros
    kept = tuple(make(size, dtype=torch.uint8) for size in _sizes(weight, layout, shared))
    return _Matrix(MatrixStruct(outs, ins, *layout, shared, 0, *(each.data_ptr() for each in kept)), kept)


def _index_in(orders: list[Tensor | None], order_I: Tensor | None) -> int:
    """Return the place of an order among others, to which it is added if it is none of them."""
    for place, other_I in enumerate(orders):
        if order_I is other_I or (order_I is not None and other_I is not None and torch.equal(order_I, other_I)):
            return place
    orders.append(order_I)
    return len(orders) - 1


def _layout_of(format: Format, ins: int) -> tuple[_Layout, int]:
    """Return the layout of a matrix of codes with `ins` inputs, and how many groups of 32 share a scale."""
    if isinstance(format, GgufBlocks):
        return _LAYOUTS[format.kind], 1
    if isinstance(format, Int4Groups):
        return _Layout(4, _F32_MIN, 0), format.group // _GROUP
    assert isinstance(format, IntGroups)
    zero = 8 if format.bits == 4 else 128
    return _Layout(format.bits, _F32_MIN if format.zeros else _F32, zero), (format.group or ins) // _GROUP


def _keeps_codes(weight: Stored, dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and _refuses(weight) is None


def _kept(weight: Stored) -> KeptWeight:
    format, ins = integers_of(weight.format), weight.shape[-1]
    order = 4 * ins if isinstance(format, IntGroups) and format.ordered else 0
    return KeptWeight(format.name, sum(_sizes(weight, *_layout_of(format, ins))) + order)


def _packed(weight: Stored) -> _Matrix:
    kernels = library()
    assert kernels is not None
    weight = as_integers(weight)
    format = weight.format
    layout, shared = _layout_of(format, weight.shape[-1])
    matrix = _allocate(weight, layout, shared)
    if isinstance(format, GgufBlocks):
        codes, constants = (weight.parts[name].contiguous() for name in ("codes", "constants"))
        kernels.headrace_pack_blocks(matrix.struct, int(format.kind), codes.data_ptr(), constants.data_ptr())
        return matrix
    if isinstance(format, Int4Groups):
        parts = [weight.parts[name].contiguous() for name in ("values", "scale", "minimum")]
    else:
        assert isinstance(format, IntGroups)
        codes, scale = weight.parts["values"], weight.parts["scale"].float()
        parts = [unpack_nibbles(codes, weight.shape[-1]) if format.bits == 4 else codes, scale]
        if format.zeros:  # (code - zero) * scale = (code - 8) * scale + (8 - zero) * scale
            parts.append((layout.zero - weight.parts["zero"].float()) * scale)
        parts = [part.contiguous() for part in parts]
    pointers = [part.data_ptr() for part in parts]
    kernels.headrace_pack_codes(matrix.struct, *pointers, *[None] * (3 - len(pointers)))
    if "order" not in weight.parts:
        return matrix
    order_I = weight.parts["order"].contiguous()
    return _Matrix(matrix.struct, (*matrix.kept, order_I), order_I)


def _dense(weight: Stored, dtype: torch.dtype) -> _Matrix:
    kernels = library()
    assert kernels is not None
    matrix, dense_OI = _allocate(weight, _DENSE[dtype]), weight.dense(dtype).contiguous()
    kernels.headrace_pack_dense(matrix.struct, dense_OI.data_ptr())
    return matrix
