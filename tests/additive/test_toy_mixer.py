"""Layers with norms behind their mixer and feed, without a change to the package.

x + norm(attention(x)), then x + norm(feed(x)): the products read the residual stream itself (OLMo et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import pytest
import torch
from additive.toy_models import EPSILON, Reference, check, plain_feed, plain_mixer, toy_spec
from torch import Tensor
from torch.nn import functional

from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.weights import SublayerWeights, load_weights
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.network.layers import FEEDS, MIXERS
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.spec import Attention, DenseFeed, LayerSpec, Norms
from headrace.ops.formats import Stored
from headrace.ops.stream import Stream

POST = Norms(EPSILON, placement="post")


@dataclass(frozen=True, slots=True)
class PostAttention(Attention):
    """Attention behind which its result is normed."""


@dataclass(frozen=True, slots=True)
class PostDense(DenseFeed):
    """DenseFeed feed behind which its result is normed."""


class PostNormAttention(Generic[Packed, Step, Kv]):
    """Attention on the stream itself; it begins with no norm, so the product before it computes none."""

    entry_norm_E: Tensor | None = None

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        assert spec.norms.placement == "post"
        self._norm_E, self._layer = weights.vectors["result_norm_E"], layer
        self._qkv, self._o = (ops.pack(weights.matrices[name], None) for name in ("qkv", "o"))

    def __call__(
        self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None, step: Step, kv: Kv
    ) -> Stream:
        x_NE, total_NE = ops.summed(stream)
        qkv_NX = ops.linear(x_NE, self._qkv, self._layer, "qkv")
        x_NX = ops.attend_with(qkv_NX, None, step, kv, self._layer)
        y_NE = ops.linear(x_NX, self._o, self._layer, "o")
        return Stream(ops.normed(Stream(y_NE), self._norm_E)[0], total_NE)


class PostNormFeed(Generic[Packed, Step, Kv]):
    """Gated feed on the stream itself."""

    entry_norm_E: Tensor | None = None

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        assert spec.norms.placement == "post"
        self._norm_E, self._layer = weights.vectors["result_norm_E"], layer
        self._gate_up, self._down = (ops.pack(weights.matrices[name], None) for name in ("gate_up", "down"))

    def __call__(self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None) -> Stream:
        x_NE, total_NE = ops.summed(stream)
        gate_NF, up_NF = ops.linear(x_NE, self._gate_up, self._layer, "gate_up").chunk(2, 1)
        y_NE = ops.linear(functional.silu(gate_NF) * up_NF, self._down, self._layer, "down")
        return Stream(ops.normed(Stream(y_NE), self._norm_E)[0], total_NE)


def post_mixer(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
    return x_NE + reference.layer_norm(reference.attention(x_NE, layer), layer, "input_layernorm")


def post_feed(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
    return x_NE + reference.layer_norm(reference.gated(x_NE, layer), layer, "post_attention_layernorm")


ROLES = {"mixer_result_norm": "input_layernorm", "feed_result_norm": "post_attention_layernorm"}
MIXER = PostAttention(heads=4, kv_heads=2, head_dim=8)
ALL_MIXERS = {**MIXERS, PostAttention: PostNormAttention}


def test_norms_behind_mixer_and_feed(tmp_path: Path) -> None:
    spec = toy_spec([LayerSpec(MIXER, PostDense(40), POST)] * 2, ROLES)
    parts, unlike = (post_mixer, post_feed), (plain_mixer, plain_feed)
    feeds = {**FEEDS, PostDense: PostNormFeed}
    check(tmp_path, spec, parts, unlike, mixers=ALL_MIXERS, feeds=feeds)


PLAIN = LayerSpec(Attention(heads=4, kv_heads=2, head_dim=8), DenseFeed(40), Norms(EPSILON))
MIXED = [PLAIN, LayerSpec(MIXER, PostDense(40), POST), PLAIN]


def test_layers_may_be_of_different_kinds(tmp_path: Path) -> None:
    spec = toy_spec(MIXED, ROLES)

    def mixer(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
        return (post_mixer if layer == 1 else plain_mixer)(reference, x_NE, layer)

    def feed(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
        return (post_feed if layer == 1 else plain_feed)(reference, x_NE, layer)

    feeds = {**FEEDS, PostDense: PostNormFeed}
    check(tmp_path, spec, (mixer, feed), (plain_mixer, feed), mixers=ALL_MIXERS, feeds=feeds)


class Told:
    """A device's operations that compute nothing and keep the norms that products are told of."""

    def __init__(self) -> None:
        self.norms: list[Tensor | None] = []
        self._x_NE = torch.ones(1, 32)

    def pack(self, weight: Stored, bias_O: Tensor | None) -> None:
        """Keep nothing."""

    def pack_head(self, weight_VE: Stored) -> None:
        """Keep nothing."""

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        return x_NE

    def attend(self, *_: object) -> tuple[Tensor, Tensor]:
        return self._x_NE, self._x_NE

    def attend_with(self, *_: object) -> Tensor:
        return self._x_NE

    def linear(self, *_: object) -> Tensor:
        return self._x_NE

    feed = normed = summed = attend

    def add(self, x_NI: Tensor, packed: None, total_NE: Tensor, norm_E: Tensor | None, layer: int, site: str) -> Stream:
        self.norms.append(norm_E)
        return Stream(x_NI, total_NE)

    def logits(self, x_SE: Tensor, head: None) -> Tensor:
        return x_SE


