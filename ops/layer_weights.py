"""`AttentionWeights` and `FeedWeights`: the two halves of a layer whose norms stand before them; never computes.

Devices that compute a whole layer by one operation take both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.stream import HeadNorms

__all__ = ["AttentionWeights", "FeedWeights"]

_Packed = TypeVar("_Packed", covariant=True)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights(Generic[_Packed]):
    """x + W_o softmax(s q k^T) v, with q, k and v the product of an RMS norm of x."""

    norm_E: Tensor
    qkv: _Packed
    head_norms: HeadNorms | None
    o: _Packed


@dataclass(frozen=True, slots=True, eq=False)
class FeedWeights(Generic[_Packed]):
    """x + W_down (silu(gate) * up), with gate and up the product of an RMS norm of x."""

    norm_E: Tensor
    gate_up: _Packed
    down: _Packed
