"""The operations of a decoder step in slow, obvious torch: the reference that the fast ones are tested against.

Only tests use them. They compute in float32 or float64, one token and one head at a time where that is clearer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.paged import PagedBatch

__all__ = ["ReferenceKv", "attention", "linear", "low_rank", "rms_norm", "rope", "silu_mul", "split_qkv", "write_kv"]


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceKv:
    """Keys and values of one layer, each float32 `[pages, T, K, D]`."""

    keys: Tensor
    values: Tensor


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return `x W^T + b`, accumulated in float64."""
    y_NO = x_NI.double() @ weight_OI.double().T
    return (y_NO if bias_O is None else y_NO + bias_O.double()).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` along the last dimension."""
    x = x.float()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.float()


def silu_mul(gate_up_N2F: Tensor) -> Tensor:
    """Return `gate * sigmoid(gate) * up`, where the input holds gate, then up."""
    half = gate_up_N2F.shape[1] // 2
    gate_NF, up_NF = gate_up_N2F[:, :half].float(), gate_up_N2F[:, half:].float()
    return gate_NF * torch.sigmoid(gate_NF) * up_NF


def split_qkv(qkv_NX: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed projections into `q_NHD`, `k_NKD` and `v_NKD`, in float32."""
    all_NAD = qkv_NX.float().view(qkv_NX.shape[0], -1, head_dim)
    return all_NAD[:, :heads], all_NAD[:, heads : heads + kv_heads], all_NAD[:, heads + kv_heads :]


def rope(x_NHD: Tensor, positions_N: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate element i with element i + D/2 of each head by the angle of the token's position."""
    half = x_NHD.shape[-1] // 2
    out_NHD = torch.empty_like(x_NHD)
    for token, position in enumerate(positions_N.tolist()):
        c, s = cos[position], sin[position]
        first, second = x_NHD[token, :, :half], x_NHD[token, :, half:]
        out_NHD[token, :, :half] = first * c - second * s
        out_NHD[token, :, half:] = second * c + first * s
    return out_NHD


def low_rank(x_NI: Tensor, update: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return (x A^T) B of all modules, side by side, computed in float64; A [r, I], B [r, O]."""
    return torch.cat([x_NI.double() @ a_RI.double().T @ b_RO.double() for a_RI, b_RO in update], 1)


def write_kv(kv: ReferenceKv, slots_N: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> None:
    """Store each token's key and value at its slot, page * page_size + offset."""
    page_size = kv.keys.shape[1]
    for token, slot in enumerate(slots_N.tolist()):
        kv.keys[slot // page_size, slot % page_size] = k_NKD[token]
        kv.values[slot // page_size, slot % page_size] = v_NKD[token]


def attention(q_NHD: Tensor, batch: PagedBatch, kv: ReferenceKv, *, window: int | None, scale: float) -> Tensor:
    """Attend from each token to its row's pages up to itself, at most `window` tokens back; return float32 `o_NX`."""
    out_NHD = torch.full(q_NHD.shape, math.nan)
    for group in batch.decodes:
        for row, length in enumerate(group.lengths_R.tolist()):
            token = group.start + row
            out_NHD[token] = _attend(q_NHD[token].float(), kv, group.pages_RP[row], length - 1, window, scale)
    for prefill in batch.prefills:
        for offset in range(prefill.count):
            token, position = prefill.start + offset, prefill.length - prefill.count + offset
            out_NHD[token] = _attend(q_NHD[token].float(), kv, prefill.pages_P, position, window, scale)
    return out_NHD.flatten(1)


def _attend(q_HD: Tensor, kv: ReferenceKv, pages_P: Tensor, position: int, window: int | None, scale: float) -> Tensor:
    page_size, kv_heads = kv.keys.shape[1], kv.keys.shape[2]
    first = 0 if window is None else max(0, position - window + 1)
    places = [(int(pages_P[at // page_size]), at % page_size) for at in range(first, position + 1)]
    group = q_HD.shape[0] // kv_heads
    heads = []
    for head, q_D in enumerate(q_HD):
        scores = torch.stack([q_D @ kv.keys[page, offset, head // group] for page, offset in places]) * scale
        values = torch.stack([kv.values[page, offset, head // group] for page, offset in places])
        heads.append(torch.softmax(scores, dim=0) @ values)
    return torch.stack(heads)
