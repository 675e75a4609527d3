"""`NgramDrafter`: guesses that a row goes on as it did the last time that it held its latest tokens.

Owns no state and runs no model (prompt lookup decoding, Saxena, 2023). Next to read: cpu/drafts.py.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Drafter", "NgramDrafter"]

_SHORTEST: Final = 2


class Drafter(Protocol):
    """Something that guesses the tokens to come. A wrong guess costs time and changes nothing else."""

    def draft(self, tokens_N: NDArray[np.int64], most: int) -> list[int]:
        """Return up to `most` tokens that may follow `tokens_N`, a row's prompt and completion: int64 [tokens]."""
        ...


class NgramDrafter:
    """Guesses by the latest earlier place of the row with the same last tokens, as many of them as possible."""

    def __init__(self, longest: int) -> None:
        """Compare up to `longest` of the last tokens, and at least two."""
        self._longest = longest

    def draft(self, tokens_N: NDArray[np.int64], most: int) -> list[int]:
        """Return what followed there; where that is the end of the row, what follows is repeated."""
        end = len(tokens_N)
        if end < _SHORTEST or most < 1:
            return []
        (ends,) = np.nonzero(tokens_N[: end - 1] == tokens_N[end - 1])
        found = -1
        for count in range(_SHORTEST, self._longest + 1):
            ends = ends[ends >= count - 1]
            ends = ends[tokens_N[ends - (count - 1)] == tokens_N[end - count]] if count <= end else ends[:0]
            if not len(ends):
                break
            found = int(ends[-1])
        if found < 0:
            return []
        period = end - 1 - found
        places = found + 1 + np.arange(most) % period
        drafts: list[int] = tokens_N[places].tolist()
        return drafts
