"""Tiny checkpoints with random weights, of head sizes that GPUs serve: every family, and three made for a purpose.

Activations are of order one and attention matters, so that a wrong key or value changes the next token. Weights are
saved in bfloat16, so that every engine and reference starts from the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
import transformers
from quantised_layouts import mxfp4
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor

from headrace.engine.tokens.gguf import BYTE_OF_CHAR

__all__ = [
    "CONTEXT",
    "EXACT",
    "FAMILIES",
    "MAKERS",
    "POISON",
    "SCALED",
    "VOCABULARY",
    "exact_logits",
    "kv_bytes",
    "kv_heads",
]

VOCABULARY = 512
CONTEXT = 512
WINDOW = 37  # shorter than most prompts, and no multiple of a page
PAGE = 16
END = 256
POISON = 7
"""In the poisoned checkpoints the token that makes logits, or keys and values, overflow."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GAINS = {
    "embed_out": 2.5, "mlp.gate.weight": 8.0, "mlp.router.weight": 8.0, "block_sparse_moe.router": 8.0, "sinks": 4.0,
    "embed": 0.5, "head": 2.5, "qkv_proj": 1.2, "v_proj": 2.0, "o_proj": 2.0, "q_proj": 1.2, "k_proj": 1.2,
    "wte": 0.5, "wpe": 0.5, "out_proj": 2.0, "c_attn": 1.4, "query_key_value": 1.4, "c_proj": 1.5, "dense": 1.5,
    "mlp.router": 8.0,  # which chooses the experts of Phi-3.5-MoE one by one: near ties would move much
}  # fmt: skip
"""Spread of an output for inputs of order one. More for queries and keys would make the models chaotic: small errors
would grow from layer to layer, and with them the margin that the judge has to allow. A small embedding keeps a tied
head from repeating the latest token for ever. The scores of experts lie far apart, so that the last of
those that are chosen weigh little: rounding may choose others."""
GAINS_OF = {
    "GptOss": {"experts.down_proj": 0.4, "q_proj": 0.9, "k_proj": 0.9},
    "Gemma4": {"router.proj": 16.0},
}
"""Gains of one architecture alone. The activation of gpt-oss's experts makes larger numbers than others do, and its
rotations have a magnitude above 1. Gemma 4 divides what its router reads by the root of its width."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 0.5,  # by experts that rounding chooses instead of others, little changes
}
"""Sizes of models with latent attention, whose heads are of other sizes than their vectors in the cache."""
GEMMA4: dict[str, Any] = {
    "head_dim": 256,
    "global_head_dim": 512,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 0,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
"""Sizes of models whose layers with a window and without have heads of different sizes, and in small models share keys
and values."""
GRANITE_FACTORS = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
WINDOWED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 1, "head_dim": 128}),
    "smollm2": (
        "Llama",
        {"tie_word_embeddings": True, "hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "mistral": (
        "Mistral",
        {
            "sliding_window": WINDOW,
            "head_dim": 128,
            "intermediate_size": 392,  # whose gates and ups fill no tile of a product
        },
    ),
    "qwen2": ("Qwen2", {"num_key_value_heads": 4, "vocab_size": 500}),
    "qwen2.5": (
        "Qwen2",
        {
            "hidden_size": 448,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen2 windowed": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
            "intermediate_size": 380,  # whose gates and ups do not come in pieces of 16 bytes
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {}),
    "phi-4-mini": (
        "Phi3",
        {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "attention_factor": 1.1,
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * pair for pair in range(24)],
                "long_factor": [1.0 + 0.1 * pair for pair in range(24)],  # the same, whatever a prompt's length
            },
        },
    ),
    "glm": ("Glm", {"head_dim": 128, "eos_token_id": []}),
    "glm4": ("Glm4", {"head_dim": 64, "eos_token_id": []}),
    "ernie 4.5": ("Ernie4_5", {"head_dim": 128, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,  # so that the queries of most prompts grow
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "granite": (
        "Granite",
        {**GRANITE_FACTORS, "head_dim": 64},
    ),
    "granite 4": (
        "GraniteMoeHybrid",
        {
            **GRANITE_FACTORS,
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 384,
            "position_embedding_type": "rope",
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
        },
    ),
    "gemma": ("Gemma", {"head_dim": 256}),  # a tied head would repeat its large embeddings
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 256,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 300,
        },
    ),
    "exaone4": (
        "Exaone4",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "starcoder2": ("Starcoder2", {"norm_epsilon": 1e-5}),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 256,
            "n_inner": 384,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": CONTEXT,
            "tie_word_embeddings": True,
        },
    ),
    "opt": ("OPT", {"ffn_dim": 384}),
    "falcon": ("Falcon", {"ffn_hidden_size": 384, "tie_word_embeddings": True}),
    "falcon 40b": (
        "Falcon",
        {"ffn_hidden_size": 384, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "command r+": ("Cohere", {"use_qk_norm": True, "logit_scale": 1.0, "tie_word_embeddings": True}),
    "cohere2": (
        "Cohere2",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "logit_scale": 0.75,
        },
    ),
    "gpt neox": (
        "GPTNeoX",
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    ),
    "phi": (
        "Phi",
        {"intermediate_size": 1536, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "jais 2": ("Jais2", {}),
    "arcee": (
        "Arcee",
        {
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "stablelm": (
        "StableLm",
        {
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "intermediate_size": 1536,  # smaller feeds leave it repeating one token
        },
    ),
    "qwen3 experts": (
        "Qwen3Moe",
        {
            "head_dim": 128,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "moe_intermediate_size": 88,  # whose gates and ups fill no tile of a product
        },
    ),
    "qwen2 experts": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "phi experts": (
        "Phimoe",
        {
            "num_local_experts": 2,  # both always chosen: with more, a near tie of the second and third moves much
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 256,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 200,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4": ("Gemma4", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 experts": (
        "Gemma4",
        GEMMA4
        | {
            "head_dim": 64,
            "global_head_dim": 128,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,  # all always chosen: with more, a near tie moves much
            "top_k_experts": 4,
            "moe_intermediate_size": 88,
        },
    ),
    "gemma4 small": (
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 64,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 64,
            "num_attention_heads": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "truncate": False,
            },
        },
    ),
    "deepseek v2": (
        "DeepseekV2",
        LATENT
        | {
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "topk_group": 3,
            "routed_scaling_factor": 0.3,
            "rope_parameters": YARN,
        },
    ),
    "deepseek v3": (
        "DeepseekV3",
        LATENT
        | {"num_attention_heads": 20, "num_key_value_heads": 20, "attention_bias": True, "rope_parameters": YARN},
    ),
    "glm 4.7 flash": (
        "Glm4MoeLite",
        {**LATENT, "kv_lora_rank": 96, "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_interleave": False},
    ),
    "ministral": ("Ministral", {"head_dim": 64, **WINDOWED}),
    "olmo2": ("Olmo2", {}),
    "seed-oss": ("SeedOss", {"head_dim": 64, "attention_out_bias": True}),
    "helium": ("Helium", {"head_dim": 64}),
    "cwm": ("Cwm", {"head_dim": 64, **WINDOWED, "bos_token_id": END, "eos_token_id": [], "rope_parameters": LLAMA3}),
    "gemma4 unified": ("Gemma4Unified", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "olmoe experts": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 4}),
    "granite experts": ("GraniteMoe", {**GRANITE_FACTORS, "num_local_experts": 8, "num_experts_per_tok": 4}),
    "granite shared experts": (
        "GraniteMoeShared",
        {**GRANITE_FACTORS, "num_local_experts": 8, "num_experts_per_tok": 4, "shared_intermediate_size": 128},
    ),
    "ernie experts": ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 4, "moe_intermediate_size": 64}),
    "glm 4.5 experts": (
        "Glm4Moe",
        {
            "head_dim": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 0.5,
        },
    ),
    "solar experts": (
        "SolarOpen",
        {
            "head_dim": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 0.5,
        },
    ),
    "hyperclovax": ("HyperCLOVAX", {}),  # without native code, as is the next
    "olmo": ("Olmo", {"clip_qkv": 4.0}),
}
CLASSES = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "Gemma4Unified": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"),
}
"""Names of a configuration and a model that do not follow from the architecture's."""
GEMMA4_TYPES = ("gemma4_text", "gemma4_unified_text")


