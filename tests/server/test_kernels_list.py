"""`headrace kernels list`, which needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.engine.bench.shapes import SHAPES
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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["qwen3-0.6b", "--arch", "sm_91"], "must be one of sm_70, sm_75"),
        (["qwen3-0.6b", "--rows", "1,x"], "--rows '1,x': give sizes from 1 up"),
        (["no-such-model"], "no-such-model: neither a file, a folder nor one of qwen3-0.6b"),
    ],
)
def test_what_is_unknown_is_refused(arguments: list[str], told: str) -> None:
    code, text = listed(*arguments, columns=200)
    assert code == 2 and told in " ".join(text.replace("│", " ").split())
