"""`CudaOps`: the operations of a decoder's block on CUDA, each by the kernel that is fastest for the number of tokens.

Owns the layout of KV pages on the device and the choice between kernels; never picks pages, samples or loads. Results
are allocated when they are needed: inside a captured graph from its pool, so that replays reuse the same addresses.

Everything runs on the current stream, and one `CudaOps` belongs to one stream: split products share its scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from headrace.ops.cuda import fused
from headrace.ops.cuda.attention.steps import ATTENTION, CudaKv, CudaStep, DecodeStep, PrefillStep, WholeStep
from headrace.ops.cuda.between import BetweenOps
from headrace.ops.cuda.codes.layout import CodeLayout, codes_of
from headrace.ops.cuda.codes.rows import CodeRows
from headrace.ops.cuda.experts.packed import CudaExperts, ExpertProducts
from headrace.ops.cuda.hazards import Launch
from headrace.ops.cuda.heads import norm_rope_write
from headrace.ops.cuda.layer_norm import activate_plain, layer_norm
from headrace.ops.cuda.missing import Missing
from headrace.ops.cuda.products.fusion import GATED, SQUARED, AddNorm, HeadTargets, Residual, Squares
from headrace.ops.cuda.products.packed import Chosen, CudaProduct, Products
from headrace.ops.paged import UNSCALED, KvScales
from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import UpdateSite
    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.products.fusion import Before
    from headrace.ops.experts import Experts
    from headrace.ops.formats import Stored
    from headrace.ops.paged import PageShape
    from headrace.ops.stream import Activation, HeadNorms, LayerNorm, PlainActivation

__all__ = ["CudaOps"]

_GIVEN: Final = Launch("another library's kernel", overlaps=False, writes=frozenset(("activations",)))
_EMBEDDING: Final = Launch("the embedding", overlaps=False, writes=frozenset(("activations",)))


class CudaOps(BetweenOps, Missing):
    """The operations of one model's layers that share an attention window."""

    def __init__(
        self,
        shape: HeadShape,
        *,
        cos_sin_PD: Tensor,
        products: Products,
        experts: ExpertProducts | None = None,
        kv_scales: Mapping[int, KvScales] = MappingProxyType({}),
        early_cos_sin_PD: Tensor | None = None,
        growth_P: Tensor | None = None,
    ) -> None:
        """Compute with heads of `shape`.

        Args:
            shape: Heads, window, cache dtype.
            cos_sin_PD: Rotary table, float32 [positions, D]: D/2 cosines, then D/2 sines.
            products: The kernels of products on the one stream on which this runs.
            experts: The kernels of experts on that stream; None for those of `EXPERTS`.
            kv_scales: Scales of 8-bit keys and values, by layer; a 16-bit cache has none.
            early_cos_sin_PD: A second rotary table, for `rotate`.
            growth_P: Factors of queries, float32 [positions], for `grow`.
        """
        self.shape, self.products = shape, products
        self.experts = experts or ExpertProducts(products.arch, products.room)
        self.arch, self.eps, self.pdl = products.arch, products.room.eps, products.room.pdl
        self.device = cos_sin_PD.device
        self._cos_sin_PD, self._early_cos_sin_PD, self._growth_P = cos_sin_PD, early_cos_sin_PD, growth_P
        self._still_1D = torch.zeros_like(cos_sin_PD[:1])  # of angles of 0, without a magnitude
        self._still_1D[:, : shape.head_dim // 2] = 1.0
        self.note = products.room.chain.note
        """Notes a launch, for the check of hazards."""
        self._sinks: dict[int, Tensor] = {}
        self._kv_scales = kv_scales if shape.kv_dtype != shape.dtype else {}
        self._norm = Launch("a norm", self.pdl, writes=frozenset(("activations",)))
        self._rotation = Launch("the rotation", self.pdl, writes=frozenset(("activations", "new keys")))

    # --- pages

    @property
    def page_shape(self) -> PageShape:
        """Shape of what a layer keeps in one page: [2 (key, value), T, K, D]."""
        return (2, self.shape.page_size, self.shape.kv_heads, self.shape.head_dim)

    # --- what the decoder calls

    def given(self, qkv_NX: Tensor) -> Tensor:
        """Return queries, keys and values, [N, (H + 2 * K) * D], that a kernel of another library has written."""
        self.note(_GIVEN)
        return qkv_NX

    def pack(self, weight: Stored, bias_O: Tensor | None) -> CudaProduct:
        """Pack a weight and its bias, and choose the kernels; values in the dtype of activations keep their address."""
        dtype, pieces = self.shape.dtype, weight.pieces()
        if all(isinstance(piece.format, CodeLayout) for piece in pieces):
            codes = [codes_of(piece) for piece in pieces]
            return self.products.pack_codes(codes, bias_O, self.shape.head_dim, dtype)
        return self.products.pack(weight.dense(dtype), bias_O, self.shape.head_dim, dtype)

    def pack_head(self, weight_VE: Stored) -> CudaProduct:
        """Pack the output head's weight for `logits`."""
        return self.pack(weight_VE, None)

    def read_table(self, table_VE: Stored) -> CodeRows:
        """Return the rows of a table in codes, in the dtype of activations; the table is shared."""
        return CodeRows(codes_of(table_VE), self.shape.dtype)

    def keep_sinks(self, layer: int, sinks_H: Tensor) -> None:
        """Take the sinks of a layer's heads, float32, which are read where they lie."""
        self._sinks[layer] = sinks_H

    def pack_experts(self, experts: Experts) -> CudaExperts:
        """Pack a layer's router and experts; codes of one kind, and values in the dtype of activations, stay in place.

        Codes of several kinds, or whose columns lie in orders of their own, become values.
        """
        return self.experts.pack(experts, self.shape.dtype)

    def logits(self, x_SE: Tensor, head: CudaProduct) -> Tensor:
        """Return the product with the output head in float32, the dtype of its sums.

        From 16 on, bfloat16 has steps of 0.125, so that near ties would depend on the shape of the step.
        """
        out_SV = torch.empty(len(x_SE), head.size_out, dtype=torch.float32, device=x_SE.device)
        head.run(head.runs.logits[len(x_SE)], x_SE, out_SV)
        return out_SV

    def embed(self, x_NE: Tensor, _tokens_N: Tensor) -> Tensor:
        """Return the embeddings, which torch has just looked up, unchanged."""
        self.note(_EMBEDDING)
        return x_NE

    def attend(
        self,
        stream: Stream,
        norm_E: Tensor,
        qkv: CudaProduct,
        head_norms: HeadNorms | None,
        step: CudaStep,
        kv: CudaKv,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Norm, multiply by `qkv`, norm and rotate heads, store k and v, attend; return ([N, H * D], the sum)."""
        x_NE, total_NE, pending = stream
        runs, rows = qkv.runs, len(x_NE)
        if isinstance(pending, Squares):
            assert total_NE is not None
            stores = self.shape.values == "products"
            if stores and isinstance(step, DecodeStep) and (heads := runs.heads.at(rows)) is not None:
                return self.attend_inside(heads, x_NE, pending, qkv, head_norms, step, kv, layer), total_NE
            if (scaled := runs.factors_plain.at(rows)) is not None:
                return self.attend_with(self._plain(scaled, x_NE, qkv, pending), head_norms, step, kv, layer), total_NE
        elif pending is None and (one := runs.norm_plain.at(rows)) is not None:
            add, total_NE = self._add_norm(stream, norm_E)
            return self.attend_with(self._plain(one, x_NE, qkv, add), head_norms, step, kv, layer), total_NE
        normed_NE, total_NE = self.normed(stream, norm_E)
        return self.attend_with(self.product(normed_NE, qkv), head_norms, step, kv, layer), total_NE

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: CudaProduct, _layer: int) -> tuple[Tensor, Tensor]:
        """Return (silu(gate) * up of the norm's product, the sum of the stream)."""
        x_NE, total_NE, pending = stream
        runs, rows = gate_up.runs, len(x_NE)
        if isinstance(pending, Squares):
            assert total_NE is not None
            if (scaled := runs.factors_gated.at(rows)) is not None:
                return self._gated(scaled, x_NE, gate_up, pending), total_NE
            if (scaled := runs.factors_plain.at(rows)) is not None:
                return self.activate(self._plain(scaled, x_NE, gate_up, pending)), total_NE
        elif pending is None and (one := runs.norm_gated.at(rows)) is not None:
            add, total_NE = self._add_norm(stream, norm_E)
            return self._gated(one, x_NE, gate_up, add), total_NE
        normed_NE, total_NE = self.normed(stream, norm_E)
        return self.gated(normed_NE, gate_up), total_NE

    def add(
        self, x_NI: Tensor, packed: CudaProduct, total_NE: Tensor, norm_E: Tensor | None, _layer: int, _site: str
    ) -> Stream:
        """Return the stream with the product added, and times the norm's weight where a kernel does all at once."""
        chosen = packed.runs.residual.at(len(x_NI))
        # Gemma's weights of norms stay in float32, which no such kernel reads.
        if chosen is None or norm_E is None or norm_E.dtype != x_NI.dtype:
            return Stream(self.product(x_NI, packed), total_NE)
        return self.add_inside(chosen, x_NI, packed, total_NE, norm_E)

    def linear(self, x_NI: Tensor, packed: CudaProduct, _layer: int, _site: str) -> Tensor:
        """Return x W^T + b."""
        return self.product(x_NI, packed)

    def summed(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return (the sum, the sum): sums have the dtype of products."""
        x_NE, total_NE, pending = stream
        assert pending is None, "no norm was named to the product before"
        total_NE = x_NE if total_NE is None else total_NE.add_(x_NE)
        return total_NE, total_NE

    def normed(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return (RMS norm of the sum, the sum)."""
        x_NE, total_NE, pending = stream
        if total_NE is None:
            normed_NE = torch.empty_like(x_NE)
            self.note(self._norm)
            fused.rms_norm(x_NE, norm_E, self.eps, normed_NE, pdl=self.pdl)
            return normed_NE, x_NE
        if pending is not None:
            if isinstance(pending, Squares):
                self.note(self._norm)
            return pending.normed(x_NE, total_NE, norm_E, self.eps), total_NE
        self.note(self._norm)
        fused.add_rms_norm(x_NE, total_NE, norm_E, self.eps, pdl=self.pdl)
        return x_NE, total_NE

    def layer_norm(self, x_NE: Tensor, norm: LayerNorm) -> Tensor:
        """Return the layer norm of each token."""
        normed_NE = torch.empty_like(x_NE)
        self.note(self._norm)
        layer_norm(x_NE, norm.weight_E, norm.bias_E, self.eps, normed_NE, pdl=self.pdl)
        return normed_NE

    def activate_plain(self, x_NF: Tensor, activation: PlainActivation) -> Tensor:
        """Return activation(x), computed in place."""
        self.note(self._norm)
        activate_plain(x_NF, activation, pdl=self.pdl)
        return x_NF

    # --- for operations with adapters, too

    def product(self, x_NI: Tensor, packed: CudaProduct) -> Tensor:
        """Return x W^T + b."""
        return self._plain(packed.runs.plain[len(x_NI)], x_NI, packed)

    def gated(self, x_NE: Tensor, packed: CudaProduct) -> Tensor:
        """Return silu(gate) * up of the product."""
        chosen = packed.runs.gated.at(len(x_NE))
        return self.activate(self.product(x_NE, packed)) if chosen is None else self._gated(chosen, x_NE, packed)

    def add_inside(
        self,
        chosen: Chosen,
        x_NI: Tensor,
        packed: CudaProduct,
        total_NE: Tensor,
        norm_E: Tensor,
        updates: UpdateSite | None = None,
    ) -> Stream:
        """Return the stream with the product added, times the norm's weight, by a kernel that does all at once."""
        out_NE = torch.empty_like(total_NE)
        shape = total_NE.shape[1] // SQUARED, len(x_NI)
        squares = Squares(torch.empty(shape, dtype=torch.float32, device=x_NI.device), self.pdl)
        packed.run(chosen, x_NI, out_NE, None, Residual(total_NE, norm_E, squares), updates)
        return Stream(out_NE, total_NE, squares)

    def attend_with(
        self, qkv_NX: Tensor, head_norms: HeadNorms | None, step: CudaStep, kv: CudaKv, layer: int
    ) -> Tensor:
        """Norm and rotate q and k, norm v where that is due, store k and v if any, attend; return [N, H * D]."""
        shape, kv_layer, scales = self.shape, kv[layer], self._kv_scales.get(layer, UNSCALED)
        q_norm_D, k_norm_D = head_norms or (None, None)
        rows, width = qkv_NX.shape[0], shape.heads * shape.head_dim
        out_NX = torch.empty(rows, width, dtype=qkv_NX.dtype, device=qkv_NX.device)
        if isinstance(step, PrefillStep):
            self._rope_and_write(qkv_NX, q_norm_D, k_norm_D, step.positions_N, step.slots_N, kv_layer, scales, qkv_NX)
            for first, kv_LMX in step.given:
                kv_MX, slots_M = kv_LMX[layer], step.slots_N[first : first + kv_LMX.shape[1]]
                self._rope_and_write(
                    kv_MX, None, None, torch.zeros_like(slots_M), slots_M, kv_layer, scales, kv_MX, given=True
                )
            q_NHD = qkv_NX[:, :width].view(rows, shape.heads, shape.head_dim)
            self.note(ATTENTION)
            step.attention.run(q_NHD, kv_layer, out_NX.view(q_NHD.shape), scales, self._sinks.get(layer))
        elif isinstance(step, WholeStep):
            self.note(step.launch)
            step.attention.run(
                qkv_NX, q_norm_D, k_norm_D, self._cos_sin_PD, kv_layer, step.inputs, out_NX, scales,
                self._sinks.get(layer), eps=self.eps, pdl=self.pdl,
            )  # fmt: skip
        else:
            at, slots_B = step.inputs.positions_B, step.inputs.slots_B
            self._rope_and_write(qkv_NX, q_norm_D, k_norm_D, at, slots_B, kv_layer, scales, out_NX)
            return self._decode(out_NX, step, kv_layer, scales, layer)
        return out_NX

    def attend_inside(
        self,
        chosen: Chosen,
        x_NE: Tensor,
        squares: Squares | None,
        qkv: CudaProduct,
        head_norms: HeadNorms | None,
        step: DecodeStep,
        kv: CudaKv,
        layer: int,
        updates: UpdateSite | None = None,
    ) -> Tensor:
        """Attend with a product that norms and rotates q and k, stores k and v, and adds updates itself."""
        kv_layer, scales = kv[layer], self._kv_scales.get(layer, UNSCALED)
        q_norm_D, k_norm_D = head_norms or (None, None)
        at, slots_B = step.inputs.positions_B, step.inputs.slots_B
        to = HeadTargets(q_norm_D, k_norm_D, self._cos_sin_PD, at, slots_B, kv_layer, scales)
        q_NX = torch.empty(len(x_NE), self.shape.heads * self.shape.head_dim, dtype=x_NE.dtype, device=x_NE.device)
        qkv.run(chosen, x_NE, q_NX, squares, to, updates)
        return self._decode(q_NX, step, kv_layer, scales, layer)

    # --- inside

    def _plain(self, chosen: Chosen, x_NI: Tensor, packed: CudaProduct, before: Before = None) -> Tensor:
        """Return x W^T + b by a kernel, of the norm or with the factors in `before`."""
        out_NO = torch.empty(len(x_NI), packed.size_out, dtype=x_NI.dtype, device=x_NI.device)
        packed.run(chosen, x_NI, out_NO, before)
        return out_NO if packed.bias_O is None else out_NO.add_(packed.bias_O)

    def _gated(self, chosen: Chosen, x_NE: Tensor, packed: CudaProduct, before: Before = None) -> Tensor:
        """Return silu(gate) * up by a kernel, of the norm or with the factors in `before`."""
        out_NF = torch.empty(len(x_NE), packed.size_out // 2, dtype=x_NE.dtype, device=x_NE.device)
        packed.run(chosen, x_NE, out_NF, before, GATED)
        return out_NF

    def activate(self, gate_up_N2F: Tensor, activation: Activation = "silu") -> Tensor:
        """Return activation(gate) * up of gates and ups that a product has left in memory."""
        rows, size = gate_up_N2F.shape
        out_NF = torch.empty(rows, size // 2, dtype=gate_up_N2F.dtype, device=gate_up_N2F.device)
        self.note(self._norm)
        fused.activate_mul(gate_up_N2F, out_NF, activation, pdl=self.pdl)
        return out_NF

    def _add_norm(self, stream: Stream, norm_E: Tensor) -> tuple[AddNorm, Tensor]:
        """Return (the norm for a product that computes it, the sum, which the product leaves there)."""
        x_NE, residual_NE, _ = stream
        if residual_NE is None:
            return AddNorm(norm_E, self.eps), x_NE
        total_NE = torch.empty_like(x_NE)
        return AddNorm(norm_E, self.eps, residual_NE, total_NE), total_NE

    def _decode(self, q_NX: Tensor, step: DecodeStep, kv_layer: Tensor, scales: KvScales, layer: int) -> Tensor:
        """Attend with rotated queries, whose keys and values are already stored."""
        out_NX = torch.empty_like(q_NX)
        head = (len(q_NX), self.shape.heads, self.shape.head_dim)
        self.note(step.launch)
        sinks_H, out_NHD = self._sinks.get(layer), out_NX.view(head)
        step.attention.run(q_NX.view(head), kv_layer, step.inputs, out_NHD, scales, sinks_H)
        return out_NX

    def _rope_and_write(
        self,
        qkv_NX: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        positions_N: Tensor,
        slots_N: Tensor,
        kv_layer: Tensor,
        scales: KvScales,
        q_out: Tensor,
        *,
        given: bool = False,
    ) -> None:
        """Call `norm_rope_write` for the model's heads, or for keys and values alone that are only stored."""
        shape = self.shape
        table = self._still_1D if given else self._cos_sin_PD
        self.note(self._rotation)
        norm_rope_write(
            qkv_NX, q_norm_D, k_norm_D, table, positions_N, slots_N, kv_layer,
            heads=0 if given else shape.heads, kv_heads=shape.kv_heads, eps=self.eps, q_out=q_out,
            k_scale=scales.k, v_scale=scales.v, values="products" if given else shape.values, pdl=self.pdl,
        )  # fmt: skip
