"""Tiny checkpoints of families that transformers' own modules compute, for several tests; no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.engine import Engine, SamplingParams

__all__ = [
    "FAMILIES",
    "GREEDY",
    "LONG_ROPE",
    "ORIGINAL",
    "SMALL",
    "WINDOW",
    "config_of",
    "described",
    "generated",
    "made",
    "saved",
    "write_tokenizer",
]

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SMALL: dict[str, Any] = {"dtype": "float32", "kv_memory": "1MiB", "page_size": 4}
"""Options of an engine."""
GREEDY = SamplingParams(temperature=0, max_tokens=8)
WINDOW = 13  # shorter than every prompt, and no multiple of a page
EVERY_OTHER = {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
}
SPLIT_HEADS = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
ORIGINAL = "original_max_position_embeddings"
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.1, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 4.0, 6.0, 9.0],
}  # fmt: skip
"""Beside the original context, one divisor for each pair of 8 rotated elements."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe, window in the middle layer": (
        "Afmoe",
        {**EVERY_OTHER, **EXPERTS, "head_dim": 16, "moe_intermediate_size": 32, "num_dense_layers": 1},
    ),
    "apertus": ("Apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "codegen": ("CodeGen", {"num_key_value_heads": ..., "intermediate_size": ..., "n_inner": 112, "rotary_dim": 8}),
    "cwm, window in the middle layer": (
        "Cwm",
        {
            **EVERY_OTHER,
            "head_dim": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),  # fmt: skip
    "flex_olmo": ("FlexOlmo", EXPERTS),
    "flint, sinks and a window in the middle layer": (
        "Flint",
        {
            **EVERY_OTHER,
            **EXPERTS,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [0],
        },
    ),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gpt_bigcode": ("GPTBigCode", {"intermediate_size": ...}),
    "gptj": ("GPTJ", {"num_key_value_heads": ..., "intermediate_size": ..., "n_inner": 112, "rotary_dim": 8}),
    "granite_swa, sinks and a window in the middle layer": (
        "GraniteSWA",
        {**EVERY_OTHER, "attention_multiplier": 0.2, "layer_rope_theta": [500.0, 100.0, 0], "residual_multiplier": 0.7},
    ),
    "granitemoe_swa, sinks and a window in the middle layer": (
        "GraniteMoeSWA",
        {
            **EVERY_OTHER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.2,
            "shared_intermediate_size": 48,
        },
    ),
    "hunyuan_v1_moe, a rope that is stretched by alpha": (
        "HunYuanMoEV1",
        {
            "head_dim": 16,
            "num_experts": 4,
            "moe_topk": 2,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 500.0,
                "alpha": 50.0,
                "factor": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "hyperclovax": ("HyperCLOVAX", {"head_dim": 16, "attention_multiplier": 0.15, "logits_scaling": 3.0}),
    "jais2": ("Jais2", {"num_key_value_heads": 4}),
    "laguna, more heads in the middle layer": (
        "Laguna",
        {
            **EVERY_OTHER,
            **EXPERTS,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_attention_heads_per_layer": [4, 6, 4],
            "rope_parameters": BY_KIND,
        },
    ),
    "mimo_v2_flash, sinks, a window and more keys in the middle layer": (
        "MiMoV2Flash",
        {
            **EVERY_OTHER,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 24,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "rope_parameters": BY_KIND,
        },
    ),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "minicpm3, divisors of short texts": ("MiniCPM3", {**SPLIT_HEADS, "rope_parameters": {**LONG_ROPE, ORIGINAL: 128}}),
    "minicpm3, divisors of long texts": ("MiniCPM3", {**SPLIT_HEADS, "rope_parameters": {**LONG_ROPE, ORIGINAL: 16}}),
    "nanochat": ("NanoChat", {}),
    "nemotron": ("Nemotron", {"attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "olmo": ("Olmo", {"clip_qkv": 2.0}),
    "olmo, a dynamic rope": (
        "Olmo",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "opt, norms behind, embeddings of another width": (
        "OPT",
        {
            "num_key_value_heads": ...,
            "intermediate_size": ...,
            "ffn_dim": 112,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
        },
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "persimmon": ("Persimmon", {"num_key_value_heads": ...}),
    "vaultgemma, window in the middle layer": (
        "VaultGemma",
        {
            **EVERY_OTHER,
            "head_dim": 24,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),  # fmt: skip
}
"""By name: architecture, and what its configuration has beside or instead of `SIZES`; `...` stands for nothing."""


def config_of(name: str, **more: Any) -> Any:
    """The configuration of a family; skips the test where this transformers has no such model."""
    architecture, changes = FAMILIES[name]
    if not hasattr(transformers, f"{architecture}Config"):
        pytest.skip(f"this transformers has no {architecture}")
    fields = {field: value for field, value in (SIZES | changes | more).items() if value is not ...}
    kind = getattr(transformers, f"{architecture}Config")
    names = getattr(kind, "attribute_map", {})
    return kind(**{names.get(field, field): value for field, value in fields.items()}, attn_implementation="eager")


def described(name: str = "olmo", **changes: Any) -> dict[str, Any]:
    """The config.json of a family, changed; `...` leaves a field out."""
    config = config_of(name)
    fields = {**config.to_dict(), "architectures": [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]}
    return {field: value for field, value in (fields | changes).items() if value is not ...}


def made(name: str, **more: Any) -> Any:
    """A model whose every parameter matters, computed by transformers' plainest attention."""
    config = config_of(name, **more)
    torch.manual_seed(11)
    model = getattr(transformers, f"{FAMILIES[name][0]}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            torch.nn.init.normal_(parameter, 0.0 if "bias" in parameter_name else 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.12)
    return model


def saved(model: Any, folder: Path) -> Path:
    """Save a model, and a tokenizer, which an engine wants even where it is given ids."""
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


async def generated(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    """The tokens that an engine generates greedily by transformers' module."""
    async with Engine(folder, **(SMALL | options)) as engine:
        assert engine.info.model_impl == "transformers", 'native code: take another model, or ask for "transformers"'
        return (await engine.generate(prompt, GREEDY)).choices[0].token_ids


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 96 tokens."""
    from tokenizers import Tokenizer, decoders, models

    alphabet = {chr(code): code - 33 for code in range(33, 33 + 94)}
    core = Tokenizer(models.BPE(alphabet, []))
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
