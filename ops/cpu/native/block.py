"""`NativeOps`: one decoder step's operations on the CPU in C.

Activations are float32 between the operations, codes of 8 bits inside products with quantised weights. Every row is
computed alike, however many rows, threads and chunks a step has. Keys lie transposed in their pages, [K, D, T].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.ops.cpu.activation import activate, activate_plain
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.experts import NativeExperts
from headrace.ops.cpu.native.layer import NativeLayer
from headrace.ops.cpu.native.library import Context, HeadsStruct, StepStruct
from headrace.ops.cpu.native.linear import NativeDenseKernel, NativeKernel, NativeLinear, as_floats
from headrace.ops.cpu.norms import layer_norm
from headrace.ops.cpu.step import CpuStep, NativeStep
from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from headrace.ops.cpu.kv import CpuKv
    from headrace.ops.cpu.linear import CpuLinear
    from headrace.ops.experts import Experts
    from headrace.ops.formats import Stored
    from headrace.ops.layer_weights import AttentionWeights, FeedWeights
    from headrace.ops.paged import PagedBatch
    from headrace.ops.stream import Activation, HeadNorms, LayerNorm, PlainActivation

__all__ = ["NativeOps"]

_PRODUCTS = (NativeKernel(), NativeDenseKernel())
_BLOCK_QUERIES = 64  # of one row: several blocks of a prompt can be shared among threads
_QUERIES = np.dtype(
    [("token", "i4"), ("count", "i4"), ("table", "i8"), ("position", "i8"), ("offset", "i8")], align=True
)
_NO_MEMORY = "no memory for a step's activations"


class NativeOps(CpuOps):
    """The operations of one model's step on the CPU, in C."""

    def __init__(
        self,
        context: Context,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        window: int | None = None,
        scale: float | None = None,
        early: tuple[Tensor, Tensor] | None = None,
        growth_P: Tensor | None = None,
        only_queries: bool = False,
    ) -> None:
        """Take the threads and memory of `context`, which several may share; the rest is that of `CpuOps`.

        `dtype` is that of dense weights, keys and values; activations are float32 in any case.
        """
        super().__init__(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            eps=eps,
            cos=cos,
            sin=sin,
            dtype=dtype,
            window=window,
            scale=scale,
            products=_PRODUCTS,
            early=early,
            growth_P=growth_P,
            only_queries=only_queries,
        )
        self._context = context
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}
        self._tables = cos.float().contiguous(), sin.float().contiguous()
        pointers = (table.data_ptr() for table in self._tables)
        sizes = heads, kv_heads, head_dim, page_size
        flags = dtype is torch.float32, only_queries
        self._heads = HeadsStruct(*sizes, *flags, window or 0, self.scale, eps, *pointers)

    @property
    def rows_are_alike(self) -> bool:
        """Whether a row has the same bits however many rows are computed with it."""
        return True

    def rest(self) -> None:
        """Let the helper threads sleep: no step runs."""
        if self._context.handle is not None:
            self._context.kernels.headrace_step(self._context.handle, 0)

    def close(self) -> None:
        """Join the helper threads; idempotent."""
        self._context.close()

    def prepare(self, batch: PagedBatch) -> CpuStep:
        """Return the values that a step's layers share; raise `ValueError` unless its rows cover its tokens once."""
        batch.check_cover()
        self._context.kernels.headrace_step(self._context.handle, 1)
        positions_N, slots_N = batch.positions_N.numpy(), batch.slots_N.numpy()
        queries, tables = _queries(batch)
        queries["offset"] = positions_N[queries["token"]] - queries["position"]
        pages = np.concatenate(tables)
        given = [(each.tokens_M.numpy(), each.kv_LMsD.float().contiguous()) for each in batch.given]
        given_N2 = _given(given, len(positions_N)) if given else None
        struct = StepStruct(
            len(positions_N),
            len(queries),
            *(each.ctypes.data for each in (positions_N, slots_N, pages, queries)),
            None if given_N2 is None else given_N2.ctypes.data,
        )
        kept = (positions_N, slots_N, pages, queries, given_N2, given)
        return NativeStep(len(positions_N), batch.positions_N, struct, kept)

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor) -> Tensor:
        """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, float32."""
        return self.normed(Stream(x_NE), weight_E)[0]

    def activate(self, gate_up_N2F: Tensor, activation: Activation) -> Tensor:
        """Return `activation(gate) * up`, float32, where the input holds gate, then up."""
        gate_up_N2F = as_floats(gate_up_N2F)
        if activation != "silu":
            return activate(gate_up_N2F, activation)
        rows, width = gate_up_N2F.shape
        y_NF = torch.empty(rows, width // 2)
        context = self._context
        context.kernels.headrace_silu_mul(context.handle, gate_up_N2F.data_ptr(), rows, width // 2, y_NF.data_ptr())
        return y_NF

    def activate_plain(self, x_NF: Tensor, activation: PlainActivation) -> Tensor:
        """Return `activation(x)`, float32; torch's GELU by tanh depends on where a row lies, so that is not used."""
        x_NF = as_floats(x_NF)
        if activation != "gelu_tanh":
            return activate_plain(x_NF, activation)
        context = self._context
        context.kernels.headrace_gelu_tanh(context.handle, x_NF.data_ptr(), *x_NF.shape, x_NF.data_ptr())
        return x_NF

    def layer_norm(self, x_NE: Tensor, norm: LayerNorm) -> Tensor:
        """Return the layer norm of each token, float32."""
        return layer_norm(as_floats(x_NE), norm, self._epsilon)

    def whole_layer(
        self, attention: AttentionWeights[CpuLinear], feed: FeedWeights[CpuLinear], layer: int
    ) -> NativeLayer:
        """Return the layer with the number `layer` as one operation."""
        return NativeLayer(self._context, self._heads, attention, feed, layer, self._float)

    def pack_experts(self, experts: Experts) -> NativeExperts:
        """Pack a layer's router and experts."""
        return NativeExperts(experts, self._context, self.pack, self.products)

    def pack_head(self, weight_VE: Stored) -> CpuLinear:
        """Pack the output head's weight for `logits`."""
        self._norms.clear()  # of a model that was loaded before
        return self.pack(weight_VE, None)

    def logits(self, x_SE: Tensor, head: CpuLinear) -> Tensor:
        """Return the output head's product, in float32."""
        return self._product(x_SE, head)

    def embed(self, x_NE: Tensor, _tokens_N: Tensor) -> Tensor:
        """Return the embeddings in float32."""
        return as_floats(x_NE)

    def attend(
        self,
        stream: Stream,
        norm_E: Tensor,
        qkv: CpuLinear,
        head_norms: HeadNorms | None,
        step: CpuStep,
        kv: CpuKv,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Norm, multiply by `qkv`, rotate, store and attend; return (the result, the sum of the stream)."""
        assert isinstance(step, NativeStep) and isinstance(qkv, NativeLinear)
        x_NE, added_NE = _pair(stream)
        norms, o_NX = self._norms_and_room(head_norms, step)
        context = self._context
        failed = context.kernels.headrace_attend(
            context.handle,
            self._heads,
            step.struct,
            layer,
            x_NE.data_ptr(),
            None if added_NE is None else added_NE.data_ptr(),
            x_NE.data_ptr(),
            self._float(norm_E),
            qkv.struct,
            *norms,
            kv.rows[layer].data_ptr(),
            o_NX.data_ptr(),
            x_NE.shape[0],
        )
        return _checked(failed, o_NX), x_NE

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: CpuLinear, _layer: int) -> tuple[Tensor, Tensor]:
        """Return (silu(gate) * up of the norm's product, the sum of the stream)."""
        assert isinstance(gate_up, NativeLinear)
        x_NE, added_NE = _pair(stream)
        y_NF = torch.empty(x_NE.shape[0], gate_up.outs // 2)
        context = self._context
        failed = context.kernels.headrace_feed(
            context.handle,
            x_NE.data_ptr(),
            None if added_NE is None else added_NE.data_ptr(),
            x_NE.data_ptr(),
            self._float(norm_E),
            self._epsilon,
            gate_up.struct,
            y_NF.data_ptr(),
            x_NE.shape[0],
        )
        return _checked(failed, y_NF), x_NE

    def add(
        self, x_NI: Tensor, packed: CpuLinear, total_NE: Tensor, _norm_E: Tensor | None, _layer: int, _site: str
    ) -> Stream:
        """Return the sum so far with the product added to it."""
        assert isinstance(packed, NativeLinear)
        packed.run(self._context, x_NI, total_NE, adds=True)
        return Stream(total_NE)

    def linear(self, x_NI: Tensor, packed: CpuLinear, _layer: int, _site: str) -> Tensor:
        """Return x W^T + b, float32."""
        return self._product(x_NI, packed)

    def summed(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the sum, float32, twice."""
        x_NE, added_NE = _pair(stream)
        total_NE = x_NE if added_NE is None else x_NE.add_(added_NE)
        return total_NE, total_NE

    def normed(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return (RMS norm of the sum, the sum), both float32."""
        x_NE, added_NE = _pair(stream)
        return self._norm(x_NE, added_NE, self._float(norm_E), self._epsilon), x_NE

    def norm_with(self, x_NC: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
        """Return the RMS norm of vectors with an epsilon of their own."""
        weight_C = weight_C.float().contiguous()
        return self._norm(as_floats(x_NC), None, weight_C.data_ptr(), epsilon).to(x_NC.dtype)

    def _norm(self, x_NE: Tensor, added_NE: Tensor | None, weight: int, epsilon: float) -> Tensor:
        """Return the RMS norm of the sum, which overwrites `x_NE`; `weight` is the address of the norm's weight."""
        normed_NE = torch.empty_like(x_NE)
        context = self._context
        failed = context.kernels.headrace_norm(
            context.handle,
            x_NE.data_ptr(),
            None if added_NE is None else added_NE.data_ptr(),
            x_NE.data_ptr(),
            weight,
            epsilon,
            *x_NE.shape,
            normed_NE.data_ptr(),
        )
        return _checked(failed, normed_NE)

    def attend_with(self, qkv_NX: Tensor, head_norms: HeadNorms | None, step: CpuStep, kv: CpuKv, layer: int) -> Tensor:
        """Rotate, store and attend; the queries, keys and values are overwritten."""
        assert isinstance(step, NativeStep)
        qkv_NX = as_floats(qkv_NX)
        norms, o_NX = self._norms_and_room(head_norms, step)
        context = self._context
        failed = context.kernels.headrace_attend_with(
            context.handle,
            self._heads,
            step.struct,
            layer,
            *norms,
            kv.rows[layer].data_ptr(),
            qkv_NX.data_ptr(),
            o_NX.data_ptr(),
        )
        return _checked(failed, o_NX)

    def _norms_and_room(self, head_norms: HeadNorms | None, step: NativeStep) -> tuple[list[int | None], Tensor]:
        """Return (addresses of the norms of heads, or None, and room for the result of attention [N, H * D])."""
        norms: list[int | None] = [None, None] if head_norms is None else [self._float(each) for each in head_norms]
        return norms, torch.empty(step.tokens, self.heads * self.head_dim)

    def _float(self, weight: Tensor) -> int:
        """Return the address of a norm's weight in float32, which is kept together with the weight."""
        kept = self._norms.get(id(weight))
        if kept is None:
            kept = self._norms[id(weight)] = (weight, weight.float().contiguous())
        return kept[1].data_ptr()

    def _product(self, x_NI: Tensor, packed: CpuLinear) -> Tensor:
        assert isinstance(packed, NativeLinear)
        y_NO = torch.empty(x_NI.shape[0], packed.outs)
        packed.run(self._context, x_NI, y_NO)
        return y_NO


def _checked(failed: int, result: Tensor) -> Tensor:
    if failed:
        raise MemoryError(_NO_MEMORY)
    return result


def _pair(stream: Stream) -> tuple[Tensor, Tensor | None]:
    """Return the stream as one tensor that may be overwritten and one to add to it, if any, float32."""
    x_NE, total_NE, _ = stream
    x_NE = as_floats(x_NE)
    return (x_NE, None) if total_NE is None else (total_NE, x_NE)


def _queries(batch: PagedBatch) -> tuple[NDArray[np.void], list[NDArray[np.int64]]]:
    """Return the blocks of queries of all rows, without their offsets, and the rows' page tables."""
    blocks, tables = [], []
    at = 0
    for group in batch.decodes:
        rows, width = group.pages_RP.shape
        found = np.empty(rows, _QUERIES)
        found["token"] = np.arange(group.start, group.start + rows)
        found["count"] = 1
        found["table"] = np.arange(at, at + rows * width, max(width, 1))
        found["position"] = group.lengths_R.numpy() - 1
        blocks.append(found)
        tables.append(group.pages_RP.numpy().reshape(-1))
        at += rows * width
    for row in batch.prefills:
        firsts = np.arange(0, row.count, _BLOCK_QUERIES)
        found = np.empty(len(firsts), _QUERIES)
        found["token"] = row.start + firsts
        found["count"] = np.minimum(row.count - firsts, _BLOCK_QUERIES)
        found["table"] = at
        found["position"] = row.length - row.count + firsts
        blocks.append(found)
        tables.append(row.pages_P.numpy())
        at += len(row.pages_P)
    return np.concatenate(blocks), tables


def _given(given: Sequence[tuple[NDArray[np.int64], Tensor]], tokens: int) -> NDArray[np.int64]:
    """Return, for each token, the address of its given keys and values in layer 0 and the bytes from layer to layer."""
    found = np.zeros((tokens, 2), np.int64)
    for tokens_M, kv_LMsD in given:
        found[tokens_M, 0] = kv_LMsD.data_ptr() + kv_LMsD[0, 0].nbytes * np.arange(len(tokens_M))
        found[tokens_M, 1] = kv_LMsD[0].nbytes
    return found
