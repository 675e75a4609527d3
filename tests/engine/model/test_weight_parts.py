"""`EngineInfo.weights` equals what the open model's tensors take, on a CPU and on an emulated GPU."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from emulated_cuda import emulated
from gguf import GGMLQuantizationType as Kind
from gguf_models import VOCAB, write_model
from quantised_checkpoints import CASES, write_checkpoint
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams
from headrace.engine.life.build import open_engine
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.weight_parts import stored_parts
from headrace.engine.model.checkpoint.weights import describe_weights, load_weights
from headrace.engine.model.cpu.opening import open_cpu
from headrace.engine.model.cpu.runner import CpuRunner
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.spec import DecoderSpec
from headrace.engine.stats import EngineInfo
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.linear import OneDnnKernel
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.formats import Stored

WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2}
OPTIONS: list[dict[str, Any]] = [
    {},
    *({"quantize": method} for method in ("fp8", "int8", "int4")),
    *({"quantize": method, "quantize_head": True} for method in ("fp8", "int8", "int4")),
]


def held(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that a thing holds, by whatever way, but those of a device's operations."""
    if id(thing) in seen or isinstance(thing, CpuOps | type):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    inside: list[object] = []
    if isinstance(thing, dict):
        inside = list(thing.values())
    elif isinstance(thing, list | tuple):
        inside = list(thing)
    elif type(thing).__module__.startswith("headrace."):
        names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        inside = [getattr(thing, name) for name in names if hasattr(thing, name)]
        inside += list(getattr(thing, "__dict__", {}).values())
    for each in inside:
        yield from held(each, seen)


def bytes_of(tensors: Iterator[Tensor]) -> int:
    """The memory of some tensors, what they share counted once."""
    sizes = {}
    for tensor in tensors:
        if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined] # has no stub
            sizes[id(tensor)] = torch.ops.mkldnn._nbytes(tensor)
        else:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def on_cpu(folder: Path, **options: Any) -> tuple[EngineInfo, int]:
    """What an engine says, and what its decoder holds."""
    made = open_engine(EngineConfig(model=folder, device="cpu", kv_memory="1MiB", **options))
    runner = made.runner
    assert isinstance(runner, CpuRunner)
    try:
        return made.info, bytes_of(held(runner._decoder, set()))
    finally:
        runner.close()


