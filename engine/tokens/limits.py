"""Limits the time and memory that the tokenizer of a stranger's model can cost; never reads a file.

A vocabulary, its control tokens and the steps that normalise and split text are data, but each has values that make
opening or a short prompt take minutes, or more memory than there is. The limits are several times the needs of known
models. Next to read: tokenizer.py, which calls these checks before a tokenizer is used.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NoReturn

from headrace.adapters.untrusted import plain
from headrace.engine.errors import ModelRejected
from headrace.engine.tokens.steps import steps_of

__all__ = ["check_added", "check_core", "check_merging", "check_token_size", "check_token_sizes"]

_MOST_IDS: Final = 1 << 22
_TOKEN_BYTES: Final = 4096
_SURELY_SHORT: Final = _TOKEN_BYTES // 4  # characters, each of at most 4 bytes
_CONTROL_TOKENS: Final = 4096  # every message of a chat is searched for all of them
_ADDED_TOKENS: Final = 1 << 15
_MERGE_COST: Final = 1 << 27
_STEPS: Final = 32  # in a normaliser, a pre-tokenizer or a decoder
_GROWTH: Final = 4096
_WORD_CHARS: Final = 1000
_FRAME_TOKENS: Final = 64
_UNKNOWN_STEP: Final = 8
_STEP_GROWTH: Final = {
    "BertNormalizer": 8,
    "ByteLevel": 2,
    "Lowercase": 2,
    "ByteFallback": 3,
    "Metaspace": 4,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 11,
    "NFKD": 11,
} | dict.fromkeys(
    ("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Fuse", "Nmt", "Punctuation", "Split")
    + ("Strip", "StripAccents", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    1,
)
"""Most bytes that each kind of step writes for one byte."""
_PROBES: Final = ("a b", "Hello, world! 123", "a \n\t\r b", "é 汉字 🙂\u0301", "")


def check_added(added: int, control: int, origin: str) -> None:
    """Refuse more added tokens, or more control tokens among them, than a chat can be searched for in time.

    Raises:
        ModelRejected: A count is over its limit; names `origin`, the number and the limit.
    """
    for what, count, limit in (
        ("control tokens", control, _CONTROL_TOKENS),
        ("added tokens", added, _ADDED_TOKENS),
    ):
        if count > limit:
            _refuse(origin, f"the number of {what}", count, limit)


def check_merging(tokens: Iterable[str], origin: str) -> None:
    """Refuse tokens that are too long, or whose merges would take too long to find by trying all splits of each.

    Raises:
        ModelRejected: A token or the cost of merging is over its limit; names `origin`, the value and the limit.
    """
    cost = 0
    for token in tokens:
        check_token_size(token, origin)
        cost += len(token) ** 2
    if cost > _MERGE_COST:
        _refuse(origin, "the sum of the squares of the tokens' lengths", cost, _MERGE_COST)


def check_token_size(token: str, origin: str) -> None:
    """Refuse a token of too many bytes.

    Raises:
        ModelRejected: The token is too long; names `origin`, the size and the limit.
    """
    if len(token) > _SURELY_SHORT and (size := len(token.encode(errors="replace"))) > _TOKEN_BYTES:
        _refuse(origin, f"the size in bytes of the token {plain(token)[:20]}...", size, _TOKEN_BYTES)


def check_token_sizes(tokens: Collection[str], origin: str) -> None:
    """Refuse a vocabulary with a token of too many bytes.

    Raises:
        ModelRejected: A token is too long; names `origin`, the size and the limit.
    """
    if max(map(len, tokens), default=0) > _SURELY_SHORT:
        for token in tokens:
            check_token_size(token, origin)


def check_core(core: Any, vocabulary: Mapping[str, int]) -> int:
    """Refuse a `tokenizers.Tokenizer` that could cost too much; errors of the library itself are the caller's to type.

    Args:
        core: The tokenizer.
        vocabulary: Id of each of its tokens, added ones included.

    Returns:
        Most bytes into which normalising and splitting may turn one byte of text.

    Raises:
        ModelRejected: A part is over its limit; names the part, its value and the limit.
    """
    highest = max(vocabulary.values(), default=0)
    if highest >= _MOST_IDS:
        _refuse("tokenizer", "the highest id", highest, _MOST_IDS - 1)
    check_token_sizes(vocabulary, "tokenizer")
    added = core.get_added_tokens_decoder().values()
    check_added(len(added), sum(token.special for token in added), "tokenizer")
    longest_word = getattr(core.model, "max_input_chars_per_word", 0)
    if longest_word > _WORD_CHARS:
        _refuse("tokenizer", "max_input_chars_per_word", longest_word, _WORD_CHARS)
    growth = {part: _growth_of(core, part) for part in ("normalizer", "pre_tokenizer", "decoder")}
    for step in steps_of(core, "post_processor"):
        for side in ("single", "pair"):
            _check_template(step.get(side) or [], side)
    _probe(core)
    whole = growth["normalizer"] * growth["pre_tokenizer"]
    if whole > _GROWTH:
        _refuse("tokenizer", "the number of bytes that it may make of one", whole, _GROWTH)
    return whole


def _growth_of(core: Any, part: str) -> int:
    """Return the most bytes that a normaliser, pre-tokenizer or decoder writes for one byte; refuse too many."""
    steps = steps_of(core, part)
    if len(steps) > _STEPS:
        _refuse("tokenizer", f"the number of steps of its {part}", len(steps), _STEPS)
    growth = math.prod(map(_growth, steps))
    if growth > _GROWTH:
        _refuse("tokenizer", f"the number of bytes that its {part} may write for one", growth, _GROWTH)
    return growth


def _check_template(pieces: list[dict[str, Any]], side: str) -> None:
    """Refuse a template that repeats a text, or puts many tokens around it."""
    texts = Counter(piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece)
    if texts and max(texts.values()) > 1:
        _refuse("tokenizer", f"how often its post_processor repeats a text ({side})", max(texts.values()), 1)
    if len(pieces) > _FRAME_TOKENS:
        _refuse("tokenizer", f"the number of parts of its post_processor ({side})", len(pieces), _FRAME_TOKENS)


def _growth(step: dict[str, Any]) -> int:
    """Return the most bytes that a step writes for one byte."""
    kind = step["type"]
    if kind == "Prepend":
        return 1 + len(step["prepend"].encode())  # every part, perhaps of one byte, gets the prefix
    if kind == "Replace" and "content" in step:
        size, pattern = len(step["content"].encode()), step["pattern"].get("String")
        return 1 + size if not pattern else max(1, -(-size // len(pattern.encode())))
    if kind == "Precompiled":
        data = base64.b64decode(step["precompiled_charsmap"])
        size = int.from_bytes(data[:4], "little")  # bytes of the trie, whose values are offsets in the texts after it
        return max(1, *map(len, data[4 + size :].split(b"\0")))
    return _STEP_GROWTH.get(kind, _UNKNOWN_STEP)


def _probe(core: Any) -> None:
    """Tokenise short texts, so that a tokenizer that panics on any text does so now; count the tokens around a text."""
    for text in _PROBES:
        try:
            bare = core.encode(text, add_special_tokens=False).ids
            framed = core.encode(text, add_special_tokens=True).ids
            core.decode(framed, skip_special_tokens=True)
        except Exception:  # the vocabulary cannot spell this text, and may well spell others
            continue
        if len(framed) > len(bare) + _FRAME_TOKENS:
            _refuse("tokenizer", "the number of tokens put around a text", len(framed) - len(bare), _FRAME_TOKENS)


def _refuse(origin: str, field: str, value: int, limit: int) -> NoReturn:
    message = f"{origin}: {field} is {value}; at most {limit} allowed"
    raise ModelRejected(message, field=origin, value=value, limit=limit)
