"""`Family`: what one file of this folder gives to the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec

__all__ = ["Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose configurations are read alike."""

    architecture: str
    """Name in a config's `architectures`, which ends in `ForCausalLM`."""
    model_type: str
    """Name in a config's `model_type`."""
    from_config: Callable[[HfConfig], DecoderSpec]
    """Returns the spec that a config.json describes; raises `ModelRejected`."""
    heeds: frozenset[str] = frozenset()
    """Fields that `from_config` reads and that are refused in the configs of other families."""
    unread: frozenset[str] = frozenset()
    """Fields that `from_config` need not read: what they say follows from others, or nothing follows from it."""
    headless: str | None = None
    """Name of the same architecture without a head; None for that of `architecture` with `Model` at its end."""
    former_names: tuple[str, ...] = ()
    """Names that `architectures` of older configs have in place of `architecture`."""
    gguf: str | None = None
    """Value of `general.architecture` in GGUF files; None if none are read."""
    from_header: Callable[[GgufHeader], DecoderSpec] | None = None
    """Returns the spec that a GGUF file describes; raises `ModelRejected`."""
    gguf_heeds: frozenset[str] = frozenset()
    """Keys, without the architecture's name, that `from_header` reads and that others refuse."""
