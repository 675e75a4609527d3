"""`printable`: removes the characters that control a terminal from a model's text; changes nothing else of it."""

from __future__ import annotations

from typing import Final

__all__ = ["printable"]

_COMMANDING: Final = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""Control characters other than tabs and line feeds."""


def printable(text: str) -> str:
    """Return `text` without control characters other than tabs and line feeds."""
    return text.translate(_COMMANDING)
