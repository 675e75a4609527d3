"""Norms on the CPU, by torch: computed in float32, each row by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.stream import LayerNorm

__all__ = ["layer_norm", "layer_norm_heads", "rms_norm"]


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: Tensor) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, float32; `eps` is a number in float32."""
    x_NE = x_NE.float()
    norm_N1 = torch.linalg.vector_norm(x_NE, 2, -1, True)
    inverse_N1 = torch.addcmul(eps, norm_N1, norm_N1, value=1.0 / x_NE.shape[-1]).rsqrt_()
    return (x_NE * inverse_N1).mul_(weight_E)


def layer_norm(x_NE: Tensor, norm: LayerNorm, eps: float) -> Tensor:
    """Return `(x - mean(x)) / sqrt(var(x) + eps) * w + b` over the last dimension, float32."""
    weight_E, bias_E = norm.weight_E.float(), None if norm.bias_E is None else norm.bias_E.float()
    return torch.layer_norm(x_NE.float(), x_NE.shape[-1:], weight_E, bias_E, eps)


def layer_norm_heads(qkv_NX: Tensor, weight_X: Tensor, head_dim: int, eps: float) -> Tensor:
    """Return queries, keys and values with a layer norm of each query and key head, in the dtype of `qkv_NX`.

    `weight_X` holds the weights of these heads, one after the other; values come behind them.
    """
    weight_BD = weight_X.view(-1, head_dim)
    qkv_NAD, heads = qkv_NX.view(len(qkv_NX), -1, head_dim), len(weight_BD)
    normed_NBD = torch.layer_norm(qkv_NAD[:, :heads].float(), (head_dim,), None, None, eps).mul_(weight_BD)
    return torch.cat((normed_NBD.to(qkv_NX.dtype), qkv_NAD[:, heads:]), 1).view(qkv_NX.shape)
