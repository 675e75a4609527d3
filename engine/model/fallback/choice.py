"""`fallback_for`: whether transformers' own module computes a model; imports transformers only where it might."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams, ModelRejected
from headrace.engine.model.families.registry import from_hf, has_family

if TYPE_CHECKING:
    from headrace.engine.model.fallback.model import FallbackModel

__all__ = ["check_native", "fallback_for"]

_NATIVE_ONLY: Final = ("adapter_slots", "quantize")


def fallback_for(
    config: EngineConfig, described: Mapping[str, object], source: Path | Literal["random"]
) -> FallbackModel | None:
    """Return the model as transformers computes it; None where headrace's own code does, or refuses.

    Args:
        config: The options of an engine.
        described: The parsed config.json.
        source: The folder of the model, or "random".

    Raises:
        InvalidParams: An option does not fit such a model.
        ModelRejected: Neither headrace nor transformers' module can run the model; the error says why.
    """
    if config.model_impl != "transformers" and has_family(described):
        return None
    from headrace.engine.model.fallback.config import knows
    from headrace.engine.model.fallback.model import FallbackModel

    if config.model_impl != "transformers" and not knows(described):
        return None
    if config.model_impl == "native":
        _refuse_native(described, 'model_impl="auto" would try the module of transformers')
        return None
    why = 'model_impl="transformers" was asked for'
    if config.model_impl == "auto":
        why = f"{_name(described)} has no native code"
    try:
        model = FallbackModel.read(described, source, max_context=config.max_context, seed=config.seed, why=why)
    except ModelRejected as error:
        if config.model_impl == "transformers":
            raise
        _refuse_native(described, f"nor can the module of transformers run it here: {error}", error)
        raise
    for field in _NATIVE_ONLY:
        value, limit = getattr(config, field), EngineConfig.model_fields[field].default
        if value != limit:
            raise InvalidParams(
                f"{field}: a model that transformers' module computes takes {limit}, got {value} ({why})",
                field=field,
                value=value,
                limit=limit,
            )
    return model


def check_native(config: EngineConfig, kind: str) -> None:
    """Refuse `model_impl="transformers"` for models of a kind that headrace alone computes.

    Raises:
        InvalidParams: The option asks for transformers' module.
    """
    if config.model_impl == "transformers":
        raise InvalidParams(
            f"model_impl: {kind} are computed by headrace's own code, got transformers",
            field="model_impl",
            value="transformers",
            limit="auto",
        )


def _refuse_native(described: Mapping[str, object], told: str, named: ModelRejected | None = None) -> None:
    """Refuse a model without native code, with what else there is to say, by a field of `named` if it is given."""
    try:
        from_hf(described)
    except ModelRejected as native:
        by = named if named is not None and _is_given(described, named.field) else native
        raise ModelRejected(f"{native}; {told}", field=by.field, value=by.value, limit=by.limit) from by


def _is_given(described: Mapping[str, object], field: str | None) -> bool:
    """Return whether a config.json has a field, or an object in it has."""
    places = (described, *(value for value in described.values() if isinstance(value, Mapping)))
    return any(field in place for place in places)


def _name(described: Mapping[str, object]) -> object:
    named = described.get("architectures")
    return named[0] if isinstance(named, list) and named else described.get("model_type")
