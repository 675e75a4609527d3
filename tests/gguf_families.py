"""Writes models of transformers as the GGUF files that llama.cpp's converter makes of them; holds no tests.

What the converter does to names, values and metadata is stated here from its source (conversion/*.py of llama.cpp, as
of 2026), not from the code under test. Names come from the gguf package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import encoded

__all__ = [
    "ARCHITECTURES",
    "Edit",
    "Metadata",
    "Tensors",
    "gguf_of",
    "half_a_head_apart",
    "random_model",
    "side_by_side",
    "write_gguf",
]

Metadata: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, np.ndarray[Any, Any]]
Edit: TypeAlias = Callable[[Metadata, Tensors], object]
"""What a test changes in a file before it is written."""

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": [],
    "pad_token_id": None,
}
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "phi3": "phi3",
    "glm": "chatglm",
    "glm4": "glm4",
    "granite": "granite",
    "granitemoehybrid": "granite",
    "smollm3": "smollm3",
    "arcee": "arcee",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
}
"""`model_type` to `general.architecture`."""
GRANITES = ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid")
LIKE_LLAMA = ("llama", "mistral", "mixtral", *GRANITES, "smollm3", "arcee")
"""Those whose queries and keys the converter puts into pairs side by side."""
GEMMAS = ("gemma", "gemma2", "gemma3_text")
OWN_HEAD_SIZE = ("phi3", "glm", *GRANITES)
"""Those whose converters do not write the size of a head."""


def random_model(model_type: str, **changes: Any) -> Any:
    """A tiny model whose every parameter matters."""
    import transformers

    torch.manual_seed(11)
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        is_factor = "norm" in name or "scale" in name
        mean, spread = (1.0, 0.2) if is_factor else (0.0, 0.3 if "bias" in name else 0.12)
        torch.nn.init.normal_(parameter, mean, spread)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            torch.nn.init.normal_(buffer, 0.0, 0.3)
        elif "layer_scalar" in name:
            torch.nn.init.normal_(buffer, 1.0, 0.2)
    return model


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def side_by_side(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of heads, with the two elements of each pair side by side in place of half a head apart."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def half_a_head_apart(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The inverse of `side_by_side`."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def heads_of(config: Any, name: str) -> int | None:
    """The number of heads whose rows the converter moves within a tensor of this name; None if it moves none."""
    if config.model_type not in LIKE_LLAMA:
        return None
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else None


def gguf_of(model: Any) -> tuple[Metadata, Tensors, dict[str, str]]:
    """A model's metadata and tensors in a GGUF file, and the name in transformers of each tensor that it has there."""
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's layers differ
    architecture = ARCHITECTURES[config.model_type]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors, origins = {}, {}
    state = model.state_dict()
    for name, parameter in state.items() if config.model_type == "gemma4_text" else apart(state):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy().copy()
        if config.model_type in GEMMAS and name.endswith("norm.weight"):
            values += 1
        heads = heads_of(config, name)
        if heads is not None:
            values = side_by_side(values, heads)
        stored = scale_of_gemma4(name) or names.get_name(with_ending(name), try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        tensors[stored], origins[stored] = values, name
    metadata, extra = rope_metadata(config)
    metadata = {**sizes(config), **metadata, **special(config)}
    prefixed = {f"{architecture}.{key}": value for key, value in metadata.items()}
    return {"general.architecture": architecture, **prefixed}, {**extra, **tensors}, origins


def scale_of_gemma4(name: str) -> str | None:
    """The name of a router's scale or of those of experts; None for other tensors."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", name)
    roles = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}
    return match and f"blk.{match[1]}.{roles[match[2]]}.scale"


def with_ending(name: str) -> str:
    """A name with the ending that the converter adds to Gemma 4's stacks of experts and factors of layers."""
    return name + ".weight" * name.endswith(("layer_scalar", ".experts.gate_up_proj", ".experts.down_proj"))


def apart(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by the names of published checkpoints, where gates and ups of experts are two stacks."""
    for name, parameter in state.items():
        name = name.replace(".gate.moe_statics.", ".moe_statics.").replace("_correction_bias", "_correction.bias")
        name = name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")
        name = name.replace("block_sparse_moe.experts.", "mlp.experts.")
        if not has_experts(state):
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        if ".mlp.experts." in name and ".mlp.router" not in name and "sinks" not in name and is_turned(state):
            yield from turned(name, parameter)
        elif name.endswith("sinks"):
            yield name + ".weight", parameter
        elif name.endswith("shared_mlp.input_linear.weight"):
            feed = "mlp.shared_expert" if has_experts(state) else "mlp"
            for role, half in zip(("gate", "up"), parameter.chunk(2, dim=0), strict=True):
                yield name.replace("shared_mlp.input_linear", f"{feed}.{role}_proj"), half
        elif name.endswith("experts.gate_up_proj"):
            for role, half in zip(("gate", "up"), parameter.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up", role) + ".weight", half
        else:
            yield name + ".weight" * name.endswith("experts.down_proj"), parameter


def has_experts(state: dict[str, torch.Tensor]) -> bool:
    """Whether a router chooses experts, and does not leave all to the feed that they share."""
    return any(".experts." in name for name in state)


def is_turned(state: dict[str, torch.Tensor]) -> bool:
    """Whether the experts are those of gpt-oss: stored [in, out], gates and ups in turn."""
    return any(name.endswith("sinks") for name in state)


def turned(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The converter's names and values of gpt-oss's experts and their biases."""
    is_bias = name.endswith("_bias")
    plain, kind = name.removesuffix("_bias"), ".bias" if is_bias else ".weight"
    values = parameter if is_bias else parameter.transpose(-1, -2)
    if plain.endswith("gate_up_proj"):
        for role, first in (("gate", 0), ("up", 1)):
            yield plain.replace("gate_up", role) + kind, values[:, first::2].contiguous()
    else:
        yield plain + kind, values.contiguous()


def sizes(config: Any) -> Metadata:
    """What every converter writes."""
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if config.model_type not in OWN_HEAD_SIZE:
        found |= {"attention.key_length": head_dim(config), "attention.value_length": head_dim(config)}
    if config.model_type in ("qwen3_moe", "olmoe", "mixtral"):
        count = config.num_local_experts if config.model_type == "mixtral" else config.num_experts
        found |= {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    if config.model_type in ("qwen3_moe", "qwen2_moe", "ernie4_5_moe", "glm4_moe"):
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    found |= of_experts(config)
    if config.model_type in LIKE_LLAMA:
        found |= {"rope.dimension_count": head_dim(config), "vocab_size": config.vocab_size}
    return found


def of_experts(config: Any) -> Metadata:
    """What the converters of some families with experts write of them."""
    kind = config.model_type
    if kind in ("granitemoe", "granitemoeshared"):
        shared = getattr(config, "shared_intermediate_size", 0)
        found = {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
        return found | ({"expert_shared_feed_forward_length": shared} if shared else {})
    if kind == "gpt_oss":
        return {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
        }
    if kind == "qwen2_moe":
        return {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    if kind == "ernie4_5_moe":
        return {
            "expert_count": config.moe_num_experts,
            "expert_used_count": config.moe_k,
            "interleave_moe_layer_step": config.moe_layer_interval,
            "leading_dense_block_count": config.moe_layer_start_index,
            "expert_shared_count": config.moe_num_shared_experts,
            "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
        }
    if kind == "glm4_moe":
        return {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_shared_count": config.n_shared_experts,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_gating_func": 2,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_weights_norm": config.norm_topk_prob,
        }
    return {}


def rope_metadata(config: Any) -> tuple[Metadata, Tensors]:
    """Keys and tensors of the rope; Gemma's first two converters write none."""
    if config.model_type in ("gemma", "gemma2"):
        return {}, {}
    rope = dict(config.rope_parameters)
    sliding = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    kind, theta = rope["rope_type"], rope["rope_theta"]
    found: Metadata = {"rope.freq_base": float(theta)}
    if sliding is not None:
        found["rope.freq_base_swa"] = float(sliding["rope_theta"])
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for field, key in (("attention_factor", "attn_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            if rope.get(field) is not None:
                found[f"rope.scaling.yarn_{key}"] = float(rope[field])
    if kind == "dynamic":
        size = head_dim(config)
        base = theta * rope["alpha"] ** (size / (size - 2))
        found |= {"rope.freq_base": base, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}
        found |= {"rope.scaling.original_context_length": 262144, "context_length": 262144}
    part = rope.get("partial_rotary_factor", 1.0)
    if config.model_type in ("phi3", "glm", "glm4", "glm4_moe"):
        found["rope.dimension_count"] = int(head_dim(config) * part)
    if config.model_type == "phi3":
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        found["rope.scaling.original_context_length"] = original
        if kind == "longrope":
            scale = config.max_position_embeddings / original
            found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
            lists = {"long": rope["long_factor"], "short": rope["short_factor"]}
            return found, {f"rope_factors_{key}.weight": np.float32(each) for key, each in lists.items()}
    return found, divisors(config, rope)


def divisors(config: Any, rope: dict[str, Any]) -> Tensors:
    """The tensor of divisors of frequencies that some kinds of rope have."""
    if rope["rope_type"] == "llama3":
        return {"rope_freqs.weight": llama3_divisors(rope, head_dim(config))}
    if rope["rope_type"] == "proportional":
        size = config.per_layer_config["full_attention"].head_dim
        return {"rope_freqs.weight": proportional_divisors(rope["partial_rotary_factor"], size)}
    return {}


def llama3_divisors(rope: dict[str, Any], size: int) -> np.ndarray[Any, Any]:
    found = []
    for pair in range(size // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / size)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, dtype=np.float32)


def proportional_divisors(part: float, size: int) -> np.ndarray[Any, Any]:
    """Divisors by which the pairs that are not rotated have hardly any frequency."""
    pairs, rotated = size // 2, int(size * part / 2)
    return np.array([1.0] * rotated + [1e30] * (pairs - rotated), dtype=np.float32)


def special(config: Any) -> Metadata:
    """What the converter of one family writes."""
    kind, window = config.model_type, getattr(config, "sliding_window", None)
    windowed = [each == "sliding_attention" for each in getattr(config, "layer_types", None) or []]
    if kind in GRANITES:
        return of_hybrids(config) | {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
        }
    if kind == "gemma2":
        return {
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "attention.sliding_window": window,
        }
    if kind == "gemma3_text":
        return {"attention.sliding_window": window} if any(windowed) else {}
    if kind == "gemma4_text":
        return gemma4(config, windowed)
    if kind == "phi3":
        return {"attention.sliding_window": window or 0}
    if kind == "mistral":
        return {"attention.sliding_window": window} if window else {}
    if kind == "gpt_oss":
        return {"attention.sliding_window": window}
    if kind in ("olmo3", "exaone4") and window:
        return {"attention.sliding_window": window, "attention.sliding_window_pattern": windowed}
    return {}


def of_hybrids(config: Any) -> Metadata:
    """What is written of Granite 4 as of its hybrid models, though all layers attend and there are no experts."""
    if config.model_type != "granitemoehybrid":
        return {}
    return {
        "attention.head_count_kv": [config.num_key_value_heads] * config.num_hidden_layers,
        "expert_count": 0,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.scaling.finetuned": True,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def gemma4(config: Any, windowed: list[bool]) -> Metadata:
    """Keys of layers with a window end in `_swa`; what differs from layer to layer is a list."""
    full, shared = config.per_layer_config["full_attention"], config.num_kv_shared_layers
    found = {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
    }
    for suffix, size in (("", full.head_dim), ("_swa", config.head_dim)):
        found |= {f"attention.{each}_length{suffix}": size for each in ("key", "value")}
        found[f"rope.dimension_count{suffix}"] = size
    if config.final_logit_softcapping:
        found["final_logit_softcapping"] = config.final_logit_softcapping
    if full.num_key_value_heads != config.num_key_value_heads:
        heads = {True: config.num_key_value_heads, False: full.num_key_value_heads}
        found["attention.head_count_kv"] = [heads[each] for each in windowed]
    if config.use_double_wide_mlp:
        own, feed = config.num_hidden_layers - shared, config.intermediate_size
        found["feed_forward_length"] = [feed] * own + [2 * feed] * shared
    if config.enable_moe_block:
        found |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    return found


def write_gguf(
    model: Any, path: Path, edit: Edit | None = None, kind: Kind = Kind.F32, kinds: dict[str, Kind] | None = None
) -> dict[str, torch.Tensor]:
    """Write a model, with its matrices in `kind`, or in those that `kinds` has by the end of their names.

    Returns the parameters of transformers' model that the file then stands for.
    """
    metadata, tensors, origins = gguf_of(model)
    if edit is not None:
        edit(metadata, tensors)
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            add(writer, key, value)
    found = {}
    for name, values in tensors.items():
        its_kind = next((each for end, each in (kinds or {}).items() if name.endswith(end)), kind)
        its_kind = its_kind if values.ndim > 1 else Kind.F32
        raw = encoded(values.reshape(-1, values.shape[-1]), its_kind, rng, most=2e-4)
        raw = raw.reshape(*values.shape[:-1], -1)
        writer.add_tensor(name, raw, raw_dtype=its_kind)
        if (origin := origins.get(name)) is not None:
            back = gguf.quants.dequantize(raw, its_kind)
            heads = heads_of(model.config, origin)
            back = back if heads is None else half_a_head_apart(back, heads)
            is_norm = model.config.model_type in GEMMAS and origin.endswith("norm.weight")
            found[origin] = torch.from_numpy(np.array(back - 1 if is_norm else back))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)
