"""`Mixer` and `Feed`: the protocols of the two halves of a layer, and which class computes which spec.

A mixer or feed takes the residual stream and returns it with its result added. A norm that it begins with may be
computed in part by the product before it, so each says which norm that is, and is told which one follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.experts import ExpertsBesideDense, ExpertsFeed
from headrace.engine.model.latent import LatentAttention
from headrace.engine.model.network.feeds.beside import DenseBesideExperts
from headrace.engine.model.network.feeds.dense import GatedFeed
from headrace.engine.model.network.feeds.experts import RoutedFeed
from headrace.engine.model.network.feeds.plain import UngatedFeed
from headrace.engine.model.network.mixers.attention import SoftmaxAttention
from headrace.engine.model.network.mixers.latent import AttentionToLatents
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.spec import (
    Attention,
    DenseFeed,
    FeedSpec,
    LayerSpec,
    MixerSpec,
    PlainFeed,
    SinkAttention,
    SoftcappedAttention,
)
from headrace.engine.model.value_normed import ValueNormedAttention
from headrace.ops.stream import Stream

__all__ = ["FEEDS", "MIXERS", "Feed", "FeedMaker", "Feeds", "Mixer", "MixerMaker", "Mixers"]

_Packed = TypeVar("_Packed", covariant=True)
_Step = TypeVar("_Step")
_Kv = TypeVar("_Kv")
_AnyStep = TypeVar("_AnyStep", covariant=True)
_AnyKv = TypeVar("_AnyKv", covariant=True)


class Mixer(Protocol[_Packed, _Step, _Kv]):
    """Protocol of a layer's mixer, its weights packed for a device. `MixerSpec.state` says what it keeps of a row."""

    entry_norm_E: Tensor | None
    """Weight of the norm that the mixer begins with, which the product before may compute in part; None without."""

    def __call__(
        self, ops: BlockOps[_Packed, _Step, _Kv], stream: Stream, next_norm_E: Tensor | None, step: _Step, kv: _Kv
    ) -> Stream:
        """Return the stream with the mixer's result added.

        Args:
            ops: The operations of this step.
            stream: The residual stream.
            next_norm_E: Weight of the norm that what follows begins with; None if it begins with none.
            step: The places of the step's tokens in the cache.
            kv: The paged cache.
        """
        ...

    def result(self, ops: BlockOps[_Packed, _Step, _Kv], x_NE: Tensor, step: _Step, kv: _Kv) -> Tensor:
        """Return what the mixer makes of a normed input, [N, E], for layers whose mixer and feed stand side by side."""
        ...


class Feed(Protocol[_Packed, _AnyStep, _AnyKv]):
    """Protocol of a layer's feed, its weights packed for a device."""

    entry_norm_E: Tensor | None
    """Weight of the norm that the feed begins with, which the product before may compute in part; None without."""

    def __call__(self, ops: BlockOps[_Packed, _AnyStep, _AnyKv], stream: Stream, next_norm_E: Tensor | None) -> Stream:
        """Return the stream with the feed's result added; arguments are those of `Mixer`."""
        ...

    def result(self, ops: BlockOps[_Packed, _AnyStep, _AnyKv], x_NE: Tensor) -> Tensor:
        """Return what the feed makes of a normed input, [N, E], for layers whose mixer and feed stand side by side."""
        ...


class MixerMaker(Protocol):
    """Protocol of a function, usually a class, that makes a layer's mixer."""

    def __call__(
        self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int
    ) -> Mixer[Packed, Step, Kv]:
        """Return the mixer of the layer with the number `layer`, its weights packed by `ops`.

        Raises:
            ModelRejected: The spec asks for what this mixer does not compute.
        """
        ...


class FeedMaker(Protocol):
    """Protocol of a function, usually a class, that makes a layer's feed."""

    def __call__(
        self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int
    ) -> Feed[Packed, Step, Kv]:
        """Return the feed of the layer with the number `layer`, its weights packed by `ops`.

        Raises:
            ModelRejected: The spec asks for what this feed does not compute.
        """
        ...


Mixers: TypeAlias = Mapping[type[MixerSpec], MixerMaker]
"""What computes each kind of mixer, by the type of its spec."""
Feeds: TypeAlias = Mapping[type[FeedSpec], FeedMaker]
"""What computes each kind of feed, by the type of its spec."""

MIXERS: Mixers = MappingProxyType(
    {
        Attention: SoftmaxAttention,
        SoftcappedAttention: SoftmaxAttention,
        SinkAttention: SoftmaxAttention,
        ValueNormedAttention: SoftmaxAttention,
        LatentAttention: AttentionToLatents,
    }
)
FEEDS: Feeds = MappingProxyType(
    {
        DenseFeed: GatedFeed,
        PlainFeed: UngatedFeed,
        ExpertsFeed: RoutedFeed,
        ExpertsBesideDense: DenseBesideExperts,
    }
)
