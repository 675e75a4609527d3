"""Reads a model's recommended sampling values, and fills requests with them; never opens a file.

The recommendations are those of generation_config.json, or of `general.sampling` in a GGUF file. Stop ids are not among
them: the model's own end a choice in any case (tokens/folder.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.engine.errors import InvalidParams, ModelRejected
from headrace.engine.params import SamplingParams

__all__ = ["from_generation_config", "from_gguf_metadata", "with_defaults"]

_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p")
_PENALTY: Final = "repetition_penalty"
_GGUF_NAMES: Final = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def from_generation_config(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the recommendations of a generation_config.json; with `do_sample` false, only its repetition penalty.

    Raises:
        ModelRejected: `SamplingParams` refuse a value.
    """
    names = (_PENALTY,) if config.get("do_sample") is False else (*_SAMPLING, _PENALTY)
    return _checked({name: config.get(name) for name in names}, "generation_config.json")


def from_gguf_metadata(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the recommendations of a GGUF file's metadata.

    The key `penalty_repeat` is left out: it counts the last `penalty_last_n` tokens, not all tokens and the prompt.

    Raises:
        ModelRejected: `SamplingParams` refuse a value.
    """
    values = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_NAMES.items()}
    return _checked(values, "general.sampling")


def with_defaults(params: SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return `params` with `defaults` for the fields that were not given.

    A beam search takes no defaults, and a request with temperature 0 only the penalty.
    """
    given = params.model_fields_set
    if params.beam_width is not None:
        return params
    is_greedy = params.temperature == 0 and "temperature" in given
    missing = {
        name: value
        for name, value in defaults.items()
        if name not in given and not (is_greedy and name in _SAMPLING) and value != getattr(params, name)
    }
    return params.model_copy(update=missing) if missing else params


def _checked(values: Mapping[str, Any], origin: str) -> dict[str, float]:
    found = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**found)
    except InvalidParams as error:
        told = f'{origin}: {error}; generation_defaults="none" opens the model without its recommendations'
        raise ModelRejected(told, field=error.field, value=error.value, limit=error.limit) from error
    return found
