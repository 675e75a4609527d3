"""Serves callers who want only the token ids of a prompt or the text of ids; never submits a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.errors import InvalidParams
from headrace.engine.intake.by_turns import ask, tokenizing_cost
from headrace.engine.intake.prompts import (
    Charge,
    Prompt,
    Tokenizing,
    check_token_ids,
    guarded,
    is_chat,
    is_short,
    to_token_ids,
)
from headrace.engine.life.opened import Opened
from headrace.engine.tokens.interface import ChatEnd, TokenizerLike
from headrace.engine.tokens.text import Detokenizer

__all__ = ["ChatOptions", "TokenizeOptions", "TokenizerInfo", "detokenize", "tokenize", "tokenizer_info"]


class ChatOptions(TypedDict, total=False):
    """Options for the way the chat template writes a chat."""

    tools: Sequence[Mapping[str, Any]] | None
    """Definitions of functions that the chat offers, as OpenAI's API writes them."""
    add_generation_prompt: bool
    """Whether the ids end where the assistant's next answer begins; False ends them with the last message."""
    continue_final_message: bool
    """Whether the ids end with the text of the last message, which the answer then continues."""
    template_kwargs: Mapping[str, Any] | None
    """More values for the chat template, such as `{"enable_thinking": False}`; plain JSON by name."""


class TokenizeOptions(ChatOptions, total=False):
    """Options for tokenising a prompt; all but `after` and `add_special_tokens` concern chats."""

    add_special_tokens: bool
    """Whether a text gets the special tokens that the tokenizer puts around every text, such as BOS; True by default. A
    chat gets those that its template writes."""
    after: Sequence[int]
    """Ids of a conversation up to the end of an answer. The result is then the ids of the whole: `after`, the
    template's text behind an answer, the messages, and the beginning of the next answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """Facts about a model's tokenizer besides its vocabulary."""

    chat_template: str
    """Text of the chat template, the one for tools if there are several; empty if there is none."""
    special_tokens: Mapping[str, str | list[str]]
    """Special tokens by the names that chat templates use for them, such as `bos_token`."""
    control_tokens: Mapping[int, str]
    """Text of every control token by id."""
    eos_ids: tuple[int, ...]
    """Ids that end an answer."""


def tokenizer_info(tokenizer: TokenizerLike) -> TokenizerInfo:
    """Return the facts about a tokenizer besides its vocabulary."""
    table = tokenizer.table
    control = {index: table.pieces[index].decode(errors="replace") for index in sorted(table.special_ids)}
    return TokenizerInfo(
        chat_template=tokenizer.chat_template,
        special_tokens=dict(tokenizer.special_tokens),
        control_tokens=control,
        eos_ids=tuple(tokenizer.eos_ids),
    )


async def tokenize(
    prompt: Prompt, options: TokenizeOptions, opened: Opened, helper: FairWorker, tenant: str | None, charge: Charge
) -> list[int]:
    """Return the token ids of `prompt`: at once if that is quick, else from a thread in a turn of the tenant.

    Args:
        prompt: The prompt to tokenise.
        options: The way a chat is written.
        opened: The model.
        helper: The threads that tokenise long prompts.
        tenant: The tenant whose turn is taken.
        charge: Function that is told of the work, in tokens.

    Raises:
        InvalidParams: The prompt is malformed, or two options do not go together.
        PromptTooLong: The text is too long for the context, however it is tokenised.
    """
    tools, after, end = options.get("tools"), options.get("after"), _end(options)
    values = options.get("template_kwargs")
    if after and end != "answer":
        raise InvalidParams("after: goes with neither of the options about the end of a chat", field="after")

    def ids() -> list[int]:
        if not after:
            return to_token_ids(prompt, opened.tokenizer, tools, end, values, options.get("add_special_tokens", True))
        return [*after, *more_token_ids(prompt, opened.tokenizer, after, tools, values)]

    known = len(after) if after else 0
    work = Tokenizing.of_prompt(prompt, opened, ids, charge, known)
    if is_short(prompt, opened.tokenizer.table) and not tools:
        return work.run()
    return await ask(work, helper, tenant=tenant, cost=tokenizing_cost(prompt, tools))


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
        return guarded(partial(tokenizer.encode_more, added)) if added else []
    if not is_chat(added):
        return to_token_ids(added, tokenizer) if added != [] else []
    ids = guarded(partial(tokenizer.encode_reply, added, tools, template_kwargs))
    if known[-1] not in tokenizer.eos_ids:
        return ids
    for place, token in enumerate(ids):  # the answer has its own end, so the template's end of it is dropped
        if token in tokenizer.eos_ids:
            return ids[place + 1 :]
        if tokenizer.table.pieces[token].strip():
            break
    return ids


def detokenize(ids: Sequence[int], opened: Opened, skip_special_tokens: bool) -> str:
    """Return the text of `ids`, with special tokens unless they are to be skipped.

    Raises:
        InvalidParams: An id is not in the vocabulary.
    """
    check_token_ids(ids, opened.info.vocab_size)
    detokenizer = Detokenizer(opened.tokenizer.table, skip_special_tokens)
    return "".join([*map(detokenizer.feed, ids), detokenizer.flush()])


def _end(options: TokenizeOptions) -> ChatEnd:
    """Return how the ids of a chat are to end."""
    if not options.get("continue_final_message", False):
        return "answer" if options.get("add_generation_prompt", True) else "closed"
    if options.get("add_generation_prompt", False):
        raise InvalidParams(
            "continue_final_message: cannot go with add_generation_prompt", field="continue_final_message", value=True
        )
    return "open"
