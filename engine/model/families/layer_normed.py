"""What configs of models with layer norms have in common: their norms, heads, and feeds without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Literal

from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import LIMITS, Attention, Norms, PlainFeed
from headrace.ops.stream import PlainActivation

__all__ = ["layer_norms", "multi_head", "plain_feed"]

_ACTIVATIONS: Final[Mapping[object, PlainActivation]] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_fast": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu2",
    }
)
"""Activations by their names in transformers, some of which are names of one function."""


def layer_norms(
    config: HfConfig,
    field: str = "layer_norm_eps",
    *,
    placement: Literal["pre", "parallel", "shared"] = "pre",
    bias: bool = True,
) -> Norms:
    """Return layer norms with the epsilon in `field`, which is 1e-5 where the config gives none."""
    return Norms(config.real(field, 0.0, 1.0, 1e-5), "layer", placement, bias)


def multi_head(config: HfConfig) -> Attention:
    """Return attention with a key head for each query head, as in families without a field for anything else."""
    return replace(config, data=config.data.changed({"num_key_value_heads": None})).attention()


def plain_feed(config: HfConfig, activation: str, *, bias: bool = True, size: int | None = None) -> PlainFeed:
    """Return a feed without a gate.

    Args:
        config: The config; `hidden_act` names the activation.
        activation: Name of the activation where the config gives none.
        bias: Whether both products have biases.
        size: Width where the config gives none; None for four times that of the stream.
    """
    name = config.data.get("hidden_act")
    known = _ACTIVATIONS.get(activation if name is None else name) if isinstance(name, (str, type(None))) else None
    if known is None:
        config.refuse("hidden_act", ", ".join(map(str, _ACTIVATIONS)))
    default = 4 * config.hidden_size if size is None else size
    return PlainFeed(config.size("intermediate_size", LIMITS["ffn_size"], default), bias, known)
