"""`fewest_tokens_rule`: finds a lower bound of the tokens of a text without tokenising it; never encodes.

If the tokens of a text are its own bytes in pieces, each byte costs at least one part in n, where n is the size of the
longest token that holds it. For a long text this takes a thousandth of the time of tokenising it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Final

from headrace.engine.tokens.gguf import byte_level_piece
from headrace.engine.tokens.steps import steps_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["fewest_tokens_rule"]

_BYTE_LEVEL: Final = "ByteLevel"
_WHOLE_TEXT: Final = frozenset((_BYTE_LEVEL, "Digits", "Metaspace", "Split"))
"""Pre-tokenizers that keep all of a text; a `Split` may be configured to drop some."""
_KEEP_ASCII: Final = frozenset(("NFC", "NFKC"))
_ONLY_ADD: Final = frozenset(("Prepend", "Replace"))
"""Normalisers of SentencePiece models, which write a space as another character; a `Replace` may do more than that."""
_SPACE: Final = "\u2581"
_ROUNDING: Final = 1e-9
_PART: Final = 1 << 16  # characters that are counted at once; other threads run in between


def fewest_tokens_rule(core: Any, vocabulary: Collection[str]) -> Callable[[str, int], int]:
    """Return a function of a text and a number that is enough, which gives a lower bound of the text's tokens.

    It returns 0 for a text about which nothing is known, and counts no further than somewhat past the second argument.

    Args:
        core: A `tokenizers.Tokenizer`.
        vocabulary: All tokens of the tokenizer, added ones included.
    """
    added = {token.content for token in core.get_added_tokens_decoder().values()}
    spelled = _spelled(core, set(vocabulary) - added)
    if spelled is None:
        return _unknown
    cost = _costs([*spelled, *(content.encode() for content in added)])
    ascii_alone = any(step["type"] in _KEEP_ASCII for step in steps_of(core, "normalizer"))

    def fewest(text: str, enough: int) -> int:
        import numpy as np

        if ascii_alone and not text.isascii():
            return 0
        tokens = 0.0
        for start in range(0, len(text), _PART):
            part = np.frombuffer(text[start : start + _PART].encode(errors="ignore"), np.uint8)
            tokens += float(np.bincount(part, minlength=256) @ cost) * (1 - _ROUNDING)
            if tokens > enough:
                break
        return int(-(-tokens // 1))

    return fewest


def _unknown(text: str, enough: int) -> int:
    return 0


def _spelled(core: Any, tokens: AbstractSet[str]) -> list[bytes] | None:
    """Return the bytes that each of `tokens` may be made of; None if the tokenizer changes texts in other ways.

    The bytes are those that the encoder reads; a decoder of another kind may write others.
    """
    normalizers, splits = steps_of(core, "normalizer"), steps_of(core, "pre_tokenizer")
    model, kinds = core.model, {step["type"] for step in normalizers}
    if (
        type(model).__name__ != "BPE"
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or not kinds <= _KEEP_ASCII | _ONLY_ADD
        or not all(map(_keeps_all, splits))
        or any(token.lstrip or token.rstrip for token in core.get_added_tokens_decoder().values())
    ):
        return None
    spaces = [_space_of(step) for step in [*normalizers, *splits] if step["type"] in ("Replace", "Metaspace")]
    levels = sum(step["type"] == _BYTE_LEVEL for step in splits)
    if levels:
        return None if levels > 1 or spaces else [byte_level_piece(token) for token in tokens]
    if any(space != _SPACE for space in spaces):
        return None
    bytes_of = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    if not model.byte_fallback or not bytes_of.keys() <= tokens:  # without all of these a character may be unknown
        bytes_of = {}
    texts = tokens if model.ignore_merges else tokens - bytes_of.keys()  # no merge makes byte tokens of their names
    spelled = [*bytes_of.values(), *(token.encode() for token in texts)]
    if spaces:  # the mark itself, if a text holds it, stands for itself
        spelled += [token.replace(_SPACE, " ").encode() for token in texts]
    return spelled


def _space_of(step: dict[str, Any]) -> str:
    """Return the text that a step writes for a space; empty if it replaces something else."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    return str(step["content"]) if step["pattern"] == {"String": " "} else ""


def _costs(pieces: Iterable[bytes]) -> NDArray[np.float64]:
    """Return the least part of a token that each byte costs: one over the length of the longest piece with that byte.

    A byte without a piece of its own costs nothing: a tokenizer may leave it out, or write one token for many of them.

    Returns:
        float64 [256].
    """
    import numpy as np

    pieces = sorted(pieces, key=len)
    sizes_V = np.fromiter(map(len, pieces), np.int64, len(pieces))
    longest = np.ones(256)
    # If a byte has several values here, the last stays, and that is the longest piece's.
    longest[np.frombuffer(b"".join(pieces), np.uint8)] = np.repeat(sizes_V, sizes_V)
    cost: NDArray[np.float64] = np.zeros(256)
    own = [piece[0] for piece in pieces if len(piece) == 1]
    cost[own] = 1 / longest[own]
    return cost


def _keeps_all(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer drops nothing of a text."""
    return step["type"] in _WHOLE_TEXT and step.get("behavior") != "Removed"
