"""`Sums` adds up the first numbers of a long list quickly; it knows nothing of what they count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

__all__ = ["Sums"]

_CHUNK = 256


class Sums:
    """A list of numbers in chunks, which sums up its first numbers without adding all of them."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        """Start with `numbers`."""
        self.chunks: list[list[int]] = [[]]
        self.sums = [0]
        for index, number in enumerate(numbers):
            self.insert(index, number)

    def insert(self, index: int, number: int) -> None:
        """Insert `number` at `index`."""
        which, index = self._find(index)
        chunk = self.chunks[which]
        chunk.insert(index, number)
        self.sums[which] += number
        if len(chunk) > 2 * _CHUNK:
            self.chunks[which : which + 1] = halves = [chunk[:_CHUNK], chunk[_CHUNK:]]
            self.sums[which : which + 1] = map(sum, halves)

    def remove(self, index: int) -> None:
        """Remove the number at `index`."""
        which, index = self._find(index + 1)
        self.sums[which] -= self.chunks[which].pop(index - 1)
        if not self.chunks[which] and len(self.chunks) > 1:
            del self.chunks[which], self.sums[which]

    def first(self, count: int) -> int:
        """Return the sum of the first `count` numbers."""
        which, count = self._find(count)
        return sum(self.sums[:which]) + sum(islice(self.chunks[which], count))

    def _find(self, count: int) -> tuple[int, int]:
        """Return the chunk in which the first `count` numbers end, and how many of them it holds."""
        for which, chunk in enumerate(self.chunks):
            if count <= len(chunk):
                return which, count
            count -= len(chunk)
        raise IndexError("there are not so many")

    def check(self, numbers: Sequence[int]) -> None:
        """Assert that these are `numbers`.

        Raises:
            AssertionError: They are not, which is a defect of headrace.
        """
        assert [number for chunk in self.chunks for number in chunk] == numbers, "the numbers are others"
        assert self.sums == list(map(sum, self.chunks)), "the numbers are added up wrongly"
