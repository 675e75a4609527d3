"""`Stream`: the residual stream between a product that adds to it and the norm that reads it, whatever the device.

A device may do a part of the norm in the product before it and the rest in the product after it; what is still missing
then travels as `Stream.pending`. Shape letters as in paged.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Activation", "HeadNorms", "LayerNorm", "Pending", "PlainActivation", "Stream"]


class Pending(Protocol):
    """Protocol of the part of a norm that is still missing; kernels that supply it in a product look at its type."""

    def normed(self, x_NE: Tensor, total_NE: Tensor, norm_E: Tensor, eps: float) -> Tensor:
        """Return the RMS norm, for products whose kernels do not supply what is missing.

        Args:
            x_NE: `Stream.x_NE`, which may be overwritten.
            total_NE: `Stream.total_NE`, which is the sum of the stream when this returns.
            norm_E: Weight of the norm.
            eps: Epsilon of the norm.
        """
        ...


class Stream(NamedTuple):
    """The residual stream before a norm. A step's operations may overwrite both tensors once they have read them."""

    x_NE: Tensor
    """What the last product added; or what `pending` says instead."""
    total_NE: Tensor | None = None
    """Sum of the stream before `x_NE` was added, or as `pending` says; None where `x_NE` is all of it."""
    pending: Pending | None = None
    """What is still missing of the next norm, if the last product has done a part of it."""

    def rows(self, rows_S: Tensor) -> Stream:
        """Return the stream of some of the tokens, by their indices, int64; nothing may be pending."""
        assert self.pending is None, "the last layer's product has no norm to do a part of"
        total_NE = self.total_NE
        return Stream(self.x_NE[rows_S], None if total_NE is None else total_NE[rows_S])


Activation: TypeAlias = Literal["silu", "gelu_tanh"]
"""Activation of a gated feed: x * sigmoid(x), or GELU with tanh for the error function (Hendrycks and Gimpel, 2016)."""


PlainActivation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "relu2"]
"""Activation of a feed without a gate: GELU by the error function or by tanh, the larger of x and 0, or its square."""


class LayerNorm(NamedTuple):
    """Weights of a norm that also takes the mean away: (x - mean(x)) / std(x) * w + b (Ba et al., 2016)."""

    weight_E: Tensor
    bias_E: Tensor | None = None


class HeadNorms(NamedTuple):
    """Weights of the RMS norms of queries and keys: of each head, [D], or of all heads together."""

    q_D: Tensor
    k_D: Tensor
