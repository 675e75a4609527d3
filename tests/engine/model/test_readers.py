"""Weights whose parts are tensors of their own are found, checked and read in pieces, and fused where they can be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from stored_weights import Blocks, Table
from torch import Tensor

from headrace.engine import ModelRejected
from headrace.engine.model.checkpoint.readers import READERS, Checkpoint, Found, in_parts
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.ops.formats import Dense, Format, Stacked, Stored

SHAPE = (44, 40)


def one_weight(folder: Path, weight: Stored) -> SafetensorsFolder:
    save_file({name: part.contiguous() for name, part in weight.parts.items()}, folder / "model.safetensors")
    return SafetensorsFolder(folder)


def block_weight() -> Stored:
    torch.manual_seed(2)
    parts = {"values": torch.randn(SHAPE).to(torch.float8_e4m3fn), "scale": torch.rand(6, 3)}
    return Stored(Blocks(), SHAPE, parts)


def table_weight() -> Stored:
    torch.manual_seed(2)
    return Stored(Table(), SHAPE, {"index": torch.randint(0, 16, SHAPE, dtype=torch.uint8), "table": torch.randn(16)})


@pytest.mark.parametrize("elements", [1, 400, 700, 1 << 20])
@pytest.mark.parametrize("weight", [block_weight(), table_weight()], ids=lambda weight: weight.format.name)
def test_pieces_make_the_weight(weight: Stored, elements: int, tmp_path: Path) -> None:
    asked: list[int] = []

    def allocate(count: int) -> Tensor:
        asked.append(count)
        return torch.empty(count, dtype=torch.uint8)

    with one_weight(tmp_path, weight) as files:
        found = in_parts(files, weight.format, SHAPE, {name: name for name in weight.parts})
        pieces = [(first, piece.dense(torch.float32)) for first, piece in found.pieces(elements, allocate)]
        assert found.nbytes(files) == weight.nbytes
    assert torch.equal(torch.cat([piece for _, piece in pieces]), weight.dense(torch.float32))
    firsts = [first for first, _ in pieces]
    assert firsts == sorted(firsts) and (len(firsts) > 1) is (elements < 1 << 20)
    assert sum(asked) == SHAPE[0] * SHAPE[1] and len(asked) == len(pieces)  # the largest part alone lies there


@dataclass(frozen=True)
class BlockReader:
    """Finds weights with a tensor of scales beside them."""

    format: Format

    def find(self, files: Checkpoint, name: str) -> Found | None:
        scale = f"{name}_scale_inv"
        if not isinstance(files, SafetensorsFolder) or scale not in files.shapes:
            return None
        return in_parts(files, self.format, files.shapes[name], {"values": name, "scale": scale})


def write(folder: Path, format: Blocks, change: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Write a model whose attention products are in blocks; return what each of them stands for."""
    path = tiny_models.whole_folder(folder) / "model.safetensors"
    tensors, dense = load_file(path), dict[str, Tensor]()
    for name in [name for name in tensors if "self_attn" in name]:
        shape = tuple(tensors[name].shape)
        scale = torch.rand(format.parts(shape)["scale"].shape) + 0.5
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
        dense[name] = format.dense({"values": tensors[name], "scale": scale}, shape, torch.float32)
    save_file(tensors | dict(change or {}), path, metadata={"format": "pt"})
    return dense


def load(folder: Path, format: Blocks, *, keep_packed: bool) -> DecoderWeights:
    spec = from_hf(read_hf_config(folder))
    readers = (BlockReader(format), *READERS)
    return load_weights(folder, spec, dtype=torch.float32, device="cpu", keep_packed=keep_packed, readers=readers)


@pytest.mark.parametrize("keep_packed", [True, False])
@pytest.mark.parametrize("outputs", [8, 12])
def test_fused_weights_keep_one_format_where_its_blocks_join(outputs: int, keep_packed: bool, tmp_path: Path) -> None:
    format = Blocks(outputs, 16)
    dense = write(tmp_path, format)
    weights = load(tmp_path, format, keep_packed=keep_packed)
    for number, layer in enumerate(weights.layers):
        parts = [dense[f"model.layers.{number}.self_attn.{role}_proj.weight"] for role in "qkv"]
        assert torch.equal(layer.mixer.matrices["qkv"].dense(torch.float32), torch.cat(parts))
        kept = format if outputs == 8 else Stacked(((format, 32), (format, 16), (format, 16)))
        assert layer.mixer.matrices["qkv"].format == (kept if keep_packed else Dense(torch.float32))


@pytest.mark.parametrize("keep_packed", [True, False])
def test_codes_that_are_not_numbers_are_refused(keep_packed: bool, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    values = torch.ones(16, 32).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[3, 5] = 0x7F
    write(tmp_path, Blocks(), {name: values})
    with pytest.raises(ModelRejected, match="not finite") as caught:
        load(tmp_path, Blocks(), keep_packed=keep_packed)
    assert caught.value.field == name


def test_an_unknown_format_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, Blocks())
    spec = from_hf(read_hf_config(tmp_path))
    with pytest.raises(ModelRejected, match="is float8_e4m3fn; wanted: floats") as caught:
        load_weights(tmp_path, spec, dtype=torch.float32, device="cpu")
    assert "self_attn" in str(caught.value.field)


def test_a_second_load_fills_the_same_memory(tmp_path: Path) -> None:
    """A GPU that slept without its weights reads them again to the addresses that its graphs were captured with."""
    write(tmp_path, Blocks())
    spec = from_hf(read_hf_config(tmp_path))
    arena, used = torch.zeros(1 << 20, dtype=torch.uint8), 0

    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nonlocal used
        start, used = used, used + -(-math.prod(shape) * dtype.itemsize // 64) * 64
        return arena[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def loaded() -> DecoderWeights:
        nonlocal used
        used, readers = 0, (BlockReader(Blocks()), *READERS)
        return load_weights(
            tmp_path, spec, dtype=torch.float32, device="cpu", keep_packed=True, readers=readers, empty=empty
        )

    first = loaded()
    end, dense = used, [layer.mixer.matrices["qkv"].dense(torch.float32) for layer in first.layers]
    arena.zero_()
    again = loaded()
    assert used == end
    for number, expected in enumerate(dense):
        qkv = first.layers[number].mixer.matrices["qkv"]
        assert torch.equal(qkv.dense(torch.float32), expected) and qkv.format == Blocks()
        for name, part in again.layers[number].mixer.matrices["qkv"].parts.items():
            assert part.data_ptr() == qkv.parts[name].data_ptr()
