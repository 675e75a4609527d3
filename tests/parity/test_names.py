"""headrace reads each name of a tensor that transformers converts when it loads a checkpoint of a native family."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layer_normed_models import LAYER_NORMED
from parity import test_experts as mixed
from parity import test_latents as latent
from safetensors.torch import load_file, save_file
from text_part_models import TEXT_PARTS
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.families.registry import FAMILIES, from_hf, read_hf_config

NATIVE: dict[str, Callable[[], Any]] = mixed.FAMILIES | latent.FAMILIES | {"gpt-neox": LAYER_NORMED["gpt-neox"]}


def check_read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Demand that headrace finds all that it needs among these tensors, and that none is left over."""
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    with SafetensorsFolder(folder) as files:
        Inventory(files, from_hf(read_hf_config(folder)))


def saved_and_read(model: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors as transformers saves a model, which headrace reads."""
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    check_read(folder, stored)
    return stored


def test_families_whose_names_are_converted_are_those_below() -> None:
    mappings = {family.model_type: [family.model_type, family.architecture] for family in FAMILIES}
    converted = {kind for kind, names in mappings.items() if any(map(get_checkpoint_conversion_mapping, names))}
    assert converted == {make().config.model_type for make in NATIVE.values()} - {"gpt_oss"}


@pytest.mark.rotated(3)
@pytest.mark.parametrize("name", NATIVE)
def test_published_names_have_each_that_a_family_converts(name: str, tmp_path: Path) -> None:
    model = NATIVE[name]()
    stored = saved_and_read(model, tmp_path)
    for rule in get_model_conversion_mapping(model, add_legacy=False):
        for source in rule.source_patterns:
            pattern = source.replace(".*.", r"\.\d+\.")
            assert any(re.search(pattern, each) for each in stored), f"no file has {source}"


def before(rule: WeightRenaming, source: str, name: str) -> str:
    """What one pattern of a rule turns into this name of a module, if it turns anything into it."""
    alone = rule if len(rule.source_patterns) == 1 else rule.copy([source], [*rule.target_patterns])
    return str(alone.reverse_transform().rename_source_key(name)[0])


@pytest.mark.rotated(3)
@pytest.mark.parametrize("name", TEXT_PARTS)
def test_names_of_text_parts_are_read_by_whichever_rule_converts_them(name: str, tmp_path: Path) -> None:
    model = TEXT_PARTS[name]()
    stored = saved_and_read(model, tmp_path)
    names = from_hf(read_hf_config(tmp_path)).names
    has_head = any(each.endswith("lm_head.weight") for each in stored)
    state = {key: each for key, each in model.state_dict().items() if has_head or key != "lm_head.weight"}
    of_text = [key for key in state if not names.is_other(key)]
    for rule in get_model_conversion_mapping(model):
        for source in rule.source_patterns if isinstance(rule, WeightRenaming) and rule.scope_prefix is None else ():
            found = {key: before(rule, source, key) for key in of_text}
            if any(new != key for key, new in found.items() if key != "lm_head.weight"):
                check_read(tmp_path, {found.get(key, key): each for key, each in state.items()})