def kv_bytes(folder: Path, pages: int) -> int:
    """Bytes of so many pages of 16 tokens in bfloat16."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type in GEMMA4_TYPES:
        return pages * PAGE * sum(map(_gemma4_elements, _storing(config))) * 2
    if (latent := getattr(config, "kv_lora_rank", None)) is not None:
        return pages * PAGE * config.num_hidden_layers * (latent + config.qk_rope_head_dim) * 2
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return pages * PAGE * config.num_hidden_layers * 2 * kv_heads(config) * head_dim * 2


def _storing(config: Any) -> list[Any]:
    """The attentions of a Gemma 4 that store keys and values."""
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return [layer.self_attn for layer in model.model.layers[:own]]


def _gemma4_elements(attention: Any) -> int:
    return 2 * int(attention.k_proj.out_features)


def kv_heads(config: Any) -> int:
    """Number of key heads, by whatever name a configuration has for it, if any."""
    if config.model_type == "falcon":
        return int(config.num_kv_heads) if config.new_decoder_architecture else 1
    has_as_many = config.model_type in ("gpt2", "opt", "gpt_neox")
    if config.model_type in GEMMA4_TYPES:  # of layers with a window; those without may have others
        return int(config.to_dict()["num_key_value_heads"])
    return int(config.num_attention_heads if has_as_many else config.num_key_value_heads)


def build(architecture: str, changes: dict[str, Any]) -> Any:
    """A model of transformers whose every parameter matters."""
    torch.manual_seed(11)
    kind, of_model = CLASSES.get(architecture, (architecture + "Config", architecture + "ForCausalLM"))
    config = tiny_models.configured(getattr(transformers, kind), SIZES, **changes)
    model = getattr(transformers, of_model)(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("per_expert_scale"):
            torch.nn.init.uniform_(parameter, 0.1, 2.0)
        elif ("norm" in name or "ln_" in name or name.endswith("scale")) and "bias" not in name:
            is_last = name in ("model.norm.weight", "transformer.ln_f.weight", "model.decoder.final_layer_norm.weight")
            scale = 5.0 if is_last and config.tie_word_embeddings else 1.0
            if architecture.startswith("Gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                scale = 1.1 * len(parameter) ** -0.25  # scores have no other factor
            left_out = 1.0 if architecture.startswith("Gemma") and not architecture.startswith("Gemma4") else 0.0
            torch.nn.init.normal_(parameter, scale - left_out, 0.2 * scale)
        elif "bias" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.05 if "v_proj" in name else 0.2)
        else:
            gains = (*GAINS_OF.get(architecture, {}).items(), *GAINS.items())
            gain = next((gain for part, gain in gains if part in name), 1.0)
            is_turned = (architecture == "GPT2" and ".h." in name) or (architecture == "GptOss" and ".experts." in name)
            inputs = parameter.shape[-2 if is_turned else -1]  # which are stored [in, out]
            torch.nn.init.normal_(parameter, 0.0, gain / math.sqrt(inputs))
            if architecture.startswith("Gemma4") and name.endswith(("k_proj.weight", "v_proj.weight")):
                parameter.data[: len(parameter) // 2].mul_(3.0)  # so that norms of heads count
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "correction_bias" in name:  # further apart than scores are, so that rounding chooses no other experts
            tensor.data.copy_(1.25 * 2.0 ** torch.randperm(tensor.numel()))
        elif name.endswith("layer_scalar"):
            torch.nn.init.uniform_(tensor, 0.7, 1.2)
    return model


def save(model: Any, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny_models.write_tokenizer(folder)


def make_family(name: str, folder: Path) -> None:
    save(build(*FAMILIES[name]), folder)


# -- logits that no order of addition can change --------------------------------------------------------------------

EXACT = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


def _exact_parts() -> tuple[Tensor, Tensor]:
    """Embedding of +1 and -1, head of multiples of 1/8 up to 1/4: sums are multiples of 1/8 up to 32."""
    generator = torch.Generator().manual_seed(3)
    shape = (VOCABULARY, EXACT["hidden_size"])
    embedding = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
    head = torch.randint(-2, 3, shape, generator=generator) / 8.0
    return embedding, head


def make_exact(folder: Path, **config: Any) -> None:
    """Blocks add nothing and norms are one, so logits are `head @ embedding[token]`: exact in bfloat16 in any order."""
    model = build("Llama", EXACT | config)
    embedding, head = _exact_parts()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
    save(model, folder)


def make_speaking(folder: Path) -> None:
    """The exact one with a token for each byte and an end, so that it can be held to any format."""
    make_exact(folder, eos_token_id=END, max_position_embeddings=2048)
    core = Tokenizer(models.BPE(dict(BYTE_OF_CHAR), []))
    core.add_special_tokens([AddedToken("<end>", special=True)])
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))


def exact_logits() -> Tensor:
    """float32 [token, V]: the logits after each token of the exact checkpoint."""
    embedding, head = _exact_parts()
    return embedding @ head.T


# -- scales of an 8-bit cache ---------------------------------------------------------------------------------------

SCALED = "llama 3"


def make_scaled(folder: Path) -> None:
    """The same model as `SCALED`, but for keys and values so large that 8 bits hold them by their scales alone.

    Queries and outputs make up for them, by powers of two that differ from layer to layer. Names are those of one tool
    and of another.
    """
    model = build(*FAMILIES[SCALED])
    scales: dict[str, Tensor] = {}
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            attention, (keys, values) = layer.self_attn, (2.0 ** (7 + index), 2.0 ** (10 - index))
            attention.k_proj.weight.mul_(keys)
            attention.q_proj.weight.div_(keys)
            attention.v_proj.weight.mul_(values)
            attention.o_proj.weight.div_(values)
            between = ("", "") if index % 2 else ("k_proj.", "v_proj.")
            prefix = f"model.layers.{index}.self_attn."
            scales[f"{prefix}{between[0]}k_scale"] = torch.tensor(keys)
            scales[f"{prefix}{between[1]}v_scale"] = torch.tensor([values], dtype=torch.bfloat16)
    save(model, folder)
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | scales, weights, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config))


# -- experts in 4-bit floats ---------------------------------------------------------------------------------------


def make_mxfp4(folder: Path, *, dense: bool) -> None:
    """The gpt-oss of `FAMILIES` with experts of 4-bit floats as OpenAI stores them; `dense`: their numbers instead."""
    model = build(*FAMILIES["gpt-oss"])
    write, drawn = mxfp4("blocks", "scales", blocked=True), np.random.default_rng(5)
    save(model, folder)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, ins, outs = tensors.pop(name).shape
        made = [write(drawn, outs, ins) for _ in range(experts)]
        halvings = 3 if "down" in name else 1  # to the sizes that other checkpoints have
        if dense:
            numbers = torch.from_numpy(np.stack([values.T for _, values in made])) / 2**halvings
            tensors[name] = numbers.bfloat16().contiguous()
            continue
        for part in ("blocks", "scales"):
            stack = torch.stack([parts[part] for parts, _ in made])
            tensors[f"{name}_{part}"] = stack - halvings if part == "scales" else stack
    save_file(tensors, weights, {"format": "pt"})
    if not dense:
        config = json.loads((folder / "config.json").read_text())
        left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
        (folder / "config.json").write_text(json.dumps(config))


# -- one token that overflows ---------------------------------------------------------------------------------------


def make_poisoned(where: str, folder: Path) -> None:
    """All weights are finite, but after `POISON` the logits are not, or the values of its position are not.

    Hidden element 0 is nonzero at that token alone: no other embedding has it and no block writes it.
    """
    model = build("Llama", {})
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[POISON, 0] = 8.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[POISON] = 0.0  # never the best, so never generated
        model.model.norm.weight[0] = 16.0
        for layer in model.model.layers:
            layer.input_layernorm.weight[0] = 16.0
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        if where == "logits":
            model.lm_head.weight[3, 0] = 3e38
        else:
            model.model.layers[1].self_attn.v_proj.weight[:8, 0] = 3e38
    save(model, folder)


MAKERS: dict[str, Callable[[Path], None]] = {
    **{name: partial(make_family, name) for name in FAMILIES},
    "exact": make_exact,
    "gpt-oss mxfp4": partial(make_mxfp4, dense=False),
    "gpt-oss dequantised": partial(make_mxfp4, dense=True),
    "scaled": make_scaled,
    "speaking": make_speaking,
    "poisoned logits": partial(make_poisoned, "logits"),
    "poisoned values": partial(make_poisoned, "values"),
}
