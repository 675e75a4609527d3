"""What a request that generates nothing wants of its hidden states; plain values, never arrays.

Such a request is prefilled like any other, in chunks too, and ends with its last token computed. Next to read: plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Embedding", "Pooling", "PoolingKind"]

PoolingKind: TypeAlias = Literal["last", "mean", "cls"]
"""How the hidden states of a text become one vector: that of its last token, their mean, or that of its first token."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is wanted: one vector, the score of a pair, or all hidden states."""

    kind: PoolingKind | Literal["score", "all"]
    second: int = 0
    """Position from which tokens belong to the second text of a pair; 0 where there is one text."""

    @property
    def spares(self) -> bool:
        """Whether all but the last token may come from the prefix cache, which holds no hidden states."""
        return self.kind == "last"


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a model embeds texts."""

    size: int
    """Elements of a vector."""
    kinds: tuple[PoolingKind, ...]
    """What it can do."""
    kind: PoolingKind | None
    """What its files ask for; None where that is none of `kinds`, and a caller has to choose."""
    normalize: bool
    """Whether they ask for vectors of length 1."""
