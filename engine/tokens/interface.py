"""`TokenizerLike`: the interface of tokenizers as the engine sees them; implements nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from headrace.engine.intake.messages import Message
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["ChatEnd", "TokenizerLike"]

ChatEnd: TypeAlias = Literal["answer", "closed", "open"]
"""The end of a chat's token ids: "answer" ends where the assistant's next answer begins, "closed" with the end of the
last message, "open" with the text of the last message, which the answer then continues."""


class TokenizerLike(Protocol):
    """The interface that the engine needs of a tokenizer; `tokenizer.Tokenizer` and `testing.ByteTokenizer` have it."""

    @property
    def table(self) -> TokenTable:
        """The text that each id stands for."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        ...

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        """Return the ids of raw text; where `framed`, with the special tokens that go around every text."""
        ...

    @property
    def chat_template(self) -> str:
        """Text of the chat template; empty if there is none."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, Any]:
        """Special tokens by the names that chat templates use for them."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        end: ChatEnd = "answer",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a chat that may offer tools, ready for the answer or with another end.

        The template may read `template_kwargs` as well.
        """
        ...

    def encode_more(self, text: str) -> list[int]:
        """Return the ids of text that continues other text."""
        ...

    def encode_reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids that the template puts behind an answer: its end, the messages, the start of the next
        answer."""
        ...

    def close(self) -> None:
        """Release everything that the tokenizer holds besides memory."""
        ...
