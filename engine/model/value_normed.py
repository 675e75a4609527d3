"""`ValueNormedAttention`: the spec of attention with normed values, which layers may share; never computes.

Next to read: network/mixers/attention.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from headrace.engine.model.roles import Fused
from headrace.engine.model.spec import Attention, DecoderSpec, Paged

__all__ = ["ValueNormedAttention", "has_normed_values", "with_sources"]


@dataclass(frozen=True, slots=True)
class ValueNormedAttention(Attention):
    """Attention with an RMS norm without weights of each value head; layers may share what they store.

    Gemma Team (2026), Gemma 4, as transformers computes it (`models/gemma4`).
    """

    keys_are_values: bool = False
    """Whether a value is its head's key before the norm and the rotation of keys, so that there is no product of it."""
    source: int | None = None
    """Number of the earlier layer whose keys and values are read, so that a layer has queries alone; None for its own.
    Heads and window are those of that layer."""

    @property
    def has_steps_before_attention(self) -> bool:
        """Whether queries, keys and values pass operations of their own between their product and attention."""
        return self.source is None

    @property
    def state(self) -> Paged:
        """Return what each token adds to the pages: nothing where those of an earlier layer are read."""
        kept = 0 if self.source is not None else 2 * self.kv_heads * self.head_dim
        return Paged(kept, self.window, self.source)

    def parameters(self, hidden_size: int) -> dict[str, Fused]:
        """Return the parameters of any attention, but those of keys and values that the layer does not make."""
        left_out = ["v"] if self.keys_are_values else []
        left_out += [] if self.source is None else ["k", "k_norm", "v"]
        found = {name: _without(fused, left_out) for name, fused in Attention.parameters(self, hidden_size).items()}
        return {name: fused for name, fused in found.items() if fused.parts}


def with_sources(mixers: Sequence[ValueNormedAttention], own: int) -> list[ValueNormedAttention] | None:
    """Return the mixers of a model whose last layers read what the last layer of their window before them stores.

    Args:
        mixers: The mixers of all layers, each with keys and values of its own.
        own: Number of first layers that keep them.

    Returns:
        The mixers, or None where a layer from `own` on finds no earlier one of its window.
    """
    sources = {mixer.window: layer for layer, mixer in enumerate(mixers[:own])}
    if any(mixer.window not in sources for mixer in mixers[own:]):
        return None
    return [*mixers[:own], *(replace(mixer, source=sources[mixer.window]) for mixer in mixers[own:])]


def has_normed_values(spec: DecoderSpec) -> bool:
    """Return whether a layer of a model norms its values."""
    return any(isinstance(kind, ValueNormedAttention) for kind in spec.mixer_kinds)


def _without(fused: Fused, roles: Collection[str]) -> Fused:
    """Return a parameter without its parts of these roles."""
    return replace(fused, parts=tuple(part for part in fused.parts if part.role.split(".")[0] not in roles))
