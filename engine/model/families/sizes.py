"""Checks of sizes that configurations and GGUF headers share."""

from __future__ import annotations

from dataclasses import replace

from headrace.adapters.untrusted import Fields, refuse
from headrace.engine.model.spec import LIMITS, Attention, LayerSpec

__all__ = ["check_heads", "head_size", "within"]


def head_size(
    fields: Fields, field: str, default: int | None, hidden: int, heads: int, hidden_field: str = "hidden_size"
) -> int:
    """Return the size of a head: from `field`, by default, or the hidden size shared out evenly."""
    if fields.data.get(field) is None and default is None and hidden % heads:
        refuse(fields.origin, hidden_field, hidden, f"a multiple of the {heads} attention heads")
    return fields.size(field, LIMITS["head_dim"], default or hidden // heads)


def check_heads(attention: Attention, origin: str, kv_field: str, head_field: str) -> Attention:
    """Return `attention` once the numbers and the size of its heads agree with each other."""
    if attention.heads % attention.kv_heads:
        refuse(origin, kv_field, attention.kv_heads, f"a divisor of the {attention.heads} attention heads")
    if attention.head_dim % 2:
        refuse(origin, head_field, attention.head_dim, "an even head size")
    return attention


def within(layer: LayerSpec, context: int) -> LayerSpec:
    """Return a layer without a window that is as long as the context, and so limits nothing."""
    mixer = layer.mixer
    if isinstance(mixer, Attention) and mixer.window is not None and mixer.window >= context:
        return replace(layer, mixer=replace(mixer, window=None))
    return layer