def test_a_product_is_told_the_norm_that_follows_and_none_where_none_does() -> None:
    """A GPU computes a part of that norm in the product, which would spoil the stream for one that reads it bare."""
    spec = toy_spec(MIXED, ROLES)
    weights = load_weights("random", spec, dtype=torch.float32, device="cpu")
    told = Told()
    ops = dict.fromkeys(spec.mixer_kinds, told)
    feeds = {**FEEDS, PostDense: PostNormFeed}
    decoder = Decoder(spec, weights, ops, mixers=ALL_MIXERS, feeds=feeds)
    decoder.hidden(torch.tensor([1]), dict.fromkeys(spec.mixer_kinds), None)
    first, last = weights.layers[0].feed.vectors["norm_E"], weights.layers[2].feed.vectors["norm_E"]
    # The first layer's two products, then the last one's: the layer between adds without a product.
    assert [id(norm) for norm in told.norms] == [id(first), id(None), id(last), id(None)]


def test_the_packages_own_layers_compute_the_same(tmp_path: Path) -> None:
    """Attention and a gated feed of the package with norms of their results; norms on both sides besides."""
    mixer = Attention(heads=4, kv_heads=2, head_dim=8)
    post = toy_spec([LayerSpec(mixer, DenseFeed(40), POST)] * 2, ROLES)
    for name in ("post", "both"):
        (tmp_path / name).mkdir()
    check(tmp_path / "post", post, (post_mixer, post_feed), (plain_mixer, plain_feed))
    roles = {"mixer_result_norm": "mixer_result_norm", "feed_result_norm": "feed_result_norm"}
    both = toy_spec([LayerSpec(mixer, DenseFeed(40), Norms(EPSILON, placement="both"))] * 2, roles)

    def sandwiched_mixer(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
        y_NE = reference.attention(reference.layer_norm(x_NE, layer, "input_layernorm"), layer)
        return x_NE + reference.layer_norm(y_NE, layer, "mixer_result_norm")

    def sandwiched_feed(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
        y_NE = reference.gated(reference.layer_norm(x_NE, layer, "post_attention_layernorm"), layer)
        return x_NE + reference.layer_norm(y_NE, layer, "feed_result_norm")

    check(tmp_path / "both", both, (sandwiched_mixer, sandwiched_feed), (plain_mixer, plain_feed))


def test_a_mixer_that_nothing_computes_is_refused_by_name() -> None:
    spec = toy_spec([LayerSpec(MIXER, DenseFeed(40), POST)], ROLES)
    ops = cpu_ops(spec, page_size=4, max_positions=8, dtype=torch.float32)
    weights = load_weights("random", spec, dtype=torch.float32, device="cpu")
    with pytest.raises(ModelRejected, match="the mixer of a layer is PostAttention") as caught:
        Decoder(spec, weights, ops)
    assert caught.value.limit == "Attention, SoftcappedAttention, SinkAttention, ValueNormedAttention, LatentAttention"
