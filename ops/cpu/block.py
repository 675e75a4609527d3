"""One decoder step's operations on the CPU, in plain torch calls over paged keys and values.

Owns the layout of KV pages in host memory, norms, rotary positions and attention; never picks pages, samples or loads.

With one token in a step, a call costs as much as its arithmetic, so `CpuOps.prepare` makes the values that layers share
(masks, indices, rotary rows, gather buffers) once for each step. Call everything without autograd, under
`torch.inference_mode()` or `torch.no_grad()`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional

from headrace.ops.cpu.activation import activate
from headrace.ops.cpu.head import CpuHead
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.linear import CpuLinear
from headrace.ops.cpu.products import PRODUCTS, CpuKernel, pack_product
from headrace.ops.cpu.step import CpuStep, DecodePiece, PrefillPiece, TorchStep
from headrace.ops.formats import Stored
from headrace.ops.sizes import padded_size
from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from headrace.ops.paged import DecodeGroup, PagedBatch, PrefillRow
    from headrace.ops.stream import Activation, HeadNorms

__all__ = ["CpuOps", "Weigh"]

Weigh: TypeAlias = "Callable[[Tensor, Tensor, float], Tensor]"
"""Turns products of queries and keys, a mask of 0 or -inf to add, and the scale into weights of values: a variant of
attention. The last dimension is the keys; the mask broadcasts."""

# Gathered keys and values of one batched product, in bytes: a bound on memory; measured, values below 6 MiB are slower.
_GATHER_BYTES = 16 * 1024 * 1024
# Up to this context one row is faster through torch's fused attention: one call, but less in parallel.
_FUSED_TOKENS = 384
# Queries of one prefill product: later blocks see more keys, so blocks save half of a causal square; and scores of more
# than these leave the processor's caches.
_QUERY_BLOCK = 128
# Shapes of attention are few (see sizes.py): multiples of these numbers of queries and keys, in steps between powers
# of two.
_FEW_QUERIES = 16
_FEW_KEYS = 64
_STEPS = 2
_NEVER = float("-inf")


class CpuOps:
    """The operations of one model's step on the CPU.

    `cos` and `sin` are float32 tables `[positions, D / 2]`; the first half of a head rotates with its second half. A
    token attends to the last `window` tokens, itself included (all if None). `scale` multiplies scores (default
    `D ** -0.5`), and `weigh` turns scores into weights of values (default: softmax). `dtype` is that of
    activations, keys and values: bfloat16 or float32. `products` are the kernels for products by weights, in order of
    preference. `early` is a second pair of tables, for `rotate`.
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
        products: Sequence[CpuKernel] = PRODUCTS,
        early: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads do not share {kv_heads} key heads evenly")
        self.heads, self.kv_heads, self.head_dim, self.page_size = heads, kv_heads, head_dim, page_size
        self.dtype, self.window, self.products = dtype, window, products
        self.scale = head_dim**-0.5 if scale is None else scale
        self._weigh = weigh
        self._group = heads // kv_heads
        self._eps = torch.tensor(eps, dtype=torch.float32)
        # x * cos + roll(x, D / 2) * sin is the rotation when the first half of sin is negative.
        self._cos_1D = torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1)
        self._sin_1D = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)
        self._early = early
        # A page's rows are its K key heads, then its K value heads.
        self._planes_s1K1 = torch.arange(2 * kv_heads).view(2, 1, kv_heads, 1)

    @property
    def rows_are_alike(self) -> bool:
        """Whether a row has the same bits however many rows are computed with it; short products of bfloat16 differ."""
        return self.dtype is not torch.bfloat16

    def rest(self) -> None:
        """Let helper threads sleep: no step runs. Torch's own threads take care of themselves."""

    def close(self) -> None:
        """Release what the operations hold beside tensors; idempotent."""

    # --- pages

    def page_bytes(self, num_layers: int) -> int:
        """Return the memory of one page over all layers, in bytes."""
        return num_layers * self._plane_bytes()

    def allocate_kv(self, num_layers: int, pages: int) -> CpuKv:
        """Return zeroed pages for keys and values."""
        shape = (num_layers, pages, 2, self.kv_heads, self.page_size, self.head_dim)
        return CpuKv.allocate(shape, self.dtype)

    # --- a step

    def prepare(self, batch: PagedBatch) -> CpuStep:
        """Return the values that a step's layers share; raise `ValueError` unless its rows cover its tokens once."""
        batch.check_cover()
        pieces: list[DecodePiece | PrefillPiece] = [block for row in batch.prefills for block in self._blocks(row)]
        for group in batch.decodes:
            pieces += self._decodes(group)
        pieces.sort(key=lambda piece: piece.start)
        return TorchStep(
            len(batch.positions_N),
            batch.positions_N,
            self._cos_1D.index_select(0, batch.positions_N),
            self._sin_1D.index_select(0, batch.positions_N),
            self._write_index(batch.slots_N),
            tuple(pieces),
            batch.given,
        )

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor) -> Tensor:
        """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32, rounded once."""
        x_NE = x_NE.float()
        norm_N1 = torch.linalg.vector_norm(x_NE, 2, -1, True)
        inverse_N1 = torch.addcmul(self._eps, norm_N1, norm_N1, value=1.0 / x_NE.shape[-1]).rsqrt_()
        return (x_NE * inverse_N1).mul_(weight_E).to(self.dtype)

    def activate(self, gate_up_N2F: Tensor, activation: Activation) -> Tensor:
        """Return `activation(gate) * up`, where the input holds gate, then up."""
        return activate(gate_up_N2F, activation)

    def norm_across_heads(self, qkv_NX: Tensor, norms: HeadNorms) -> Tensor:
        """Return queries, keys and values with an RMS norm of all queries, and one of all keys."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_NX, k_NX, v_NX = qkv_NX.split((queries, keys, keys), 1)
        normed = (self.rms_norm(part.contiguous(), norm_X) for part, norm_X in ((q_NX, norms.q_D), (k_NX, norms.k_D)))
        return torch.cat((*normed, v_NX), 1)

    def rotate(self, qkv_NX: Tensor, step: CpuStep) -> Tensor:
        """Rotate queries and keys in place by the tables `early`; return queries, keys and values side by side."""
        assert self._early is not None
        cos_N1C, sin_N1C = (table_PC.index_select(0, step.positions_N).unsqueeze(1) for table_PC in self._early)
        qkv_NAD = qkv_NX[: step.tokens].view(step.tokens, -1, self.head_dim)
        qk_NBD = qkv_NAD[:, : self.heads + self.kv_heads]
        first_NBC, second_NBC = qk_NBD.float().chunk(2, -1)
        turned = first_NBC * cos_N1C - second_NBC * sin_N1C, second_NBC * cos_N1C + first_NBC * sin_N1C
        qk_NBD.copy_(torch.cat(turned, -1))
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
        """Split packed `q, k, v` of the step's tokens, rotate q and k, store k and v; return `q_NHD`.

        Norm weights, where given, apply to each head of q and k before the rotation. Values that are not finite are
        stored as 0, so that a failed request cannot affect a later one that uses the same page.
        """
        assert isinstance(step, TorchStep)
        qkv_NAD = qkv_NX.view(qkv_NX.shape[0], -1, self.head_dim)
        q_end, k_end = self.heads, self.heads + self.kv_heads
        qk_NBD = qkv_NAD[:, :k_end]
        if q_norm_D is not None and k_norm_D is not None:
            normed = self.rms_norm(qkv_NAD[:, :q_end], q_norm_D), self.rms_norm(qkv_NAD[:, q_end:k_end], k_norm_D)
            qk_NBD = torch.cat(normed, 1)
        rolled_NBD = torch.roll(qk_NBD, self.head_dim // 2, -1)
        qk_NBD = torch.addcmul(qk_NBD * step.cos_N1D, rolled_NBD, step.sin_N1D)
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
                parts.append(self._decode_attention(q_NHD, piece))
            else:
                parts.append(self._block_attention(q_NHD, piece))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # --- what the decoder calls

    def side_by_side(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        """Return queries, keys and values in one tensor, [N, (H + 2 * K) * D]."""
        return torch.cat((q_NHD, k_NKD, v_NKD), 1).view(len(q_NHD), -1)

    def pack(self, weight: Stored, bias_O: Tensor | None) -> CpuLinear:
        """Pack a weight and its bias for `product`."""
        return pack_product(weight, bias_O, dtype=self.dtype, products=self.products)

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

    def _plane_bytes(self) -> int:
        return 2 * self.kv_heads * self.page_size * self.head_dim * self.dtype.itemsize

    def _write_index(self, slots_N: Tensor) -> Tensor:
        page_N, offset_N = slots_N // self.page_size, slots_N % self.page_size
        first_N11 = (page_N * (2 * self.kv_heads * self.page_size) + offset_N).view(-1, 1)
        return (first_N11 + self._planes_s1K1.view(1, -1) * self.page_size).view(-1)

    def _gather(self, pages_RP: Tensor, scratch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return indices of `CpuKv.rows`, in the order [2, R, K, P], and a buffer of these rows (`scratch` or new)."""
        planes = 2 * self.kv_heads
        index = (pages_RP.unsqueeze(1) * planes + self._planes_s1K1).reshape(-1)
        return index, self._scratch(pages_RP.numel()) if scratch is None else scratch[: index.shape[0]]

    def _scratch(self, pages: int) -> Tensor:
        return torch.empty(2 * self.kv_heads * pages, self.page_size * self.head_dim, dtype=self.dtype)

    def _width(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens, rounded up to one of few."""
        unit = max(1, _FEW_KEYS // self.page_size)
        return unit * padded_size(-(-tokens // (unit * self.page_size)), steps=_STEPS)

    def _decodes(self, group: DecodeGroup) -> list[DecodePiece]:
        total, pages = group.pages_RP.shape
        chunk = max(1, _GATHER_BYTES // (pages * self._plane_bytes()))
        # Even chunks: a last chunk of one row would cost a full round of calls.
        chunk = math.ceil(total / math.ceil(total / chunk))
        return [self._decode(group, first, min(first + chunk, total)) for first in range(0, total, chunk)]

    def _decode(self, group: DecodeGroup, first: int, last: int) -> DecodePiece:
        pages_RP, lengths_R1 = group.pages_RP[first:last], group.lengths_R[first:last, None]
        start, stop = group.start + first, group.start + last
        rows, pages = pages_RP.shape
        if rows == 1 and pages * self.page_size <= _FUSED_TOKENS and self._weigh is None:
            index, buffer = self._gather(pages_RP)
            seen = slice(self._first_seen(int(lengths_R1)), int(lengths_R1))
            keys_KSD, values_KSD = buffer.view(2, self.kv_heads, -1, self.head_dim)[:, :, seen].unbind()
            return DecodePiece(start, stop, 1, index, buffer, keys_KSD, values_KSD, None)
        added, width = padded_size(rows, steps=_STEPS) - rows, self._width(pages * self.page_size)
        index, buffer = self._gather(functional.pad(pages_RP, (0, width - pages, 0, added)))
        keys_BSD, values_BSD = buffer.view(2, -1, width * self.page_size, self.head_dim).unbind()
        lengths_R1 = functional.pad(lengths_R1, (0, 0, 0, added), value=1)
        positions_1S = torch.arange(width * self.page_size).view(1, -1)
        hidden_RS = positions_1S >= lengths_R1
        if self.window is not None:
            hidden_RS |= positions_1S < lengths_R1 - self.window
        bias_R11S = self._bias(hidden_RS)[:, None, None]
        return DecodePiece(start, stop, rows + added, index, buffer, keys_BSD, values_BSD, bias_R11S)

    def _first_seen(self, length: int) -> int:
        """Return the first position that the last of `length` tokens attends to."""
        return 0 if self.window is None else max(0, length - self.window)

    def _bias(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, _NEVER)

    def _blocks(self, row: PrefillRow) -> list[PrefillPiece]:
        firsts = range(row.length - row.count, row.length, _QUERY_BLOCK)
        stops = [min(first + _QUERY_BLOCK, row.length) for first in firsts]
        starts = [self._first_seen(first + 1) // self.page_size for first in firsts]  # pages
        widths = [self._width(stop - start * self.page_size) for start, stop in zip(starts, stops, strict=True)]
        scratch = self._scratch(max(widths))
        pages_P = functional.pad(row.pages_P, (0, max(widths)))
        blocks = []
        for first, stop, start, width in zip(firsts, stops, starts, widths, strict=True):
            index, buffer = self._gather(pages_P[None, start : start + width], scratch)
            keys_KSD, values_KSD = buffer.view(2, self.kv_heads, -1, self.head_dim).unbind()
            count = _FEW_QUERIES * padded_size(-(-(stop - first) // _FEW_QUERIES), steps=_STEPS)
            queries_C1 = torch.arange(first, first + count).clamp_(max=stop - 1).view(-1, 1)
            keys_1S = torch.arange(start * self.page_size, (start + width) * self.page_size).view(1, -1)
            hidden_CS = keys_1S > queries_C1
            if self.window is not None:
                hidden_CS |= keys_1S <= queries_C1 - self.window
            begin = row.start + first - firsts.start
            bias_CS = self._bias(hidden_CS)
            blocks.append(PrefillPiece(begin, begin + stop - first, index, buffer, keys_KSD, values_KSD, bias_CS))
        return blocks

    def _decode_attention(self, q_NHD: Tensor, piece: DecodePiece) -> Tensor:
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
        weights = self._weights(scores_RKGS, piece.bias_R11S)
        return torch.bmm(weights.view(scores_BGS.shape), piece.values_BSD).view(piece.rows, -1)[:count]

    def _weights(self, scores: Tensor, bias: Tensor) -> Tensor:
        if self._weigh is not None:
            return self._weigh(scores, bias, self.scale)
        return torch.softmax(torch.add(bias, scores, alpha=self.scale), -1)

    def _block_attention(self, q_NHD: Tensor, block: PrefillPiece) -> Tensor:
        count, padded = block.stop - block.start, block.bias_CS.shape[0]
        q_CHD = q_NHD[block.start : block.stop]
        if padded > count:
            q_CHD = functional.pad(q_CHD, (0, 0, 0, 0, 0, padded - count))
        q_CKGD = q_CHD.view(padded, self.kv_heads, self._group, -1)
        q_KMD = q_CKGD.permute(1, 2, 0, 3).reshape(self.kv_heads, -1, self.head_dim)
        scores_KMS = torch.bmm(q_KMD, block.keys_KSD.transpose(1, 2))
        scores_KGCS = scores_KMS.view(self.kv_heads, self._group, padded, -1)
        weights = self._weights(scores_KGCS, block.bias_CS)
        o_KMD = torch.bmm(weights.view(scores_KMS.shape), block.values_KSD)
        o_KGCD = o_KMD.view(self.kv_heads, self._group, padded, -1)[:, :, :count]
        return o_KGCD.permute(2, 0, 1, 3).reshape(count, -1)
