"""What an engine on a GPU says where kernels cannot be compiled, and what `headrace kernels build` makes.

The GPU is emulated (tests/emulated_cuda.py), so that nothing is compiled; files stand in for what would have been.
"""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emulated_cuda import Gpu, emulated
from quantised_checkpoints import CASES, write_checkpoint

from headrace.engine import DeviceUnavailable, InvalidParams, ModelRejected
from headrace.engine.bench.engine.random_heads import write_head
from headrace.engine.config import EngineConfig
from headrace.engine.life.build import build_kernels, open_engine
from headrace.engine.model.families.registry import from_hf
from headrace.engine.speculation import DraftModel, Eagle
from headrace.server.cli import main

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 256,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
    "hidden_act": "silu", "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    return tmp_path


def config(folder: Path, **changes: Any) -> EngineConfig:
    options = {"load_format": "random", "kv_memory": "1MiB", "max_rows": 2, "max_batched_tokens": 64} | changes
    return EngineConfig(model=folder, device="cuda", **options)


def test_a_machine_without_a_compiler_is_told_what_to_install_before_weights_are_read(
    gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cuda = importlib.import_module("headrace.engine.model.cuda.opening")
    cuda_cache = importlib.import_module("headrace.ops.cuda.compiling.cache")
    monkeypatch.setattr(open_cuda, "check_compilers", cuda_cache.check_compilers)
    monkeypatch.setattr(open_cuda, "load_weights", None)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(DeviceUnavailable, match=r"^device: compiling kernels needs a C\+\+ compiler.*apt-get install"):
        open_engine(config(folder))
    monkeypatch.setattr(cuda_cache, "find_host_compilers", lambda: None)
    with pytest.raises(DeviceUnavailable, match="^device: this torch was built without CUDA"):
        open_engine(config(folder))


def test_a_kernel_that_fails_while_an_engine_opens_is_a_typed_error(
    gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "compiling xqa failed: error: no such thing (the whole log is x.log)"

    def fail(*values: Any, **options: Any) -> None:
        raise importlib.import_module("headrace.ops.cuda.compiling.toolkit").CannotCompile(message)

    monkeypatch.setattr(importlib.import_module("headrace.engine.model.cuda.prefills"), "_attention", fail)
    with pytest.raises(DeviceUnavailable) as caught:
        open_engine(config(folder))
    assert str(caught.value) == f"device: {message}"


def test_a_chain_in_which_a_kernel_may_read_what_is_still_written_is_refused(
    gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: products of one row write weights, which the next of them reads before it waits."""
    vector = importlib.import_module("headrace.ops.cuda.products.kernels").VectorProducts
    launch = vector.launch

    def planted(self: Any, *given: Any, **named: Any) -> Any:
        honest = launch(self, *given, **named)
        return replace(honest, writes=honest.writes | {"weights"})

    monkeypatch.setattr(vector, "launch", planted)
    with pytest.raises(DeviceUnavailable, match="the product 'vector' reads weights before it waits, and the product"):
        open_engine(config(folder))


def test_kernels_of_several_models_become_one_wheel(
    gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda_cache = importlib.import_module("headrace.ops.cuda.compiling.cache")
    runner = importlib.import_module("headrace.engine.model.cuda.runner").CudaRunner
    warm_up, warmed = runner.warm_up, []

    def keep_one(self: Any, *, everything: bool = False) -> None:
        warm_up(self)
        if everything:
            kept = cuda_cache.cache().own / "flashinfer" / f"module{len(warmed)}"
            kept.mkdir(parents=True)
            (kept / f"{kept.name}.so").write_bytes(b"code")
            (kept / "lock").touch()
            warmed.append(kept)

    monkeypatch.setattr(runner, "warm_up", keep_one)
    command = [
        "headrace",
        "kernels",
        "build",
        str(folder),
        str(folder / "config.json"),
        "--wheel",
        str(folder / "dist"),
    ]
    monkeypatch.setattr(sys, "argv", [*command, "--max-rows", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    (wheel,) = (folder / "dist").iterdir()
    assert f"2 kernels in {wheel}" in capsys.readouterr().out
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [f"headrace_kernels_sm90a/flashinfer/module{index}/module{index}.so" for index in range(2)]
    assert [name for name in names if "flashinfer" in name] == libraries
    assert not warmed[0].exists(), "a folder that nobody asked for was left"


def asked_of_nvcc(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The sources for codes that are compiled from now on, with their macros."""
    asked = []
    declared = importlib.import_module("headrace.ops.cuda.products.kernels")

    def build(source: str, updates: bool, macros: dict[str, int]) -> None:
        if macros:
            asked.append((source, {**macros, "updates": updates}))

    monkeypatch.setattr(declared, "_build_for_rows", build)
    return asked


@pytest.mark.parametrize(("method", "head"), [("fp8", False), ("int8", False), ("int8", True), ("int4", False)])
def test_kernels_of_weights_that_the_engine_will_quantise_are_built_and_named(
    method: str, head: bool, gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = importlib.import_module("headrace.ops.cuda.codes.kinds")
    kind = {"fp8": codes.Kind(codes.E4M3), "int8": codes.Kind(codes.INT8), "int4": codes.Kind(codes.INT4, 128, True)}[
        method
    ]
    asked = asked_of_nvcc(monkeypatch)
    command = ["headrace", "kernels", "build", str(folder), "--quantize", method, "--max-rows", "2"]
    more = ["--quantize-head"] if head else []
    monkeypatch.setattr(sys, "argv", [*command, *more, "--cache", str(folder / "kept")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert {source for source, _ in asked} == {"even_heads", "even_linear"}
    assert all(macros == {**kind.macros, "updates": False} for _, macros in asked)
    assert f"{folder}: kernels for weights in {kind.name}{'' if head else ' and dense'}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "formats"), [("fp8 blocks", ("fp8-g128", "dense")), ("awq", ("int4-g64-zeros", "dense"))]
)
def test_kernels_are_those_of_the_formats_in_the_files(
    name: str, formats: tuple[str, ...], gpu: Gpu, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, CASES[name])
    assert build_kernels(config(tmp_path)).formats == formats
    with pytest.raises(InvalidParams, match="^quantize: .* is stored as "):
        build_kernels(config(tmp_path, quantize="int4"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelRejected, match="^quantization_config: .* build from the whole folder"):
        build_kernels(config(tmp_path))


def test_kernels_are_built_without_reading_weights(gpu: Gpu, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["fp8 blocks"])
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    weights.write_bytes(data[:head] + b"\x7f" * (len(data) - head))  # NaN, which no engine opens with
    assert build_kernels(config(tmp_path)).formats == ("fp8-g128", "dense")


def test_kernels_of_a_draft_model_are_built_in_the_formats_of_its_files(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, target = tmp_path / "small", tmp_path / "target"
    for folder in (small, target):
        folder.mkdir()
    write_checkpoint(small, CASES["fp8 blocks"])
    described = json.loads((small / "config.json").read_text())
    del described["quantization_config"]
    (target / "config.json").write_text(json.dumps(described))
    codes = importlib.import_module("headrace.ops.cuda.codes.kinds")
    asked = asked_of_nvcc(monkeypatch)
    wanted = {"stored": codes.Kind(codes.E4M3, 128), "asked for": codes.Kind(codes.INT8)}
    build_kernels(config(target, speculation=DraftModel(small, k=1)))
    assert asked and all(macros == {**wanted["stored"].macros, "updates": False} for _, macros in asked)
    asked.clear()
    build_kernels(config(target, speculation=DraftModel(target, k=1, quantize="int8")))
    assert asked and all(macros == {**wanted["asked for"].macros, "updates": False} for _, macros in asked)
    (small / "model.safetensors").unlink()
    with pytest.raises(ModelRejected, match=r"^speculation\.path: .* build from the whole folder") as caught:
        build_kernels(config(target, speculation=DraftModel(small, k=1)))
    assert caught.value.field == "speculation.path"


def test_kernels_of_a_quantised_head_are_built(gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = importlib.import_module("headrace.ops.cuda.codes.kinds")
    write_head(folder / "head", from_hf(QWEN3))
    asked = asked_of_nvcc(monkeypatch)
    build_kernels(config(folder, speculation=Eagle(folder / "head", k=1, quantize="int4")))
    wanted = {**codes.Kind(codes.INT4, 128, True).macros, "updates": False}
    assert asked and all(macros == wanted for _, macros in asked)


def test_the_command_builds_for_engines_that_speculate(gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of_nvcc(monkeypatch)
    speculate = f"draft:{folder},k=1,quantize=int8"
    command = ["headrace", "kernels", "build", str(folder), "--speculate", speculate, "--max-rows", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--cache", str(folder / "kept")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and asked


def test_a_folder_that_cannot_keep_kernels_is_refused_before_they_are_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = folder / "config.json" / "kernels"  # below a file there can be no folder
    monkeypatch.setattr(sys, "argv", ["headrace", "kernels", "build", str(folder), "--cache", str(taken)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "cannot be written" in " ".join(capsys.readouterr().err.split())
