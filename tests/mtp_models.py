"""Tiny checkpoints that come with a module for multi-token prediction, and the module in transformers; no tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from draft_heads import MtpHead
from torch import Tensor

__all__ = ["FAMILIES", "LAYERS", "SIZES", "with_module"]

LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("DeepseekV3", LATENT),
    "GLM-4.5": ("Glm4Moe", {"num_key_value_heads": 2, "use_qk_norm": True, "attention_bias": True, "head_dim": 16}),
    "GLM-4.7-Flash": ("Glm4MoeLite", {**LATENT, "mlp_layer_types": ["dense", *["sparse"] * LAYERS]}),
}


def with_module(family: str, folder: Path, **sizes: Any) -> tuple[Any, MtpHead]:
    """A checkpoint whose last layer is the module's, and the module in transformers."""
    torch.manual_seed(7)
    name, changes = FAMILIES[family]
    config, kind = (getattr(transformers, f"{name}{end}") for end in ("Config", "ForCausalLM"))
    model = kind(config(**SIZES | changes | sizes)).eval()
    for of, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in of:
            mean, spread = (1.0, 0.2) if "norm" in of else (0.0, 0.15)
            torch.nn.init.normal_(parameter, mean, spread)
    model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text()) | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in written:
        written["mlp_layer_types"] = written["mlp_layer_types"][:LAYERS]
    path.write_text(json.dumps(written))
    tensors = MtpHead.add_to(folder, LAYERS, SIZES["hidden_size"])
    layer = model.model.layers[LAYERS]

    def block(x: Tensor) -> Tensor:
        positions = torch.arange(len(x))[None]
        with torch.inference_mode():
            turned = model.model.rotary_emb(x[None], position_ids=positions)
            mask = torch.full((1, 1, len(x), len(x)), float("-inf")).triu(1)
            found = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=turned)
        return found[0] if isinstance(found, Tensor) else found[0][0]

    return model, MtpHead(block, tensors, model.config.rms_norm_eps)
