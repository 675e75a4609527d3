"""`SerialLayer`: a layer whose feed reads what its mixer has added to the stream, as most decoders have it.

    x' = x + f(x),   x'' = x' + g(x'),   with mixer f and feed g, norms included

Vaswani et al. (2017), "Attention is all you need".
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.network.layers import Feed, Mixer
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.whole import whole_layer
from headrace.ops.stream import Stream

__all__ = ["SerialLayer"]


class SerialLayer(Generic[Packed, Step, Kv]):
    """A mixer, then a feed."""

    def __init__(
        self,
        mixer: Mixer[Packed, Step, Kv],
        feed: Feed[Packed, Step, Kv],
        device: DeviceOps[Packed, Step, Kv],
        layer: int,
    ) -> None:
        """Take the two halves of the layer with the number `layer`, packed by `device`."""
        self.entry_norm_E: Tensor | None = mixer.entry_norm_E
        self._mixer, self._feed, self._device = mixer, feed, device
        self._whole = whole_layer(mixer, feed, device, layer)

    def __call__(
        self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None, step: Step, kv: Kv
    ) -> Stream:
        """Return the stream with the results of both added; with adapters the halves are computed one by one."""
        if self._whole is not None and ops is self._device:
            return self._whole(stream, step, kv)
        stream = self._mixer(ops, stream, self._feed.entry_norm_E, step, kv)
        return self._feed(ops, stream, next_norm_E)
