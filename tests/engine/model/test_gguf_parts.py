"""A GGUF model in several files is read as one, and is refused if a file is missing or is of another model."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import write_model

from headrace.engine import EngineConfig, ModelRejected
from headrace.engine.inspection.inspect import inspect_model
from headrace.engine.life.model_files import find_model
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.reread import rereading
from headrace.engine.model.checkpoint.weights import load_weights

FIRST, SECOND, THIRD = (f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3))
NUMBER, COUNT, TENSORS = b"split.no", b"split.count", b"split.tensors.count"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny.gguf", Kind.Q4_0, split_max_tensors=4)
    return tmp_path


def refused(path: Path) -> ModelRejected:
    with pytest.raises(ModelRejected) as caught:
        GgufFile(path)
    return caught.value


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_parts_are_read_as_the_one_file_that_they_were(small_first_shard: bool, tmp_path: Path) -> None:
    expected = write_model(tmp_path / "whole.gguf", Kind.Q4_0)
    write_model(tmp_path / "tiny.gguf", Kind.Q4_0, split_max_tensors=4, small_first_shard=small_first_shard)
    first = min(tmp_path.glob("tiny-00001-of-0000?.gguf"))
    with GgufFile(first) as parts, GgufFile(tmp_path / "whole.gguf") as whole:
        assert parts.tensors.keys() == expected.keys()
        assert parts.spec() == whole.spec()
        for name, values in expected.items():
            assert np.array_equal(torch.cat([rows for _, rows in parts.blocks(name)]).numpy(), values), name
        weights = load_weights(parts, parts.spec(), dtype=torch.float32, device="cpu")
        again = rereading(parts)
    assert np.array_equal(weights.embedding_VE.numpy(), expected["token_embd.weight"])
    assert again() == first
    with pytest.raises(ValueError, match="closed"):
        list(parts.blocks("output_norm.weight"))


def test_a_missing_part_is_named(folder: Path) -> None:
    (folder / SECOND).unlink()
    error = refused(folder / FIRST)
    assert error.field == SECOND and f"{SECOND}, part 2 of 3, is missing" in str(error)
    facts = inspect_model(EngineConfig(model=folder / FIRST, device="cpu"))
    assert [problem.field for problem in facts.problems] == [SECOND]


def test_a_later_part_says_which_is_the_first(folder: Path) -> None:
    error = refused(folder / THIRD)
    assert error.field == "split.no" and f"open {FIRST}" in str(error)


def test_names_that_do_not_say_the_parts_are_refused(folder: Path) -> None:
    (folder / FIRST).rename(folder / "tiny.gguf")
    error = refused(folder / "tiny.gguf")
    assert error.field == "split.count" and "NAME-00001-of-00003.gguf" in str(error)


def change(key: bytes, form: str, value: int) -> Callable[[bytes], bytes]:
    """A function that gives a key of a file's metadata another number."""

    def changed(data: bytes) -> bytes:
        at = data.index(key) + len(key) + 4
        return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]

    return changed


@pytest.mark.parametrize(
    ("part", "edit", "field"),
    [
        (SECOND, change(NUMBER, "<H", 2), "split.no"),
        (SECOND, change(COUNT, "<H", 4), "split.count"),
        (SECOND, change(TENSORS, "<i", 12), "split.tensors.count"),
        (FIRST, change(COUNT, "<H", 2), "split.count"),
        (FIRST, change(COUNT, "<H", 65535), "split.count"),
        (THIRD, lambda data: data[:-40], "the end of "),
        (THIRD, lambda data: b"", THIRD),
        (THIRD, lambda data: data.replace(b"blk.0.ffn_up", b"blk.0.attn_q"), "tensor"),
    ],
)
def test_parts_that_do_not_agree_are_refused(
    part: str, edit: Callable[[bytes], bytes], field: str, folder: Path
) -> None:
    path = folder / part
    before = path.read_bytes()
    path.write_bytes(edit(before))
    assert path.read_bytes() != before
    error = refused(folder / FIRST)
    assert (error.field or "").startswith(field) and str(error).startswith("tiny-0000")


def test_parts_that_lack_tensors_are_refused(folder: Path) -> None:
    """As they do if a part comes from a model that was split in another way."""
    for part in (FIRST, SECOND, THIRD):
        path = folder / part
        path.write_bytes(change(TENSORS, "<i", 12)(path.read_bytes()))
    error = refused(folder / FIRST)
    assert error.field == "split.tensors.count" and "11, the tensors of all parts" in str(error)


def test_a_folder_of_parts_holds_one_model(folder: Path) -> None:
    assert find_model(EngineConfig(model=folder)) == (folder / FIRST, "tiny")
    assert find_model(EngineConfig(model=folder, file="tiny*")).path == folder / FIRST
    assert find_model(EngineConfig(model=folder, file=SECOND)).path == folder / SECOND
    (folder / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelRejected, match="several GGUF files") as caught:
        find_model(EngineConfig(model=folder))
    assert SECOND not in str(caught.value)
