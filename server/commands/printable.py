"""`printable`: a model's text without what commands a terminal; changes nothing else of it."""

from __future__ import annotations

from typing import Final

__all__ = ["printable"]

_COMMANDING: Final = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""Control characters: all but tabs and line feeds."""


def printable(text: str) -> str:
    """`text` without control characters other than tabs and line feeds."""
    return text.translate(_COMMANDING)
