"""`Opened`: the result of opening a model, whatever the device; holds values and never makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.adapters.bank import AdapterDevice
from headrace.engine.scheduling.plan import Ability, Capacity, Runner
from headrace.engine.scheduling.pooling import Embedding
from headrace.engine.stats import EngineInfo
from headrace.engine.tokens.interface import TokenizerLike

__all__ = ["CrossEncoder", "EncodedPair", "Opened"]


class EncodedPair(NamedTuple):
    """A query and a document as token ids."""

    ids: list[int]
    second: int
    """Position of the first token of the second type; 0 if the model has one type."""
    document: int
    """Position of the document's first token."""


@dataclass(frozen=True, slots=True)
class CrossEncoder:
    """A model's way of scoring pairs of texts."""

    encode_pair: Callable[[str, str], EncodedPair]
    """Function that returns the token ids of a query and a document."""
    has_sigmoid: bool
    """Whether a score is the sigmoid of the model's logit."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open model: all that an engine needs besides its scheduler."""

    runner: Runner
    tokenizer: TokenizerLike
    capacity: Capacity
    info: EngineInfo
    abilities: frozenset[Ability] = frozenset()
    """Abilities of the runner beyond `Sampling`; requests that need others are refused."""
    embedding: Embedding | None = None
    """The model's way of embedding texts; None if the runner cannot pool."""
    scoring: CrossEncoder | None = None
    """The model's way of scoring pairs of texts; None if it does not read them together."""
    adapters: AdapterDevice | None = None
    """The device's interface for adapters; None if it was opened for none."""
    generates: bool = True
    """Whether the model can choose tokens."""
    has_pages: bool = True
    """Whether pages hold anything; an encoder's do not, so no prefix is ever found in them."""
