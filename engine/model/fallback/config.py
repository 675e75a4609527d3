"""Reads a config.json as transformers does and finds the class of the model, or refuses by name; runs no model's code.

A class is one of the transformers library's own: code that lies beside a checkpoint is never imported. What is refused
here is what a config says; what only a module shows is refused by tracing.py and the trial.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Final, NamedTuple, NoReturn

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from headrace.adapters.untrusted import refuse
from headrace.engine.errors import ModelRejected
from headrace.engine.model.fallback.ropes import DIVISORS, LAYERS, ORIGINAL, long_ropes, pairs
from headrace.engine.model.fallback.values import check_values, refuse_field, told
from headrace.engine.model.families.own_code import has_other_code
from headrace.engine.model.families.unread import ABSENT, refuse_unread, says_nothing
from headrace.engine.model.spec import LIMITS

__all__ = ["FOUND_IN", "ModelClass", "knows", "model_class"]

FOUND_IN: Final = "the transformers library's own module"
_ORIGIN: Final = "config.json"
_UNREAD: Final[Mapping[str, frozenset[str]]] = {
    "apertus": frozenset(("qk_norm",)),
    "minimax_m2": frozenset(
        """
        attn_type_list layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta
        mtp_transformer_layers num_mtp_modules qk_norm_type rotary_dim scoring_func use_mtp use_qk_norm use_routing_bias
        """.split()
    ),
}
"""Fields of published configs, by `model_type`, that say what the module does in any case, or that it makes use of."""
_READ_BESIDE: Final = frozenset(("head_dim", "partial_rotary_factor"))
"""Fields that modules read where the class of their configuration does not have them."""
_NOT_SHAPES: Final = (
    "_",
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "fusion_config",
    "transformers_weights",
)
"""Beginnings of fields that say nothing of a model: they choose implementations, some of them the hub's, and files."""
_REFUSED: Final[Mapping[str, str]] = {
    "quantization_config": "weights that are not quantised, where transformers' own module runs the model",
    "is_encoder_decoder": "models without an encoder",
    "add_cross_attention": "attention to the model's own tokens alone",
    "num_kv_shared_layers": "layers with keys and values of their own",
    "alibi": "positions that are not added to scores",
    "use_bidirectional_attention": "attention to earlier tokens alone",
}
"""Fields that nothing here computes if they are set, and what is supported instead."""


class ModelClass(NamedTuple):
    """A model of the transformers library: the class, and the configuration that it is made with."""

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    has_head: bool
    """Whether the class chooses tokens."""
    context: int
    """Most tokens of a request, on which rotations may depend."""

    def copied(self) -> PreTrainedConfig:
        """Return a copy of the configuration: making a model changes it."""
        return copy.deepcopy(self.config)


def knows(described: Mapping[str, object]) -> bool:
    """Return whether the transformers library has a causal language model for the names in a config.json."""
    kind, named = described.get("model_type"), described.get("architectures")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return False
    names = _names(kind)
    return names[0] is not None and (named is None or named in [[name] for name in names])


def model_class(described: Mapping[str, object], max_context: int | None = None) -> ModelClass:
    """Return the class and the configuration of a config.json.

    Args:
        described: The parsed file.
        max_context: Most tokens of a request; None for as many as the model was made for.

    Raises:
        ModelRejected: The transformers library has no such class, or the model has what the fallback cannot compute;
            the error names the field.
    """
    for field, supported in _REFUSED.items():
        if described.get(field) not in ABSENT:
            refuse(_ORIGIN, field, described[field], supported)
    family = described.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        refuse(_ORIGIN, "model_type", family, "families of headrace and of transformers")
    if has_other_code(described, [name for name in _names(family) if isinstance(name, str)]):
        refuse(_ORIGIN, "auto_map", described["auto_map"], "models that need no code of their own")
    config = _read(described)
    _check(config)
    _check_layers(config)
    named = described.get("architectures")
    for mapping, has_head in ((MODEL_FOR_CAUSAL_LM_MAPPING, True), (MODEL_MAPPING, False)):
        kind = mapping.get(type(config), None)
        if isinstance(kind, type) and (named is None or named == [kind.__name__]):
            _check_class(kind)
            _check_unread(described, config)
            bound = _bound(config)
            return ModelClass(kind, config, has_head, min(max_context or bound, bound))
    refuse(_ORIGIN, "architectures", named, "one causal language model, or one without its head")


def _names(kind: str) -> list[object]:
    """Return what the transformers library calls the classes of a `model_type`, with and without a head."""
    return [mapping.get(kind) for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES)]


