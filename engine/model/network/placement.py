"""Where a layer's norms are: before its mixer and feed, behind them, or both; and of which kind they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.ops.stream import LayerNorm, Stream

__all__ = ["Entry", "add_result"]


class Entry:
    """The norm that a sublayer, or the output head, begins with: an RMS norm, a layer norm or none."""

    def __init__(self, vectors: Mapping[str, Tensor], device: DeviceOps[Packed, Step, Kv]) -> None:
        """Take the weights by their names in `Norms.parameters`."""
        self.norm_E: Tensor | None = vectors.get("norm_E")
        """Weight of the RMS norm, which the product before may compute in part; None without."""
        self._layer_norm: Callable[[Tensor], Tensor] | None = None
        if (weight_E := vectors.get("layer_norm_E")) is not None:
            norm = LayerNorm(weight_E, vectors.get("layer_norm_bias_E"))
            self._layer_norm = lambda x_NE: device.layer_norm(x_NE, norm)

    def __call__(self, ops: BlockOps[Packed, Step, Kv], stream: Stream) -> tuple[Tensor, Tensor]:
        """Return (the norm of the stream's sum, the sum); without a norm the sum in the dtype of products."""
        if self.norm_E is not None:
            return ops.normed(stream, self.norm_E)
        summed_NE, total_NE = ops.summed(stream)
        return (summed_NE if self._layer_norm is None else self._layer_norm(total_NE)), total_NE


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
