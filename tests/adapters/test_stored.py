"""However an adapter's bytes lie in memory, they become the same block, and what shrinks meanwhile is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from adapter_folders import SIZES, lora_tensors, write_folder
from emulated_kernels import unpack
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters import files, recipe, stored
from headrace.adapters.errors import AdapterRejected, ModelRejected
from headrace.adapters.files import read_adapter
from headrace.adapters.layout import ModelShape
from headrace.adapters.stored import DTYPES, Part, Stored
from headrace.adapters.untrusted import parse_members, parse_object

SHAPE = ModelShape(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, vocab_size=96)
TOP = "base_model.model.model.embed_tokens"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=5,
)


def write(folder: Path, rank: int, dtypes: Sequence[torch.dtype]) -> Path:
    """Updates of every module and of the embeddings, of mixed dtypes, and the frozen embeddings beside them."""
    tensors = lora_tensors(1, rank, SIZES)
    tensors |= {f"{TOP}.lora_embedding_A": torch.randn(rank, 96), f"{TOP}.lora_embedding_B": torch.randn(32, rank)}
    tensors = {key: tensor.to(dtypes[place % len(dtypes)]) for place, (key, tensor) in enumerate(tensors.items())}
    tensors[f"{TOP}.base_layer.weight"] = torch.randn(96, 32)
    targets = [*(name.rpartition(".")[2] for name in SIZES), "embed_tokens"]
    return write_folder(folder, {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "target_modules": targets}, tensors)


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("dtypes", [DTYPES, [torch.float32], [torch.bfloat16, torch.float32]])
def test_pieces_make_the_same_block(
    rank: int, dtypes: Sequence[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a", rank, dtypes)
    whole = read_adapter(folder, SHAPE, torch.bfloat16, max_rank=8)
    monkeypatch.setattr(stored, "PIECE_BYTES", 320)
    monkeypatch.setattr(files, "_ALONE_BYTES", 1000)
    monkeypatch.setattr(files, "_SETTLED_NS", -(10**12))
    taken: list[int] = []

    def take(nbytes: int) -> list[torch.Tensor]:
        taken.append(nbytes)
        return [torch.full((320,), 0xFF, dtype=torch.uint8) for _ in range(-(-nbytes // 320))]

    first = read_adapter(folder, SHAPE, torch.bfloat16, max_rank=8, take=take)
    again = read_adapter(folder, SHAPE, torch.bfloat16, max_rank=8, take=take, stamp=first.stamp)
    assert taken[0] == taken[1] < (folder / "adapter_model.safetensors").stat().st_size - 96 * 32 * 4
    for found in (first, again):
        assert found.digest == whole.digest and found.nbytes == whole.nbytes and found.host_bytes >= taken[0]
        assert torch.equal(unpacked(found.block), whole.block)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_joined_modules_make_the_block_of_their_parts(
    in_pieces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One update of q, k and v is three with the same A and some rows of B each."""
    apart, joined = {}, {}
    for site, modules in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
        folder = site.split(".")[0]
        sizes = [SIZES[f"{folder}.{module}_proj"] for module in modules]
        for layer in range(2):
            name = f"base_model.model.model.layers.{layer}."
            a = torch.randn(3, sizes[0][0])
            parts = [torch.randn(outputs, 3) for _, outputs in sizes]
            joined |= {f"{name}{site}.lora_A.weight": a, f"{name}{site}.lora_B.weight": torch.cat(parts)}
            for module, b in zip(modules, parts, strict=True):
                one = f"{name}{folder}.{module}_proj"
                apart |= {f"{one}.lora_A.weight": a.clone(), f"{one}.lora_B.weight": b}
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 5}
    write_folder(tmp_path / "apart", config, apart)
    write_folder(tmp_path / "joined", config, joined)
    expected = read_adapter(tmp_path / "apart", SHAPE, torch.bfloat16, max_rank=8)
    assert isinstance(expected.block, torch.Tensor)
    if not in_pieces:
        found = read_adapter(tmp_path / "joined", SHAPE, torch.bfloat16, max_rank=8)
        assert isinstance(found.block, torch.Tensor) and torch.equal(found.block, expected.block)
        return
    monkeypatch.setattr(stored, "PIECE_BYTES", 320)
    monkeypatch.setattr(files, "_ALONE_BYTES", 1000)

    def take(nbytes: int) -> list[torch.Tensor]:
        return [torch.full((320,), 0xFF, dtype=torch.uint8) for _ in range(-(-nbytes // 320))]

    found = read_adapter(tmp_path / "joined", SHAPE, torch.bfloat16, max_rank=8, take=take)
    assert torch.equal(unpacked(found.block), expected.block)


def test_adapters_made_alike_share_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_SETTLED_NS", -(10**12))
    folders = [write(tmp_path / str(number), rank, DTYPES) for number, rank in enumerate((8, 8, 4))]
    stamps = [read_adapter(folder, SHAPE, torch.float32, max_rank=8).stamp for folder in folders]
    first, alike, other = (stamp and stamp.recipe for stamp in stamps)
    assert first is alike is not other and None not in (first, other)
    damaged = write(tmp_path / "damaged", 8, DTYPES)
    file = damaged / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    last = first.spans[-1].offset + first.spans[-1].nbytes if first else 0
    data[last - 4 : last] = b"\xff" * 4
    file.write_bytes(data)
    with pytest.raises(AdapterRejected, match=r"lora_.*not finite"):
        read_adapter(damaged, SHAPE, torch.float32, max_rank=8)


def unpacked(block: Any) -> torch.Tensor:
    """What a GPU makes of pieces."""
    assert isinstance(block, Stored)
    found = torch.zeros(block.recipe.elements, dtype=block.dtype)
    memory = torch.cat(list(block.pieces))
    for kind, dtype in enumerate(DTYPES):
        unpack(
            SimpleNamespace(
                parts=torch.from_numpy(block.recipe.parts), scales=torch.from_numpy(block.recipe.scales),
                staged=memory.view(dtype), target=found, KIND=kind, STAGED=len(memory),
            )
        )  # fmt: skip
    ends = block.recipe.parts[:, Part.AT] // 320
    sizes = np.array([DTYPES[kind].itemsize for kind in block.recipe.parts[:, Part.KIND]])
    last = block.recipe.parts[:, Part.AT] + block.recipe.parts[:, Part.COUNT] * sizes - 1
    assert (last // 320 == ends).all(), "a part in two pieces"
    return found


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "a", 8, DTYPES)
    file = folder / "adapter_model.safetensors"

    def shrinking(*given: Any, **options: Any) -> Any:
        os.truncate(file, file.stat().st_size // 2)
        return recipe.recipe_of(*given, **options)

    monkeypatch.setattr(files, "recipe_of", shrinking)
    with pytest.raises(AdapterRejected, match="shrinking"):
        read_adapter(folder, SHAPE, torch.bfloat16, max_rank=8)


@given(st.data())
def test_members_are_those_of_the_whole(data: Any) -> None:
    text = json.dumps(data.draw(VALUES), indent=data.draw(st.sampled_from([None, 1])))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(["", ",", "}", "{", '"', ":", " ", '"a":1,'])) + text[at + 1 :]
    results = []
    for parse in (parse_object, parse_members):
        try:
            results.append(parse(text.encode(), "it"))
        except ModelRejected:
            results.append(None)
    assert results[0] == results[1]
