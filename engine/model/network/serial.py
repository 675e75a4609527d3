"""`SerialLayer`: a layer whose feed reads what its mixer has added to the stream, as most decoders have it.

    x' = x + f(x),   x'' = x' + g(x'),   with mixer f and feed g, norms included

Vaswani et al. (2017), "Attention is all you need".
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.network.layers import Feed, Mixer
from headrace.engine.model.network.operations import BlockOps, Kv, Packed, Step
from headrace.ops.stream import Stream

__all__ = ["SerialLayer"]


class SerialLayer(Generic[Packed, Step, Kv]):
    """A mixer, then a feed."""

    def __init__(self, mixer: Mixer[Packed, Step, Kv], feed: Feed[Packed, Step, Kv]) -> None:
        """Take the two halves, packed for a device."""
        self.entry_norm_E: Tensor | None = mixer.entry_norm_E
        self._mixer, self._feed = mixer, feed

    def __call__(
        self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None, step: Step, kv: Kv
    ) -> Stream:
        """Return the stream with the results of both added."""
        stream = self._mixer(ops, stream, self._feed.entry_norm_E, step, kv)
        return self._feed(ops, stream, next_norm_E)
