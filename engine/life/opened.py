"""`Opened`: what opening a model yields, whatever the device; holds values and never makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.adapters.bank import AdapterDevice
from headrace.engine.intake.prompts import TokenizerLike
from headrace.engine.scheduling.plan import Ability, Capacity, Runner
from headrace.engine.scheduling.pooling import Embedding
from headrace.engine.stats import EngineInfo

__all__ = ["CrossEncoder", "EncodedPair", "Opened"]


class EncodedPair(NamedTuple):
    """A query and a document as token ids."""

    ids: list[int]
    second: int
    """Position from which tokens are of the second type; 0 where the model tells none apart."""
    document: int
    """Position of the document's first token."""


@dataclass(frozen=True, slots=True)
class CrossEncoder:
    """How a model scores pairs of texts."""

    encode_pair: Callable[[str, str], EncodedPair]
    """Token ids of a query and a document."""
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
    """What the runner can do beyond `Sampling`; requests that need more are refused."""
    embedding: Embedding | None = None
    """How the model embeds texts; None where the runner cannot pool."""
    scoring: CrossEncoder | None = None
    """How the model scores pairs of texts; None where it does not read them together."""
    adapters: AdapterDevice | None = None
    """What it takes to give the device adapters; None where it was opened for none."""
    generates: bool = True
    """Whether the model can choose tokens at all."""
    has_pages: bool = True
    """Whether pages hold anything; an encoder's do not, so no prefix is ever found in them."""
