"""Checks of where a layer's norms are."""

from __future__ import annotations

from headrace.adapters.untrusted import refuse
from headrace.engine.model.spec import LayerSpec

__all__ = ["check_pre_norms"]


def check_pre_norms(spec: LayerSpec) -> None:
    """Raise `ModelRejected` unless the layer's norms are RMS norms before its mixer and its feed."""
    if (spec.norms.kind, spec.norms.placement) != ("rms", "pre"):
        refuse("the network", "the norms of a layer", spec.norms, "RMS norms before mixer and feed")
