"""PEFT folders of any content, written by hand in milliseconds, for the model of tiny_models.py; holds no tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from tiny_models import CONFIG
from torch import Tensor

__all__ = [
    "BOTH",
    "SIZES",
    "lora_folder",
    "lora_tensors",
    "merged",
    "peft_model",
    "prompt_folder",
    "wrapped",
    "write_folder",
]

_HIDDEN, _HEAD, _FFN = CONFIG["hidden_size"], CONFIG["hidden_size"] // CONFIG["num_attention_heads"], 48
_KV = CONFIG["num_key_value_heads"] * _HEAD
SIZES = {
    "self_attn.q_proj": (_HIDDEN, _HIDDEN),
    "self_attn.k_proj": (_HIDDEN, _KV),
    "self_attn.v_proj": (_HIDDEN, _KV),
    "self_attn.o_proj": (_HIDDEN, _HIDDEN),
    "mlp.gate_proj": (_HIDDEN, _FFN),
    "mlp.up_proj": (_HIDDEN, _FFN),
    "mlp.down_proj": (_FFN, _HIDDEN),
}
"""Inputs and outputs of each module."""
BOTH = ("self_attn.q_proj", "self_attn.v_proj")


def lora_tensors(seed: int, rank: int, modules: Iterable[str] = BOTH, spread: float = 0.4) -> dict[str, Tensor]:
    """Random updates of some modules in every layer, named as PEFT names them."""
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for module in modules:
            inputs, outputs = SIZES[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=drawn) * spread
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=drawn) * spread
    return tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """An adapter folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def lora_folder(folder: Path, seed: int, rank: int = 4, modules: Iterable[str] = BOTH, **changes: Any) -> Path:
    """A LoRA adapter with random weights; alpha is the rank."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank} | changes
    return write_folder(folder, config, lora_tensors(seed, rank, modules))


def prompt_folder(folder: Path, seed: int, count: int = 5) -> Path:
    """A prompt-tuning adapter with random virtual tokens."""
    drawn = torch.Generator().manual_seed(seed)
    tensors = {"prompt_embeddings": torch.randn(count, _HIDDEN, generator=drawn)}
    return write_folder(folder, {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": count}, tensors)


def merged(model: Any, tensors: dict[str, Tensor], scale: float = 1.0) -> Any:
    """A copy of a transformers model with updates added to its weights: an independent reference."""
    import copy

    other = copy.deepcopy(model)
    weights = dict(other.named_parameters())
    with torch.no_grad():
        for name, a_RI in tensors.items():
            if name.endswith("lora_A.weight"):
                b_OR = tensors[name.replace("lora_A", "lora_B")]
                weights[name.removeprefix("base_model.model.").replace("lora_A.", "")] += scale * b_OR @ a_RI
    return other


def peft_model(base: Any, **options: Any) -> Any:
    """A model with a LoRA of random A and B on the modules that `options` name, as PEFT computes it."""
    model = wrapped(base, **options)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    return model.eval()


def wrapped(base: Any, **options: Any) -> Any:
    """A model with a new LoRA, as PEFT makes it.

    For models with experts, PEFT would take the names of shared experts and dense feeds for those of experts.
    """
    import peft

    with mock.patch("peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"):
        return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
