"""Tiny GGUF models of one layer, written by the gguf package; holds no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

__all__ = [
    "FFN",
    "HEADS",
    "HEAD_DIM",
    "HIDDEN",
    "KV_HEADS",
    "SHAPES",
    "UNWRITTEN_KINDS",
    "VOCAB",
    "encoded",
    "write_model",
]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 4, 2, 64, 512, 40
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (FFN, HIDDEN),
    "blk.0.ffn_up.weight": (FFN, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, FFN),
}
UNWRITTEN_KINDS = {
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}
"""Kinds of blocks that the package reads and does not write, with the places of their float16 constants in a block."""


def encoded(
    values: np.ndarray[Any, Any], kind: Kind, rng: np.random.Generator, most: float = 0.1
) -> np.ndarray[Any, Any]:
    """`values` in blocks of `kind`; for kinds that the package does not write, blocks of random bits.

    The constants of random blocks are at most `most`.
    """
    if kind not in UNWRITTEN_KINDS:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (values.shape[0], values.shape[1] // block, size), dtype=np.uint8)
    for at in UNWRITTEN_KINDS[kind]:
        halves = rng.uniform(-most, most, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., at : at + 2] = halves.view(np.uint8)
    return raw.reshape(values.shape[0], -1)


def write_model(
    path: Path,
    kind: Kind,
    arch: str = "llama",
    extra: dict[str, tuple[int, ...]] | None = None,
    kinds: dict[str, Kind] | None = None,
    **split: Any,
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a tiny model whose matrices are of `kind`, or of those that `kinds` has by name.

    Returns every tensor as the gguf package dequantises it. `split` is the package's `split_max_tensors` and what goes
    with it: parts are named after `path`.
    """
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, arch, **split)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "é"])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.token_type", [1, 2])
    expected = {}
    for name, shape in {**SHAPES, **(extra or {})}.items():
        values = rng.normal(size=shape).astype(np.float32)
        if name == "rope_freqs.weight":
            values = np.linspace(1, 8, shape[0], dtype=np.float32)
        raw_kind = (kinds or {}).get(name, kind) if len(shape) == 2 else Kind.F32
        raw = encoded(values, raw_kind, rng)
        expected[name] = gguf.quants.dequantize(raw, raw_kind)
        writer.add_tensor(name, raw, raw_dtype=raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
