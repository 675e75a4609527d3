"""`kv_layout`: where the layers of a model keep keys and values, in pools of pages of one shape; allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.engine.model.spec import DecoderSpec, MixerSpec, Paged
from headrace.ops.paged import KvLayout, PageShape

__all__ = ["HasPages", "kv_layout", "page_shapes"]


class HasPages(Protocol):
    """Protocol of a device's operations, which know the shape of a layer's pages."""

    @property
    def page_shape(self) -> PageShape:
        """Shape of what a layer keeps in one page."""
        ...


def kv_layout(spec: DecoderSpec, ops: Mapping[MixerSpec, HasPages], beside: Sequence[PageShape | int] = ()) -> KvLayout:
    """Return where the layers of a model keep keys and values, by the operations of each kind of mixer.

    Args:
        spec: The model.
        ops: Its operations.
        beside: Pages of layers behind those of the model, as `page_shapes` returns them: what drafts for it has its
            own.
    """
    own = page_shapes(spec, ops)
    return KvLayout.of([*own, *(len(own) + each if isinstance(each, int) else each for each in beside)])


def page_shapes(spec: DecoderSpec, ops: Mapping[MixerSpec, HasPages]) -> list[PageShape | int]:
    """Return the shape of each layer's pages, or the number of the layer whose pages it reads."""
    found = list[PageShape | int]()
    for layer in spec.layers:
        source = layer.mixer.state.source if isinstance(layer.mixer.state, Paged) else None
        found.append(ops[layer.mixer].page_shape if source is None else source)
    return found
