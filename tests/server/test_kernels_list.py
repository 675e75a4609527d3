"""`headrace kernels list`, which needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import write_model
from quantised_checkpoints import CASES, write_checkpoint
from typer.testing import CliRunner

from headrace.engine.bench.shapes import SHAPES
from headrace.engine.errors import InvalidParams, ModelRejected
from headrace.engine.model.checkpoint.weights import describe_weights, load_weights
from headrace.engine.model.cuda.listed import list_kernels
from headrace.engine.model.cuda.operations import kinds_of
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.formats import Stored
from headrace.server.commands.kernels import kernels


def listed(*arguments: str, columns: int = 100) -> tuple[int, str]:
    done = CliRunner().invoke(kernels, ["list", *arguments], env={"COLUMNS": str(columns), "TERM": "dumb"})
    return done.exit_code, done.output


def rows_of(text: str, operation: str) -> list[list[str]]:
    """The cells of an operation's lines in the first table."""
    found, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) < 3:
            continue
        inside = cells[0] == operation or (inside and not cells[0])
        if inside:
            found.append(cells)
    return found


def test_each_product_has_its_kernel_by_rows() -> None:
    code, text = listed("qwen3-0.6b", "--arch", "sm_90", "--rows", "1,16,64,256")
    assert not code and max(map(len, text.splitlines())) <= 100
    assert "on sm_90 (measured: numbers of NVIDIA H200)" in text
    assert [cells[-4:] for cells in rows_of(text, "head")] == [["vector", "few rows", "few rows", "cuBLAS"]]
    assert ["vector", "even", "even", "cuBLAS"] in [cells[-4:] for cells in rows_of(text, "down")]
    assert rows_of(text, "prefill")[0][-4:] == ["tile"] * 4


def test_ranges_of_rows_are_listed_where_no_rows_are_named() -> None:
    code, text = listed("llama-3.1-8b", "--arch", "sm_90")
    assert not code
    head = " ".join(cells[-1] for cells in rows_of(text, "head"))
    assert head == "1: vector, 2-64: few rows, 65+: cuBLAS"
    assert "1-4 of up to 4,096 tokens together: fused" in text


def test_another_gpu_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    code, text = listed(str(tmp_path), "--arch", "sm_89", columns=200)
    assert "nobody has measured it" in text
    assert not code and "even" not in "".join(cells[-1] for cells in rows_of(text, "down"))
    assert "sm_89 lacks warpgroup matrix products" in text and "sm_89 lacks FlashInfer's XQA kernels" in text
    code, text = listed(str(tmp_path), "--arch", "sm_75", columns=200)
    assert not code and "The engine does not open on such a GPU: sm_75 lacks arithmetic in bfloat16" in text


def test_a_cache_of_8_bits_has_other_kernels() -> None:
    _, usual = listed("qwen3-0.6b", "--rows", "4", "--arch", "sm_90")
    _, small = listed("qwen3-0.6b", "--rows", "4", "--arch", "sm_90", "--kv-dtype", "fp8")
    assert "xqa" not in usual.split("not used")[0] and "xqa" in small.split("not used")[0]


def cells_of(text: str, operation: str) -> str:
    """The kernels of an operation, line by line."""
    return "; ".join(cells[-1] for cells in rows_of(text, operation))


def refusals(text: str) -> dict[tuple[str, str], str]:
    """Why each kernel is not used, by its name and where."""
    return {(kernel, where): why for kernel, where, why in table_of(text.split("Kernels that are not used")[-1])}


def table_of(text: str) -> list[list[str]]:
    """The lines of a table, each of which fits its columns."""
    lines = ([cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines())
    return [cells for cells in lines if len(cells) == 3 and all(cells)]


def test_formats_of_a_mixed_checkpoint_have_lines_of_their_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["compressed mixture"])
    code, text = listed(str(tmp_path), "--arch", "sm_90", columns=300)
    assert not code
    assert cells_of(text, "qkv (fp8)").startswith("-; -; ")
    assert cells_of(text, "qkv (fp8)").endswith("-64: even, 65+: scaled")
    down = cells_of(text, "down (int4-g32-zeros, 1 layer)")
    assert "-64: even, 65-96: even in passes, 97-1024: many rows" in down and down.endswith("1025+: unpacked")
    assert "vector" in cells_of(text, "down (bfloat16, 1 layer)") and "cuBLAS" in cells_of(text, "head")
    why = refusals(text)
    assert why["even heads, fp8", "qkv (fp8)"] == "heads are of 64, the kernel takes 128"
    assert why["cuBLAS", "qkv (fp8), o (fp8)"] == "multiplies by dense weights, not fp8"
    code, text = listed(str(tmp_path), "--arch", "sm_80", columns=300)
    assert not code and cells_of(text, "o (fp8)").endswith("-64: tiles, 65+: unpacked")
    assert "sm_80 lacks warpgroup matrix products" in refusals(text)["even, fp8", "qkv (fp8), o (fp8)"]


