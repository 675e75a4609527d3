"""The attention of a model's layers in the words of a GPU's kernels; chooses no kernel and asks no device."""

from __future__ import annotations

from typing import Final

import torch

from headrace.adapters.untrusted import refuse
from headrace.engine.model.spec import Attention, DecoderSpec, SinkAttention, SoftcappedAttention
from headrace.engine.model.value_normed import ValueNormedAttention
from headrace.ops.cuda.attention.shape import HeadShape, Values

__all__ = ["attention_kinds", "head_shape"]

_SCORES: Final = (Attention.scores, SinkAttention.scores, SoftcappedAttention.scores)
"""Ways in which scores become weights that `HeadShape` can tell."""


def attention_kinds(spec: DecoderSpec) -> tuple[Attention, ...]:
    """Return the different attentions of a model's layers, whose heads may differ in number and size.

    Raises:
        ModelRejected: A layer has no attention, or one that is a variant that no kernel computes.
    """
    found: list[Attention] = []
    for mixer in spec.mixer_kinds:
        if not isinstance(mixer, Attention):
            refuse(spec.architecture, "the mixer of a layer", mixer, "attention")
        if mixer.scores not in _SCORES:
            refuse(spec.architecture, "the scores of a layer's attention", mixer.scores, ", ".join(_SCORES))
        found.append(mixer)
    return tuple(found)


def head_shape(
    attention: Attention,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> HeadShape:
    """Return the shape of the attention that kernels compute; `kv_dtype` is `dtype` if it is None."""
    return HeadShape(
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        scale=attention.scale,
        window=attention.window,
        cap=attention.cap if isinstance(attention, SoftcappedAttention) else None,
        has_sinks=isinstance(attention, SinkAttention),
        values=_values(attention),
    )


def _values(attention: Attention) -> Values:
    """Return where the values come from that a layer stores."""
    if not isinstance(attention, ValueNormedAttention):
        return "products"
    if attention.source is not None:
        return "stored"
    return "normed keys" if attention.keys_are_values else "normed"
