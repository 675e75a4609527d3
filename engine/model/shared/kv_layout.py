"""`kv_layout`: where the layers of a model keep keys and values, in pools of pages of one shape; allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headrace.engine.model.spec import DecoderSpec, MixerSpec, Paged
from headrace.ops.paged import KvLayout, PageShape

__all__ = ["HasPages", "kv_layout"]


class HasPages(Protocol):
    """Protocol of a device's operations, which know the shape of a layer's pages."""

    @property
    def page_shape(self) -> PageShape:
        """Shape of what a layer keeps in one page."""
        ...


def kv_layout(spec: DecoderSpec, ops: Mapping[MixerSpec, HasPages], more: int = 0) -> KvLayout:
    """Return where the layers of a model keep keys and values, by the operations of each kind of mixer.

    Args:
        spec: The model.
        ops: Its operations.
        more: Number of layers behind those of the model, with pages like those of its first one.
    """
    found = list[PageShape | int]()
    for layer in spec.layers:
        source = layer.mixer.state.source if isinstance(layer.mixer.state, Paged) else None
        found.append(ops[layer.mixer].page_shape if source is None else source)
    return KvLayout.of([*found, *found[:1] * more])