def test_a_format_that_hopper_s_kernels_refuse_is_left_to_triton(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["compressed mxfp4"])
    code, text = listed(str(tmp_path), "--arch", "sm_90", columns=300)
    assert not code and cells_of(text, "o (mxfp4)").endswith("3-64: tiles, 65+: unpacked")
    told = refusals(text)["even, fp4-g32-e8m0", "qkv (mxfp4), o (mxfp4), gate_up (mxfp4), down (mxfp4)"]
    assert told.startswith("takes 8-bit floats, and integers of 4 and 8 bits")


def test_weights_in_orders_of_their_own_are_multiplied_one_after_the_other(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["gptq v2 in an order"])
    code, text = listed(str(tmp_path), "--arch", "sm_90", columns=300)
    assert not code
    lines = [line for line in text.splitlines() if "qkv (int4-g32-zeros-ordered, " in line and "64: even" in line]
    assert len(lines) == 2 and all(
        " outputs, 2 layers)" in line and "96: even in passes, 97-1024: many rows, 1025+: unpacked" in line
        for line in lines
    )
    down = cells_of(text, "down (int4-g32-zeros-ordered)")
    assert "-64: even, 65-96: even in passes, 97-1024: many rows" in down and down.endswith("1025+: unpacked")


def test_a_quantised_head_is_multiplied_by_its_codes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "folder", CASES["gptq with rules"])
    _, text = listed(str(tmp_path / "folder"), "--arch", "sm_90", columns=300)
    assert cells_of(text, "head (int8-g32-zeros)") == "1-2: vector, 3-64: tiles, 65+: unpacked"
    write_model(tmp_path / "tied.gguf", Kind.Q6_K)
    _, text = listed(str(tmp_path / "tied.gguf"), "--arch", "sm_90", columns=300)
    assert cells_of(text, "head (q6_k)").endswith("+: unpacked")
    _, text = listed("qwen3-0.6b", "--arch", "sm_90", "--quantize", "int8", "--quantize-head", columns=300)
    assert cells_of(text, "head (int8)").endswith("+: unpacked") and ": even" in cells_of(text, "down (int8)")


def test_the_kinds_of_codes_are_those_of_a_loaded_model(tmp_path: Path) -> None:
    def layout(weight: Stored) -> Stored:
        return in_codes(weight, torch.bfloat16)

    for name, case in CASES.items():
        write_checkpoint(tmp_path / name, case)
        spec = from_hf(read_hf_config(tmp_path / name))
        stored = describe_weights(tmp_path / name, spec, dtype=torch.bfloat16, keep_packed=True)
        loaded = load_weights(
            tmp_path / name,
            spec,
            dtype=torch.bfloat16,
            device="cpu",
            layout=lambda each: in_codes(each, torch.bfloat16),
        )
        kinds = {kind.name for kind in kinds_of(loaded)}
        refused = list_kernels(spec, Arch.named("sm_90"), weights=stored).refusals
        dense_alone = "multiplies by dense weights, not "
        used = {each.why.removeprefix(dense_alone) for each in refused if each.why.startswith(dense_alone)}
        assert used == kinds, name


def test_gguf_files_and_quantised_folders_without_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", Kind.Q4_1)
    code, text = listed(str(tmp_path), "--arch", "sm_90", columns=300)
    assert not code and cells_of(text, "o (q4_1)").endswith("3-64: tiles, 65+: unpacked")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(
        json.dumps({**SHAPES["qwen3-0.6b"], "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(ModelRejected, match=r"neither model\.safetensors nor"):
        CliRunner().invoke(kernels, ["list", str(bare)], catch_exceptions=False)
    write_checkpoint(tmp_path / "fp8", CASES["fp8 blocks"])
    with pytest.raises(InvalidParams, match="^quantize: .* is stored as fp8-128x128 already"):
        CliRunner().invoke(kernels, ["list", str(tmp_path / "fp8"), "--quantize", "int4"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["qwen3-0.6b", "--arch", "sm_91"], "must be one of sm_70, sm_75"),
        (["qwen3-0.6b", "--rows", "1,x"], "--rows '1,x': give sizes from 1 up"),
        (["no-such-model"], "no-such-model: neither a file, a folder, a hub id on this machine nor one of qwen3-0.6b"),
    ],
)
def test_what_is_unknown_is_refused(arguments: list[str], told: str) -> None:
    code, text = listed(*arguments, columns=200)
    assert code == 2 and told in " ".join(text.replace("│", " ").split())
