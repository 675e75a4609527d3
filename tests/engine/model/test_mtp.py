"""Modules for multi-token prediction draft what the equations of DeepSeek-V3 give with layers of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from draft_driver import Drafting, Row, states_of
from draft_heads import MtpHead
from model_driver import OPERATIONS
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine import ModelRejected
from headrace.engine.model.drafting.heads.reading import open_mtp
from headrace.engine.model.drafting.heads.spec import RecurrentSpec
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.families.text_parts import HOMES

LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("DeepseekV3", LATENT),
    "GLM-4.5": ("Glm4Moe", {"num_key_value_heads": 2, "use_qk_norm": True, "attention_bias": True, "head_dim": 16}),
    "GLM-4.7-Flash": ("Glm4MoeLite", {**LATENT, "mlp_layer_types": ["dense", *["sparse"] * LAYERS]}),
}
CUTS = {"in one piece": (64, None), "in chunks": (5, None), "decode after a prompt": (7, 9), "one by one": (1, None)}


def with_module(family: str, folder: Path) -> tuple[Any, MtpHead]:
    """A checkpoint whose last layer is the module's, and the module in transformers."""
    torch.manual_seed(7)
    name, changes = FAMILIES[family]
    config, kind = (getattr(transformers, f"{name}{end}") for end in ("Config", "ForCausalLM"))
    model = kind(config(**SIZES | changes)).eval()
    for of, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in of:
            mean, spread = (1.0, 0.2) if "norm" in of else (0.0, 0.15)
            torch.nn.init.normal_(parameter, mean, spread)
    model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text()) | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in written:
        written["mlp_layer_types"] = written["mlp_layer_types"][:LAYERS]
    path.write_text(json.dumps(written))
    tensors = MtpHead.add_to(folder, LAYERS, SIZES["hidden_size"])
    layer = model.model.layers[LAYERS]

    def block(x: Tensor) -> Tensor:
        positions = torch.arange(len(x))[None]
        with torch.inference_mode():
            turned = model.model.rotary_emb(x[None], position_ids=positions)
            mask = torch.full((1, 1, len(x), len(x)), float("-inf")).triu(1)
            found = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=turned)
        return found[0] if isinstance(found, Tensor) else found[0][0]

    return model, MtpHead(block, tensors, model.config.rms_norm_eps)


@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_equations(family: str, native: bool, tmp_path: Path) -> None:
    model, head = with_module(family, tmp_path)
    rows = [Row(torch.randint(0, 96, (length,)).tolist()) for length in (21, 9, 16, 3)]
    expected = [head.drafts(states_of(model, row.ids, LAYERS), row.ids[1:], 3) for row in rows]
    assert len({tuple(drafts) for drafts in expected}) == len(rows), "drafts that depend on nothing prove nothing"
    drafting = Drafting(tmp_path, None, native=native)
    for cut in CUTS.values():
        assert drafting.side_by_side(rows, *cut, 3) == expected, cut


def test_a_spec_says_what_the_module_reads(tmp_path: Path) -> None:
    with_module("DeepSeek-V3", tmp_path)
    target = from_hf(read_hf_config(tmp_path))
    with open_mtp(tmp_path, target) as found:
        spec = found.spec
    assert isinstance(spec, RecurrentSpec)
    assert (spec.method, spec.taps, spec.target_size, spec.draft_vocab_size) == ("mtp", (), 64, 96)
    assert spec.block.layers == target.layers[-1:] and spec.feeds_back_normed


@pytest.mark.parametrize("home", ["model.language_model.", "language_model.model."])
def test_a_module_is_found_within_a_larger_model(home: str, tmp_path: Path) -> None:
    with_module("GLM-4.5", tmp_path)
    target = from_hf(read_hf_config(tmp_path))
    target = replace(target, names=replace(target.names, homes=HOMES, others=("vision_tower",)))
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {name.replace("model.", home, 1): tensor for name, tensor in tensors.items()}
    save_file(moved | {"model.vision_tower.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with open_mtp(tmp_path, target) as found:
        assert isinstance(found.spec, RecurrentSpec)
        part = found.spec.parameters()["fuse"].parts[0]
        assert found.inventory.of(part).tensors[0] == f"{home}layers.{LAYERS}.eh_proj.weight"


def dropped(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"model.layers.{LAYERS}.{name}")


def misshapen(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"model.layers.{LAYERS}.{name}": torch.ones(7, 64)})


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str, str]] = {
    "no module": (dropped("eh_proj.weight"), f"layers.{LAYERS}.eh_proj.weight", "holds a module that drafts"),
    "no norm": (dropped("enorm.weight"), f"layers.{LAYERS}.enorm.weight", "missing"),
    "no router": (dropped("mlp.gate.weight"), f"layers.{LAYERS}.mlp.gate.weight", "missing"),
    "another product": (misshapen("eh_proj.weight"), f"layers.{LAYERS}.eh_proj.weight", r"\[64, 128\]"),
    "another tensor": (misshapen("extra.weight"), f"layers.{LAYERS}.extra.weight", "left over"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_module_is_refused_by_the_name_of_its_tensor(damage: str, tmp_path: Path) -> None:
    with_module("GLM-4.5", tmp_path)
    change, field, why = DAMAGE[damage]
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelRejected, match=why) as caught, open_mtp(tmp_path, from_hf(read_hf_config(tmp_path))):
        pass
    assert field in str(caught.value.field)
