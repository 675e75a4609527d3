"""A stored format that headrace does not know, from checkpoint to logits, by public names and without a changed file.

Ternary weights: each element is -1, 0 or 1, and each output has one scale. A reader finds them in safetensors, and a
kernel multiplies by them without a multiplication for each weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tiny_models
import torch
from document_blocks import blocks, run_block
from model_driver import ModelUnderTest, capacity
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine import ModelRejected
from headrace.engine.model.checkpoint.readers import READERS, Checkpoint, Found, Reader, in_parts
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.cpu.linear import CpuLinear, KeptWeight
from headrace.ops.cpu.products import PRODUCTS, explain
from headrace.ops.formats import PartSpec, Stored

PACKED = ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The products in ternary; v_proj stays as it is, so that one product is fused from two formats."""
IDS = list(range(3, 90, 2))


@dataclass(frozen=True)
class Ternary:
    """Elements -1, 0 and 1, and one scale for each output."""

    name: str = "ternary"

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        return {"signs": PartSpec(shape, torch.int8), "scale": PartSpec(shape[:-1], torch.float32)}

    def dense(self, parts: Mapping[str, Tensor], _shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return (parts["signs"] * parts["scale"].unsqueeze(-1)).to(dtype)


class TernaryReader:
    """Finds `X.signs` and `X.scale` where a plain checkpoint has `X.weight`."""

    def find(self, files: Checkpoint, name: str) -> Found | None:
        stem = name.removesuffix(".weight")
        if not isinstance(files, SafetensorsFolder) or f"{stem}.signs" not in files.shapes:
            return None
        tensors = {"signs": f"{stem}.signs", "scale": f"{stem}.scale"}
        return in_parts(files, Ternary(), files.shapes[tensors["signs"]], tensors)


@dataclass
class TernaryKernel:
    """Adds the inputs whose sign is 1 and subtracts those whose sign is -1."""

    ran: list[int] = field(default_factory=list)
    """Rows of each product so far."""
    name: str = "ternary sums"

    def refuses(self, weight: Stored, _dtype: torch.dtype) -> str | None:
        return None if weight.format == Ternary() else f"adds ternary weights, not {weight.format.name}"

    def rows(self, _weight: Stored) -> range:
        return range(1, 9)

    def pack(self, weight: Stored, bias_O: Tensor | None, dtype: torch.dtype) -> CpuLinear:
        signs_OI, scale_O = weight.parts["signs"], weight.parts["scale"].to(dtype)
        plus_IO, minus_IO = (signs_OI == 1).T.to(dtype), (signs_OI == -1).T.to(dtype)

        def run(x_NI: Tensor) -> Tensor:
            self.ran.append(len(x_NI))
            y_NO = (x_NI @ plus_IO - x_NI @ minus_IO) * scale_O
            return y_NO if bias_O is None else y_NO + bias_O

        return run

    def kept(self, weight: Stored, dtype: torch.dtype) -> list[KeptWeight]:
        return [KeptWeight(weight.format.name, weight.shape[0] * (2 * weight.shape[1] + 1) * dtype.itemsize)]


def ternary(weight_OI: Tensor) -> dict[str, Tensor]:
    scale_O = weight_OI.abs().mean(1)
    return {"signs": (weight_OI / scale_O[:, None]).round().clamp(-1, 1).to(torch.int8), "scale": scale_O}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model twice: its products in ternary, and as the plain numbers that these stand for."""
    packed, plain = (tiny_models.whole_folder(tmp_path_factory.mktemp(name)) for name in ("packed", "plain"))
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if name.split(".")[-2] in PACKED:
            parts = ternary(stored.pop(name))
            stored |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
            tensors[name] = Ternary().dense(parts, tuple(tensor.shape), torch.float32)
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


def load(
    folder: Path, *, keep_packed: bool, readers: Sequence[Reader] = (TernaryReader(), *READERS)
) -> tuple[DecoderSpec, DecoderWeights]:
    spec = from_hf(read_hf_config(folder))
    weights = load_weights(folder, spec, dtype=torch.float32, device="cpu", keep_packed=keep_packed, readers=readers)
    return spec, weights


@pytest.mark.parametrize("keep_packed", [True, False])
def test_logits_are_those_of_the_plain_model(folders: tuple[Path, Path], keep_packed: bool) -> None:
    packed, plain = folders
    spec, weights = load(packed, keep_packed=keep_packed)
    kernel = TernaryKernel()
    tested = ModelUnderTest.make(spec, weights, torch.float32, capacity(96), (kernel, *PRODUCTS))
    _, reference = ModelUnderTest.load(plain)
    found, expected = (model.logits([IDS, IDS[:7]], 5, prompt=20) for model in (tested, reference))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert bool(kernel.ran) is keep_packed and max(kernel.ran, default=0) <= 8


def test_the_documented_format_does_the_same(folders: tuple[Path, Path]) -> None:
    document = "docs/extending_formats.md"
    names = run_block(document, "\n".join(source for _, source in blocks(document)))
    spec, weights = load(folders[0], keep_packed=True, readers=names["readers"])
    assert weights.layers[0].feed.matrices["down"].format == names["Ternary"]()
    tested = ModelUnderTest.make(spec, weights, torch.float32, capacity(96), names["products"])
    _, reference = ModelUnderTest.load(folders[1])
    (found,), (expected,) = (model.logits([IDS], 5, prompt=20) for model in (tested, reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_each_product_keeps_the_formats_of_its_tensors(folders: tuple[Path, Path]) -> None:
    _, weights = load(folders[0], keep_packed=True)
    layer = weights.layers[1]
    matrices = {**layer.mixer.matrices, **layer.feed.matrices}
    assert {matrices[name].format for name in ("gate_up", "o", "down")} == {Ternary()}
    assert matrices["gate_up"].shape == (96, 32) and matrices["gate_up"].nbytes == 96 * 32 + 96 * 4
    assert matrices["qkv"].format.name == "ternary + ternary + float32"
    assert weights.head.format.name == "float32"


def test_the_choice_is_explained(folders: tuple[Path, Path]) -> None:
    _, weights = load(folders[0], keep_packed=True)
    layer = weights.layers[0]
    products = (TernaryKernel(), *PRODUCTS)
    (few, name), (many, other) = explain(layer.feed.matrices["down"], torch.bfloat16, products).kernels
    assert (few.start, few.stop, name) == (1, 9, "ternary sums") and many.start == 9 and other in ("onednn", "torch")
    refusals = explain(layer.mixer.matrices["qkv"], torch.bfloat16, products).refusals
    assert refusals["ternary sums"] == "adds ternary weights, not ternary + ternary + float32"


def broken(folder: Path, to: Path, name: str, tensor: Tensor | None) -> Path:
    tiny_models.whole_folder(to)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("scale", None, "missing"),
        ("scale", torch.ones(33), r"float32 \[33\]"),
        ("scale", torch.ones(32).half(), r"float16 \[32\]"),
        ("scale", torch.full((32,), float("nan")), "not finite"),
        ("signs", torch.ones(32, 32, dtype=torch.uint8), "uint8"),
        ("signs", torch.ones(32, 16, dtype=torch.int8), r"wanted: the shape \[32, 32\]"),
    ],
)
@pytest.mark.parametrize("keep_packed", [True, False])
def test_parts_that_do_not_fit_are_refused_by_name(
    folders: tuple[Path, Path], tmp_path: Path, part: str, tensor: Tensor | None, message: str, keep_packed: bool
) -> None:
    name = f"model.layers.1.self_attn.o_proj.{part}"
    with pytest.raises(ModelRejected, match=message) as caught:
        load(broken(folders[0], tmp_path / "broken", name, tensor), keep_packed=keep_packed)
    assert str(caught.value.field).startswith("model.layers.1.self_attn.o_proj.")
