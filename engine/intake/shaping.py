"""Makes the changes to the logits that a caller asks for, of penalties, biases and words; never applies them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from headrace.engine.errors import InvalidParams
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.shaping import MOST_WORD_TOKENS, Shaping
from headrace.engine.tokens.interface import TokenizerLike

__all__ = ["SHAPING_FIELDS", "make_shaping"]

SHAPING_FIELDS: Final = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "forbidden_token_ids",
    "bad_words",
    "min_tokens",
)
"""Fields of `SamplingParams` that ask for changes to the logits, if they are not at their defaults."""


def make_shaping(
    params: SamplingParams, prompt_len: int, stop_ids: AbstractSet[int], tokenizer: TokenizerLike, vocab_size: int
) -> Shaping | None:
    """Return the changes that `params` make to the logits; None if they make none.

    Raises:
        InvalidParams: The masks leave no token.
    """
    words = _word_ids(params.bad_words, tokenizer, vocab_size)
    forbidden = {*params.forbidden_token_ids, *(word[0] for word in words if len(word) == 1)}
    stops = tuple(sorted(token for token in stop_ids if token < vocab_size)) if params.min_tokens else ()
    shaping = Shaping(
        bias=params.logit_bias,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        allowed=params.allowed_token_ids,
        forbidden=tuple(sorted(forbidden)),
        min_length=prompt_len + params.min_tokens if stops else 0,
        stops=stops,
        bad_words=tuple(sorted(word for word in words if len(word) > 1)),
    )
    allowed = range(vocab_size) if shaping.allowed is None else shaping.allowed
    if forbidden.issuperset(allowed) or forbidden.union(stops).issuperset(allowed):
        field = "forbidden_token_ids" if shaping.allowed is None else "allowed_token_ids"
        raise InvalidParams(
            f"{field}: with bad_words and min_tokens they leave no token to choose",
            field=field,
            value=getattr(params, field),
        )
    return None if shaping == Shaping() else shaping


def _word_ids(words: Sequence[str], tokenizer: TokenizerLike, vocab_size: int) -> set[tuple[int, ...]]:
    """Return the token ids of each word as it stands in a text, after a space and without one.

    Raises:
        InvalidParams: A word has no tokens, or all words together have too many.
    """
    frame = set(tokenizer.encode("")) if words else set()  # special tokens around any text
    found = set()
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()) if word.strip() else (word,):
            ids = tokenizer.encode(text)
            first, last = ids[:1], ids[1:][-1:]
            ids = ids[len(frame.intersection(first)) : len(ids) - len(frame.intersection(last))]
            if not ids:
                raise InvalidParams(f"bad_words: {word!r} has no tokens", field="bad_words", value=word)
            if max(ids) < vocab_size:
                found.add(tuple(ids))
    if (total := sum(map(len, found))) > MOST_WORD_TOKENS:
        raise InvalidParams(
            f"bad_words: together at most {MOST_WORD_TOKENS} tokens, with a space before each and without, got {total}",
            field="bad_words",
            value=words,
            limit=MOST_WORD_TOKENS,
        )
    return found
