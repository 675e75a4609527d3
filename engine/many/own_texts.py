"""`own_texts`: texts that a model writes itself, as sequences of token ids; for calibrating where there are no others.

Uses `Engine.info` and `Engine.stream` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.engine.errors import InvalidParams
from headrace.engine.params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

__all__ = ["own_texts"]

_MOST = 128
"""Most choices of a request that `SamplingParams` allow."""


async def own_texts(
    engine: Engine, first: int, *, sequences: int, tokens: int, wrote: Callable[[int], None]
) -> list[list[int]]:
    """Return `sequences` sequences of `tokens` ids each, sampled at temperature 1 from the token that begins a text.

    The model goes on behind an end of a sequence, so that all of them are full. They are choices of as few requests as
    fit, whose seeds are 0, 1 and so on: the rows of each step do not depend on when it runs, and an engine with the
    same room and nothing else to do writes the same again.

    Args:
        engine: An open engine; `generation_defaults="none"` keeps the model's recommendations out.
        first: Id of the token that begins each sequence.
        sequences: Number of sequences.
        tokens: Ids of a sequence, the first one included; at least 2.
        wrote: Called with the number of tokens so far, after each token.

    Raises:
        InvalidParams: The context, or the memory for keys and values, has no room for a sequence.
    """
    info = engine.info
    pages = -(-tokens // info.page_size)
    if tokens > info.max_context or pages > info.num_pages:
        most = min(info.max_context, info.num_pages * info.page_size)
        told = f"sequence_tokens: must be at most {most:,}, for which the engine has room, got {tokens:,}"
        raise InvalidParams(told, field="sequence_tokens", value=tokens, limit=most)
    together = min(info.max_rows, info.num_pages // pages, _MOST)
    found: list[list[int]] = []
    written = 0
    for seed, done in enumerate(range(0, sequences, together)):
        count = min(together, sequences - done)
        asked = SamplingParams(n=count, seed=seed, temperature=1.0, max_tokens=tokens - 1, ignore_eos=True)
        texts = [[first] for _ in range(count)]
        async for token in engine.stream([first], asked):
            if token.id is not None:
                texts[token.index].append(token.id)
                written += 1
                wrote(written)
        found += texts
    return found
