"""Turns a caller's prompt into token ids, or refuses it; never knows the requests that use them.

`Tokenizing` does it at once where that is quick, and charges for it; by_turns.py has it done in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeGuard, TypeVar

from headrace.engine.errors import InvalidParams, PromptTooLong, TokenizerFailed
from headrace.engine.intake.messages import Message
from headrace.engine.life.opened import Opened
from headrace.engine.tokens.interface import ChatEnd, TokenizerLike
from headrace.engine.tokens.panics import raise_typed
from headrace.engine.tokens.token_table import TokenTable

__all__ = [
    "TOKENS_A_SECOND",
    "Charge",
    "Prompt",
    "Tokenizing",
    "charge_nobody",
    "check_fewest_tokens",
    "check_text_size",
    "check_token_ids",
    "guarded",
    "is_chat",
    "is_short",
    "is_text",
    "text_size",
    "to_token_ids",
]

T = TypeVar("T")

_SHORT = 2048  # characters that tokenise in about a millisecond: not worth a thread
_CHARACTER = 4  # bytes of UTF-8, at most

Charge: TypeAlias = Callable[[int], None]
"""Function that is told, on the event loop, of work done for a request besides its steps, in tokens."""
TOKENS_A_SECOND: Final = 1000
"""Tokens that are charged for each second of work that has made no tokens."""

Prompt: TypeAlias = str | Sequence[int | Message]
"""A prompt: raw text, token ids, or a chat of `{"role", "content"}` messages; ids and messages together are refused.

The type is one sequence of either, since mypy infers the type of a list literal in a call from one alternative only.
"""


def is_short(prompt: object, table: TokenTable) -> bool:
    """Return whether tokenising `prompt` is quick enough for the event loop; a chat, rendered in a process, is not."""
    return not is_chat(prompt) and text_size(prompt) <= (_SHORT if table.is_quick else 0)


def is_text(prompt: object) -> bool:
    """Return whether `prompt` is a text or a chat, which has to be tokenised, and not a list of token ids."""
    return isinstance(prompt, str) or is_chat(prompt)


def check_text_size(prompt: object, table: TokenTable, max_context: int, name: str = "prompt") -> None:
    """Refuse a text with too many characters however it is tokenised; takes no time for a long one.

    Args:
        prompt: A prompt for `to_token_ids`; token ids pass.
        table: Texts of the model's ids.
        max_context: Most tokens of a prompt and its answer together.
        name: Name of the prompt in errors.

    Raises:
        PromptTooLong: The text has more characters than the context has bytes when every token is the longest.
    """
    if not table.longest:  # the model has no tokenizer, so text is refused elsewhere
        return
    size, most = text_size(prompt), table.longest * max_context
    if size > most:
        error = PromptTooLong(
            f"{name}: {size} characters are more than the context of {max_context} tokens can hold, "
            f"which is {most} with tokens of at most {table.longest} bytes",
            field=name,
            value=size,
            limit=most,
        )
        error.context = max_context
        raise error


def check_fewest_tokens(prompt: object, table: TokenTable, max_context: int, name: str = "prompt") -> None:
    """Refuse a text whose bytes need more tokens than the context has; reads much of it, so a long one needs a thread.

    A chat passes, since its template may leave some of it out, and so do token ids. The arguments are those of
    `check_text_size`.

    Raises:
        PromptTooLong: The text has more than `max_context` tokens at the least.
    """
    if isinstance(prompt, str) and len(prompt) * _CHARACTER > max_context:
        fewest = table.fewest_tokens(prompt, max_context)
        if fewest > max_context:
            error = PromptTooLong(
                f"{name}: its {len(prompt)} characters are at least {fewest} tokens, "
                f"more than the context of {max_context}",
                field=name,
                value=fewest,
                limit=max_context,
            )
            error.context = max_context
            raise error


def text_size(prompt: object) -> int:
    """Return the characters of a text, or of the texts of a chat's messages; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    size = 0
    for message in prompt if is_chat(prompt) else ():
        if isinstance(message, Mapping):
            size += sum(len(value) for value in message.values() if isinstance(value, str))
    return size


