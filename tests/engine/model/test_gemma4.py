"""Gemma 4 in an engine: what is told of its memory and weights, and what is quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from quantising import Told

from headrace.engine import EngineConfig, InvalidParams
from headrace.engine.inspection.inspect import inspect_model
from headrace.engine.life.build import open_engine
from headrace.engine.model.checkpoint.weights import load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.quantising.run import quantise_folder

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SMALL = {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
EXPERTS = {
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
ELEMENTS = {"small": 2 * 2 * (16 + 32), "experts": 2 * 2 * 2 * (16 + 32)}
"""Elements of a token in the cache; the last layers of the small model have none of their own."""


def folder_of(folder: Path, kind: str) -> Path:
    torch.manual_seed(5)
    config = transformers.Gemma4TextConfig(**SIZES | (SMALL if kind == "small" else EXPERTS))
    model = transformers.Gemma4ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name and "scal" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.08)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return folder


@pytest.fixture(params=["small", "experts"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_what_an_engine_and_inspect_tell(kind: str, quantize: Any, tmp_path: Path) -> None:
    config = EngineConfig(model=folder_of(tmp_path, kind), device="cpu", kv_memory="1MiB", quantize=quantize)
    facts = inspect_model(config)
    assert facts.runs and facts.shape is not None
    assert (facts.shape.heads, facts.shape.kv_heads, facts.shape.head_size) == (4, 2, 16)
    assert facts.shape.experts == (4 if kind == "experts" else None)
    cpu = facts.devices[0]
    assert cpu.kv_bytes_per_token == 2 * ELEMENTS[kind]
    made = open_engine(config)
    made.runner.close()
    assert made.info.page_bytes == 16 * 2 * ELEMENTS[kind]
    assert cpu.pages == (1 << 20) // made.info.page_bytes
    assert cpu.weights == made.info.weights
    assert ("int8" in {part.format for part in cpu.weights}) == (quantize is not None)
    if quantize is None:
        file = tmp_path / "model.safetensors"
        assert 0 < file.stat().st_size - facts.stored_bytes < 1 << 14, "the file's header, and nothing else"


def test_a_quantised_copy_has_the_embeddings_of_layers_as_they_are(tmp_path: Path) -> None:
    quantise_folder(folder_of(tmp_path / "model", "small"), tmp_path / "copy", "int8", Told())
    specs = [from_hf(read_hf_config(tmp_path / name)) for name in ("model", "copy")]
    plain, copied = (
        load_weights(tmp_path / name, spec, dtype=torch.bfloat16, device="cpu", keep_packed=True)
        for name, spec in zip(("model", "copy"), specs, strict=True)
    )
    assert plain.per_layer is not None and copied.per_layer is not None
    for name in ("table_VX", "product_XE"):
        pair = [getattr(each.per_layer, name).parts["values"] for each in (plain, copied)]
        assert torch.equal(*pair)
    for part in ("mixer", "feed"):
        assert {each.format.name for each in getattr(copied.layers[2], part).matrices.values()} == {"int8"}
    with pytest.raises(InvalidParams, match="layers end behind their feeds"):
        ids = torch.zeros(64, 128, dtype=torch.int64)
        quantise_folder(tmp_path / "model", tmp_path / "other", "int8", Told(), data=ids)
