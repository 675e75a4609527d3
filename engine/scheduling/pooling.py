"""`Pooling` and `Embedding`: requests for hidden states in place of tokens, as plain values; never holds an array.

A pooled request is prefilled like any other, in chunks too, and ends when its last token is computed. Next to read:
plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Embedding", "Pooling", "PoolingKind"]

PoolingKind: TypeAlias = Literal["last", "mean", "cls"]
"""Way to turn the hidden states of a text into one vector: that of its last token, their mean, or that of its first
token."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """Kind of result that a pooled request asks for: one vector, the score of a pair, or all hidden states."""

    kind: PoolingKind | Literal["score", "all"]
    second: int = 0
    """Position from which tokens belong to the second text of a pair; 0 for a single text."""

    @property
    def spares(self) -> bool:
        """Whether all but the last token may come from the prefix cache, which holds no hidden states."""
        return self.kind == "last"


@dataclass(frozen=True, slots=True)
class Embedding:
    """Embedding settings of a model."""

    size: int
    """Elements of a vector."""
    kinds: tuple[PoolingKind, ...]
    """Kinds of pooling that the model supports."""
    kind: PoolingKind | None
    """Kind of pooling that the model's files ask for; None if it is not in `kinds`, so that callers have to choose
    one."""
    normalize: bool
    """Whether the model's files ask for vectors of length 1."""
