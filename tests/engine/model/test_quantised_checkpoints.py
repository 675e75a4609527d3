"""Quantised safetensors: what is read from every tool's layout is what its specification says, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quantised_checkpoints import CASES, CONFIG, products, write_checkpoint
from quantised_layouts import ct_bytes
from safetensors.torch import load_file, save_file

from headrace.engine import Engine, ModelRejected, SamplingParams
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.ops.formats import Stacked, Stored

_QKV = " ".join(f"model.layers.1.self_attn.{part}_proj" for part in "qkv")
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def load(folder: Path, dtype: torch.dtype, *, keep_packed: bool) -> DecoderWeights:
    spec = from_hf(read_hf_config(folder))
    return load_weights(folder, spec, dtype=dtype, device="cpu", keep_packed=keep_packed)


def matrices(weights: DecoderWeights) -> dict[str, Stored]:
    """Fused parameters, by the layer and the modules that they are fused from."""
    found = {"lm_head": weights.head}
    for number in range(len(weights.layers)):
        layer = weights.layers[number]
        for inside, sublayer in (("self_attn", layer.mixer), ("mlp", layer.feed)):
            for name, matrix in sublayer.matrices.items():
                modules = [f"model.layers.{number}.{inside}.{part}_proj" for part in _FUSED.get(name, (name,))]
                found[" ".join(modules)] = matrix
    return found


def formats(weight: Stored) -> set[str]:
    if isinstance(weight.format, Stacked):
        return {format.name for format, _ in weight.format.pieces}
    return {weight.format.name}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_what_the_specification_says(name: str, tmp_path: Path) -> None:
    state = write_checkpoint(tmp_path, CASES[name])
    for dtype, keep_packed in ((torch.float32, True), (torch.bfloat16, False)):
        weights = load(tmp_path, dtype, keep_packed=keep_packed)
        kept, seen = set(), set()
        for modules, matrix in matrices(weights).items():
            names = modules.split()
            seen |= set(names)
            expected = torch.cat([torch.from_numpy(state[f"{module}.weight"]) for module in names])
            assert torch.equal(matrix.dense(dtype), expected.to(dtype)), modules
            if names != ["lm_head"] or "lm_head" in CASES[name].config:
                kept |= formats(matrix)
        assert seen == products().keys()
        assert kept == (CASES[name].formats if keep_packed else {"bfloat16"})


@pytest.mark.parametrize("name", CASES)
def test_rows_of_rotated_heads_change_places_in_their_format(name: str, tmp_path: Path) -> None:
    """Helium holds the pairs of rotated elements side by side, and devices half a head apart."""
    head_dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    changes = {"architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": head_dim}
    state = write_checkpoint(tmp_path, CASES[name], **changes)
    matrix = matrices(load(tmp_path, torch.float32, keep_packed=True))[_QKV]
    q, k, v = (torch.from_numpy(state[f"{module}.weight"]) for module in _QKV.split())
    halves = [each.view(-1, head_dim // 2, 2, each.shape[1]).transpose(1, 2).flatten(0, 2) for each in (q, k)]
    assert torch.equal(matrix.dense(torch.float32), torch.cat([*halves, v]))
    assert not torch.equal(torch.cat(halves), torch.cat((q, k)))
    assert formats(matrix) <= CASES[name].formats


def test_the_model_has_matrices_with_partial_blocks() -> None:
    assert CONFIG["hidden_size"] % 128 and CONFIG["intermediate_size"] % 128


def test_an_embedding_may_be_quantised_and_be_the_head(tmp_path: Path) -> None:
    config = {**CASES["compressed int8"].config}
    config["config_groups"] = {"group_0": {**config["config_groups"]["group_0"], "targets": ["Linear", "Embedding"]}}
    write_checkpoint(tmp_path, replace(CASES["compressed int8"], config=config), tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("lm_head")}
    del tensors["model.embed_tokens.weight"]
    parts, dense = ct_bytes()(np.random.default_rng(1), CONFIG["vocab_size"], CONFIG["hidden_size"])
    save_file(tensors | {f"model.embed_tokens.{name}": part for name, part in parts.items()}, path)
    weights = load(tmp_path, torch.float32, keep_packed=True)
    assert torch.equal(weights.embedding_VE, torch.from_numpy(dense))
    assert weights.head.parts["values"] is weights.embedding_VE


@pytest.mark.anyio
async def test_a_damaged_checkpoint_costs_another_engine_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "good", CASES["gptq"])
    write_checkpoint(tmp_path / "bad", CASES["awq"])
    tensors = load_file(tmp_path / "bad/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.scales"][2, 3] = torch.nan
    save_file(tensors, tmp_path / "bad/model.safetensors")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    async with Engine(tmp_path / "good", kv_memory="1MiB") as engine:
        expected = (await engine.generate([1, 2, 3], params)).choices[0].token_ids
        stream = engine.stream([1, 2, 3], params)
        found = [(await anext(stream)).id]
        with pytest.raises(ModelRejected, match=r"1.mlp.up_proj.scales is nan at \[2, 3\]"):
            async with Engine(tmp_path / "bad", kv_memory="1MiB"):
                pass
        assert [*found, *[token.id async for token in stream]] == expected


def test_a_bias_of_zeros_that_the_model_does_not_have_is_let_be(tmp_path: Path) -> None:
    """Early tools for GPTQ wrote one for every layer."""
    write_checkpoint(tmp_path, CASES["gptq"])
    path, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.o_proj.bias"
    tensors = load_file(path)
    save_file(tensors | {name: torch.zeros(192, dtype=torch.float16)}, path)
    load(tmp_path, torch.float32, keep_packed=True)
    save_file(tensors | {name: torch.ones(192, dtype=torch.float16)}, path)
    with pytest.raises(ModelRejected, match="o_proj.bias is left over"):
        load(tmp_path, torch.float32, keep_packed=True)
