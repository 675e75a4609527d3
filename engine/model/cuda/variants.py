"""`check_scores`: which variants of attention a GPU computes; imports no compiler."""

from __future__ import annotations

from headrace.adapters.untrusted import refuse
from headrace.engine.model.spec import Attention, DecoderSpec

__all__ = ["check_scores"]


def check_scores(spec: DecoderSpec) -> None:
    """Raise `ModelRejected` where a layer's attention is a variant that no kernel computes."""
    for attention in spec.attention_kinds:
        if attention.scores != Attention.scores:
            refuse(spec.architecture, "the scores of a layer's attention", attention.scores, Attention.scores)
