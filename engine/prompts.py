"""Turns what a caller gives as a prompt into token ids, or refuses it; never knows what happens to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.engine.errors import InvalidParams
from headrace.engine.messages import Message
from headrace.engine.text import TokenTable

__all__ = ["TokenizerLike", "check_token_ids", "is_short", "to_token_ids"]

_SHORT = 2048  # characters that tokenise in about a millisecond: not worth a thread
_MESSAGE = 32  # characters that tokenise in the time that the template takes for a message


class TokenizerLike(Protocol):
    """What the engine needs of a tokenizer; `tokenizer.Tokenizer` and `testing.ByteTokenizer` are such."""

    @property
    def table(self) -> TokenTable:
        """What each id stands for."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of raw text."""
        ...

    @property
    def chat_template(self) -> str:
        """Text of the chat template; empty where there is none."""
        ...

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Ids of a chat that may offer tools, ready for the answer."""
        ...


def is_short(prompt: object) -> bool:
    """Whether tokenising `prompt` is quick enough for the event loop's own thread."""
    if isinstance(prompt, str):
        return len(prompt) <= _SHORT
    if not isinstance(prompt, Sequence) or not prompt or not isinstance(prompt[0], Mapping):
        return True
    length = _MESSAGE * len(prompt)
    for message in prompt if length <= _SHORT else ():
        if isinstance(message, Mapping):
            length += sum(len(value) for value in message.values() if isinstance(value, str))
    return length <= _SHORT


def to_token_ids(prompt: Any, tokenizer: TokenizerLike, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
    """Token ids of raw text, of a chat that may offer `tools`, or of ids themselves.

    Raises:
        InvalidParams: The prompt is empty, of another kind, or malformed; names the part.
    """
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt) if prompt else []  # never a BOS alone
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidParams(
            f"prompt: must be a str, a list of token ids or a list of messages, got {type(prompt).__name__}",
            field="prompt",
            value=prompt,
        )
    elif prompt and isinstance(prompt[0], Mapping):
        ids = tokenizer.encode_chat(prompt, tools)
    else:
        ids = list(prompt)
    if not ids:
        raise InvalidParams("prompt: is empty, at least one token is needed", field="prompt", value=prompt, limit=1)
    return ids


def check_token_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse what is not an id below the width of the logits.

    Raises:
        InvalidParams: Names the first offending place.
    """
    for place, value in enumerate(ids):
        if type(value) is not int or not 0 <= value < vocab_size:
            raise InvalidParams(
                f"prompt[{place}]: must be a token id from 0 to {vocab_size - 1}, got {value!r}",
                field=f"prompt[{place}]",
                value=value,
                limit=vocab_size - 1,
            )