def _read(described: Mapping[str, object]) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[str(described["model_type"])]
    _check_types(described.get("layer_types"))
    check_values(described, kind, _ORIGIN)
    plain = {name: value for name, value in described.items() if not name.startswith(_NOT_SHAPES)}
    try:
        config: PreTrainedConfig = kind.from_dict(copy.deepcopy(plain))
    except Exception as error:  # a stranger's values in another library's constructor
        refuse_field(error, described, _ORIGIN)
        raise ModelRejected(f"{_ORIGIN}: transformers cannot read it: {told(error)}", field=_ORIGIN) from error
    return config


def _check_unread(described: Mapping[str, object], config: PreTrainedConfig) -> None:
    """Refuse fields that the configuration's class does not have: it keeps them, and the module does not read them.

    Older names of fields do not count, which the class keeps no longer, nor do numbers that it works out itself.
    """
    kind = type(config)
    own = {field.name for field in fields(kind)}.union(kind.attribute_map, _READ_BESIDE)
    own |= _UNREAD.get(config.model_type, frozenset())
    others = {name for name, value in described.items() if name not in own and not says_nothing(name, value)}
    if others & vars(config).keys():
        without = _read({name: value for name, value in described.items() if name not in others})
        kept = vars(config).keys() - vars(without).keys()
        refuse_unread(described, described.keys() - kept, _ORIGIN, f"transformers' {kind.__name__}")


def _check(config: PreTrainedConfig) -> None:
    """Refuse what the configuration's class sets where the file does not."""
    for field in ("is_encoder_decoder", "add_cross_attention", "num_kv_shared_layers", "alibi"):
        if getattr(config, field, None) not in ABSENT:
            refuse(_ORIGIN, field, getattr(config, field), _REFUSED[field])
    if config.get_text_config() is not config:
        refuse(_ORIGIN, "model_type", config.model_type, "models of text alone, where they have no native code")
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    _check_types(types)
    for rope in long_ropes(config):
        _check_long_rope(config, rope)


def _check_long_rope(config: PreTrainedConfig, rope: Mapping[str, object]) -> None:
    """Refuse a longrope without divisors for each pair, or without the context to which short texts go."""
    for field in DIVISORS:
        divisors = rope.get(field)
        if not isinstance(divisors, list):
            refuse(_ORIGIN, field, divisors, "a list of numbers")
        if len(divisors) != pairs(config, rope):
            supported = f"{pairs(config, rope)}, one for each pair that is rotated"
            refuse(_ORIGIN, field, f"{len(divisors)} numbers", supported)
    _check_context(ORIGINAL, rope.get(ORIGINAL))
    if hasattr(config, ORIGINAL):  # counts for more, whatever it is
        _check_context(ORIGINAL, getattr(config, ORIGINAL))


def _check_types(types: object) -> None:
    """Refuse a kind of layer that no attention is."""
    for kind in types if isinstance(types, list | tuple) else ():
        if not isinstance(kind, str) or kind not in LAYERS:
            refuse(_ORIGIN, "layer_types", kind, ", ".join(sorted(LAYERS)))


def _check_layers(config: PreTrainedConfig) -> None:
    """Refuse an impossible number of layers before a module is made, which takes memory for each of them."""
    layers, most = getattr(config, "num_hidden_layers", None), LIMITS["num_layers"]
    if not isinstance(layers, int) or not 1 <= layers <= most:
        refuse(_ORIGIN, "num_hidden_layers", layers, f"an integer from 1 to {most}")


def _bound(config: PreTrainedConfig) -> int:
    """Return the number of tokens that a model was made for."""
    return _check_context("max_position_embeddings", getattr(config, "max_position_embeddings", None))


def _check_context(field: str, value: object) -> int:
    """Refuse what is no number of tokens, and return it."""
    most = LIMITS["max_context"]
    if type(value) is not int or not 1 <= value <= most:
        refuse(_ORIGIN, field, value, f"an integer from 1 to {most}")
    return value


def _check_class(kind: type[PreTrainedModel]) -> None:
    if getattr(kind, "_is_stateful", False):
        _refuse_class(kind, "keeps a state beside keys and values, as linear attention and state-space layers do")
    if not getattr(kind, "_supports_attention_backend", False):
        _refuse_class(kind, "computes its attention itself, not through transformers' attention interface")


def _refuse_class(kind: type[PreTrainedModel], why: str) -> NoReturn:
    raise ModelRejected(
        f"{_ORIGIN}: architectures is {kind.__name__}, which has no native code here, and its module in transformers "
        f"{why}",
        field="architectures",
        value=kind.__name__,
    )
