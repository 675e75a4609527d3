"""The tables of families and formats in docs/models.md say what the code reads."""

from __future__ import annotations

import re
from pathlib import Path

from quantised_checkpoints import CASES

from headrace.engine.model.checkpoint.quantised import auto_round, compressed_tensors, modelopt
from headrace.engine.model.checkpoint.quantised.reader import METHODS
from headrace.engine.model.families.experts.granitemoeshared import GRANITE_MOE_SHARED
from headrace.engine.model.families.experts.mixtral import MIXTRAL
from headrace.engine.model.families.mistral import MISTRAL
from headrace.engine.model.families.olmo3 import OLMO3
from headrace.engine.model.families.registry import FAMILIES
from headrace.engine.model.families.text_parts import MULTIMODAL
from headrace.engine.tokens.gguf import PRE_TOKENIZERS

ROOT = Path(__file__).parents[3]
PLAIN = "float32"
ALIKE = {
    MISTRAL.architecture: "as `llama",
    MIXTRAL.architecture: "as `llama",
    OLMO3.architecture: "as `olmo2",
    GRANITE_MOE_SHARED.architecture: "as `granitemoe",
}
"""Families whose GGUF files call themselves like those of another."""


def rows() -> dict[str, tuple[str, set[str]]]:
    """What is read and the formats that it is kept in, by the quant_method."""
    lines = (ROOT / "docs/models.md").read_text().splitlines()
    lines = lines[lines.index("## Quantised safetensors") :]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")][1:]
    return {method.strip("`"): (read, set(kept.strip("` ").split("`, `"))) for method, read, kept in cells}


def test_the_table_has_the_families() -> None:
    lines = (ROOT / "docs/models.md").read_text().splitlines()
    named = [line for line in lines if re.match(r"\| `\w+(ForCausalLM|LMHeadModel)`", line)]
    cells = [line.strip("| ").split(" | ") for line in named]
    assert {each[0].strip("`"): each[2].strip("`") for each in cells} == {
        family.architecture: family.gguf or ALIKE.get(family.architecture, "–") for family in FAMILIES
    }


def test_the_table_has_the_text_parts() -> None:
    lines = (ROOT / "docs/models.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| `\w+ForConditionalGeneration`", line)]
    assert {each[0].strip("`"): tuple(each[3].strip("`").split("`, `")) for each in cells} == {
        each.architecture: each.others for each in MULTIMODAL
    }
    own = {each[0].strip("`") for each in cells if each[2] != "as `text_config` says"}
    assert own == {each.architecture for each in MULTIMODAL if each.has_own_text or each.model_type.startswith("gemma")}


def test_the_guide_names_the_splits_of_tokenizers() -> None:
    text = (ROOT / "docs/models.md").read_text()
    named = re.findall("`([^`]+)`", text.partition("how text\n  is split: ")[2].partition(". Others")[0])
    assert named == list(PRE_TOKENIZERS)


def test_the_table_has_the_methods_that_are_read() -> None:
    assert rows().keys() == METHODS.keys()


def test_the_table_names_what_each_method_reads() -> None:
    table = rows()
    assert all(f"`{name}`" in table["compressed-tensors"][0] for name in compressed_tensors.FORMATS)
    assert all(f"`{name}`" in table["modelopt"][0] for name in modelopt.ALGORITHMS)
    named = table["auto-round"][0].partition("of ")[2].partition(", with")[0].replace(" and", ",").split(", ")
    assert named and all(name.strip("`") in auto_round.PACKINGS for name in named)


def test_the_table_says_as_what_each_checkpoint_is_kept() -> None:
    table = rows()
    kept: dict[str, set[str]] = {}
    for case in CASES.values():
        method = case.config.get("quant_method", "modelopt")
        names = {name if name.startswith("fp8") else name.split("-")[0] for name in case.formats - {PLAIN}}
        kept[method] = kept.get(method, set()) | names
    for method, names in kept.items():
        assert names <= table[method][1], method
    assert kept.keys() == METHODS.keys() - {"fbgemm_fp8"}


def test_the_readme_names_the_tools() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(name in text for name in ("FP8", "INT8", "GPTQ", "AWQ", "AutoRound", "MXFP4", "NVFP4", "bitsandbytes"))
    assert "docs/models.md" in text
