"""The tables of families and formats in docs/models.md say what the code reads."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import fallback_models
import pytest
import torch
from quantised_checkpoints import CASES

from headrace.engine.model.checkpoint.gguf_header import KINDS
from headrace.engine.model.checkpoint.quantised import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    gptq,
    modelopt,
)
from headrace.engine.model.checkpoint.quantised.reader import METHODS
from headrace.engine.model.families.registry import FAMILIES
from headrace.engine.model.families.text_parts import MULTIMODAL
from headrace.engine.tokens.gguf import PRE_TOKENIZERS
from headrace.engine.tools.registry import format_names
from headrace.ops.cpu.native.library import library
from headrace.ops.cpu.native.linear import NativeKernel
from headrace.ops.formats import Format, Stored
from headrace.ops.quantised import Float4Groups, Fp8, IntGroups, Table4

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to fix

ROOT = Path(__file__).parents[3]
PLAIN = "float32"


def rows() -> dict[str, tuple[str, set[str]]]:
    """What is read and the formats that it is kept in, by the quant_method."""
    text = (ROOT / "docs/models.md").read_text()
    lines = text.partition("\n## Quantised safetensors")[2].partition("\n###")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")][1:]
    return {method.strip("`"): (read, set(kept.strip("` ").split("`, `"))) for method, read, kept in cells}


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    """What docs/models_table.py has."""
    return runpy.run_path(str(ROOT / "docs/models_table.py"))


@pytest.mark.xdist_group("table of models")  # what is refused takes seconds to find out
def test_the_table_of_models_is_what_the_script_writes(written: dict[str, Any]) -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert written["written"]() == page, "run `python docs/models_table.py`, which writes the table of models.md"
    named = re.findall(r"^\| `(\w+)` \|", page.partition("\n\nMany checkpoints")[0], re.MULTILINE)
    assert len(named) == len(set(named)) > 80


def test_the_table_of_models_has_all_that_are_known(written: dict[str, Any]) -> None:
    native = {family.model_type for family in FAMILIES}
    assert written["NATIVE"].keys() == native
    compared = {fallback_models.config_of(name).model_type for name in fallback_models.FAMILIES}
    assert written["FALLBACK"].keys() == compared - native
    assert not written["REFUSED"].keys() & (compared | native)
    formats = {name for noted in written["NATIVE"].values() for name in noted.tools.split()}
    assert formats <= set(format_names())


@pytest.mark.xdist_group("table of models")
def test_the_table_of_models_names_the_tests_that_compare_them(written: dict[str, Any]) -> None:
    shared = (ROOT / "tests/layer_normed_models.py").read_text()
    for name, _, runs, _, _, _, tests, _ in [*written["native"](), *written["others"]()]:
        stem = re.sub("ForCausalLM|LMHeadModel", "", name.strip("`"))
        for test in tests.strip("`").split("`, `") if runs in ("native", "fallback") else ():
            text = (ROOT / f"tests/parity/{test}.py").read_text()
            text += shared if test == "test_families" else ""
            assert runs == "fallback" or test == "test_gguf_families" or stem in text, name


def test_the_table_has_the_text_parts() -> None:
    lines = (ROOT / "docs/models.md").read_text().partition("### Text parts")[2].splitlines()
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


def named_in(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall("`([^`]+)`", text)


def test_the_table_names_what_each_method_reads() -> None:
    read = {method: cell for method, (cell, _) in rows().items()}
    assert named_in(read["compressed-tensors"]) == list(compressed_tensors.FORMATS)
    assert named_in(read["modelopt"]) == list(modelopt.ALGORITHMS)
    packings = read["auto-round"].partition(" of ")[2].partition(", with")[0]
    assert sorted(named_in(packings)) == sorted(auto_round.PACKINGS)
    assert named_in(read["gptq"].partition(" with ")[0]) == list(gptq.FORMATS)
    assert named_in(read["awq"]) == [awq.VERSION] and f" {awq.BITS} bits" in read["awq"]
    assert named_in(read["bitsandbytes"]) == list(bitsandbytes.TYPES)
    four_and_eight = f"{' and '.join(map(str, gptq.BITS))} bits"
    assert four_and_eight in read["gptq"] and four_and_eight in read["auto-round"]


def test_the_table_says_as_what_each_checkpoint_is_kept() -> None:
    kept: dict[str, set[str]] = {"fbgemm_fp8": {"fp8"}}  # whose checkpoints are those of fp8 under another name
    for case in CASES.values():
        method = case.config.get("quant_method", "modelopt")
        names = {name if name.startswith("fp8") else name.split("-")[0] for name in case.formats - {PLAIN}}
        kept[method] = kept.get(method, set()) | names
    assert kept == {method: formats for method, (_, formats) in rows().items()}


@pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2")
def test_the_table_says_what_a_cpu_keeps() -> None:
    """Which formats the kernels multiply by, and the bits that they take, of 1,024 by 1,024 weights."""
    formats = (
        IntGroups(4, 128), IntGroups(8, None), Fp8(), Fp8((128, 128)), Float4Groups("e8m0"), Float4Groups("e4m3"),
        Table4(),
    )  # fmt: skip
    dense = {each.name.split("-g")[0] for each in formats if NativeKernel().refuses(on_meta(each), torch.bfloat16)}
    lines = (ROOT / "docs/models.md").read_text().partition("### What a CPU keeps")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    becomes = {name: kept for named, kept, _ in cells for name in named_in(named)}
    assert {name for name, kept in becomes.items() if kept == "bfloat16"} == dense
    assert becomes.keys() == {name for _, kept in rows().values() for name in kept}

    def bits(format: Format) -> float:
        (kept,) = NativeKernel().kept(on_meta(format), torch.bfloat16)
        return kept.nbytes * 8 / 1024**2

    found = [bits(IntGroups(4, group, zeros=zeros)) for group in (128, 32) for zeros in (False, True)]
    assert f"{found[0]:g} and {found[1]:g} for 128, {found[2]:g} and {found[3]:g} for 32" in cells[0][2]
    assert bits(IntGroups(8, None)) == 8 + 32 / 1024


def on_meta(format: Format) -> Stored:
    return Stored.allocate(format, (1024, 1024), lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))


def test_the_guide_and_the_readme_name_the_kinds_of_gguf() -> None:
    guide = (ROOT / "docs/models.md").read_text().partition("tensors of these kinds are read: ")[2]
    readme = (ROOT / "README.md").read_text().partition("experts (")[2].partition(")")[0]
    both = guide.partition(", in any")[0].replace(" and", ","), readme.replace("to Q6_K", ", Q3_K, Q4_K, Q5_K, Q6_K")
    for text in both:
        assert sorted(text.replace(",", " ").split()) == sorted(kind.name for kind in KINDS)


def test_the_readme_names_the_tools() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(name in text for name in ("FP8", "INT8", "GPTQ", "AWQ", "AutoRound", "MXFP4", "NVFP4", "bitsandbytes"))
    assert "docs/models.md" in text
