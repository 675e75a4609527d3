"""`freeze_ropes`: gives a module's rotary embeddings the frequencies of one length of text, for good.

Some ropes turn by other frequencies in longer texts. Keys lie rotated in the cache, and a step has rows of many
lengths, so that all requests need the same ones: those of the longest that the engine takes, as in families with native
code. `longrope` has divisors for texts up to the original context and others beyond (Ding et al., 2024); `dynamic`
stretches what is longer than the model's own context, where headrace stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.adapters.untrusted import refuse

__all__ = ["DIVISORS", "LAYERS", "ORIGINAL", "freeze_ropes", "long_ropes", "pairs", "ropes_in"]

DIVISORS: Final = ("short_factor", "long_factor")
"""Fields of a longrope: what divides the frequency of each pair in short texts, and in long ones."""
ORIGINAL: Final = "original_max_position_embeddings"
LAYERS: Final = frozenset(("full_attention", "sliding_attention", "attention"))
"""Kinds of layers that attend, of which each may have a rope of its own."""
_CHANGING: Final = frozenset(("dynamic", "longrope"))
_ORIGIN: Final = "config.json"


def ropes_in(given: object) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield the parameters of each rotary embedding in a field, and the key there that they stand behind.

    That is None for those of all layers. A field may have both, of which a module then uses either.
    """
    if isinstance(given, dict):
        inside = [(str(key), value) for key, value in given.items() if isinstance(value, dict)]
        if len(inside) < len(given) or not given:
            yield None, given
        yield from inside


def _ropes(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each rotary embedding, but for kinds of layers of which there are none."""
    absent = LAYERS.difference(getattr(config, "layer_types", None) or LAYERS)
    return (rope for key, rope in ropes_in(getattr(config, "rope_parameters", None)) if key not in absent)


def long_ropes(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each longrope."""
    return (rope for rope in _ropes(config) if rope.get("rope_type") == "longrope")


def pairs(config: PreTrainedConfig, rope: Mapping[str, Any]) -> int:
    """Return the number of pairs that a longrope rotates in each head, as transformers finds it."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size * (rope.get("partial_rotary_factor") or 1.0)) // 2


def freeze_ropes(model: nn.Module, config: PreTrainedConfig, context: int) -> None:
    """Let the rotary embeddings in `model` turn as in texts of `context` tokens, whatever the length of a text.

    Args:
        model: A module of transformers, with its weights or on the meta device.
        config: Its configuration.
        context: Most tokens of a request.

    Raises:
        ModelRejected: Frequencies change with the length in a way that is not transformers' usual one, or would within
            `context` tokens.
    """
    frozen = {kind for module in model.modules() for kind in _freeze(module, context)}
    for rope in _ropes(config):
        kind = rope.get("rope_type")
        is_fixed = kind == "dynamic" and rope.get("alpha") is not None  # Hunyuan's, of one stretch for all
        if kind in _CHANGING - frozen and not is_fixed:
            refuse(_ORIGIN, "rope_type", kind, "rotations that do not depend on a request's length")


def _freeze(module: nn.Module, context: int) -> Iterator[str]:
    """Freeze what a module rotates by, and yield the kinds of ropes that were frozen."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        if _fix(module, kinds, None, context):
            module.rope_type = "default"  # type: ignore[assignment]
            yield kinds
    elif isinstance(kinds, dict):  # by kinds of layers
        for layers, kind in kinds.items():
            if _fix(module, kind, layers, context):
                kinds[layers] = "default"
                yield kind


def _fix(module: nn.Module, kind: str, layers: str | None, context: int) -> bool:
    """Set the frequencies for one kind of layers, None for all, and return whether they might change otherwise."""
    if kind not in _CHANGING:
        return False
    prefix = "" if layers is None else f"{layers}_"
    if kind == "dynamic":
        longest = getattr(module, f"{prefix}max_seq_len_cached", getattr(module, "max_seq_len_cached", 0))
        if context > longest:
            refuse(_ORIGIN, "rope_type", kind, f"a max_context of at most {longest}, up to which nothing is stretched")
        return True
    frequencies = getattr(module, f"{prefix}inv_freq", None)
    if not isinstance(frequencies, Tensor):
        return False  # a module that rotates in a way of its own
    with torch.no_grad():
        found, _ = ROPE_INIT_FUNCTIONS[kind](module.config, frequencies.device, seq_len=context, layer_type=layers)
        frequencies.copy_(found)
    return True
