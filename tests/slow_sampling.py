"""What sampling options do to logits, slowly and in plain Python: the reference of several tests; holds no tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.engine.scheduling.shaping import Shaping

__all__ = ["log_softmax", "shaped"]


def shaped(logits: Sequence[float], tokens: Sequence[int], prompt_len: int, asked: Shaping) -> list[float]:
    """The logits for the token after `tokens` as `asked` changes them, in float64."""
    completion = list(tokens[prompt_len:])
    found = []
    for token, logit in enumerate(logits):
        value = logit + dict(asked.bias).get(token, 0.0)
        if token in tokens:
            value = value / asked.repetition_penalty if value > 0 else value * asked.repetition_penalty
        value -= asked.frequency_penalty * completion.count(token)
        value -= asked.presence_penalty * (token in completion)
        masked = asked.allowed is not None and token not in asked.allowed
        masked |= token in asked.forbidden
        masked |= len(tokens) < asked.min_length and token in asked.stops
        masked |= any(
            word[-1] == token
            and tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]
            and len(tokens) >= len(word) - 1
            for word in asked.bad_words
        )
        found.append(-math.inf if masked else value)
    return found


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Natural-log softmax in float64."""
    most = max(logits)
    total = math.fsum(math.exp(value - most) for value in logits)
    return [value - most - math.log(total) for value in logits]
