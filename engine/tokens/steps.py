"""`steps_of`: lists the steps of a part of a `tokenizers.Tokenizer` as plain dicts; never encodes."""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["steps_of"]

_INNER: Final = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
"""Field of a `Sequence` that holds its steps, by part of a tokenizer."""


def steps_of(core: Any, part: str) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer in the order in which they run, nested sequences flattened.

    Args:
        core: A `tokenizers.Tokenizer`.
        part: Name of the part: "normalizer", "pre_tokenizer", "decoder" or "post_processor".
    """
    whole = getattr(core, part)
    left = [] if whole is None else [json.loads(whole.__getstate__())]
    found: list[dict[str, Any]] = []
    while left:
        step = left.pop()
        inner = step.get(_INNER[part]) if step.get("type") == "Sequence" else None
        if inner is None:
            found.append(step)
        else:
            left += reversed(inner)
    return found
