"""Keyword arguments of `LLM`'s methods, for editors and type checkers; checks no value.

They equal those of the methods of `Engine` that answer, which refuse wrong values. A test keeps the names equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from headrace.engine.intake.prompt_ids import ChatOptions, TokenizeOptions
from headrace.engine.intake.prompts import Charge
from headrace.engine.many.generate import KeepingErrors, ManyOptions, RequestOptions
from headrace.engine.scheduling.pooling import PoolingKind

__all__ = [
    "ChatKeepingErrors",
    "ChatManyOptions",
    "EmbedKeywords",
    "HiddenKeywords",
    "ScoreKeywords",
    "StreamKeywords",
    "TokenizeKeywords",
]


class StreamKeywords(RequestOptions, total=False):
    """Keywords of `Engine.stream`."""

    charge: Charge


class ChatManyOptions(ManyOptions, ChatOptions, total=False):
    """Keywords of `LLM.chat` that let it raise errors."""


class ChatKeepingErrors(KeepingErrors, ChatOptions):
    """Keywords of `LLM.chat` that put errors in the places of answers."""


class HiddenKeywords(TypedDict, total=False):
    """Keywords of `Engine.hidden_states`."""

    adapter: str | None
    tenant: str | None
    cache_salt: str | None
    priority: int


class ScoreKeywords(HiddenKeywords, total=False):
    """Keywords of `Engine.score`."""

    truncate: bool
    charge: Charge


class EmbedKeywords(TypedDict, total=False):
    """Keywords of `Engine.embed` other than `progress`."""

    pooling: PoolingKind | None
    normalize: bool | None
    dimensions: int | None
    truncate: bool
    adapter: str | Sequence[str | None] | None
    tenant: str | None
    cache_salt: str | None
    priority: int
    charge: Charge


class TokenizeKeywords(TokenizeOptions, total=False):
    """Keywords of `Engine.tokenize`."""

    tenant: str | None
    charge: Charge
