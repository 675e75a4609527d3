"""A feed of two experts with a router, without a change to the package.

Each token's result is the sum of the experts', weighted by the softmax of the router's scores (Shazeer et al., 2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import pytest
import torch
from additive.toy_models import EPSILON, Reference, check, plain_mixer, toy_spec
from torch import Tensor
from torch.nn import functional

from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.weights import SublayerWeights, load_weights
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.network.layers import FEEDS
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.roles import Fused, matrix
from headrace.engine.model.spec import Attention, FeedSpec, LayerSpec, Norms
from headrace.ops.stream import Stream

ROLES = {
    "router": "mlp.router",
    **{f"{kind}{expert}": f"mlp.experts.{expert}.{kind}_proj" for kind in ("gate", "up", "down") for expert in (0, 1)},
}


@dataclass(frozen=True, slots=True)
class TwoExperts(FeedSpec):
    """Two gated feeds of one size, and the router's scores of both."""

    size: int

    def parameters(self, hidden_size: int) -> Mapping[str, Fused]:
        found = {"router": matrix(hidden_size, router=2)}
        for expert in (0, 1):
            rows = {f"gate{expert}": self.size, f"up{expert}": self.size}
            found[f"gate_up{expert}"] = matrix(hidden_size, **rows)
            found[f"down{expert}"] = matrix(self.size, **{f"down{expert}": hidden_size})
        return found


class RoutedFeed(Generic[Packed, Step, Kv]):
    """The experts' results, weighted, in the operations that every device has."""

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        self.entry_norm_E: Tensor | None = weights.vectors["norm_E"]
        self._norm_E, self._layer = weights.vectors["norm_E"], layer
        self._router, *experts = (
            ops.pack(weights.matrices[name], None) for name in ("router", "gate_up0", "down0", "gate_up1", "down1")
        )
        self._experts = (experts[:2], experts[2:])

    def __call__(self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None) -> Stream:
        x_NE, total_NE = ops.normed(stream, self._norm_E)
        shares_N2 = torch.softmax(ops.linear(x_NE, self._router, self._layer, "router").float(), -1).to(x_NE.dtype)
        y_NE = torch.zeros_like(x_NE)
        for share_N, (gate_up, down) in zip(shares_N2.unbind(1), self._experts, strict=True):
            gate_NF, up_NF = ops.linear(x_NE, gate_up, self._layer, "gate_up").chunk(2, 1)
            x_NF = functional.silu(gate_NF) * up_NF
            y_NE += share_N[:, None] * ops.linear(x_NF, down, self._layer, "down")
        return Stream(y_NE, total_NE)


def routed(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
    n_NE = reference.layer_norm(x_NE, layer, "post_attention_layernorm")
    shares_N2 = torch.softmax(n_NE @ reference.weight(layer, "mlp.router").T, -1)
    experts = [reference.gated(n_NE, layer, f"mlp.experts.{expert}") for expert in (0, 1)]
    return x_NE + shares_N2[:, :1] * experts[0] + shares_N2[:, 1:] * experts[1]


def first_alone(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
    n_NE = reference.layer_norm(x_NE, layer, "post_attention_layernorm")
    return x_NE + reference.gated(n_NE, layer, "mlp.experts.0")


LAYER = LayerSpec(Attention(heads=4, kv_heads=2, head_dim=8, qk_norm=False), TwoExperts(24), Norms(EPSILON))


def test_two_experts(tmp_path: Path) -> None:
    feeds = {**FEEDS, TwoExperts: RoutedFeed}
    check(tmp_path, toy_spec([LAYER] * 2, ROLES), (plain_mixer, routed), (plain_mixer, first_alone), feeds=feeds)


def test_a_feed_that_nothing_computes_is_refused_by_name() -> None:
    spec = toy_spec([LAYER], ROLES)
    ops = cpu_ops(spec, page_size=4, max_positions=8, dtype=torch.float32)
    weights = load_weights("random", spec, dtype=torch.float32, device="cpu")
    with pytest.raises(ModelRejected, match="the feed of a layer is TwoExperts") as caught:
        Decoder(spec, weights, ops)
    assert caught.value.limit == ", ".join(kind.__name__ for kind in FEEDS)
