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
from headrace.engine.model.checkpoint.readers import READERS
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.cpu.runner import cpu_ops
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.network.feeds.dense import GatedFeed
from headrace.engine.model.network.layers import FEEDS

DOCUMENT = "docs/extending.md"
NAMES = run_block(DOCUMENT, "\n".join(source for _, source in blocks(DOCUMENT)))
SPEC = NAMES["spec"]


def fused_tensors() -> dict[str, Tensor]:
    """Random tensors, with those of queries, keys and values one above the other in one."""
    torch.manual_seed(3)
    tensors = {SPEC.names.of(part): torch.randn(shape) for part, shape in all_parts(SPEC)}
    for layer in range(SPEC.num_layers):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blocks.{layer}.attn.qkv.{part}.{kind}") for part in "qkv"]
            tensors[f"blocks.{layer}.attn.qkv.{kind}"] = torch.cat(parts)
    return tensors


def load(folder: Path) -> DecoderWeights:
    readers = (NAMES["QkvReader"](), *READERS)
    return load_weights(folder, SPEC, dtype=torch.float32, device="cpu", readers=readers)


def test_each_part_comes_from_its_place_in_the_fused_tensor(tmp_path: Path) -> None:
    tensors = fused_tensors()
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


@pytest.mark.parametrize("elements", [1, 64, 1000, 1 << 20])
def test_pieces_of_any_size_join(tmp_path: Path, elements: int) -> None:
    tensors = fused_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as files:
        found = NAMES["QkvReader"]().find(files, "blocks.1.attn.qkv.k.weight")
        pieces = list(found.pieces(elements, lambda count: torch.empty(count, dtype=torch.uint8)))
    firsts = [first for first, _ in pieces]
    assert firsts == sorted(set(firsts)) and firsts[0] == 0
    whole = torch.cat([piece.dense(torch.float32) for _, piece in pieces])
    assert torch.equal(whole, tensors["blocks.1.attn.qkv.weight"][64:128])


def test_a_fused_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    tensors = fused_tensors()
    tensors["blocks.0.attn.qkv.weight"] = torch.ones(3 * 60, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelRejected, match=r"blocks\.0\.attn\.qkv\.q\.weight is \[60, 64\]"):
        load(tmp_path)
