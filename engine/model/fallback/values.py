"""`check_values`: refuses values of a config.json with which a module of transformers can be made but says nonsense.

transformers checks the types of most fields. Of numbers that are out of range it warns, or it takes them as they are.
Here they are refused, by the names that they have in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.adapters.untrusted import Fields, plain, refuse
from headrace.engine.model.fallback.ropes import DIVISORS, ORIGINAL, ropes_in
from headrace.engine.model.spec import LIMITS

__all__ = ["check_values", "refuse_field", "told"]

_SIZES: Final[Mapping[str, int]] = {
    "num_hidden_layers": LIMITS["num_layers"],
    "hidden_size": LIMITS["hidden_size"],
    "intermediate_size": LIMITS["ffn_size"],
    "moe_intermediate_size": LIMITS["ffn_size"],
    "num_attention_heads": LIMITS["num_heads"],
    "num_key_value_heads": LIMITS["num_kv_heads"],
    "head_dim": LIMITS["head_dim"],
    "vocab_size": LIMITS["vocab_size"],
    "max_position_embeddings": LIMITS["max_context"],
    ORIGINAL: LIMITS["max_context"],
}
"""Sizes by their usual names, and the most of each. Some models have lists of them, which are not looked at."""
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN: Final = ("num_experts_per_tok", "moe_k")
_ACTIVATIONS: Final = ("hidden_act", "hidden_activation", "activation_function")
_EPSILON: Final = re.compile(r"(^|_)(eps|epsilon)$")
_ROPES: Final = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS: Final[Mapping[str, tuple[float, float]]] = {
    "rope_theta": (1.0, 1e12),
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
    "attention_factor": (1e-3, 1e3),
    "alpha": (1.0, 1e6),
}
"""Numbers of a rotary embedding, with the least and the most of each, as in families/hf_rope.py."""
_NAMED: Final = re.compile(r"Validation error for field '(\w+)'")
_EXPECTED: Final = re.compile(r"expected (\w+), got")
_TYPES: Final = {
    "int": "an integer", "float": "a number", "bool": "true or false", "str": "a string", "list": "a list",
    "dict": "an object", "NoneType": "null",
}  # fmt: skip


def check_values(described: Mapping[str, object], kind: type[PreTrainedConfig], origin: str) -> None:
    """Refuse sizes, epsilons, activations, experts and ropes that no model can have.

    Args:
        described: The parsed file.
        kind: The class of the configuration, which knows fields by other names, too.
        origin: The file's base name, for messages.

    Raises:
        ModelRejected: A value is impossible; the error has the field, the value and what is supported.
    """
    fields = Fields(described, origin)
    _check_numbers(fields, kind)
    for name in _ACTIVATIONS:
        value = described.get(name)
        if isinstance(value, str) and value not in ACT2FN:
            fields.refuse(name, "an activation of transformers, such as silu, gelu or relu2")
    for name in ("dtype", "torch_dtype"):
        if not isinstance(getattr(torch, str(described.get(name) or "float32"), None), torch.dtype):
            fields.refuse(name, "a dtype of torch, such as bfloat16")
    _check_experts(fields)
    for field in _ROPES:
        for key, rope in ropes_in(described.get(field)):
            _check_rope(Fields(rope, f"{origin}: {field}" if key is None else f"{origin}: {field}.{key}"))


def _check_numbers(fields: Fields, kind: type[PreTrainedConfig]) -> None:
    described = fields.data
    for usual, most in _SIZES.items():
        for name in {usual, kind.attribute_map.get(usual, usual)}:
            if not isinstance(described.get(name), (list, type(None))):
                fields.size(name, most)
    for name, value in described.items():
        if _EPSILON.search(name) and value is not None:
            fields.real(name, 0.0, 1.0)
    window = described.get("sliding_window")
    if isinstance(window, int) and window < 0:
        fields.size("sliding_window", LIMITS["max_context"])
    for name in ("partial_rotary_factor", "rotary_pct"):
        _check_part(fields, name)
    for name in ("rope_theta", "rotary_emb_base"):
        if described.get(name) is not None:
            fields.real(name, *_ROPE_NUMBERS["rope_theta"])


def _check_experts(fields: Fields) -> None:
    """Refuse a choice of more experts than there are."""
    counts = [value for name in _EXPERTS if isinstance(value := fields.data.get(name), int) and value]
    for name in _CHOSEN:
        if counts and isinstance(fields.data.get(name), int):
            fields.size(name, min(counts))


def _check_part(fields: Fields, name: str) -> None:
    if fields.data.get(name) is not None and not fields.real(name, 0.0, 1.0):
        fields.refuse(name, "a number above 0, up to 1")


def _check_rope(rope: Fields) -> None:
    given = {name: value for name, value in rope.data.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "mrope", *ROPE_INIT_FUNCTIONS):
        rope.refuse("rope_type" if "rope_type" in given else "type", ", ".join(("default", *ROPE_INIT_FUNCTIONS)))
    for name, (low, high) in _ROPE_NUMBERS.items():
        if name in given or (name == "factor" and kind in ("linear", "llama3")):
            rope.real(name, low, high)
    _check_part(rope, "partial_rotary_factor")
    if ORIGINAL in given:
        rope.size(ORIGINAL, LIMITS["max_context"])
    if kind == "longrope":
        for name in DIVISORS:
            _check_divisors(rope, name)
    if "low_freq_factor" in given and rope.real("high_freq_factor", 0.0, 1e6) <= rope.real("low_freq_factor", 0.0, 1e6):
        rope.refuse("high_freq_factor", f"more than low_freq_factor, which is {given['low_freq_factor']:g}")
    if "beta_slow" in given and rope.real("beta_fast", 0.0, 1e6, 32.0) < rope.real("beta_slow", 0.0, 1e6):
        rope.refuse("beta_slow", f"at most beta_fast, which is {given.get('beta_fast', 32.0):g}")


def _check_divisors(rope: Fields, name: str) -> None:
    """Refuse divisors that are no numbers; how many there are to be depends on the size of heads."""
    given = rope.data.get(name)
    for each in given if isinstance(given, list) and given else [None]:
        if isinstance(each, bool) or not isinstance(each, (int, float)) or not 1e-6 <= each <= 1e6:
            rope.refuse(name, "a list of numbers from 1e-06 to 1e+06")


def refuse_field(error: Exception, described: Mapping[str, object], origin: str) -> None:
    """Refuse the field that an error of transformers' configurations names, if it names one."""
    found = _NAMED.search(str(error))
    if found is None:
        return
    expected = dict.fromkeys(_TYPES.get(name, name) for name in _EXPECTED.findall(str(error)))
    refuse(origin, found[1], described.get(found[1]), " or ".join(expected) or told(error))


def told(error: BaseException) -> str:
    """Return in one line what an error of another library says, of strict dataclasses what lies behind it."""
    while isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    return plain(f"{type(error).__name__}: {' '.join(str(error).split())}")
