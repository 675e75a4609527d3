"""`CudaOps`: the operations of a decoder's block on CUDA, each by the kernel that is fastest for the number of tokens.

Owns the layout of KV pages on the device and the choice between kernels; never picks pages, samples or loads. Results
are allocated when they are needed: inside a captured graph from its pool, so that replays reuse the same addresses.

Everything runs on the current stream, and one `CudaOps` belongs to one stream: split products share its scratch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.ops.cuda import fused
from headrace.ops.cuda.attention.decode import FusedDecode
from headrace.ops.cuda.attention.paged import DecodeAttention, HeadShape, PrefillAttention
from headrace.ops.cuda.attention.tile import TileAttention
from headrace.ops.cuda.memory.pages import PageMemory
from headrace.ops.cuda.products.even_heads import EvenHeads, HeadTargets
from headrace.ops.cuda.products.even_linear import EvenLinear, Squares
from headrace.ops.cuda.products.linear import MAX_ROWS, LinearScratch, linear, linear_silu_mul
from headrace.ops.cuda.products.tile_linear import TileLinear
from headrace.ops.cuda.products.vector import AddNorm, vector_linear
from headrace.ops.paged import UNSCALED, KvScales
from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import WornSite
    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.fused import DecodeInputs
    from headrace.ops.formats import Stored
    from headrace.ops.stream import HeadNorms

__all__ = ["CudaOps", "CudaProduct", "DecodeStep", "GivenRows", "PrefillStep"]

# Measured on an H200: the activation inside the product pays where it saves enough traffic, not where F is small.
_GATED_FEATURES = 8192
# One row: every program computes the norm of its input again, which pays while the input is short.
_NORM_FEATURES = 2048
_LINEAR_MULTIPLE = 64


class CudaProduct(NamedTuple):
    """Weight [O, I], contiguous, and its bias."""

    weight_OI: Tensor
    bias_O: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """Decode step: one token for each row; the device reads everything when a graph replays."""

    inputs: DecodeInputs
    attention: FusedDecode | DecodeAttention


@dataclass(frozen=True, slots=True, eq=False)
class PrefillStep:
    """Prefill step: several tokens for each row, with a plan for attention."""

    positions_N: Tensor
    slots_N: Tensor
    attention: PrefillAttention | TileAttention
    given: tuple[GivenRows, ...] = ()


class GivenRows(NamedTuple):
    """Virtual tokens whose keys and values are given, not computed (prefix tuning, Li and Liang, 2021)."""

    first: int
    """Index of the first of these among the step's tokens."""
    kv_LMX: Tensor
    """Keys, already rotated, then values of each layer: [layers, M, 2 * K * D]."""


def _is_whole(packed: CudaProduct) -> bool:
    """Return whether outputs, and gates and ups separately, come in whole pieces of 16 bytes."""
    return len(packed.weight_OI) % 16 == 0


