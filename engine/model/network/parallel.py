"""`ParallelLayer`: a layer whose mixer and feed read the same stream, and whose results are added together.

    y = x + f(n) + g(m),   n = norm(x),   m = n or a norm of x of its own

Wang and Komatsuzaki (2021), "GPT-J-6B"; Black et al. (2022), "GPT-NeoX-20B", for two norms.
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.network.layers import Feed, Mixer
from headrace.engine.model.network.operations import BlockOps, Kv, Packed, Step
from headrace.engine.model.network.placement import Entry
from headrace.ops.stream import Stream

__all__ = ["ParallelLayer"]


class ParallelLayer(Generic[Packed, Step, Kv]):
    """A mixer beside a feed."""

    entry_norm_E: Tensor | None = None
    """Always None: norms are of the whole sum, of which no product before computes a part."""

    def __init__(
        self,
        mixer: Mixer[Packed, Step, Kv],
        feed: Feed[Packed, Step, Kv],
        mixer_entry: Entry,
        feed_entry: Entry | None,
    ) -> None:
        """Take the two halves, packed for a device, and their norms; `feed_entry` is None where they share one."""
        self._mixer, self._feed = mixer, feed
        self._mixer_entry, self._feed_entry = mixer_entry, feed_entry

    def __call__(
        self, ops: BlockOps[Packed, Step, Kv], stream: Stream, _next_norm_E: Tensor | None, step: Step, kv: Kv
    ) -> Stream:
        """Return the stream with the results of both added."""
        n_NE, total_NE = self._mixer_entry(ops, stream)
        mixed_NE = self._mixer.result(ops, n_NE, step, kv)
        m_NE = n_NE if self._feed_entry is None else self._feed_entry(ops, Stream(total_NE))[0]
        fed_NE = self._feed.result(ops, m_NE)
        return Stream(fed_NE, ops.summed(Stream(mixed_NE, total_NE))[1])
