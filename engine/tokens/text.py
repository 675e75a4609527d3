"""Turns token ids into text step by step; never loads a tokenizer or samples.

These are pure state machines over plain data, so that the same ids give the same text however they arrive. Next to
read: tokenizer.py, which builds the `TokenTable`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

__all__ = ["Detokenizer", "SpacedDetokenizer", "TokenTable"]

_REPLACEMENT: Final = "\ufffd"


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


class Detokenizer:
    """Builds the text of one growing sequence of ids.

    Joining every `feed` and the last `flush` gives exactly `decode(ids)` of a byte-level tokenizer, for any ids. For
    SentencePiece the leading space that `decode` drops is kept, because a completion continues its prompt: the text is
    `decode(prompt + ids)` after its first `decode(prompt)`. Ids outside the table have no text.
    """

    __slots__ = ("_pending", "_size", "_skip", "_table", "_texts")

    def __init__(self, table: TokenTable, skip_special_tokens: bool = True) -> None:
        """Start an empty sequence."""
        self._table = table
        self._skip = skip_special_tokens
        self._texts = table.visible_texts if skip_special_tokens else table.texts
        self._size = len(self._texts)
        self._pending = bytearray()

    def feed(self, token_id: int) -> str:
        """Return the characters that this id completes; empty while a character is incomplete."""
        if 0 <= token_id < self._size and not self._pending:
            text = self._texts[token_id]
            if text is not None:
                return text
        return self._feed_bytes(token_id)

    def flush(self) -> str:
        """Return the text that is still held, with U+FFFD for incomplete bytes; the sequence ends here."""
        if self._table.byte_ids:
            return self._end_run()
        text = self._pending.decode("utf-8", "replace")
        self._pending.clear()
        return text

    def _feed_bytes(self, token_id: int) -> str:
        if not 0 <= token_id < self._size or (self._skip and token_id in self._table.special_ids):
            return ""
        piece = self._table.pieces[token_id]
        if not self._table.byte_ids:
            self._pending += piece
            text, used = codecs.utf_8_decode(self._pending, "replace", False)
            del self._pending[:used]
            return text
        if token_id in self._table.byte_ids:
            self._pending += piece
            return ""
        # An id with no token is not part of the sequence, so it does not end a run of bytes.
        return self._end_run() + piece.decode("utf-8") if piece else ""

    def _end_run(self) -> str:
        try:
            text = self._pending.decode("utf-8")
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._pending)
        self._pending.clear()
        return text


class SpacedDetokenizer(Detokenizer):
    """Builds text with special tokens, and a space between each of them and its neighbours."""

    __slots__ = ("_begun", "_owes_space")

    def __init__(self, table: TokenTable) -> None:
        """Start an empty sequence."""
        super().__init__(table, skip_special_tokens=False)
        self._begun = False
        self._owes_space = False

    def feed(self, token_id: int) -> str:
        """Return the characters that this id completes, and the spaces before them."""
        if token_id not in self._table.special_ids:
            return self._spaced(super().feed(token_id))
        before = self.flush()
        self._owes_space = self._begun
        text = before + self._spaced(super().feed(token_id))
        self._owes_space = True
        return text

    def flush(self) -> str:
        """Return the text that is still held; the sequence ends here."""
        return self._spaced(super().flush())

    def _spaced(self, text: str) -> str:
        if text and self._owes_space:
            self._owes_space = False
            text = " " + text
        self._begun = self._begun or bool(text)
        return text


def _complete_text(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None
