"""`whole_layer`: finds layers that a device computes by one operation in place of several; never computes one."""

from __future__ import annotations

from headrace.engine.model.network.feeds.dense import GatedFeed
from headrace.engine.model.network.layers import Feed, Mixer
from headrace.engine.model.network.mixers.attention import SoftmaxAttention
from headrace.engine.model.network.operations import DeviceOps, Kv, LayerOps, Packed, Step, WholeLayer

__all__ = ["whole_layer"]


def whole_layer(
    mixer: Mixer[Packed, Step, Kv], feed: Feed[Packed, Step, Kv], ops: DeviceOps[Packed, Step, Kv], layer: int
) -> WholeLayer[Step, Kv] | None:
    """Return a layer as one operation of its device; None where the device, or this layer, takes several."""
    if not (isinstance(ops, LayerOps) and isinstance(mixer, SoftmaxAttention) and isinstance(feed, GatedFeed)):
        return None
    attention, gated = mixer.weights, feed.weights
    return None if attention is None or gated is None else ops.whole_layer(attention, gated, layer)
