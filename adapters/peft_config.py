"""`PeftConfig`: the part of an adapter_config.json that the engine computes; never reads weights.

Settings that the engine would have to ignore are refused here by name, so that an adapter that loads is computed right.
Next to read: files.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace.adapters.untrusted import Fields

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "PeftConfig", "parse_peft_config"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_KINDS: dict[str, Literal["lora", "prompt", "prefix"]] = {
    "LORA": "lora",
    "PROMPT_TUNING": "prompt",
    "PREFIX_TUNING": "prefix",
}
_RANK_OPTION = "max_adapter_rank"
_MOST_VIRTUAL = 4096
_MOST_PATTERNS = 512
_MOST_REPEATING = 32
_PATTERN_LENGTH = 200
_REPETITION = re.compile(r"[*+?{]")
_NO: tuple[object, ...] = (None, False, "", [], {})
# Fields that change the arithmetic or the base model: the values that are accepted, and why others are refused.
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "alora_invocation_tokens": (_NO, "adapters that begin in mid-prompt are not supported"),
    "arrow_config": (_NO, "mixtures of adapters are not supported"),
    "bias": ((None, "none"), "trained biases are not supported"),
    "init_lora_weights": (
        (None, True, False, "gaussian", "eva", "mica", "orthogonal"),
        "it is trained on changed base weights: convert it to a plain LoRA with PEFT first",
    ),
    "kasa_config": (_NO, "this variant is not supported"),
    "layer_replication": (_NO, "the model's layers are not repeated"),
    "lora_bias": (_NO, "trained biases are not supported"),
    "modules_to_save": (_NO, "whole modules would replace the model's own, which all adapters share"),
    "monteclora_config": (_NO, "this variant is not supported"),
    "target_parameters": (_NO, "experts are not supported"),
    "trainable_token_indices": (_NO, "trained tokens would replace the model's own, which all adapters share"),
    "use_bdlora": (_NO, "this variant is not supported"),
    "use_dora": (_NO, "DoRA depends on the base weights: merge it, or train a plain LoRA"),
    "use_qalora": (_NO, "this variant is not supported"),
    "velora_config": (_NO, "this variant is not supported"),
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """One adapter's configuration, checked."""

    kind: Literal["lora", "prompt", "prefix"]
    rank: int = 0
    alpha: float = 0.0
    rank_stabilised: bool = False
    """Updates are scaled by alpha / sqrt(rank) (Kalajdzievski, 2023) instead of alpha / rank."""
    rank_pattern: Mapping[re.Pattern[str], int] = field(default_factory=dict)
    alpha_pattern: Mapping[re.Pattern[str], float] = field(default_factory=dict)
    virtual_tokens: int = 0

    def rank_of(self, module: str) -> int:
        """Return the rank of the module that the model calls `module`, such as `model.layers.0.self_attn.q_proj`."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of the module's update."""
        rank = self.rank_of(module)
        return _matching(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)


def parse_peft_config(data: Mapping[str, object], *, max_rank: int) -> PeftConfig:
    """Check a parsed adapter_config.json.

    Args:
        data: The parsed file.
        max_rank: The largest rank that the engine accepts.

    Raises:
        ModelRejected: A setting is one that the engine does not compute; names field, value and what is supported.
    """
    fields = Fields(data, CONFIG_FILE)
    kind = _KINDS.get(str(data.get("peft_type")))
    if kind is None:
        fields.refuse("peft_type", ", ".join(_KINDS))
    if data.get("auto_map") is not None:
        fields.refuse("auto_map", "adapters that need no code of their own")
    for name, (allowed, reason) in _NEUTRAL.items():
        value = data.get(name)
        if not any(value is each or (value == each and type(value) is type(each)) for each in allowed):
            fields.refuse(name, f"none ({reason})")
    if kind != "lora":
        if data.get("num_transformer_submodules") not in (None, 1):
            fields.refuse("num_transformer_submodules", 1)
        return PeftConfig(kind, virtual_tokens=fields.size("num_virtual_tokens", _MOST_VIRTUAL))
    ranks, alphas = _pattern(fields, "rank_pattern"), _pattern(fields, "alpha_pattern")
    return PeftConfig(
        kind,
        rank=fields.size("r", max_rank, option=_RANK_OPTION),
        alpha=fields.real("lora_alpha", -1e6, 1e6, 8.0),
        rank_stabilised=fields.flag("use_rslora", False),
        rank_pattern={compiled: values.size(key, max_rank, option=_RANK_OPTION) for key, compiled, values in ranks},
        alpha_pattern={compiled: values.real(key, -1e6, 1e6) for key, compiled, values in alphas},
    )


def _pattern(fields: Fields, name: str) -> list[tuple[str, re.Pattern[str], Fields]]:
    """Return a pattern's keys, each with its regular expression, which cannot take long, and the reader of its
    value."""
    given = fields.data.get(name) or {}
    if not isinstance(given, Mapping) or len(given) > _MOST_PATTERNS:
        fields.refuse(name, f"an object of at most {_MOST_PATTERNS} entries")
    if sum(_REPETITION.search(key) is not None for key in given) > _MOST_REPEATING:
        fields.refuse(name, f"an object of at most {_MOST_REPEATING} expressions with repetitions")
    values = Fields(given, f"{CONFIG_FILE}: {name}")
    found = []
    for key in given:
        compiled = _compiled(key)
        if compiled is None:
            values.refuse(key, "names, or expressions with at most 2 repetitions and 4 alternatives")
        found.append((key, compiled, values))
    return found


def _compiled(key: str) -> re.Pattern[str] | None:
    """Compile a pattern's key, which matches the end of a module's name at a dot, as PEFT matches it.

    A key can match in few ways, so that matching takes few steps. Returns None for one that is broken or may be slow.
    """
    repeated = len(_REPETITION.findall(key))
    if len(key) > _PATTERN_LENGTH or repeated > 2 or key.count("|") > 4 or re.search(r"\)[*+?{]", key):
        return None
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError):
        return None


def _matching(pattern: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    """Return the value of the first key that matches the module's name."""
    return next((value for key, value in pattern.items() if key.match(module)), default)
