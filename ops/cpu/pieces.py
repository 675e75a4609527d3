"""`Pieces`: divides a step's attention into batched products over gathered pages on the CPU; never multiplies.

Owns the layout of pages in host memory: a page's rows are its K key heads, then its K value heads. R rows, P pages of a
row, C queries of a block, S keys, D elements of a head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.ops.cpu.step import DecodePiece, PrefillPiece
from headrace.ops.sizes import padded_size

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.paged import DecodeGroup, PagedBatch, PrefillRow

__all__ = ["Pieces"]

# Gathered keys and values of one batched product, in bytes: a bound on memory; measured, values below 6 MiB are slower.
_GATHER_BYTES = 16 * 1024 * 1024
# Up to this context one row is faster through torch's fused attention: one call, but less in parallel.
_FUSED_TOKENS = 384
# Queries of one prefill product: later blocks see more keys, so blocks save half of a causal square; and scores of more
# than these leave the processor's caches.
_QUERY_BLOCK = 128
# Shapes of attention are few (see sizes.py): multiples of these numbers of queries and keys, in steps between powers
# of two.
_FEW_QUERIES = 16
_FEW_KEYS = 64
_STEPS = 2


class Pieces:
    """Makes what the layers of one kind share of a step's attention."""

    def __init__(
        self, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, *, window: int | None, fuses: bool
    ) -> None:
        """Divide attention of `kv_heads` key heads; `fuses` is whether one row may go through torch's fused call."""
        self._kv_heads, self._head_dim, self._page_size, self._dtype = kv_heads, head_dim, page_size, dtype
        self._window, self._fuses = window, fuses
        self._planes_s1K1 = torch.arange(2 * kv_heads).view(2, 1, kv_heads, 1)

    @property
    def plane_bytes(self) -> int:
        """Memory of one page of one layer."""
        return 2 * self._kv_heads * self._page_size * self._head_dim * self._dtype.itemsize

    def of(self, batch: PagedBatch) -> tuple[DecodePiece | PrefillPiece, ...]:
        """Return the pieces of a step, in the order of its tokens."""
        pieces: list[DecodePiece | PrefillPiece] = [block for row in batch.prefills for block in self._blocks(row)]
        for group in batch.decodes:
            pieces += self._decodes(group)
        return tuple(sorted(pieces, key=lambda piece: piece.start))

    def write_index(self, slots_N: Tensor) -> Tensor:
        """Return the rows of `CpuKv.slots` that a step's tokens write, keys before values, for each token."""
        page_N, offset_N = slots_N // self._page_size, slots_N % self._page_size
        first_N11 = (page_N * (2 * self._kv_heads * self._page_size) + offset_N).view(-1, 1)
        return (first_N11 + self._planes_s1K1.view(1, -1) * self._page_size).view(-1)

    def _gather(self, pages_RP: Tensor, scratch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return indices of `CpuKv.rows`, in the order [2, R, K, P], and a buffer of these rows (`scratch` or new)."""
        planes = 2 * self._kv_heads
        index = (pages_RP.unsqueeze(1) * planes + self._planes_s1K1).reshape(-1)
        return index, self._scratch(pages_RP.numel()) if scratch is None else scratch[: index.shape[0]]

    def _scratch(self, pages: int) -> Tensor:
        return torch.empty(2 * self._kv_heads * pages, self._page_size * self._head_dim, dtype=self._dtype)

    def _width(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens, rounded up to one of few."""
        unit = max(1, _FEW_KEYS // self._page_size)
        return unit * padded_size(-(-tokens // (unit * self._page_size)), steps=_STEPS)

    def _decodes(self, group: DecodeGroup) -> list[DecodePiece]:
        total, pages = group.pages_RP.shape
        chunk = max(1, _GATHER_BYTES // (pages * self.plane_bytes))
        # Even chunks: a last chunk of one row would cost a full round of calls.
        chunk = math.ceil(total / math.ceil(total / chunk))
        return [self._decode(group, first, min(first + chunk, total)) for first in range(0, total, chunk)]

    def _decode(self, group: DecodeGroup, first: int, last: int) -> DecodePiece:
        pages_RP, lengths_R1 = group.pages_RP[first:last], group.lengths_R[first:last, None]
        start, stop = group.start + first, group.start + last
        rows, pages = pages_RP.shape
        if rows == 1 and pages * self._page_size <= _FUSED_TOKENS and self._fuses:
            index, buffer = self._gather(pages_RP)
            seen = slice(self._first_seen(int(lengths_R1)), int(lengths_R1))
            keys_KSD, values_KSD = buffer.view(2, self._kv_heads, -1, self._head_dim)[:, :, seen].unbind()
            return DecodePiece(start, stop, 1, index, buffer, keys_KSD, values_KSD, None)
        added, width = padded_size(rows, steps=_STEPS) - rows, self._width(pages * self._page_size)
        index, buffer = self._gather(functional.pad(pages_RP, (0, width - pages, 0, added)))
        keys_BSD, values_BSD = buffer.view(2, -1, width * self._page_size, self._head_dim).unbind()
        lengths_R1 = functional.pad(lengths_R1, (0, 0, 0, added), value=1)
        positions_1S = torch.arange(width * self._page_size).view(1, -1)
        hidden_RS = positions_1S >= lengths_R1
        if self._window is not None:
            hidden_RS |= positions_1S < lengths_R1 - self._window
        bias_R11S = self._bias(hidden_RS)[:, None, None]
        return DecodePiece(start, stop, rows + added, index, buffer, keys_BSD, values_BSD, bias_R11S)

    def _first_seen(self, length: int) -> int:
        """Return the first position that the last of `length` tokens attends to."""
        return 0 if self._window is None else max(0, length - self._window)

    def _bias(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -math.inf)

    def _blocks(self, row: PrefillRow) -> list[PrefillPiece]:
        firsts = range(row.length - row.count, row.length, _QUERY_BLOCK)
        stops = [min(first + _QUERY_BLOCK, row.length) for first in firsts]
        starts = [self._first_seen(first + 1) // self._page_size for first in firsts]  # pages
        widths = [self._width(stop - start * self._page_size) for start, stop in zip(starts, stops, strict=True)]
        scratch = self._scratch(max(widths))
        pages_P = functional.pad(row.pages_P, (0, max(widths)))
        blocks = []
        for first, stop, start, width in zip(firsts, stops, starts, widths, strict=True):
            index, buffer = self._gather(pages_P[None, start : start + width], scratch)
            keys_KSD, values_KSD = buffer.view(2, self._kv_heads, -1, self._head_dim).unbind()
            count = _FEW_QUERIES * padded_size(-(-(stop - first) // _FEW_QUERIES), steps=_STEPS)
            queries_C1 = torch.arange(first, first + count).clamp_(max=stop - 1).view(-1, 1)
            keys_1S = torch.arange(start * self._page_size, (start + width) * self._page_size).view(1, -1)
            hidden_CS = keys_1S > queries_C1
            if self._window is not None:
                hidden_CS |= keys_1S <= queries_C1 - self._window
            begin = row.start + first - firsts.start
            bias_CS = self._bias(hidden_CS)
            blocks.append(PrefillPiece(begin, begin + stop - first, index, buffer, keys_KSD, values_KSD, bias_CS))
        return blocks