class CudaOps:
    """The operations of one model's layers that share an attention window."""

    def __init__(
        self,
        shape: HeadShape,
        arch: Arch,
        *,
        eps: float,
        cos_sin_PD: Tensor,
        scratch: LinearScratch,
        even: EvenLinear | None = None,
        even_heads: EvenHeads | None = None,
        tile: TileLinear | None = None,
        kv_scales: Mapping[int, KvScales] = MappingProxyType({}),
    ) -> None:
        """Compute with heads of `shape`.

        Args:
            shape: Heads, window, cache dtype.
            arch: The abilities of the GPU.
            eps: Epsilon of the norms.
            cos_sin_PD: Rotary table, float32 [positions, D]: D/2 cosines, then D/2 sines.
            scratch: The scratch of the one stream on which this runs.
            even: The products of few rows on that stream, used where they fit; None where they cannot run.
            even_heads: The products that become queries, keys and values, used where they fit; None if they cannot run.
            tile: The products of many rows, used where they fit; None where they cannot run.
            kv_scales: Scales of 8-bit keys and values, by layer; a 16-bit cache has none.
        """
        self.shape, self.arch = shape, arch
        self.eps = eps
        self.device = cos_sin_PD.device
        self._cos_sin_PD = cos_sin_PD
        self._scratch, self._even, self._even_heads, self._tile = scratch, even, even_heads, tile
        self._kv_scales = kv_scales if shape.kv_dtype != shape.dtype else {}
        self.pdl = arch.has("dependent_launch")
        """Whether a kernel may be launched while the one before it still runs."""

    @property
    def even(self) -> EvenLinear | None:
        """Products of few rows, if these and `even_heads` can run; else None."""
        return None if self._even_heads is None else self._even

    # --- pages

    def page_bytes(self, num_layers: int) -> int:
        """Return the memory of one page over all layers, in bytes."""
        shape = self.shape
        return num_layers * 2 * shape.page_size * shape.kv_heads * shape.head_dim * shape.kv_dtype.itemsize

    def allocate_pages(self, num_layers: int, num_pages: int) -> PageMemory:
        """Return zeroed pages `[layers, pages, 2, T, K, D]`."""
        shape = self.shape
        page = (2, shape.page_size, shape.kv_heads, shape.head_dim)
        return PageMemory(num_layers, page, shape.kv_dtype, num_pages, self._cos_sin_PD.device)

    @staticmethod
    def copy_pages(kv: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in all layers; all sources are read before any page is written."""
        if pairs:
            source, target = torch.tensor(pairs, dtype=torch.int64).to(kv.device, non_blocking=False).unbind(1)
            for layer in kv.view(torch.uint8):  # an fp8 cache has no index_copy of its own
                layer.index_copy_(0, target, layer.index_select(0, source))

    # --- what the decoder calls

    def pack(self, weight: Stored, bias_O: Tensor | None) -> CudaProduct:
        """Pack a weight and its bias for `product`; values in the dtype of activations keep their address."""
        return CudaProduct(weight.dense(self.shape.dtype).contiguous(), bias_O)

    def pack_head(self, weight_VE: Stored) -> CudaProduct:
        """Pack the output head's weight for `logits`."""
        return self.pack(weight_VE, None)

    def logits(self, x_SE: Tensor, head: CudaProduct) -> Tensor:
        """Return the product with the output head in float32, the dtype of its sums.

        From 16 on, bfloat16 has steps of 0.125, so that near ties would depend on the shape of the step.
        """
        return self._product(x_SE, head.weight_OI, torch.float32)

    def embed(self, x_NE: Tensor, _tokens_N: Tensor) -> Tensor:
        """Return the embeddings unchanged."""
        return x_NE

    def attend(
        self,
        stream: Stream,
        norm_E: Tensor,
        qkv: CudaProduct,
        head_norms: HeadNorms | None,
        step: DecodeStep | PrefillStep,
        kv: Tensor,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Norm, multiply by `qkv`, norm and rotate heads, store k and v, attend; return ([N, H * D], the sum)."""
        x_NE, total_NE, pending = stream
        if isinstance(pending, Squares) and self._even is not None and _is_whole(qkv):
            assert total_NE is not None
            if self._can_make_heads(x_NE, qkv, step):
                return self.attend_inside(x_NE, pending, qkv, head_norms, step, kv, layer), total_NE
            qkv_NX = self._even_product(self._even, x_NE, qkv, pending)
        elif pending is None and x_NE.shape[0] == 1 and x_NE.shape[1] <= _NORM_FEATURES:
            qkv_NX, total_NE = self._vector(x_NE, total_NE, norm_E, qkv.weight_OI, gated=False)
            qkv_NX = qkv_NX if qkv.bias_O is None else qkv_NX.add_(qkv.bias_O)
        else:
            normed_NE, total_NE = self.normed(stream, norm_E)
            qkv_NX = self.product(normed_NE, qkv)
        return self.attend_with(qkv_NX, head_norms, step, kv, layer), total_NE

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: CudaProduct, _layer: int) -> tuple[Tensor, Tensor]:
        """Return (silu(gate) * up of the norm's product, the sum of the stream)."""
        x_NE, total_NE, pending = stream
        if isinstance(pending, Squares) and self._even is not None and _is_whole(gate_up):
            assert total_NE is not None
            return self._even_feed(self._even, x_NE, gate_up, pending), total_NE
        if pending is None and gate_up.bias_O is None and len(x_NE) == 1 and x_NE.shape[1] <= _NORM_FEATURES:
            return self._vector(x_NE, total_NE, norm_E, gate_up.weight_OI, gated=True)
        normed_NE, total_NE = self.normed(stream, norm_E)
        return self.gated(normed_NE, gate_up), total_NE

    def add(
        self, x_NI: Tensor, packed: CudaProduct, total_NE: Tensor, norm_E: Tensor | None, _layer: int, _site: str
    ) -> Stream:
        """Return the stream with the product added, and times the norm's weight where a kernel does all at once."""
        even = self._even_for(len(x_NI), packed.weight_OI)
        if even is None or norm_E is None or packed.bias_O is not None:
            return Stream(self.product(x_NI, packed), total_NE)
        out_NE = torch.empty_like(total_NE)
        return Stream(out_NE, total_NE, even.add(x_NI, packed.weight_OI, total_NE, norm_E, out_NE))

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
            fused.rms_norm(x_NE, norm_E, self.eps, normed_NE, pdl=self.pdl)
            return normed_NE, x_NE
        if pending is not None:
            return pending.normed(x_NE, total_NE, norm_E, self.eps), total_NE
        fused.add_rms_norm(x_NE, total_NE, norm_E, self.eps, pdl=self.pdl)
        return x_NE, total_NE

    # --- for operations with adapters, too

    def product(self, x_NI: Tensor, packed: CudaProduct) -> Tensor:
        """Return x W^T + b."""
        weight_OI, bias_O = packed
        even = self._even_for(len(x_NI), weight_OI)
        if len(x_NI) == 1 or even is None:
            out_NO = self._product(x_NI, weight_OI, x_NI.dtype)
        else:
            out_NO = torch.empty(len(x_NI), len(weight_OI), dtype=x_NI.dtype, device=x_NI.device)
            even.product(x_NI, weight_OI, out_NO)
        return out_NO if bias_O is None else out_NO.add_(bias_O)

    def gated(self, x_NE: Tensor, packed: CudaProduct) -> Tensor:
        """Return silu(gate) * up of the product."""
        weight_2FI, (rows, size_in) = packed.weight_OI, x_NE.shape
        out_NF = torch.empty(rows, weight_2FI.shape[0] // 2, dtype=x_NE.dtype, device=x_NE.device)
        if packed.bias_O is None and rows == 1:
            vector_linear(x_NE, weight_2FI, out_NF, gated=True, pdl=self.pdl)
            return out_NF
        even = self._even_for(rows, weight_2FI)
        gated = rows <= MAX_ROWS and out_NF.shape[1] >= _GATED_FEATURES and size_in % _LINEAR_MULTIPLE == 0
        if packed.bias_O is None and even is not None:
            even.silu_mul(x_NE, weight_2FI, out_NF)
        elif packed.bias_O is None and self._tile is not None and TileLinear.fits(rows, *weight_2FI.shape):
            self._tile.silu_mul(x_NE, weight_2FI, out_NF, pdl=self.pdl)
        elif packed.bias_O is None and gated:
            linear_silu_mul(x_NE, weight_2FI, out_NF, pdl=self.pdl)
        else:
            fused.silu_mul(self.product(x_NE, packed), out_NF, pdl=self.pdl)
        return out_NF

    def attend_with(
        self,
        qkv_NX: Tensor,
        head_norms: HeadNorms | None,
        step: DecodeStep | PrefillStep,
        kv: Tensor,
        layer: int,
    ) -> Tensor:
        """Norm and rotate q and k, store k and v, attend; return [N, H * D]."""
        shape, kv_layer, scales = self.shape, kv[layer], self._kv_scales.get(layer, UNSCALED)
        q_norm_D, k_norm_D = head_norms or (None, None)
        rows, width = qkv_NX.shape[0], shape.heads * shape.head_dim
        out_NX = torch.empty(rows, width, dtype=qkv_NX.dtype, device=qkv_NX.device)
        if isinstance(step, PrefillStep):
            self._rope_and_write(qkv_NX, q_norm_D, k_norm_D, step.positions_N, step.slots_N, kv_layer, scales, qkv_NX)
            for first, kv_LMX in step.given:
                kv_MX, slots_M = kv_LMX[layer], step.slots_N[first : first + kv_LMX.shape[1]]
                still_M = torch.zeros_like(slots_M)  # position 0 is not rotated
                self._rope_and_write(kv_MX, None, None, still_M, slots_M, kv_layer, scales, kv_MX, heads=0)
            q_NHD = qkv_NX[:, :width].view(rows, shape.heads, shape.head_dim)
            step.attention.run(q_NHD, kv_layer, out_NX.view(rows, shape.heads, shape.head_dim), scales)
        elif isinstance(step.attention, FusedDecode):
            step.attention.run(
                qkv_NX, q_norm_D, k_norm_D, self._cos_sin_PD, kv_layer, step.inputs, out_NX, scales,
                eps=self.eps, pdl=self.pdl,
            )  # fmt: skip
        else:
            at, slots_B = step.inputs.positions_B, step.inputs.slots_B
            self._rope_and_write(qkv_NX, q_norm_D, k_norm_D, at, slots_B, kv_layer, scales, out_NX)
            return self._decode(out_NX, step, kv_layer, scales)
        return out_NX

    def attend_inside(
        self,
        x_NE: Tensor,
        squares: Squares | None,
        qkv: CudaProduct,
        head_norms: HeadNorms | None,
        step: DecodeStep | PrefillStep,
        kv: Tensor,
        layer: int,
        worn: WornSite | None = None,
    ) -> Tensor:
        """Attend with a product that norms and rotates q and k, stores k and v, and adds updates itself."""
        assert self._even_heads is not None and isinstance(step, DecodeStep)
        kv_layer, scales = kv[layer], self._kv_scales.get(layer, UNSCALED)
        q_norm_D, k_norm_D = head_norms or (None, None)
        at, slots_B = step.inputs.positions_B, step.inputs.slots_B
        to = HeadTargets(q_norm_D, k_norm_D, self._cos_sin_PD, at, slots_B, kv_layer, scales)
        q_NX = self._even_heads.run(x_NE, qkv.weight_OI, squares, to, worn)
        return self._decode(q_NX, step, kv_layer, scales)

    # --- inside

    def _product(self, x_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x W^T in `dtype`, from a kernel that rounds float32 sums to any dtype."""
        rows, size_in = x_NI.shape
        out_NO = torch.empty(rows, len(weight_OI), dtype=dtype, device=x_NI.device)
        if rows == 1:
            vector_linear(x_NI, weight_OI, out_NO, pdl=self.pdl)
        elif rows <= MAX_ROWS and size_in % _LINEAR_MULTIPLE == 0:
            linear(x_NI, weight_OI, out_NO, self._scratch, pdl=self.pdl)
        elif dtype is x_NI.dtype:
            torch.mm(x_NI, weight_OI.t(), out=out_NO)
        else:
            torch.mm(x_NI, weight_OI.t(), out_dtype=dtype, out=out_NO)
        return out_NO

    def _even_for(self, rows: int, weight_OI: Tensor) -> EvenLinear | None:
        return self._even if EvenLinear.fits(rows, *weight_OI.shape) else None

    def _can_make_heads(self, x_NE: Tensor, qkv: CudaProduct, step: DecodeStep | PrefillStep) -> bool:
        """Return whether one kernel can make queries, keys and values of the step, rotate and store them."""
        if not isinstance(step, DecodeStep) or isinstance(step.attention, FusedDecode) or qkv.bias_O is not None:
            return False
        return self._even_heads is not None and EvenHeads.fits(*x_NE.shape)

    def _decode(self, q_NX: Tensor, step: DecodeStep, kv_layer: Tensor, scales: KvScales) -> Tensor:
        """Attend with rotated queries, whose keys and values are already stored."""
        assert not isinstance(step.attention, FusedDecode)
        out_NX = torch.empty_like(q_NX)
        head = (len(q_NX), self.shape.heads, self.shape.head_dim)
        step.attention.run(q_NX.view(head), kv_layer, step.inputs, out_NX.view(head), scales)
        return out_NX

    @staticmethod
    def _even_product(even: EvenLinear, x_NI: Tensor, packed: CudaProduct, squares: Squares) -> Tensor:
        """Return the product of a norm, of which `squares` holds the missing factors."""
        out_NO = torch.empty(len(x_NI), len(packed.weight_OI), dtype=x_NI.dtype, device=x_NI.device)
        even.product(x_NI, packed.weight_OI, out_NO, squares)
        return out_NO if packed.bias_O is None else out_NO.add_(packed.bias_O)

    def _even_feed(self, even: EvenLinear, x_NE: Tensor, packed: CudaProduct, squares: Squares) -> Tensor:
        """Return silu(gate) * up of the product of a norm, of which `squares` holds the missing factors."""
        out_NF = torch.empty(len(x_NE), len(packed.weight_OI) // 2, dtype=x_NE.dtype, device=x_NE.device)
        if packed.bias_O is None:
            even.silu_mul(x_NE, packed.weight_OI, out_NF, squares)
        else:
            fused.silu_mul(self._even_product(even, x_NE, packed, squares), out_NF, pdl=self.pdl)
        return out_NF

    def _vector(
        self, x_1E: Tensor, residual_1E: Tensor | None, norm_E: Tensor, weight_OI: Tensor, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        """Add, norm, multiply and activate for one row in one kernel; return (the product, the sum)."""
        total_1E = x_1E if residual_1E is None else torch.empty_like(x_1E)
        size_out = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
        out_1O = torch.empty(1, size_out, dtype=x_1E.dtype, device=x_1E.device)
        add = AddNorm(norm_E, self.eps, residual_1E, None if residual_1E is None else total_1E)
        vector_linear(x_1E, weight_OI, out_1O, norm=add, gated=gated, pdl=self.pdl)
        return out_1O, total_1E

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
        heads: int | None = None,
    ) -> None:
        """Call `norm_rope_write` for the model's heads, or for fewer queries."""
        shape = self.shape
        fused.norm_rope_write(
            qkv_NX, q_norm_D, k_norm_D, self._cos_sin_PD, positions_N, slots_N, kv_layer,
            heads=shape.heads if heads is None else heads, kv_heads=shape.kv_heads, eps=self.eps, q_out=q_out,
            k_scale=scales.k, v_scale=scales.v, pdl=self.pdl,
        )  # fmt: skip
