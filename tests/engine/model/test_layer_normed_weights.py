"""Checkpoints of models with layer norms: the names that transformers and the oldest files give, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from layer_normed_models import LAYER_NORMED
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config

Tensors = dict[str, Tensor]


def load(folder: Path) -> DecoderWeights:
    spec = from_hf(read_hf_config(folder))
    return load_weights(folder, spec, dtype=torch.float32, device="cpu")


def save_changed(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: each.clone() for name, each in tensors.items()}, folder / "model.safetensors")


def same(one: DecoderWeights, other: DecoderWeights) -> bool:
    pairs = [(one.embedding_VE, other.embedding_VE), *zip(one.top_tensors, other.top_tensors, strict=True)]
    for number in range(len(one.layers)):
        for half in ("mixer", "feed"):
            first, second = (getattr(each.layers[number], half) for each in (one, other))
            pairs += [(first.vectors[name], second.vectors[name]) for name in first.vectors]
            pairs += [(first.matrices[name].dense(torch.float32), second.matrices[name].dense(torch.float32))
                      for name in first.matrices]  # fmt: skip
    return all(torch.equal(*pair) for pair in pairs)


BUFFERS: dict[str, Tensors] = {
    "gpt2": {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.1.attn.masked_bias": torch.tensor(-1e4)},
    "gpt-neox": {
        "layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "layers.0.attention.masked_bias": torch.tensor(-1e9),
        "layers.1.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "layers.1.attention.rotary_emb.inv_freq": torch.ones(2),
    },
    "falcon, new architecture": {"h.0.self_attention.rotary_emb.inv_freq": torch.ones(8)},
    "stablelm": {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
}
PREFIXES = {"gpt2": "transformer.", "gpt-neox": "gpt_neox.", "falcon, new architecture": "transformer."}


@pytest.mark.parametrize("family", BUFFERS)
def test_masks_and_tables_of_old_checkpoints_are_left_alone(family: str, tmp_path: Path) -> None:
    LAYER_NORMED[family]().save_pretrained(tmp_path)
    before = load(tmp_path)
    prefix = PREFIXES.get(family, "model.")
    save_changed(tmp_path, lambda tensors: tensors | {prefix + name: each for name, each in BUFFERS[family].items()})
    assert same(before, load(tmp_path))


def test_gpt2_without_the_prefix_as_on_the_hub(tmp_path: Path) -> None:
    LAYER_NORMED["gpt2"]().save_pretrained(tmp_path)
    before = load(tmp_path)
    save_changed(
        tmp_path,
        lambda tensors: BUFFERS["gpt2"] | {name.removeprefix("transformer."): each for name, each in tensors.items()},
    )
    assert "wte.weight" in load_file(tmp_path / "model.safetensors") and same(before, load(tmp_path))


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon, new architecture", "gpt-neox", "phi", "cohere"])
def test_a_model_without_its_head(family: str, tmp_path: Path) -> None:
    """Saved by transformers' class without the head, whose names lack the prefix."""
    model = LAYER_NORMED[family]()
    model.base_model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    assert not spec.has_head and not any("lm_head" in name for name in load_file(tmp_path / "model.safetensors"))
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(load(tmp_path).embedding_VE, load(tmp_path / "whole").embedding_VE)


ERRORS = {
    "gpt2": "transformer.h.1.attn.c_attn.weight",
    "gpt2 with other options": "transformer.wpe.weight",
    "opt": "model.decoder.layers.0.final_layer_norm.bias",
    "falcon, new architecture": "transformer.h.2.ln_mlp.weight",
    "falcon, one key for all queries": "transformer.h.2.self_attention.query_key_value.weight",
    "gpt-neox": "gpt_neox.layers.0.attention.query_key_value.bias",
    "phi": "lm_head.bias",
    "stablelm with norms of heads": "model.layers.1.self_attn.k_layernorm.norms.1.weight",
    "starcoder2, window": "model.layers.0.mlp.c_fc.bias",
    "cohere": "model.layers.0.input_layernorm.weight",
}


@pytest.mark.parametrize("family", ERRORS)
def test_what_is_missing_left_over_or_of_another_shape_is_named(family: str, tmp_path: Path) -> None:
    LAYER_NORMED[family]().save_pretrained(tmp_path)
    whole, name = load_file(tmp_path / "model.safetensors"), ERRORS[family]
    cases: dict[str, tuple[Tensors, str]] = {
        "missing": ({other: each for other, each in whole.items() if other != name}, name),
        "left over": ({**whole, f"{name}.more": torch.ones(2)}, f"{name}.more"),
        "wanted: the shape": ({**whole, name: torch.ones(3, *whole[name].shape[1:])}, name),
    }
    for word, (tensors, field) in cases.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelRejected, match=word) as caught:
            load(tmp_path)
        assert caught.value.field == field


@pytest.mark.parametrize("heads", [1, 3])
def test_norms_of_another_number_of_heads_are_named(heads: int, tmp_path: Path) -> None:
    LAYER_NORMED["cohere, normed heads"]().save_pretrained(tmp_path)
    name = "model.layers.1.self_attn.k_norm.weight"
    assert load_file(tmp_path / "model.safetensors")[name].shape == (2, 16)
    save_changed(tmp_path, lambda tensors: {**tensors, name: torch.ones(heads, 16)})
    with pytest.raises(ModelRejected, match=rf"is \[{heads}, 16\]; wanted: the shape \[(2|heads)") as caught:
        load(tmp_path)
    assert caught.value.field == name


def test_a_transposed_matrix_is_told_as_the_file_has_it(tmp_path: Path) -> None:
    LAYER_NORMED["gpt2"]().save_pretrained(tmp_path)
    name = "transformer.h.0.mlp.c_fc.weight"
    save_changed(tmp_path, lambda tensors: {**tensors, name: torch.ones(112, 64)})
    with pytest.raises(ModelRejected, match=r"is \[112, 64\]; wanted: the shape \[64, 112\]"):
        load(tmp_path)
