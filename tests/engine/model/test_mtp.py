"""Modules for multi-token prediction draft what the equations of DeepSeek-V3 give with layers of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_driver import Drafting, Row, states_of
from model_driver import OPERATIONS
from mtp_models import FAMILIES, LAYERS, with_module
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine import ModelRejected
from headrace.engine.model.drafting.heads.reading import open_mtp
from headrace.engine.model.drafting.heads.spec import RecurrentSpec
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.families.text_parts import HOMES

CUTS = {"in one piece": (64, None), "in chunks": (5, None), "decode after a prompt": (7, 9), "one by one": (1, None)}


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


def in_block_fp8(folder: Path, block: int, plain: str) -> dict[str, Tensor]:
    """Store products as DeepSeek does, each block at a size of its own; return what all tensors stand for then."""
    tensors, read = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, weight in [*tensors.items()]:
        read[name] = weight
        if weight.dim() < 2 or "_proj" not in name or re.search(plain, name):
            continue
        outs, ins = weight.shape
        most = weight.abs().max()
        scales = (0.6 + torch.rand(-(-outs // block), -(-ins // block))) * most / 448
        tensors[name] = (weight * 448 / most).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        each = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:outs, :ins]
        read[name] = tensors[name].float() * each
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    stored = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    return read


@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize(("family", "plain"), [("DeepSeek-V3", "eh_proj"), ("GLM-4.5", "nothing")])
def test_a_module_in_block_fp8_drafts_what_its_plain_weights_do(
    family: str, plain: str, native: bool, tmp_path: Path
) -> None:
    model, head = with_module(family, tmp_path / "stored")
    rows = [Row(torch.randint(0, 96, (length,)).tolist()) for length in (21, 9, 16)]
    of_exact = [head.drafts(states_of(model, row.ids, LAYERS), row.ids[1:], 3) for row in rows]
    read = in_block_fp8(tmp_path / "stored", 24, plain)
    model.config.save_pretrained(tmp_path / "plain")
    save_file(read, tmp_path / "plain/model.safetensors", {"format": "pt"})
    model.load_state_dict(type(model).from_pretrained(tmp_path / "plain", dtype=torch.float32).state_dict())
    head.mtp["eh_proj.weight"] = read[f"model.layers.{LAYERS}.eh_proj.weight"]
    expected = [head.drafts(states_of(model, row.ids, LAYERS), row.ids[1:], 3) for row in rows]
    assert expected != of_exact, "scales that change nothing prove nothing"
    assert Drafting(tmp_path / "stored", None, native=native).side_by_side(rows, 7, 9, 3) == expected


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
