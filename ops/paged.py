"""The places of layers and of one step's tokens in the paged KV cache, as attention and KV writes need them.

Owns the plain values that a runner passes to a device's operations; never touches a scheduler, a request or a model.

Shape letters, here and in every file of `ops` and `engine/model`: N tokens of the step, R rows of the step, E hidden
size, H query heads, K key/value heads, D head size, F feed-forward size, V vocabulary, P pages of one row, T page size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

__all__ = ["UNSCALED", "DecodeGroup", "GivenKv", "KvLayout", "KvScales", "PageShape", "PagedBatch", "PrefillRow"]

PageShape: TypeAlias = tuple[int, ...]
"""Shape of what one layer keeps in one page, as a device lays it out: keys and values of T tokens, or vectors."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where the layers of a model keep keys and values: in pools, each of the layers whose pages have one shape.

    A page has the same number in all pools, so that whoever gives out pages knows of one cache alone.
    """

    pools: tuple[tuple[int, PageShape], ...]
    """Number of layers and shape of a layer's page, of each pool."""
    places: tuple[tuple[int, int], ...]
    """Pool of each layer's pages, and the layer's number within the pool."""

    @staticmethod
    def of(layers: Sequence[PageShape | int]) -> KvLayout:
        """Return the layout of layers with pages of these shapes, or with the pages of an earlier layer, by number."""
        counts: dict[PageShape, int] = {}
        places: list[tuple[int, int]] = []
        for layer in layers:
            if isinstance(layer, int):
                places.append(places[layer])
                continue
            number = counts.get(layer, 0)
            counts[layer] = number + 1
            places.append((list(counts).index(layer), number))
        return KvLayout(tuple((count, shape) for shape, count in counts.items()), tuple(places))

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Return the memory of one page over all layers, in bytes."""
        return dtype.itemsize * sum(count * math.prod(shape) for count, shape in self.pools)


class KvScales(NamedTuple):
    """Scales of one layer's 8-bit keys and values: values are divided by them when stored and multiplied when read."""

    k: float = 1.0
    v: float = 1.0


UNSCALED: Final = KvScales()


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows that compute one token each, batched because their contexts need about the same number of pages.

    The rows' tokens are the step's `start .. start + len(lengths)`, one for each row.
    """

    start: int
    pages_RP: Tensor
    """Page numbers, int64, padded with page 0 past a row's own pages. Pages before every layer's window may be left
    out."""
    lengths_R: Tensor
    """Context lengths in tokens from the first of these pages on, including the new one, int64."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row that computes several tokens: the step's tokens `start .. start + count`."""

    start: int
    count: int
    pages_P: Tensor
    """Page numbers, int64, that hold `length` tokens."""
    length: int
    """Context length after this step in tokens, from the first of these pages on; the queries are its last `count`
    positions."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenKv:
    """Virtual tokens whose keys and values are given, not computed (prefix tuning, Li and Liang, 2021)."""

    tokens_M: Tensor
    """Indices among the step's tokens, int64."""
    kv_LMsD: Tensor
    """Keys, already rotated, then values of the tokens: [layers, M, 2 * K, D]."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's tokens: their positions, the places of their keys and values, and the rows that they belong to."""

    positions_N: Tensor
    """Position of each token in its own sequence, int64."""
    slots_N: Tensor
    """Place of each token's key and value, int64: page * page_size + offset."""
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]
    given: tuple[GivenKv, ...] = ()

    def check_cover(self) -> None:
        """Raise `ValueError` unless the rows cover the step's tokens once."""
        tokens = self.positions_N.shape[0]
        spans = [(group.start, group.lengths_R.shape[0]) for group in self.decodes]
        spans += [(row.start, row.count) for row in self.prefills]
        end = 0
        for start, count in sorted(spans):
            if start != end or count < 1:
                raise ValueError(f"a row starts at token {start} with {count} tokens where token {end} is next")
            end += count
        if end != tokens:
            raise ValueError(f"rows cover {end} of {tokens} tokens")