def on_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[EngineInfo, int]:
    """What an engine says, and the bytes of the tensors that it asked the memory of weights for."""
    made: list[int] = []
    with emulated():
        memory = importlib.import_module("headrace.ops.cuda.memory.weights").WeightMemory
        empty = memory.empty

        def counted(self: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            made.append(math.prod(shape) * dtype.itemsize)
            found: Tensor = empty(self, shape, dtype)
            return found

        monkeypatch.setattr(memory, "empty", counted)
        build = importlib.import_module("headrace.engine.life.build")
        small = {"max_context": 256, "max_batched_tokens": 256, "max_rows": 8}
        opened = build.open_engine(EngineConfig(model=folder, device="cuda", kv_memory="1MiB", **small, **options))
        opened.runner.close()
    return opened.info, sum(made)


def formats(info: EngineInfo) -> dict[str, set[str]]:
    return {
        part: {each.format for each in info.weights if each.part == part}
        for part in ("embedding", "attention", "feed-forward", "head", "other")
    }


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("compressed mixture", "gptq v2 in an order", "gptq with rules", "fp8 blocks", "bitsandbytes nf4")
    folders = {name: tmp_path_factory.mktemp("quantised") / name for name in names}
    for name, folder in folders.items():
        write_checkpoint(folder, CASES[name])
    return folders


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [*OPTIONS, {"dtype": "float32"}], ids=str)
def test_a_cpu_says_what_it_keeps(options: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    folder = tiny_models.random_folder(tmp_path, **WIDE, tie_word_embeddings=tied)
    info, real = on_cpu(folder, load_format="random", **options)
    assert info.weight_bytes == sum(part.nbytes for part in info.weights) == real
    wanted = {"fp8": "bfloat16", "int8": "int8", "int4": "int4-g128-zeros"}.get(options.get("quantize", ""), "bfloat16")
    if "dtype" in options:
        wanted = "float32"
    assert wanted in formats(info)["attention"]
    assert (wanted in formats(info)["head"]) == (
        options.get("quantize_head", False) or wanted in ("bfloat16", "float32")
    )


@pytest.mark.parametrize("name", ["compressed mixture", "gptq v2 in an order", "gptq with rules", "fp8 blocks"])
def test_quantised_checkpoints(name: str, quantised: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    info, real = on_cpu(quantised[name])
    assert info.weight_bytes == real
    info, real = on_gpu(quantised[name], monkeypatch)
    assert info.weight_bytes == real
    if name == "compressed mixture":
        assert formats(info)["attention"] == {"fp8"} and formats(info)["head"] == {"bfloat16"}
        assert formats(info)["feed-forward"] == {"int4-g32-zeros", "bfloat16"}


@pytest.mark.rotated(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gpu_says_what_it_keeps(
    options: dict[str, Any], tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.random_folder(tmp_path, **WIDE, tie_word_embeddings=tied)
    info, real = on_gpu(folder, monkeypatch, load_format="random", **options)
    assert info.weight_bytes == real
    wanted = {"int4": "int4-g128-zeros"}.get(options.get("quantize", ""), options.get("quantize", "bfloat16"))
    assert wanted in formats(info)["attention"] and formats(info)["embedding"] == {"bfloat16"}
    head = wanted if options.get("quantize_head") else "bfloat16"
    assert formats(info)["head"] == (set() if tied and head == "bfloat16" else {head})


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_1, Kind.Q6_K])
def test_gguf(kind: Kind, head: bool, tmp_path: Path) -> None:
    biases = {"blk.0.attn_q.bias": (256,), "blk.0.attn_k.bias": (128,), "blk.0.attn_v.bias": (128,)}
    write_model(tmp_path / "model.gguf", kind, extra=biases | {"output.weight": (VOCAB, 256)} if head else {})
    with GgufFile(tmp_path / "model.gguf") as file:
        device = open_cpu(EngineConfig(model=tmp_path, kv_memory="1MiB"), file.spec(), file)
    runner = device.runner
    assert isinstance(runner, CpuRunner)
    assert sum(part.nbytes for part in device.weights) == bytes_of(held(runner._decoder, set()))
    runner.close()
    stored = {each.format for each in device.weights if each.part == "attention"}
    assert stored == ({"bfloat16"} if kind == Kind.F16 else {kind.name.lower()})


def test_a_gpu_keeps_what_headers_say(tmp_path: Path) -> None:
    """Of GGUF files and of every kind of checkpoint: the parts of weights that are read, and of those that are not."""

    def layout(weight: Stored) -> Stored:
        return in_codes(weight, torch.bfloat16)

    sources: list[tuple[Path, DecoderSpec]] = []
    for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q6_K, Kind.BF16):
        path = tmp_path / f"{kind.name}.gguf"
        write_model(path, kind)
        with GgufFile(path) as file:
            sources.append((path, file.spec()))
    mixed = tmp_path / "mixed.gguf"
    write_model(mixed, Kind.Q4_K, kinds={"blk.0.attn_v.weight": Kind.Q6_K, "blk.0.ffn_down.weight": Kind.Q6_K})
    with GgufFile(mixed) as file:
        sources.append((mixed, file.spec()))
    for number, case in enumerate(CASES.values()):
        write_checkpoint(tmp_path / str(number), case)
        sources.append((tmp_path / str(number), from_hf(read_hf_config(tmp_path / str(number)))))
    for source, spec in sources:
        loaded = load_weights(source, spec, dtype=torch.bfloat16, device="cpu", layout=layout)
        described = describe_weights(source, spec, dtype=torch.bfloat16, layout=layout)
        assert stored_parts(described) == stored_parts(loaded), source


def test_large_padded_weights_are_extrapolated_exactly() -> None:
    for outs, ins, dtype in ((20_011, 96, torch.bfloat16), (9_001, 70, torch.float32)):
        weight = Stored.from_dense(torch.empty(outs, ins, dtype=dtype))
        packed = OneDnnKernel().pack(weight, None, dtype)
        (kept,) = OneDnnKernel().kept(weight, dtype)
        assert kept.nbytes == bytes_of(held(packed, set()))


def test_a_quantised_head_needs_quantised_layers() -> None:
    with pytest.raises(InvalidParams, match="quantize_head: needs quantize=") as caught:
        EngineConfig(model="any", quantize_head=True)
    assert caught.value.field == "quantize_head"
