"""Turns a caller's prompt into token ids, or refuses it; never knows the requests that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeGuard

from headrace.engine.errors import InvalidParams, PromptTooLong, TokenizerFailed
from headrace.engine.intake.messages import Message
from headrace.engine.tokens.interface import ChatEnd, TokenizerLike
from headrace.engine.tokens.panics import typed
from headrace.engine.tokens.text import TokenTable

__all__ = [
    "Prompt",
    "check_fewest_tokens",
    "check_text_size",
    "check_token_ids",
    "is_short",
    "is_text",
    "more_token_ids",
    "to_token_ids",
    "tokenizing_cost",
]

_SHORT = 2048  # characters that tokenise in about a millisecond: not worth a thread
_MESSAGE = 32  # characters that tokenise in the time in which the template writes a message
_COSTLY = 2**20  # characters beyond which a prompt is as costly as any
_CHARACTER = 4  # bytes of UTF-8, at most

Prompt: TypeAlias = str | Sequence[int | Message]
"""A prompt: raw text, token ids, or a chat of `{"role", "content"}` messages; ids and messages together are refused.

The type is one sequence of either, since mypy infers the type of a list literal in a call from one alternative only.
"""


def is_short(prompt: object, table: TokenTable) -> bool:
    """Return whether tokenising `prompt` is quick enough for the event loop; a chat, rendered in a process, is not."""
    return not _is_chat(prompt) and _text_size(prompt) <= (_SHORT if table.is_quick else 0)


def is_text(prompt: object) -> bool:
    """Return whether `prompt` is a text or a chat, which has to be tokenised, and not a list of token ids."""
    return isinstance(prompt, str) or _is_chat(prompt)


def tokenizing_cost(prompt: object, tools: Sequence[Mapping[str, Any]] | None = None, most: int = _COSTLY) -> int:
    """Return roughly the characters of a prompt and of its tools, counted no further than somewhat past `most`."""
    if not _is_chat(prompt):
        return _text_size(prompt)
    cost, left = 0, [*prompt, *(tools or ())]
    while left and cost <= most:
        part = left.pop()
        if isinstance(part, str):
            cost += len(part)
        elif isinstance(part, Mapping | Sequence):
            cost += _MESSAGE * (1 + len(part) // 4)
            left += part.values() if isinstance(part, Mapping) else part
    return cost


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
    size, most = _text_size(prompt), table.longest * max_context
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


def _text_size(prompt: object) -> int:
    """Return the characters of a text, or of the texts of a chat's messages; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    size = 0
    for message in prompt if _is_chat(prompt) else ():
        if isinstance(message, Mapping):
            size += sum(len(value) for value in message.values() if isinstance(value, str))
    return size


def _is_chat(prompt: object) -> TypeGuard[Sequence[Any]]:
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
        ids = _guarded(partial(tokenizer.encode, prompt, framed=framed)) if prompt else []  # never a BOS alone
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidParams(
            f"prompt: must be a str, a list of token ids or a list of messages, got {type(prompt).__name__}",
            field="prompt",
            value=prompt,
        )
    elif prompt and (isinstance(prompt[0], Mapping) or hasattr(prompt[0], "model_dump")):  # refused as a message
        ids = _guarded(partial(tokenizer.encode_chat, prompt, tools, end, template_kwargs))
    else:
        ids = list(prompt)
    if not ids:
        raise InvalidParams("prompt: is empty, at least one token is needed", field="prompt", value=prompt, limit=1)
    return ids


def more_token_ids(
    added: Any,
    tokenizer: TokenizerLike,
    known: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids to add to `known`: ids as they are, those of text, or those of messages in the chat
    template.

    The template may read `tools` and `template_kwargs` as well.

    Raises:
        InvalidParams: `added` is of another kind, or malformed; names the part.
        TokenizerFailed: The tokenizer cannot handle `added`.
    """
    if isinstance(added, str):
        return _guarded(partial(tokenizer.encode_more, added)) if added else []
    if not _is_chat(added):
        return to_token_ids(added, tokenizer) if added != [] else []
    ids = _guarded(partial(tokenizer.encode_reply, added, tools, template_kwargs))
    if known[-1] not in tokenizer.eos_ids:
        return ids
    for place, token in enumerate(ids):  # the answer has its own end, so the template's end of it is dropped
        if token in tokenizer.eos_ids:
            return ids[place + 1 :]
        if tokenizer.table.pieces[token].strip():
            break
    return ids


def _guarded(encode: Callable[[], list[int]]) -> list[int]:
    """Return the ids from a tokenizer; raise `TokenizerFailed`, for this request alone, for any untyped error."""
    with typed(lambda problem: TokenizerFailed(f"the tokenizer failed: {problem}")):
        return encode()


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
