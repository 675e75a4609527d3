"""`WordWrap`: breaks a streamed text between words where a terminal would break inside one; writes nothing itself."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len

__all__ = ["WordWrap"]

_TAB = 8
"""Columns between a terminal's tab stops."""


class WordWrap:
    """A wrapper of one text that comes piece by piece.

    The word at the end of a piece is held back until a later piece, or `end`, shows where it stops. A word that is
    wider than the terminal is left to the terminal to break, and wide characters, such as Chinese ones, are words of
    their own.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        """Begin at the first column of a terminal that is `width()` columns wide at the moment of asking."""
        self._width = width
        self._column = 0
        self._gap = self._word = ""
        self._too_wide = False  # a part of a word that fits no line has been written

    def take(self, text: str) -> str:
        """Return what can be written now that `text` has come."""
        width, out = max(1, self._width()), []
        for char in text:
            if char == "\n":
                out.append(self.end() + "\n")
            elif char.isspace():
                out.append(self._placed(width))
                self._gap += char
                self._too_wide = False
            elif cell_len(char) > 1:  # a wide character may stand apart from its neighbours
                out.append(self._placed(width))
                self._word = char
                out.append(self._placed(width))
            else:
                self._word += char
                if len(self._word) > width or self._too_wide:
                    out.append(self._placed(width))
                    self._too_wide = True
        return "".join(out)

    def end(self) -> str:
        """Return the word that was held back, without the space after it, and begin again at the first column."""
        held = self._placed(max(1, self._width()))
        self._column, self._gap, self._too_wide = 0, "", False
        return held

    def _placed(self, width: int) -> str:
        """Return the word that was held back, after the space before it or on a new line."""
        if not self._word:
            return ""
        gap, word, self._gap, self._word = self._gap, self._word, "", ""
        start, size = self._after(gap), cell_len(word)
        if start + size > width >= size and self._column and not self._too_wide:
            self._column = size
            return f"\n{word}"
        self._column = (start + size) % width or width
        return gap + word

    def _after(self, gap: str) -> int:
        """Return the column after `gap`."""
        column = self._column
        for char in gap:
            column += _TAB - column % _TAB if char == "\t" else cell_len(char)
        return column
