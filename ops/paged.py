"""Where one step's tokens live in the paged KV cache, as attention and KV writes need it.

Owns the plain values that a runner hands to the ops of a device; never touches a scheduler, a request or a model.

Shape letters, here and in every file of `ops` and `engine/model`: N tokens of the step, R rows of the step, E hidden
size, H query heads, K key/value heads, D head size, F feed-forward size, V vocabulary, P pages of one row, T page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["UNSCALED", "DecodeGroup", "GivenKv", "KvScales", "PagedBatch", "PrefillRow"]


class KvScales(NamedTuple):
    """What the 8-bit keys and values of one layer are multiplied by when they are read, and divided by before."""

    k: float = 1.0
    v: float = 1.0


UNSCALED: Final = KvScales()


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows that compute one token each, batched because their contexts need about the same number of pages.

    They are the step's tokens `start .. start + len(lengths)`, one token a row.
    """

    start: int
    pages_RP: Tensor
    """int64 page numbers, padded with page 0 past a row's own pages."""
    lengths_R: Tensor
    """int64 context lengths in tokens, the new token included."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row that computes several tokens: the step's tokens `start .. start + count`."""

    start: int
    count: int
    pages_P: Tensor
    """int64 page numbers that hold `length` tokens."""
    length: int
    """Context length after this step in tokens; the queries are its last `count` positions."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenKv:
    """Virtual tokens whose keys and values are given instead of computed (prefix tuning, Li and Liang, 2021)."""

    tokens_M: Tensor
    """int64: which of the step's tokens."""
    kv_LMsD: Tensor
    """[layers, M, 2 * K, D]: their keys, as they are after rotation, then their values."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's tokens: their positions, the places their keys and values go to, and who attends to what."""

    positions_N: Tensor
    """int64 position of each token in its own sequence."""
    slots_N: Tensor
    """int64 place of each token's key and value: page * page_size + offset."""
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]
    given: tuple[GivenKv, ...] = ()
