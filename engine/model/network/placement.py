"""Where a layer's norms are: before its mixer and feed, behind them, or both."""

from __future__ import annotations

from torch import Tensor

from headrace.engine.model.network.operations import BlockOps, Kv, Packed, Step
from headrace.ops.stream import Stream

__all__ = ["add_result", "enter"]


def enter(ops: BlockOps[Packed, Step, Kv], stream: Stream, norm_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (the input of a sublayer, the sum of the stream); the input is the sum itself without `norm_E`."""
    return ops.summed(stream) if norm_E is None else ops.normed(stream, norm_E)


def add_result(
    ops: BlockOps[Packed, Step, Kv],
    x_NI: Tensor,
    packed: Packed,
    total_NE: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    layer: int,
    site: str,
) -> Stream:
    """Return the stream with the last product of a sublayer, or the norm of this product, added.

    Args:
        ops: The operations of this step.
        x_NI: Input of the product.
        packed: Weight of the product.
        total_NE: The sum of the stream.
        norms: Weight of the norm of the product, or None, and that of the norm that what follows begins with, or None.
        layer: Number of the layer.
        site: Name of the product among the sites of adapters.
    """
    result_norm_E, next_norm_E = norms
    if result_norm_E is None:
        return ops.add(x_NI, packed, total_NE, next_norm_E, layer, site)
    y_NE = ops.linear(x_NI, packed, layer, site)
    return Stream(ops.normed(Stream(y_NE), result_norm_E)[0], total_NE)
