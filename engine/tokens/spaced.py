"""`SpacedDetokenizer`: text of ids with a space around each special token; never loads a tokenizer or samples."""

from __future__ import annotations

from headrace.engine.tokens.text import Detokenizer
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["SpacedDetokenizer"]


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
