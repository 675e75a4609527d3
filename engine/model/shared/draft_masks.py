"""`masks_behind`: the masks of a grammar behind the drafts of a row; keeps nothing, and knows no device.

A device that verifies `k` drafts a row has room for masks [rows, k + 1, words]: the first of a row is known before its
drafts are, and this yields those behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.engine.scheduling.shaping import GrammarState

__all__ = ["masks_behind"]


def masks_behind(state: GrammarState, mask: bytes, drafts: Sequence[int]) -> Iterator[bytes]:
    """Yield the mask behind each of `drafts` that the grammar allows, up to the first that it refuses.

    Nothing behind that one is ever chosen, since it is not. `state` advances by one token with each mask; whoever asks
    takes back those that turn out to be wrong.

    Args:
        state: The grammar where the row stands.
        mask: The mask there.
        drafts: The row's drafts.
    """
    for token in drafts:
        if token // 8 >= len(mask) or not mask[token // 8] >> token % 8 & 1:
            return
        state.advance(token)
        mask = state.allowed()
        yield mask
