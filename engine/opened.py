"""`Opened`: what opening a model yields, whatever the device; holds values and never makes them."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.prompts import TokenizerLike
from headrace.engine.scheduling.plan import Ability, Capacity, Runner
from headrace.engine.scheduling.pooling import Embedding
from headrace.engine.stats import EngineInfo

__all__ = ["Opened"]


@dataclass(frozen=True, slots=True)
class Opened:
    """An open model: all that an engine needs besides its scheduler."""

    runner: Runner
    tokenizer: TokenizerLike
    capacity: Capacity
    info: EngineInfo
    abilities: frozenset[Ability] = frozenset()
    """What the runner can do beyond `Sampling`; requests that need more are refused."""
    embedding: Embedding | None = None
    """How the model embeds texts; None where the runner cannot pool."""
    generates: bool = True
    """Whether the model can choose tokens at all."""
