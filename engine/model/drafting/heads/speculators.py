"""Reads heads in the format of the speculators library: a config around that of the layer; never reads a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.adapters.untrusted import Fields
from headrace.engine.model.drafting.heads.eagle import read_eagle3
from headrace.engine.model.drafting.heads.spec import RecurrentSpec
from headrace.engine.model.spec import DecoderSpec

__all__ = ["is_speculators", "read_speculators"]

_TYPE: Final = "speculators_model_type"
_LAYER: Final = "transformer_layer_config"
_OWN: Final = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "target_hidden_size",
)
"""Fields of the outer config that say what the head computes."""
_LAYER_TYPES: Final = ("llama", "qwen3")


def is_speculators(config: Mapping[str, object]) -> bool:
    """Return whether a config.json is of this format."""
    return _TYPE in config


def read_speculators(
    config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec, origin: str
) -> RecurrentSpec:
    """Return the spec of a head.

    Args:
        config: The config.json of the head.
        shapes: Shapes of its tensors, by name.
        target: The model that the head is to draft for.
        origin: Base name of the head's folder, for messages.

    Raises:
        ModelRejected: The head is of a kind that is not read, or was made for another target.
    """
    fields = Fields(config, f"{origin}/config.json")
    if config[_TYPE] != "eagle3":
        fields.refuse(_TYPE, "eagle3")
    layer = config.get(_LAYER)
    if not isinstance(layer, Mapping):
        fields.refuse(_LAYER, "an object: the config of the head's layer")
    if layer.get("model_type", "llama") not in _LAYER_TYPES:
        Fields(layer, f"{fields.origin}: {_LAYER}").refuse("model_type", ", ".join(_LAYER_TYPES))
    _check_verifier(fields, target)
    own = {name: config[name] for name in _OWN if config.get(name) is not None}
    return read_eagle3({**layer, **own}, shapes, target, origin)


def _check_verifier(fields: Fields, target: DecoderSpec) -> None:
    """Refuse a head that says that it was made for models of another architecture."""
    outer = fields.data.get("speculators_config")
    verifier = outer.get("verifier") if isinstance(outer, Mapping) else None
    named = verifier.get("architectures") if isinstance(verifier, Mapping) else None
    if isinstance(named, list) and named and target.architecture not in named:
        Fields({"architectures": named}, f"{fields.origin}: speculators_config.verifier").refuse(
            "architectures", f"{target.architecture}, the model that it is to draft for"
        )
