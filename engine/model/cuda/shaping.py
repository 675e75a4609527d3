"""`ShapedRows`: the shaping that rows of a CUDA engine ask of their logits, on the device; runs no kernel of a step.

Owns the arrays of bias, masks, counts and bad words, which are allocated when a first row asks, and the host's record
of which rows ask. A row's part is written when the row is new; the device then updates the counts. Next to read:
sampling.py, and ops/cuda/sampling/shape.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.model.cuda.rows import DeviceRows
from headrace.engine.scheduling.plan import Capacity, NewRow, RowOptions
from headrace.engine.scheduling.shaping import MOST_WORD_TOKENS, Shaping
from headrace.ops.cuda.sampling.shape import (
    ADDS,
    COLUMNS,
    MARKS,
    MASKED,
    STOPS,
    WORD_COLUMNS,
    WORDS,
    ShapeArrays,
    count_known,
)

__all__ = ["ShapedRows"]

# A word of k tokens takes WORD_COLUMNS + k - 1 places.
_WORD_PLACES = 2 * MOST_WORD_TOKENS


class ShapedRows:
    """The rows that ask for shaped logits."""

    def __init__(self, rows: DeviceRows, capacity: Capacity, device: torch.device, places: int) -> None:
        """Start without rows, and without memory.

        Args:
            rows: The row table, through which words are sent.
            capacity: Most rows, and the width of the logits.
            device: The GPU.
            places: Most tokens that a step chooses for a row.
        """
        self._rows, self._places = rows, places
        self._capacity = capacity
        self._device = device
        self._arrays: ShapeArrays | None = None
        self.asks = np.zeros(capacity.max_rows + 1, np.bool_)
        """Whether each row asks for shaping, bool [rows]; this includes a grammar's mask, which grammars.py keeps."""

    def arrays(self) -> ShapeArrays:
        """Return the arrays that hold the shaping of all rows; the first call allocates them.

        Raises:
            torch.OutOfMemoryError: There is no memory for them.
        """
        if self._arrays is None:
            size = self._capacity
            self._arrays = ShapeArrays(size.max_rows, size.vocab_size, _WORD_PLACES, self._device, self._places)
        return self._arrays

    def take(self, new_rows: Sequence[NewRow], options: Sequence[RowOptions]) -> None:
        """Enqueue the shaping of new rows, and clear that of their former requests; the rows' tokens are sent first.

        Raises:
            torch.OutOfMemoryError: A first row asks for shaping, and there is no memory for the arrays.
        """
        asking = {
            each.row: (each, each.shaping or Shaping())
            for each in options
            if each.shaping is not None or each.grammar is not None
        }
        changed = [new.row for new in new_rows if self.asks[new.row] or new.row in asking]
        if not changed:
            return
        arrays = self.arrays()
        self.asks[changed] = True  # if an error comes before the table is sent, the rows' next requests write it
        self._rows.flush()
        table = np.zeros((len(changed), COLUMNS), np.int32)
        for line, row in zip(table, changed, strict=True):
            if row in asking:
                line[:] = self._write(*asking[row], arrays)
        places = COLUMNS * np.array(changed)[:, None] + np.arange(COLUMNS)
        self._rows.send(arrays.table_RC.view(-1), places.reshape(-1), table.reshape(-1))
        self.asks[changed] = [row in asking for row in changed]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _write(self, options: RowOptions, shaping: Shaping, arrays: ShapeArrays) -> NDArray[np.int32]:
        """Enqueue a row's lines of the arrays; return its columns of the table."""
        row, kind = options.row, 0
        factors = (shaping.repetition_penalty, shaping.frequency_penalty, shaping.presence_penalty)
        if shaping.bias or shaping.allowed is not None or shaping.forbidden:
            kind |= ADDS
            base, line_V = _additions(shaping, self._capacity.vocab_size)
            arrays.added_RV[row].fill_(base)
            (places,) = np.nonzero(line_V != base)
            self._rows.send(arrays.added_RV[row].view(torch.int32), places, line_V[places].view(np.int32))
        if shaping.stops or factors != (1.0, 0.0, 0.0):
            kind |= MARKS
            arrays.marks_RV[row].zero_()
            stops = np.unique(np.array(shaping.stops, np.int64))
            self._rows.send(arrays.marks_RV[row], stops, np.full(len(stops), STOPS, np.int32))
            count_known(self._rows.pool_RC, row, options.prompt_len, len(options.tokens), arrays)
        if shaping.bad_words:
            kind |= WORDS
            words = _words(shaping.bad_words)
            self._rows.send(arrays.words_RW[row], np.arange(len(words)), words)
        if options.grammar is not None:
            kind |= MASKED
        line = np.zeros(COLUMNS, np.int32)
        line[:3] = kind, shaping.min_length, len(shaping.bad_words)
        line[3:6] = np.array(factors, np.float32).view(np.int32)
        return line


def _additions(shaping: Shaping, vocab_size: int) -> tuple[float, NDArray[np.float32]]:
    """Return the most frequent addition to a logit, and all additions, float32 [V]; -inf bans a token."""
    base = 0.0 if shaping.allowed is None else -math.inf
    line_V = np.full(vocab_size, base, np.float32)
    if shaping.allowed is not None:
        line_V[list(shaping.allowed)] = 0.0
    for token, value in shaping.bias:
        line_V[token] += np.float32(value)
    line_V[list(shaping.forbidden)] = -np.inf
    return base, line_V


def _words(bad_words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return a row's bad words in the layout of `WORD_COLUMNS`, and behind these the words' tokens but the last."""
    before = [word[:-1] for word in bad_words]
    ends = np.cumsum([len(each) for each in before]) + WORD_COLUMNS * len(bad_words)
    heads = [(word[-1], len(each), end - len(each)) for word, each, end in zip(bad_words, before, ends, strict=True)]
    return np.array([*itertools.chain(*heads, *before)], np.int32)
