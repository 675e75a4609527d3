"""`fewest_tokens_rule`: a lower bound of the tokens of a text that is found without tokenising it; never encodes.

Where the tokens of a text are its own bytes in pieces, a byte costs at least one part in as many as the longest token
that holds such a byte has. For a long text that takes a thousandth of the time of tokenising it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["fewest_tokens_rule"]

_WHOLE_TEXT: Final = frozenset(("ByteLevel", "Digits", "Metaspace", "Split"))
"""Pre-tokenizers that keep all of a text; `Split` may be told otherwise."""
_KEEP_ASCII: Final = frozenset(("NFC", "NFKC"))
_ONLY_ADD: Final = frozenset(("Prepend", "Replace"))
"""Normalisers of SentencePiece models, which write a space as another character; `Replace` may be told otherwise."""
_ROUNDING: Final = 1e-9


def fewest_tokens_rule(core: Any, pieces: Sequence[bytes]) -> Callable[[str], int]:
    """How to find a number of tokens that no text falls below, 0 where nothing is known of it.

    Args:
        core: A `tokenizers.Tokenizer`.
        pieces: The bytes of every id.
    """
    normalizers = _steps(core.normalizer, "normalizers")
    kinds = {step["type"] for step in normalizers}
    replaces = [step for step in normalizers if step["type"] == "Replace"]
    added = core.get_added_tokens_decoder().values()
    if (
        type(core.model).__name__ != "BPE"
        or not kinds <= _KEEP_ASCII | _ONLY_ADD
        or any(step["pattern"] != {"String": " "} or step["content"] != "\u2581" for step in replaces)
        or not all(map(_keeps_all, _steps(core.pre_tokenizer, "pretokenizers")))
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return _unknown
    cost = _costs([*pieces, *(token.content.encode() for token in added)])
    ascii_alone = bool(kinds & _KEEP_ASCII)

    def fewest(text: str) -> int:
        import numpy as np

        if ascii_alone and not text.isascii():
            return 0
        counts = np.bincount(np.frombuffer(text.encode(errors="ignore"), np.uint8), minlength=256)
        return int(-(-(counts @ cost) * (1 - _ROUNDING) // 1))

    return fewest


def _unknown(text: str) -> int:
    return 0


def _costs(pieces: Iterable[bytes]) -> NDArray[np.float64]:
    """The least part of a token that each byte takes: one over the length of the longest piece with it.

    A byte without a piece of its own takes nothing: a tokenizer may leave it out, or write one token for many of them.
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
    """Whether a pre-tokenizer leaves nothing of a text out."""
    return step["type"] in _WHOLE_TEXT and step.get("behavior") != "Removed"


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, in order; of a sequence within a sequence, too."""
    if part is None:
        return []
    waiting, found = [json.loads(part.__getstate__())], list[dict[str, Any]]()
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting[:0] = step[name]
        else:
            found.append(step)
    return found
