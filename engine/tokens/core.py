"""`TokenizerCore`: the only caller of the `tokenizers` library once a tokenizer is built; types every failure.

A panic in the library is not an `Exception`, and some tokenizers fail on some texts only, so each call is guarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from headrace.engine.errors import InvalidParams, PromptTooLong, TokenizerFailed
from headrace.engine.tokens.panics import typed

__all__ = ["TokenizerCore"]

_LONG: Final = 2048  # characters from which encoding must not hold the GIL
_MOST_CHARS: Final = 64 << 20  # after normalising, at some 30 bytes of memory each


class TokenizerCore:
    """A `tokenizers.Tokenizer` that several threads may use. Any error that a text causes is a typed one."""

    def __init__(self, core: Any, name: str, *, growth: int) -> None:
        """Wrap a tokenizer.

        Args:
            core: The `tokenizers.Tokenizer`; not changed by others from here on.
            name: Name of the model in messages.
            growth: Most bytes into which the tokenizer may turn one byte of text before it looks for tokens.
        """
        self._core = core
        self._name = name
        self._growth = growth
        self.most_characters = _MOST_CHARS // growth
        """Most characters of a text, or of both texts of a pair."""

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        """Return the ids of `text`; if `framed`, with the special tokens that go around every text.

        Raises:
            PromptTooLong: The text could need more memory than a text may take.
            TokenizerFailed: The tokenizer cannot handle this text.
        """
        self._check_size(len(text))
        with self._typed():
            if len(text) > _LONG:  # `encode` holds the GIL to the end, a batch of one does not
                ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=framed)[0].ids
            else:
                ids = self._core.encode(text, add_special_tokens=framed).ids
        return ids

    def encode_pair(self, first: str, second: str) -> Any:
        """Return the `tokenizers.Encoding` of two texts, with the special tokens around and between them.

        Raises:
            PromptTooLong: The texts could need more memory than a text may take.
            TokenizerFailed: The tokenizer cannot handle these texts.
        """
        self._check_size(len(first) + len(second))
        with self._typed():
            return self._core.encode_batch_fast([(first, second)], add_special_tokens=True)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens.

        Raises:
            InvalidParams: An id is not an integer from 0 to 2**32 - 1.
            TokenizerFailed: The tokenizer cannot handle these ids.
        """
        with self._typed():
            try:
                text: str = self._core.decode(list(ids), skip_special_tokens=True)
            except (OverflowError, TypeError):
                raise InvalidParams("ids: token ids are integers from 0 to 2**32 - 1", field="ids") from None
        return text

    @property
    def unknown_id(self) -> int | None:
        """Id of the token that stands for text without a token; None if the tokenizer has no such token."""
        with self._typed():
            unknown = getattr(self._core.model, "unk_token", None)
            found: int | None = None if unknown is None else self._core.token_to_id(unknown)
        return found

    def with_aliases(self, tokens: Mapping[str, Any]) -> tuple[TokenizerCore, dict[str, int]]:
        """Return a copy that reads special tokens as ordinary text and knows an alias for each, and the aliases' ids.

        Args:
            tokens: By alias, the `AddedToken` whose rules about neighbouring white space the alias follows.

        Raises:
            TokenizerFailed: The tokenizer cannot be copied.
        """
        from tokenizers import AddedToken, Tokenizer

        with self._typed():
            core: Any = Tokenizer.from_str(self._core.to_str())
            core.encode_special_tokens = True
            core.add_tokens(
                [
                    AddedToken(
                        alias,
                        single_word=token.single_word,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                        normalized=token.normalized,
                    )
                    for alias, token in tokens.items()
                ]
            )
            ids = {alias: core.token_to_id(alias) for alias in tokens}
        return TokenizerCore(core, self._name, growth=self._growth), ids

    def _check_size(self, chars: int) -> None:
        if chars > self.most_characters:
            raise PromptTooLong(
                f"prompt: {chars} characters are more than the {self.most_characters} that the tokenizer of "
                f"{self._name} may be given, which makes up to {self._growth} bytes of one",
                field="prompt",
                value=chars,
                limit=self.most_characters,
            )

    @contextmanager
    def _typed(self) -> Iterator[None]:
        with typed(lambda problem: TokenizerFailed(f"the tokenizer of {self._name} failed: {problem}")):
            yield