def is_chat(prompt: object) -> TypeGuard[Sequence[Any]]:
    """Return whether `prompt` is a chat."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def to_token_ids(
    prompt: Any,
    tokenizer: TokenizerLike,
    tools: Sequence[Mapping[str, Any]] | None = None,
    end: ChatEnd = "answer",
    template_kwargs: Mapping[str, Any] | None = None,
    framed: bool = True,
) -> list[int]:
    """Return the token ids of raw text, of a chat, or of ids themselves.

    `framed` is the argument of `encode`; the others are those of `encode_chat`.

    Raises:
        InvalidParams: The prompt is empty, of another kind, or malformed; names the part.
        TokenizerFailed: The tokenizer cannot handle the prompt.
    """
    if isinstance(prompt, str):
        ids = guarded(partial(tokenizer.encode, prompt, framed=framed)) if prompt else []  # never a BOS alone
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidParams(
            f"prompt: must be a str, a list of token ids or a list of messages, got {type(prompt).__name__}",
            field="prompt",
            value=prompt,
        )
    elif prompt and (isinstance(prompt[0], Mapping) or hasattr(prompt[0], "model_dump")):  # refused as a message
        ids = guarded(partial(tokenizer.encode_chat, prompt, tools, end, template_kwargs))
    else:
        ids = list(prompt)
    if not ids:
        raise InvalidParams("prompt: is empty, at least one token is needed", field="prompt", value=prompt, limit=1)
    return ids


def guarded(encode: Callable[[], list[int]]) -> list[int]:
    """Return the ids from a tokenizer; raise `TokenizerFailed`, for this request alone, for any untyped error."""
    try:
        return encode()
    except BaseException as error:
        raise_typed(error, lambda problem: TokenizerFailed(f"the tokenizer failed: {problem}"))


def check_token_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse anything but an id below the width of the logits.

    Raises:
        InvalidParams: An entry is not such an id; names the first one's place.
    """
    for place, value in enumerate(ids):
        if type(value) is not int or not 0 <= value < vocab_size:
            raise InvalidParams(
                f"prompt[{place}]: must be a token id from 0 to {vocab_size - 1}, got {value!r}",
                field=f"prompt[{place}]",
                value=value,
                limit=vocab_size - 1,
            )


def charge_nobody(tokens: int) -> None:
    """Do nothing: the `Charge` of callers who name no other."""


class Tokenizing(Generic[T]):
    """One tokenising of a prompt, whose work is charged when it ends, even if nobody waits for it any more."""

    def __init__(
        self, encode: Callable[[], T], made: Callable[[T], int], check: Callable[[], None], charge: Charge
    ) -> None:
        """Keep the arguments; begin nothing yet.

        Args:
            encode: Tokenises the prompt.
            made: Returns how many tokens were made of text, given what `encode` returned.
            check: Called just before `encode`, to refuse prompts that take next to no time to refuse.
            charge: Function that is told of the tokens, or of one for each millisecond if `encode` raised.
        """
        self._encode = encode
        self._made = made
        self._check = check
        self._charge = charge
        self._work = 0

    @classmethod
    def of_prompt(
        cls, prompt: Any, opened: Opened, encode: Callable[[], list[int]], charge: Charge, known: int = 0
    ) -> Tokenizing[list[int]]:
        """Return the tokenising of a prompt for `to_token_ids`.

        Args:
            prompt: The prompt that `encode` turns into token ids.
            opened: The model.
            encode: Returns the ids.
            charge: Function that is told of the work, in tokens.
            known: Number of leading ids that are not made from `prompt`.

        Raises:
            PromptTooLong: The prompt has too many characters however it is tokenised.
        """
        table, most = opened.tokenizer.table, opened.info.max_context
        check_text_size(prompt, table, most)
        return Tokenizing(
            encode,
            lambda ids: len(ids) - known if is_text(prompt) else 0,
            partial(check_fewest_tokens, prompt, table, most),
            charge,
        )

    def run(self) -> T:
        """Tokenise, charge for it, and return the result; for quick prompts, on the event loop's own thread."""
        try:
            return self.encode()
        finally:
            self.pay()

    def encode(self) -> T:
        """Tokenise and return the result; `pay` must follow on the event loop."""
        self._check()
        began = time.perf_counter()
        try:
            result = self._encode()
        except BaseException:
            self._work = int((time.perf_counter() - began) * TOKENS_A_SECOND)
            raise
        self._work = self._made(result)
        return result

    def pay(self) -> None:
        """Charge for the work that `encode` has done."""
        if self._work > 0:
            self._charge(self._work)
