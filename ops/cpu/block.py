"""One decoder step's operations on the CPU, in plain torch calls over paged keys and values.

Owns norms, rotary positions and attention; never picks pages, samples or loads. Next to read: pieces.py, how a step's
attention is divided.

With one token in a step, a call costs as much as its arithmetic, so `CpuOps.prepare` makes the values that layers share
(masks, indices, rotary rows, gather buffers) once for each step. Call everything without autograd, under
`torch.inference_mode()` or `torch.no_grad()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.ops.cpu.activation import activate, activate_plain
from headrace.ops.cpu.experts import CpuExperts
from headrace.ops.cpu.head import CpuHead
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.linear import CpuLinear
from headrace.ops.cpu.norms import layer_norm, layer_norm_heads, rms_norm
from headrace.ops.cpu.pieces import Pieces
from headrace.ops.cpu.products import PRODUCTS, CpuKernel, pack_product
from headrace.ops.cpu.rotation import rotate
from headrace.ops.cpu.scores import Scores, Weigh
from headrace.ops.cpu.step import CpuStep, DecodePiece, PrefillPiece, TorchStep
from headrace.ops.formats import Stored
from headrace.ops.paged import KvLayout
from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from headrace.ops.cpu.native.experts import NativeExperts
    from headrace.ops.experts import Experts
    from headrace.ops.latents import LatentWeights
    from headrace.ops.paged import PagedBatch, PageShape
    from headrace.ops.stream import Activation, HeadNorms, LayerNorm, PlainActivation

__all__ = ["CpuOps"]


class CpuOps:
    """The operations of one model's step on the CPU.

    `cos` and `sin` are float32 tables `[positions, D / 2]`; the first half of a head rotates with its second half. A
    token attends to the last `window` tokens, itself included (all if None). `scale` multiplies scores (default
    `D ** -0.5`), and `weigh` turns scores into weights of values (default: softmax, beside sinks if `has_sinks`).
    `dtype` is that of activations, keys and values: bfloat16 or float32. `products` are the kernels for products by
    weights, in order of preference. `early` is a second pair of tables, for `rotate`, and `growth_P` one of the factors
    of queries, for `grow`. With `only_queries` layers read the keys and values of an earlier one, so that tokens have
    queries alone.
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        dtype: torch.dtype,
        window: int | None = None,
        scale: float | None = None,
        weigh: Weigh | None = None,
        has_sinks: bool = False,
        products: Sequence[CpuKernel] = PRODUCTS,
        early: tuple[Tensor, Tensor] | None = None,
        growth_P: Tensor | None = None,
        only_queries: bool = False,
    ) -> None:
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads do not share {kv_heads} key heads evenly")
        self.heads, self.kv_heads, self.head_dim, self.page_size = heads, kv_heads, head_dim, page_size
        self.dtype, self.window, self.products = dtype, window, products
        self.scale = head_dim**-0.5 if scale is None else scale
        self._weigh, self._group = weigh, heads // kv_heads
        self._scores = Scores(kv_heads, self._group)
        self._epsilon, self._eps = eps, torch.tensor(eps, dtype=torch.float32)
        # x * cos + roll(x, D / 2) * sin is the rotation when the first half of sin is negative.
        self._cos_1D = torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1)
        self._sin_1D = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)
        self._early, self._growth_P, self._only_queries = early, growth_P, only_queries
        self._ones_D = torch.ones(head_dim)
        is_softmax = weigh is None and not has_sinks
        self._pieces = Pieces(kv_heads, head_dim, page_size, dtype, window=window, fuses=is_softmax)

    @property
    def rows_are_alike(self) -> bool:
        """Whether a row has the same bits however many rows are computed with it; short products of bfloat16 differ."""
        return self.dtype is not torch.bfloat16

    def rest(self) -> None:
        """Let helper threads sleep: no step runs. Torch's own threads take care of themselves."""

    def close(self) -> None:
        """Release what the operations hold beside tensors; idempotent."""

    # --- pages

    @property
    def page_shape(self) -> PageShape:
        """Shape of what a layer keeps in a page."""
        return (2, self.kv_heads, self.page_size, self.head_dim)

    def allocate_kv(self, num_layers: int, pages: int) -> CpuKv:
        """Return zeroed pages for layers that all are of this kind."""
        return CpuKv.allocate(KvLayout.of([self.page_shape] * num_layers), pages, self.dtype)

    # --- a step

    def prepare(self, batch: PagedBatch) -> CpuStep:
        """Return the values that a step's layers share; raise `ValueError` unless its rows cover its tokens once."""
        batch.check_cover()
        return TorchStep(
            len(batch.positions_N),
            batch.positions_N,
            self._cos_1D.index_select(0, batch.positions_N),
            self._sin_1D.index_select(0, batch.positions_N),
            self._pieces.write_index(batch.slots_N),
            self._pieces.of(batch),
            batch.given,
        )

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor) -> Tensor:
        """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32, rounded once."""
        return rms_norm(x_NE, weight_E, self._eps).to(self.dtype)

    def activate(self, gate_up_N2F: Tensor, activation: Activation) -> Tensor:
        """Return `activation(gate) * up`, where the input holds gate, then up."""
        return activate(gate_up_N2F, activation)

    def activate_plain(self, x_NF: Tensor, activation: PlainActivation) -> Tensor:
        """Return `activation(x)`."""
        return activate_plain(x_NF, activation)

    def layer_norm(self, x_NE: Tensor, norm: LayerNorm) -> Tensor:
        """Return the layer norm of each token, computed in float32, rounded once."""
        return layer_norm(x_NE, norm, self._epsilon).to(self.dtype)

    def positions(self, step: CpuStep) -> Tensor:
        """Return the positions of a step's tokens, int64."""
        return step.positions_N

    def norm_across_heads(self, qkv_NX: Tensor, norms: HeadNorms) -> Tensor:
        """Return queries, keys and values with an RMS norm of all queries, and one of all keys."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_NX, k_NX, v_NX = qkv_NX.split((queries, keys, keys), 1)
        normed = (self.rms_norm(part.contiguous(), norm_X) for part, norm_X in ((q_NX, norms.q_D), (k_NX, norms.k_D)))
        return torch.cat((*normed, v_NX), 1)

    def layer_norm_heads(self, qkv_NX: Tensor, weight_X: Tensor) -> Tensor:
        """Return queries, keys and values with a layer norm of each query and key head."""
        return layer_norm_heads(qkv_NX, weight_X, self.head_dim, self._epsilon)

    def grow(self, qkv_NX: Tensor, step: CpuStep) -> Tensor:
        """Multiply queries in place by the factors of their positions; return queries, keys and values side by side."""
        assert self._growth_P is not None
        factors_N1 = self._growth_P.index_select(0, step.positions_N).unsqueeze(1)
        qkv_NX[: step.tokens, : self.heads * self.head_dim].mul_(factors_N1)
        return qkv_NX

    def norm_values(self, qkv_NX: Tensor) -> Tensor:
        """Return queries, keys and values with an RMS norm of each value head; values are keys if there are none."""
        keys = self.kv_heads * self.head_dim
        normed_VD = self.rms_norm(qkv_NX[:, -keys:].reshape(-1, self.head_dim), self._ones_D)
        has_values = qkv_NX.shape[1] == (self.heads + 2 * self.kv_heads) * self.head_dim
        return torch.cat((qkv_NX[:, :-keys] if has_values else qkv_NX, normed_VD.view(-1, keys)), 1)

    def rotate(self, qkv_NX: Tensor, step: CpuStep) -> Tensor:
        """Rotate queries and keys in place by the tables `early`; return queries, keys and values side by side."""
        assert self._early is not None
        qkv_NAD = qkv_NX[: step.tokens].view(step.tokens, -1, self.head_dim)
        rotate(qkv_NAD[:, : self.heads + self.kv_heads], self._early, step.positions_N)
        return qkv_NX

    def rope_and_write(
        self,
        qkv_NX: Tensor,
        step: CpuStep,
        kv: CpuKv,
        layer: int,
        q_norm_D: Tensor | None = None,
        k_norm_D: Tensor | None = None,
    ) -> Tensor:
        """Split packed `q, k, v`, or q alone, of the step's tokens, rotate q and k, store k and v; return `q_NHD`.

        Norm weights, where given, apply to each head of q and k before the rotation. Values that are not finite are
        stored as 0, so that a failed request cannot affect a later one that uses the same page.
        """
        assert isinstance(step, TorchStep)
        qkv_NAD = qkv_NX.view(qkv_NX.shape[0], -1, self.head_dim)
        q_end, k_end = self.heads, self.heads + (0 if self._only_queries else self.kv_heads)
        qk_NBD = qkv_NAD[:, :k_end]
        if q_norm_D is not None and k_norm_D is not None:
            parts = (qkv_NAD[:, :q_end], q_norm_D), (qkv_NAD[:, q_end:k_end], k_norm_D)
            qk_NBD = torch.cat([self.rms_norm(*part) for part in parts], 1)
        rolled_NBD = torch.roll(qk_NBD, self.head_dim // 2, -1)
        qk_NBD = torch.addcmul(qk_NBD * step.cos_N1D, rolled_NBD, step.sin_N1D)
        if self._only_queries:
            return qk_NBD
        new_NsD = torch.cat((qk_NBD[:, q_end:], qkv_NAD[:, k_end:]), 1).nan_to_num_(0.0, 0.0, 0.0)
        for given in step.given:
            new_NsD[given.tokens_M] = given.kv_LMsD[layer]
        kv.slots[layer].index_copy_(0, step.write, new_NsD.view(-1, self.head_dim))
        return qk_NBD[:, :q_end]

    def attention(self, q_NHD: Tensor, step: CpuStep, kv: CpuKv, layer: int) -> Tensor:
        """Attend from the step's queries to the pages of their rows, which already hold new keys; return `o_NX`."""
        assert isinstance(step, TorchStep)
        rows = kv.rows[layer]
        parts = []
        for piece in step.pieces:
            torch.index_select(rows, 0, piece.gather, out=piece.buffer)
            if isinstance(piece, DecodePiece):
                parts.append(self._decode_attention(q_NHD, piece, layer))
            else:
                parts.append(self._block_attention(q_NHD, piece, layer))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # --- what the decoder calls

    def given(self, qkv_NX: Tensor) -> Tensor:
        """Return queries, keys and values, [N, (H + 2 * K) * D], that another library has computed."""
        return qkv_NX

    def pack(self, weight: Stored, bias_O: Tensor | None) -> CpuLinear:
        """Pack a weight and its bias for `product`."""
        return pack_product(weight, bias_O, dtype=self.dtype, products=self.products)

    def keep_sinks(self, layer: int, sinks_H: Tensor) -> None:
        """Take the sinks of a layer's heads, float32."""
        self._scores.keep_sinks(layer, sinks_H)

    def norm_with(self, x_NC: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
        """Return the RMS norm of vectors with an epsilon of their own."""
        return rms_norm(x_NC.contiguous(), weight_C, torch.tensor(epsilon)).to(x_NC.dtype)

    def pack_latents(self, weights: LatentWeights, layer: int) -> Callable[[Tensor, Tensor, CpuStep, CpuKv], Tensor]:
        """Raise `NotImplementedError`: latents.py has the operations of models with latent vectors."""
        raise NotImplementedError(f"pages of keys and values hold no latent vectors of layer {layer}")

    def pack_experts(self, experts: Experts) -> CpuExperts | NativeExperts:
        """Pack a layer's router and experts."""
        return CpuExperts(experts, self.pack, self.products)

    def pack_head(self, weight_VE: Stored) -> CpuLinear:
        """Pack the output head's weight for `logits`."""
        return CpuHead(weight_VE, dtype=self.dtype, products=self.products)

    def logits(self, x_SE: Tensor, head: CpuLinear) -> Tensor:
        """Return the output head's product, in float32."""
        return head(x_SE)

    def embed(self, x_NE: Tensor, _tokens_N: Tensor) -> Tensor:
        """Return the embeddings unchanged."""
        return x_NE

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
        normed_NE, total_NE = self.normed(stream, norm_E)
        return self.attend_with(qkv(normed_NE), head_norms, step, kv, layer), total_NE

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: CpuLinear, _layer: int) -> tuple[Tensor, Tensor]:
        """Return (silu(gate) * up of the norm's product, the sum of the stream)."""
        normed_NE, total_NE = self.normed(stream, norm_E)
        return self.activate(gate_up(normed_NE), "silu"), total_NE

    def add(
        self, x_NI: Tensor, packed: CpuLinear, total_NE: Tensor, _norm_E: Tensor | None, _layer: int, _site: str
    ) -> Stream:
        """Return the product and the sum so far, which the next norm adds."""
        return Stream(packed(x_NI), total_NE)

    def linear(self, x_NI: Tensor, packed: CpuLinear, _layer: int, _site: str) -> Tensor:
        """Return x W^T + b."""
        return packed(x_NI)

    def summed(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return (the sum in `dtype`, the sum), which is float32."""
        x_NE, total_NE, _ = stream
        total_NE = x_NE.float() if total_NE is None else total_NE.add_(x_NE)
        return total_NE.to(self.dtype), total_NE

    def normed(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return (RMS norm of the sum, the sum). Sums are float32: bfloat16 would lose more bits than a product."""
        x_NE, total_NE, _ = stream
        total_NE = x_NE.float() if total_NE is None else total_NE.add_(x_NE)
        return self.rms_norm(total_NE, norm_E), total_NE

    def attend_with(self, qkv_NX: Tensor, head_norms: HeadNorms | None, step: CpuStep, kv: CpuKv, layer: int) -> Tensor:
        """Rotate, store and attend: `rope_and_write`, then `attention`; rows behind the step's tokens give zeros."""
        tokens = step.tokens
        q_NHD = self.rope_and_write(qkv_NX[:tokens], step, kv, layer, *(head_norms or (None, None)))
        o_NX = self.attention(q_NHD, step, kv, layer)
        return o_NX if len(qkv_NX) == tokens else functional.pad(o_NX, (0, 0, 0, len(qkv_NX) - tokens))

    # --- inside

    def _decode_attention(self, q_NHD: Tensor, piece: DecodePiece, layer: int) -> Tensor:
        q_BGD = q_NHD[piece.start : piece.stop].reshape(-1, self._group, self.head_dim)
        if piece.bias_R11S is None:
            # The query heads that share a key head act as queries of one position, so that keys are not repeated.
            one_BGD = functional.scaled_dot_product_attention(
                q_BGD.unsqueeze(0), piece.keys_BSD.unsqueeze(0), piece.values_BSD.unsqueeze(0), scale=self.scale
            )
            return one_BGD.reshape(1, -1)
        count = piece.stop - piece.start
        if piece.rows > count:
            q_BGD = functional.pad(q_BGD, (0, 0, 0, 0, 0, (piece.rows - count) * self.kv_heads))
        scores_BGS = torch.bmm(q_BGD, piece.keys_BSD.transpose(1, 2))
        scores_RKGS = scores_BGS.view(piece.rows, self.kv_heads, self._group, -1)
        weights = self._weights(scores_RKGS, piece.bias_R11S, layer)
        return torch.bmm(weights.view(scores_BGS.shape), piece.values_BSD).view(piece.rows, -1)[:count]

    def _weights(self, scores: Tensor, bias: Tensor, layer: int) -> Tensor:
        if self._weigh is not None:
            return self._weigh(scores, bias, self.scale)
        added = torch.add(bias, scores, alpha=self.scale)
        return self._scores.weights(added, layer, is_block=bias.ndim == 2)

    def _block_attention(self, q_NHD: Tensor, block: PrefillPiece, layer: int) -> Tensor:
        count, padded = block.stop - block.start, block.bias_CS.shape[0]
        q_CHD = q_NHD[block.start : block.stop]
        if padded > count:
            q_CHD = functional.pad(q_CHD, (0, 0, 0, 0, 0, padded - count))
        q_CKGD = q_CHD.view(padded, self.kv_heads, self._group, -1)
        q_KMD = q_CKGD.permute(1, 2, 0, 3).reshape(self.kv_heads, -1, self.head_dim)
        scores_KMS = torch.bmm(q_KMD, block.keys_KSD.transpose(1, 2))
        scores_KGCS = scores_KMS.view(self.kv_heads, self._group, padded, -1)
        weights = self._weights(scores_KGCS, block.bias_CS, layer)
        o_KMD = torch.bmm(weights.view(scores_KMS.shape), block.values_KSD)
        o_KGCD = o_KMD.view(self.kv_heads, self._group, padded, -1)[:, :, :count]
        return o_KGCD.permute(2, 0, 1, 3).reshape(count, -1)
