"""The tiles of a prefill's queries, and the ring of pinned memory in which their lists go to the device.

`tile_jobs` is plain arithmetic on the host. Letters as in `ops/paged.py`; W rows of the step, J tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PlanRing", "tile_jobs"]

_RING: Final = 3
"""Most plans that may be on their way to the device."""


def tile_jobs(
    counts: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]], page_size: int, tokens: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the tiles of a step, those with the longest context first, and the pages of all rows.

    Args:
        counts: New tokens of each row; queries are packed in this order.
        lengths: Context length of each row, the new tokens included.
        pages: Page numbers of each row, at least as many as its length needs.
        page_size: Tokens of a page.
        tokens: Most tokens of a tile.

    Returns:
        Of each tile [J, 4] its first token in the step, its number of tokens, the position of the first, and where its
        row's pages begin; and the page numbers.
    """
    counts_W, lengths_W = np.array(counts), np.array(lengths)
    tiles_W = -(-counts_W // tokens)
    row_J = np.arange(len(counts_W)).repeat(tiles_W)
    offset_J = (np.arange(len(row_J)) - (tiles_W.cumsum() - tiles_W)[row_J]) * tokens
    used_W = -(-lengths_W // page_size)
    count_J = np.minimum(counts_W[row_J] - offset_J, tokens)
    position_J = (lengths_W - counts_W)[row_J] + offset_J
    token_J, page_J = (counts_W.cumsum() - counts_W)[row_J] + offset_J, (used_W.cumsum() - used_W)[row_J]
    first = np.argsort(-(position_J + count_J), kind="stable")
    jobs_J4 = np.stack((token_J, count_J, position_J, page_J), 1)[first]
    return jobs_J4, np.concatenate([np.array(row[:used]) for row, used in zip(pages, used_W, strict=True)])


class PlanRing:
    """Pinned memory for the plans of some steps, each of which waits only for the one that had its place before."""

    def __init__(self, device: torch.device) -> None:
        """Send to `device`."""
        self._device = device
        self._ring = [torch.empty(0, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._sent = [torch.cuda.Event() for _ in range(_RING)]
        self._plans = 0

    def send(self, words: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        """Return the words on the device, int32, once the current stream has reached their copy."""
        slot = self._plans % _RING
        self._plans += 1
        self._sent[slot].synchronize()
        if len(self._ring[slot]) < len(words):
            self._ring[slot] = torch.empty(2 * len(words), dtype=torch.int32, pin_memory=True)
        pinned = self._ring[slot][: len(words)]
        pinned.numpy()[:] = words
        on_device = pinned.to(self._device, non_blocking=True)
        self._sent[slot].record()
        return on_device
