"""`NativeLayer`: a whole layer of attention and a gated feed by one call of the kernels in C."""

from __future__ import annotations

from ctypes import pointer
from typing import TYPE_CHECKING

from headrace.ops.cpu.native.library import Context, HeadsStruct, LayerStruct
from headrace.ops.cpu.native.linear import NativeLinear, as_floats
from headrace.ops.cpu.step import CpuStep, NativeStep
from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace.ops.cpu.kv import CpuKv
    from headrace.ops.cpu.linear import CpuLinear
    from headrace.ops.layer_weights import AttentionWeights, FeedWeights

__all__ = ["NativeLayer"]


class NativeLayer:
    """A layer whose result has the bits that its operations give one after the other."""

    def __init__(
        self,
        context: Context,
        heads: HeadsStruct,
        attention: AttentionWeights[CpuLinear],
        feed: FeedWeights[CpuLinear],
        layer: int,
        floats: Callable[[Tensor], int],
    ) -> None:
        """Take the weights of the layer with the number `layer`, packed by the operations of `context`.

        `floats` returns the address of a norm's weight in float32, which it keeps as long as the weight is there.
        """
        self._norms = (attention.norm_E, *(attention.head_norms or (None, None)), feed.norm_E)
        self._linears = [_native(each) for each in (attention.qkv, attention.o, feed.gate_up, feed.down)]
        self._context, self._heads, self._layer, self._floats = context, heads, layer, floats
        self._struct: LayerStruct | None = None

    def __call__(self, stream: Stream, step: CpuStep, kv: CpuKv) -> Stream:
        """Return the stream with the results of both halves added.

        Raises:
            MemoryError: There is no memory for the step's activations.
        """
        assert isinstance(step, NativeStep)
        if self._struct is None:  # not before all weights are packed: norms of an earlier model are dropped then
            self._struct = self._made()
        x_NE, context = _summed(stream), self._context
        rows, address = len(x_NE), kv.rows[self._layer].data_ptr()
        if context.kernels.headrace_layer(
            context.handle, self._heads, step.struct, self._struct, self._layer, x_NE.data_ptr(), address, rows
        ):
            raise MemoryError("no memory for a step's activations")
        return Stream(x_NE)

    def _made(self) -> LayerStruct:
        norm, q_norm, k_norm, feed_norm = (None if each is None else self._floats(each) for each in self._norms)
        qkv, o, gate_up, down = (pointer(each.struct) for each in self._linears)
        return LayerStruct(norm, q_norm, k_norm, qkv, o, feed_norm, gate_up, down)


def _native(packed: CpuLinear) -> NativeLinear:
    assert isinstance(packed, NativeLinear)
    return packed


def _summed(stream: Stream) -> Tensor:
    """Return the sum of the stream, float32, in memory that may be overwritten."""
    x_NE = as_floats(stream.x_NE)
    return x_NE if stream.total_NE is None else stream.total_NE.add_(x_NE)
