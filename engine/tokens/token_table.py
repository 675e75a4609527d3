"""`TokenTable`: the text of each id of a vocabulary; computed once for a tokenizer, never changed.

Next to read: table.py, which builds it, and text.py, which turns ids into text with it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

__all__ = ["TokenTable"]


class TokenTable:
    """Text of each vocabulary id. Built once per tokenizer, shared by all its detokenizers, then never changed.

    There are two kinds. In a byte-level vocabulary (`byte_ids` empty) the text is the joined bytes read as UTF-8, with
    U+FFFD for each maximal invalid part. In a SentencePiece vocabulary each piece is text, except the byte-fallback
    ids: a run of these is UTF-8 as a whole, or one U+FFFD per byte.
    """

    __slots__ = (
        "byte_ids",
        "fewest_tokens",
        "is_quick",
        "joins_space",
        "longest",
        "most_characters",
        "pieces",
        "special_ids",
        "texts",
        "visible_texts",
    )

    def __init__(
        self, pieces: list[bytes], special_ids: AbstractSet[int], byte_ids: AbstractSet[int] = frozenset()
    ) -> None:
        """Precompute the text of every piece that is complete by itself.

        Args:
            pieces: Bytes per id; empty if the vocabulary has no such id.
            special_ids: Control tokens, left out of the text if the caller asks for that.
            byte_ids: Byte-fallback tokens, one byte each; empty for a byte-level vocabulary.
        """
        self.pieces = pieces
        self.special_ids = frozenset(special_ids)
        self.byte_ids = frozenset(byte_ids)
        self.longest = max(map(len, pieces), default=0)
        """Bytes of the longest piece."""
        self.fewest_tokens: Callable[[str, int], int] = lambda text, enough: 0
        """Function that returns a lower bound of the tokens of a text, counted until it exceeds `enough`; 0 if
        unknown."""
        self.is_quick = True
        """Whether the tokenizer takes at most about a microsecond for any character of a text."""
        self.most_characters: int | None = None
        """Most characters that the tokenizer may be given at once; None for any number."""
        self.joins_space = False
        """Whether the tokenizer reads several white characters as one."""
        self.texts: list[str | None] = [
            None if index in self.byte_ids else _complete_text(piece) for index, piece in enumerate(pieces)
        ]
        """Text per id; None if it depends on the neighbours."""
        self.visible_texts = ["" if index in self.special_ids else text for index, text in enumerate(self.texts)]
        """Text per id, with special tokens left out."""


def _complete_text(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None
