"""Applies a request's shaping or hook to the logits of one row on the host; chooses no token and needs no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engine.errors import HookFailed
from headrace.engine.scheduling.plan import RowOptions
from headrace.engine.scheduling.shaping import LogitsProcessor, Shaping
from headrace.ops.cpu.shape import Shaper

__all__ = ["processed_logits", "shaper_of"]


def processed_logits(
    processor: LogitsProcessor, tokens: list[int], logits_V: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Call a hook with the tokens of a row so far and its next logits, and return its result as an array.

    Args:
        processor: The hook, which may write to both and return an array or a torch tensor.
        tokens: Token ids of prompt and completion.
        logits_V: float32 [vocabulary].

    Returns:
        float32 [vocabulary], each element finite or -inf.

    Raises:
        HookFailed: The hook raised, or returned something other than logits.
    """
    try:
        returned: Any = processor(tokens, logits_V)
        is_tensor = callable(getattr(returned, "detach", None))
        changed_V = np.array(returned.detach().float().cpu().numpy() if is_tensor else returned, np.float32)
    except BaseException as error:  # an error of a hook must not end the engine's thread
        raise HookFailed(f"logits_processor raised {type(error).__name__} after {len(tokens)} tokens") from error
    if changed_V.shape != logits_V.shape:
        what = f"an array [{len(logits_V)}]"
        raise HookFailed(f"logits_processor must return {what}, got {type(returned).__name__} {changed_V.shape}")
    if np.isnan(changed_V).any() or changed_V.max() == math.inf:
        raise HookFailed("logits_processor must return finite numbers or -inf")
    return changed_V


def shaper_of(options: RowOptions, shaping: Shaping, vocab_size: int) -> Shaper:
    """Return a `Shaper` that applies `shaping` to the logits of a new row."""
    return Shaper(
        tokens=options.tokens,
        prompt_len=options.prompt_len,
        vocab_size=vocab_size,
        bias=shaping.bias,
        repetition_penalty=shaping.repetition_penalty,
        frequency_penalty=shaping.frequency_penalty,
        presence_penalty=shaping.presence_penalty,
        allowed=shaping.allowed,
        forbidden=shaping.forbidden,
        min_length=shaping.min_length,
        stops=shaping.stops,
        bad_words=shaping.bad_words,
    )
