"""`CudaOps`: what a decoder block needs on CUDA, over FlashInfer and Triton; never knows a request or a model's weights.

Everything runs on the current stream and may be captured in a graph: outputs come from torch's allocator, nothing is
read back. Shape letters are those of paged.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from headrace.ops.cuda_fused import add_rms_norm, norm_rope_write, rms_norm, silu_mul

__all__ = ["CudaOps", "CudaStep"]


@dataclass(frozen=True, slots=True)
class CudaStep:
    """Where the tokens of one forward pass live, and how they attend."""

    positions_N: Tensor
    """int32 or int64."""
    slots_N: Tensor
    """int64: page * page_size + offset."""
    attend: Callable[[Tensor, Tensor, Tensor], None]
    """(queries [N, H, D], one layer's cache, output [N, H, D])."""


class CudaOps:
    """Operations for one model's geometry and one attention window."""

    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, eps: float, cos_sin_PD: Tensor) -> None:
        """Args: `cos_sin_PD` is float32 [positions, D] on the device: D/2 cosines, then D/2 sines."""
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self._eps = eps
        self._cos_sin_PD = cos_sin_PD

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The product with a weight [O, I]."""

        def product(x_NI: Tensor) -> Tensor:
            return dense_linear(x_NI, weight_OI, bias_O)

        return product

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + eps) * w."""
        out_NE = torch.empty_like(x_NE)
        rms_norm(x_NE, weight_E, self._eps, out_NE)
        return out_NE

    def add_rms_norm(self, x_NE: Tensor, residual_NE: Tensor, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); both inputs are overwritten."""
        add_rms_norm(x_NE, residual_NE, weight_E, self._eps)
        return x_NE, residual_NE

    def silu_mul(self, gate_up_N2F: Tensor) -> Tensor:
        """silu(gate) * up."""
        out_NF = gate_up_N2F.new_empty(gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2)
        silu_mul(gate_up_N2F, out_NF)
        return out_NF

    def rope_and_write(
        self,
        qkv_NX: Tensor,
        step: CudaStep,
        kv_LPsTKD: Tensor,
        layer: int,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to their pages; queries [N, H, D]."""
        q_NHD = qkv_NX.new_empty(qkv_NX.shape[0], self.heads, self.head_dim)
        norm_rope_write(
            qkv_NX,
            q_norm_D,
            k_norm_D,
            self._cos_sin_PD,
            step.positions_N,
            step.slots_N,
            kv_LPsTKD[layer],
            heads=self.heads,
            kv_heads=self.kv_heads,
            eps=self._eps,
            q_out=q_NHD,
        )
        return q_NHD

    def attention(self, q_NHD: Tensor, step: CudaStep, kv_LPsTKD: Tensor, layer: int) -> Tensor:
        """softmax(q kᵀ / sqrt(D)) v over each token's context, [N, H * D]."""
        out_NHD = torch.empty_like(q_NHD)
        step.attend(q_NHD, kv_LPsTKD[layer], out_NHD)
        return out_NHD.view(q_NHD.shape[0], -1)
