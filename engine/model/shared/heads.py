"""The attention of a model's layers in the words of a GPU's kernels; chooses no kernel and asks no device."""

from __future__ import annotations

from typing import Final

import torch

from headrace.adapters.untrusted import refuse
from headrace.engine.model.spec import Attention, DecoderSpec, SinkAttention, SoftcappedAttention
from headrace.ops.cuda.attention.shape import HeadShape

__all__ = ["attention_kinds", "head_shape"]

_SCORES: Final = (Attention.scores, SinkAttention.scores, SoftcappedAttention.scores)
"""Ways in which scores become weights that `HeadShape` can tell."""


def attention_kinds(spec: DecoderSpec) -> tuple[Attention, ...]:
    """Return the different attentions of a model's layers.

    Raises:
        ModelRejected: An attention is a variant that no kernel computes, or the same errors as from
            `DecoderSpec.attention_kinds`.
    """
    for attention in spec.attention_kinds:
        if attention.scores not in _SCORES:
            refuse(spec.architecture, "the scores of a layer's attention", attention.scores, ", ".join(_SCORES))
    return spec.attention_kinds


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
    )
