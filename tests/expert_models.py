"""Folders with tiny models that have experts, as transformers writes them; holds no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models

__all__ = ["CONFIG", "expert_folder", "expert_model"]

CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "Qwen2Moe": {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40},
    "Mixtral": {"num_local_experts": 8},
    "GptOss": {"num_local_experts": 8, "head_dim": 16, "sliding_window": 13},
    "GraniteMoe": {"num_local_experts": 8},
    "GraniteMoeShared": {"num_local_experts": 8, "shared_intermediate_size": 40},
}


def expert_model(family: str = "Qwen3Moe", **changes: Any) -> Any:
    """A model of transformers with random weights, whose router decides much."""
    import torch
    import transformers

    torch.manual_seed(5)
    config, model = (getattr(transformers, f"{family}{end}") for end in ("Config", "ForCausalLM"))
    made = model(config(**CONFIG | _OF_FAMILY[family] | changes)).eval()
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    return made


def expert_folder(folder: Path, family: str = "Qwen3Moe", **changes: Any) -> Path:
    """A checkpoint with config, safetensors and tokenizer."""
    expert_model(family, **changes).save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return folder
