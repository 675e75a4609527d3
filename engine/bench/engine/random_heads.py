"""A draft head of EAGLE-3 with random weights for a benchmark; never a trained one, so its drafts are never right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from headrace.engine.bench.opening import BenchmarkFailed
from headrace.engine.model.quantising.compressed import TensorSpec
from headrace.engine.model.quantising.shards import Shards, lay_out, nbytes
from headrace.engine.model.spec import Attention, DecoderSpec, DenseFeed

__all__ = ["write_head"]

_MOST_GUESSED: Final = 32_000
"""Tokens that the heads of EAGLE's authors can guess."""
_FEWEST_LAYERS: Final = 7
"""Layers of the smallest model whose early, middle and late layers, as EAGLE-3 counts them, rise."""


def write_head(folder: Path, target: DecoderSpec) -> None:
    """Write a head for `target`: a layer of the target's sizes, and an output head for its first 32,000 tokens.

    Raises:
        BenchmarkFailed: The target's layers keep no keys and values, as in EAGLE-3.
    """
    mixer, feed = target.layers[0].mixer, target.layers[0].feed
    if not isinstance(mixer, Attention):
        raise BenchmarkFailed(f"--drafter eagle3: {target.architecture} has no keys and values as this head keeps them")
    size, inner = target.hidden_size, feed.size if isinstance(feed, DenseFeed) else 4 * target.hidden_size
    count, guessed, layers = target.vocab_size, min(_MOST_GUESSED, target.vocab_size), target.num_layers
    taps = [2, layers // 2, layers - 3] if layers >= _FEWEST_LAYERS else sorted({0, layers // 2, layers})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": count,
        "draft_vocab_size": guessed,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "max_position_embeddings": target.max_context,
        "rms_norm_eps": target.norm_eps,
        "eagle_aux_hidden_state_layer_ids": taps,
    }
    queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    products = {
        "fc": (size, len(taps) * size),
        "midlayer.self_attn.q_proj": (queries, 2 * size),
        "midlayer.self_attn.k_proj": (keys, 2 * size),
        "midlayer.self_attn.v_proj": (keys, 2 * size),
        "midlayer.self_attn.o_proj": (size, queries),
        "midlayer.mlp.gate_proj": (inner, size),
        "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner),
        "lm_head": (guessed, size),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors: dict[str, TensorSpec] = {f"{name}.weight": (torch.bfloat16, shape) for name, shape in products.items()}
    tensors |= {f"{name}.weight": (torch.bfloat16, (size,)) for name in norms}
    if guessed < count:
        tensors["d2t"] = (torch.int64, (guessed,))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with Shards(folder, lay_out(tensors, sum(map(nbytes, tensors.values())))) as files:
        for name, (dtype, shape) in tensors.items():
            files.write_blocks(name, iter([_drawn(dtype, shape)]), wait=False)


def _drawn(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return random numbers for a matrix, ones for a norm, and zeros for a map, by which ids stay as they are."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).uniform_(-0.03, 0.03) if len(shape) > 1 else torch.ones(shape, dtype=dtype)
