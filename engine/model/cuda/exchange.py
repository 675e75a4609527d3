"""`Exchange`: the pinned memory through which the graphs of decode steps hear from the host and answer it.

Owns a line each way for every replay, so that nothing is copied beside a graph; never knows what the words mean. Host
and device each count replays, and so mean the same line. Next to read: rows.py, and ops/cuda/memory/scatter.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.cuda.memory.scatter import Batch, Turns, apply_words, leave_ids

__all__ = ["MOST_PAIRS", "Exchange", "Pieces"]

MOST_PAIRS: Final = 2048
"""Of places and words that one replay takes."""
_TURNS = 16
"""Replays after which a line is used again: by then somebody has waited for the first one's step."""

Pieces: TypeAlias = Sequence[tuple[NDArray[np.int64] | NDArray[np.int32], NDArray[np.int64] | NDArray[np.int32]]]
"""Places, and the words that go there."""


class Exchange:
    """What one runner's graphs read before a step and write after it."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        """Start with no replay behind it; ids are those of up to `max_rows` rows."""
        words_TW = torch.empty(_TURNS + 1, 1 + 2 * MOST_PAIRS, dtype=torch.int32, pin_memory=True)
        ids_TB = torch.empty(_TURNS + 1, max_rows, dtype=torch.int32, pin_memory=True)
        self.turn_2 = torch.zeros(2, dtype=torch.int32, device=device)
        """On the device: the line of the next replay, and that of the latest."""
        self.spare: Final = _TURNS
        """A line that graphs may read and write without harm while they are captured."""
        self._turns = Turns(self.turn_2, words_TW, ids_TB)
        self._turn = 0
        self._words: list[NDArray[np.int32]] = list(words_TW.numpy())
        self._views = [line.data for line in self._words]
        self._ids: list[NDArray[np.int32]] = list(ids_TB.numpy())
        self._words[self.spare][0] = 0

    def give(self, cells: Mapping[int, int], pieces: Pieces) -> NDArray[np.int32]:
        """Leave at most `MOST_PAIRS` to the graph that is replayed next; where its ids will be once it is done.

        Args:
            cells: Place -> word.
            pieces: More of them; no place may come twice.
        """
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        view, end = self._views[turn], 1
        for place, word in cells.items():
            view[end], view[end + 1] = place, word
            end += 2
        for places, words in pieces:
            line, start, end = self._words[turn], end, end + 2 * len(places)
            line[start:end:2], line[start + 1 : end : 2] = places, words
        view[0] = end // 2
        return self._ids[turn]

    def apply(self, target: Tensor, batch: Batch) -> None:
        """Enqueue what a graph begins with: it takes what `give` left, and sees which rows of the batch go on."""
        apply_words(target, self._turns, batch)

    def answer(self, ids_B: Tensor, *, pdl: bool) -> None:
        """Enqueue what it ends with: the ids that it has sampled go where `give` said."""
        leave_ids(ids_B, self._turns, pdl=pdl)
