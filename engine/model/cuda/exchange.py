"""`Exchange`: the pinned memory through which the host talks to the graphs of decode steps, and they to the host.

Owns a line each way for every replay, so that nothing is copied beside a graph; knows nothing of what the words mean.
Host and device each count replays, and so agree on the line. Next to read: rows.py, and ops/cuda/memory/scatter.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.cuda.memory.scatter import Batch, ExchangeLines, apply_words, leave_ids, scatter_words

__all__ = ["MOST_PAIRS", "Exchange", "Pieces", "Sender"]

_RING: Final = 16
_MOST_SENT: Final = 1 << 16

MOST_PAIRS: Final = 2048
"""Most pairs of a place and a word that one replay takes."""
_TURNS = 16
"""Replays after which a line is used again: by then the step of its last replay has been waited for."""

Pieces: TypeAlias = Sequence[tuple[NDArray[np.int64] | NDArray[np.int32], NDArray[np.int64] | NDArray[np.int32]]]
"""Pairs of arrays: places, and the words to write there."""


class Sender:
    """Sends many words to scattered places of a tensor beside graphs: one copy and one kernel for each `_MOST_SENT`."""

    def __init__(self, device: torch.device) -> None:
        """Allocate pinned memory for several sends at once."""
        most = 1 + 2 * _MOST_SENT
        self._ring = [torch.empty(most, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._views = [buffer.numpy() for buffer in self._ring]
        self._staged = torch.zeros(most, dtype=torch.int32, device=device)
        self._copied = [torch.cuda.Event() for _ in range(_RING)]
        self._sends = 0

    def send(self, target: Tensor, places: NDArray[np.int32], words: NDArray[np.int32]) -> None:
        """Enqueue the words on the current stream.

        Args:
            target: int32 tensor of one dimension, contiguous.
            places: Indices in it; none may come twice.
            words: int32 words to write there.
        """
        for start in range(0, len(places), _MOST_SENT):
            some = slice(start, start + _MOST_SENT)
            self._send(target, places[some], words[some])

    def _send(self, target: Tensor, places: NDArray[np.int32], words: NDArray[np.int32]) -> None:
        slot = self._sends % _RING
        self._sends += 1
        self._copied[slot].synchronize()
        end = 1 + 2 * len(places)
        view = self._views[slot]
        view[0] = len(places)
        view[1:end:2] = places
        view[2:end:2] = words
        with torch.inference_mode():
            self._staged[:end].copy_(self._ring[slot][:end], non_blocking=True)
        self._copied[slot].record()
        scatter_words(target, self._staged, len(places))


class Exchange:
    """The lines that one runner's graphs read before a step and write after it."""

    def __init__(self, words: int, device: torch.device) -> None:
        """Start before the first replay; an answer has up to `words` words."""
        words_TW = torch.empty(_TURNS + 1, 1 + 2 * MOST_PAIRS, dtype=torch.int32, pin_memory=True)
        ids_TB = torch.empty(_TURNS + 1, words, dtype=torch.int32, pin_memory=True)
        self.turn_2 = torch.zeros(2, dtype=torch.int32, device=device)
        """Line of the next replay and line of the latest, int32 [2] on the device."""
        self.spare: Final = _TURNS
        """Line that graphs may read and write without harm while they are captured."""
        self._turns = ExchangeLines(self.turn_2, words_TW, ids_TB)
        self._turn = 0
        self._words: list[NDArray[np.int32]] = list(words_TW.numpy())
        self._views = [line.data for line in self._words]
        self._ids: list[NDArray[np.int32]] = list(ids_TB.numpy())
        self._words[self.spare][0] = 0

    def give(self, cells: Mapping[int, int], pieces: Pieces) -> NDArray[np.int32]:
        """Leave at most `MOST_PAIRS` words to the graph that is replayed next; return the memory that its ids go to.

        Args:
            cells: Word for each place.
            pieces: More places and words; no place may come twice.
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
        """Enqueue the beginning of a graph: it writes the words of `give`, and notes which rows of the batch go on."""
        apply_words(target, self._turns, batch)

    def answer(self, ids_B: Tensor, *, pdl: bool) -> None:
        """Enqueue the end of a graph: its sampled ids go to the memory that `give` returned."""
        leave_ids(ids_B, self._turns, pdl=pdl)
