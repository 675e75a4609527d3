"""Quantised copies of models with layer norms or feeds without a gate: joined heads, learned positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints
import tiny_models
import torch
import transformers
from model_driver import ModelUnderTest, capacity
from quantising import Told, copied, sequences
from torch import Tensor

from headrace.engine import InvalidParams
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.ops.quantise import Method

GPT2 = {"n_embd": 192, "n_inner": 320, "n_layer": 2, "n_head": 3, "n_positions": 128}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 320, "pad_token_id": None}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"ffn_hidden_size": 320, "new_decoder_architecture": True, "num_kv_heads": 1},
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", {}),
}


def dense(named: str, folder: Path) -> Path:
    torch.manual_seed(11)
    config, model, changes = KINDS[named]
    kind = getattr(transformers, config)
    made = getattr(transformers, model)(tiny_models.configured(kind, quantised_checkpoints.CONFIG, **changes))
    for name, parameter in made.named_parameters():
        if "norm" not in name and "ln_" not in name:
            is_table = any(word in name for word in ("embed", "wte", "wpe"))
            torch.nn.init.normal_(parameter, 0.0, 1.0 if is_table else 1.5 * parameter.shape[-1] ** -0.5)
    made.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return folder


def load(folder: Path, quantize: Method | None = None) -> DecoderWeights:
    spec = from_hf(read_hf_config(folder))
    return load_weights(folder, spec, dtype=torch.float32, device="cpu", keep_packed=True, quantize=quantize)


def logits(folder: Path, ids: list[int]) -> Tensor:
    spec = from_hf(read_hf_config(folder))
    tested = ModelUnderTest.make(spec, load(folder), torch.float32, capacity(spec.vocab_size))
    return tested.logits([ids], 128)[0]


@pytest.mark.parametrize("kind", ["starcoder2", "opt", "gpt-neox", "falcon", "phi"])
@pytest.mark.parametrize("method", ["int4", "fp8"])
def test_a_copy_is_what_an_engine_makes(kind: str, method: Method, tmp_path: Path) -> None:
    folder = dense(kind, tmp_path / "model")
    copied(folder, tmp_path / "out", method)
    found, wanted = load(tmp_path / "out"), load(folder, method)
    for number in range(len(wanted.layers)):
        for half in ("mixer", "feed"):
            ours, others = (getattr(each.layers[number], half).matrices for each in (found, wanted))
            for name, weight in others.items():
                assert ours[name].format == weight.format
                assert all(torch.equal(ours[name].parts[part], weight.parts[part]) for part in weight.parts), name


@pytest.mark.parametrize("method", ["int4", "int8"])
def test_matrices_stored_the_other_way_round_stay_dense_in_a_copy_but_not_in_an_engine(
    method: Method, tmp_path: Path
) -> None:
    folder, told = dense("gpt2", tmp_path / "model"), Told()
    with pytest.raises(InvalidParams, match="fits no linear layer"):
        copied(folder, tmp_path / "out", method, told)
    weight = load(folder, method).layers[0].feed.matrices["up"]
    dense_OI = load(folder).layers[0].feed.matrices["up"].dense(torch.float32)
    assert weight.nbytes < dense_OI.nbytes / 3 and weight.shape == (320, 192)
    assert (weight.dense(torch.float32) - dense_OI).abs().max() < 0.1 * dense_OI.abs().max()


@pytest.mark.parametrize("kind", ["opt", "starcoder2", "arcee"])
def test_data_make_a_copy_better(kind: str, tmp_path: Path) -> None:
    """Inputs without positions or biases would be those of another model."""
    folder, ids_ST = dense(kind, tmp_path / "model"), sequences(16, 64)
    copied(folder, tmp_path / "plain", "int4")
    copied(folder, tmp_path / "calibrated", "int4", data=ids_ST)
    ids = ids_ST[0].tolist()
    truth = logits(folder, ids)
    plain, calibrated = (float((logits(tmp_path / each, ids) - truth).norm()) for each in ("plain", "calibrated"))
    assert calibrated < 0.9 * plain


def test_parallel_layers_are_not_calibrated(tmp_path: Path) -> None:
    folder = dense("phi", tmp_path / "model")
    with pytest.raises(InvalidParams, match="side by side") as caught:
        copied(folder, tmp_path / "out", "int4", data=sequences(16, 64))
    assert caught.value.field == "data" and not (tmp_path / "out").exists()
