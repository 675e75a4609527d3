"""`Detokenizer` turns token ids into text step by step; never loads a tokenizer or samples.

It is a pure state machine over plain data, so that the same ids give the same text however they arrive. Next to read:
token_table.py, the text of each id by itself.
"""

from __future__ import annotations

import codecs
from typing import Final

from headrace.engine.tokens.token_table import TokenTable

__all__ = ["Detokenizer"]

_REPLACEMENT: Final = "\ufffd"


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
