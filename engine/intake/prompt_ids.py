"""Makes token ids of prompts and text of ids for callers who ask for nothing else; never submits a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.errors import InvalidParams
from headrace.engine.intake.prompts import ChatEnd, TokenizerLike, check_token_ids, more_token_ids, to_token_ids
from headrace.engine.intake.tokenizing import Charge, Tokenizing
from headrace.engine.intake.turns import Prompt
from headrace.engine.life.opened import Opened
from headrace.engine.tokens.text import Detokenizer

__all__ = ["ChatOptions", "TokenizeOptions", "TokenizerInfo", "detokenize", "tokenize", "tokenizer_info"]


class ChatOptions(TypedDict, total=False):
    """How the chat template writes a chat."""

    tools: Sequence[Mapping[str, Any]] | None
    """Definitions of functions that the chat offers, as OpenAI's API writes them."""
    add_generation_prompt: bool
    """Whether the ids end where the assistant's next answer begins; False ends them with the last message."""
    continue_final_message: bool
    """End with the text of the last message, which the answer then continues."""
    template_kwargs: Mapping[str, Any] | None
    """More values for the chat template, such as `{"enable_thinking": False}`; plain JSON by name."""


class TokenizeOptions(ChatOptions, total=False):
    """What may be said about a prompt; all but `after` and `add_special_tokens` is about chats."""

    add_special_tokens: bool
    """Whether a text gets the special tokens that the tokenizer puts around every text, such as BOS; True unless it is
    given. A chat gets those that its template writes."""
    after: Sequence[int]
    """Ids of a conversation up to the end of an answer. The ids are then those of all of it: `after`, what the chat
    template writes behind an answer, the messages, and where the next answer begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """What a model's tokenizer has besides its vocabulary."""

    chat_template: str
    """Text of the chat template, of several the one for tools; empty where there is none."""
    special_tokens: Mapping[str, str | list[str]]
    """Special tokens by the names that chat templates use for them, such as `bos_token`."""
    control_tokens: Mapping[int, str]
    """Text of every token that stands for no text of its own, by id."""
    eos_ids: tuple[int, ...]
    """Ids that end an answer."""


def tokenizer_info(tokenizer: TokenizerLike) -> TokenizerInfo:
    """Return what a tokenizer has besides its vocabulary."""
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
    """Return the token ids of `prompt`: at once where that is quick, else from a thread in a turn of its tenant.

    Args:
        prompt: What is tokenised.
        options: How a chat is written.
        opened: The model.
        helper: Its threads tokenise.
        tenant: Whose turn it takes.
        charge: Is told of the work.

    Raises:
        InvalidParams: The prompt is malformed, or two options do not go together.
        PromptTooLong: Its text is too long for the context, however it is tokenised.
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
    work = Tokenizing.of_prompt(prompt, opened, ids, tenant=tenant, charge=charge, tools=tools, known=known)
    return await work.ask(helper)


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
