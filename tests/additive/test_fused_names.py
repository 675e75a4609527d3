"""The family of docs/extending.md: names of its own, fused queries, keys and values, and biases of some products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from document_blocks import blocks, run_block
from safetensors.torch import save_file
from torch import Tensor

from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.plan import all_parts
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.network.feeds.dense import GatedFeed
from headrace.engine.model.network.layers import FEEDS

DOCUMENT = "docs/extending.md"
NAMES = run_block(DOCUMENT, "\n".join(source for _, source in blocks(DOCUMENT)))
SPEC = NAMES["spec"]


def fused_tensors() -> dict[str, Tensor]:
    """Random tensors, with those of queries, keys and values one above the other in one."""
    torch.manual_seed(3)
    return {SPEC.names.of(part): torch.randn(shape) for part, shape in all_parts(SPEC)}


def load(folder: Path) -> DecoderWeights:
    return load_weights(folder, SPEC, dtype=torch.float32, device="cpu")


def test_each_part_comes_from_its_place_in_the_fused_tensor(tmp_path: Path) -> None:
    tensors = fused_tensors()
    assert tensors["blocks.0.attn.qkv.weight"].shape == (3 * 64, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path)
    for layer in range(SPEC.num_layers):
        mixer, feed = weights.layers[layer].mixer, weights.layers[layer].feed
        assert torch.equal(mixer.matrices["qkv"].dense(torch.float32), tensors[f"blocks.{layer}.attn.qkv.weight"])
        assert torch.equal(mixer.vectors["qkv_bias"], tensors[f"blocks.{layer}.attn.qkv.bias"])
        assert torch.equal(feed.vectors["down_bias"], tensors[f"blocks.{layer}.mlp.down_proj.bias"])
        assert "gate_up_bias" not in feed.vectors
    ops = cpu_ops(SPEC, page_size=4, max_positions=8, dtype=torch.float32)
    Decoder(SPEC, weights, ops, feeds={**FEEDS, NAMES["DownBiased"]: GatedFeed})  # which packs it


def test_a_fused_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    tensors = fused_tensors()
    tensors["blocks.0.attn.qkv.weight"] = torch.ones(3 * 60, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelRejected, match=r"blocks\.0\.attn\.qkv\.weight is \[180, 64\]"):
        load(tmp_path)
