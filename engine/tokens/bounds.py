"""`fewest_tokens_rule`: a lower bound of the tokens of a text that is found without tokenising it; never encodes.

Where the tokens of a text are its own bytes in pieces, a byte costs at least one part in as many as the longest token
that holds such a byte has. For a long text that takes a thousandth of the time of tokenising it.
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
"""Pre-tokenizers that keep all of a text; `Split` may be told otherwise."""
_KEEP_ASCII: Final = frozenset(("NFC", "NFKC"))
_ONLY_ADD: Final = frozenset(("Prepend", "Replace"))
"""Normalisers of SentencePiece models, which write a space as another character; `Replace` may be told otherwise."""
_SPACE: Final = "\u2581"
_ROUNDING: Final = 1e-9
_PART: Final = 1 << 16  # characters that are counted at once, between which other threads run


def fewest_tokens_rule(core: Any, vocabulary: Collection[str]) -> Callable[[str, int], int]:
    """Return the function from a text, and a number that is enough, to a number of tokens that it never falls below.

    It returns 0 where nothing is known of a text, and counts no further than somewhat past the number that is enough.

    Args:
        core: A `tokenizers.Tokenizer`.
        vocabulary: Its tokens, those that were added too.
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
    """Return the bytes of text that each of `tokens` may be made of; None where a text is not kept as it is.

    This is what the encoder reads, which a decoder of another kind may write otherwise.
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
    if not model.byte_fallback or not bytes_of.keys() <= tokens:  # without one a character may be unknown
        bytes_of = {}
    texts = tokens if model.ignore_merges else tokens - bytes_of.keys()  # which no merge makes of their names
    spelled = [*bytes_of.values(), *(token.encode() for token in texts)]
    if spaces:  # one that a text holds already stands for itself
        spelled += [token.replace(_SPACE, " ").encode() for token in texts]
    return spelled


def _space_of(step: dict[str, Any]) -> str:
    """Return what a step writes for a space; empty where it replaces something else."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    return str(step["content"]) if step["pattern"] == {"String": " "} else ""


def _costs(pieces: Iterable[bytes]) -> NDArray[np.float64]:
    """Return the least part of a token that each byte takes: one over the length of the longest piece with it.

    A byte without a piece of its own takes nothing: a tokenizer may leave it out, or write one token for many of them.

    Returns:
        float64 [256].
    """
    import numpy as np

    pieces = sorted(pieces, key=len)
    sizes_V = np.fromiter(map(len, pieces), np.int64, len(pieces))
    longest = np.ones(256)
    # Of several values for one byte the last stays, which is that of the longest piece.
    longest[np.frombuffer(b"".join(pieces), np.uint8)] = np.repeat(sizes_V, sizes_V)
    cost: NDArray[np.float64] = np.zeros(256)
    own = [piece[0] for piece in pieces if len(piece) == 1]
    cost[own] = 1 / longest[own]
    return cost


def _keeps_all(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer leaves nothing of a text out."""
    return step["type"] in _WHOLE_TEXT and step.get("behavior") != "Removed"
