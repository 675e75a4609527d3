"""`headrace inspect`: what it says without opening a model equals what the opened engine says, errors included."""

from __future__ import annotations

import importlib
import io
import json
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from drafting_engines import small_folder
from emulated_cuda import emulated
from gguf import GGMLQuantizationType as Kind
from gguf_models import write_model
from gpu.checkpoints import FAMILIES, kv_heads, make_family
from quantised_checkpoints import CASES, write_checkpoint
from rich.console import Console
from typer.testing import CliRunner

from headrace.engine import EngineConfig, EngineInfo, HeadraceError, InvalidParams
from headrace.engine.inspection.facts import ModelFacts
from headrace.engine.inspection.inspect import inspect_model
from headrace.engine.life.build import open_engine
from headrace.engine.model.checkpoint import safetensors
from headrace.server.cli import app
from headrace.server.commands.model_facts import print_facts

PLAIN = {"TERM": "dumb", "COLUMNS": "200"}


@pytest.fixture(autouse=True)
def same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let as much memory seem free whenever somebody asks, little enough to limit the pages of a larger model."""
    for module in ("model.cpu.sizing", "inspection.devices"):
        monkeypatch.setattr(f"headrace.engine.{module}.free_host_bytes", lambda: 1 << 30)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["inspect", *arguments], env=PLAIN, catch_exceptions=False)
    return done.exit_code, done.output


def facts_of(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code, text = run(str(folder), "--json", *arguments)
    found: dict[str, Any] = json.loads(text)
    return code, found


def opened(folder: Path, **options: Any) -> EngineInfo:
    made = open_engine(EngineConfig(model=folder, **options))
    made.runner.close()
    return made.info


def failure(folder: Path, **options: Any) -> tuple[str, str]:
    """The class and the message of the error that opening raises."""
    with pytest.raises(HeadraceError) as caught:
        open_engine(EngineConfig(model=folder, **options))
    return type(caught.value).__name__, str(caught.value)


def check_against(info: EngineInfo, facts: ModelFacts, place: int = 0) -> None:
    """Assert that an engine on a device says what was said of it."""
    device = facts.devices[place]
    assert facts.runs and facts.shape is not None and device.problem is None
    assert (facts.shape.architecture, facts.shape.vocab_size) == (info.architecture, info.vocab_size)
    assert (device.weights, device.weight_bytes) == (info.weights, info.weight_bytes)
    assert device.dtype == info.dtype
    assert device.kv_bytes_per_token == info.page_bytes // info.page_size
    assert device.pages == info.num_pages
    for fit in device.fits:
        assert fit.rows == min(info.max_rows, info.num_pages // -(-fit.context // info.page_size))
    assert device.fits[-1].context == info.max_context


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(family: str, tmp_path: Path) -> None:
    make_family(family, tmp_path)
    facts = inspect_model(EngineConfig(model=tmp_path))
    check_against(opened(tmp_path), facts)
    assert facts.shape is not None
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (facts.shape.family, facts.shape.layers) == (config.model_type, config.num_hidden_layers)
    assert (facts.shape.heads, facts.shape.kv_heads) == (config.num_attention_heads, kv_heads(config))
    assert {part.format for part in facts.stored} == {"bfloat16"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    stored = ("correction_bias", "layer_scalar")
    buffers = [each for name, each in model.named_buffers() if name.endswith(stored)]
    # Some versions of transformers keep a router's weights in float32, wherever the file has bfloat16.
    assert facts.stored_bytes == sum(2 * each.numel() for each in [*model.parameters(), *buffers])


@pytest.mark.parametrize("options", [{"max_context": 100}, {"quantize": "int8", "quantize_head": True}], ids=str)
def test_options_of_the_engine(options: dict[str, Any], tmp_path: Path) -> None:
    tiny_models.whole_folder(tmp_path)
    check_against(opened(tmp_path, **options), inspect_model(EngineConfig(model=tmp_path, **options)))


@pytest.mark.parametrize("name", ["compressed mixture", "gptq v2 in an order", "bitsandbytes nf4", "fp8 blocks"])
def test_quantised_checkpoints(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES[name])
    facts = inspect_model(EngineConfig(model=tmp_path))
    check_against(opened(tmp_path), facts)
    formats = {each.format for each in facts.stored if each.part in ("attention", "feed-forward")}
    assert {each.removeprefix("bfloat16") for each in formats} >= CASES[name].formats - {"float32"}


def test_a_gguf_file(smollm2: Path) -> None:
    facts = inspect_model(EngineConfig(model=smollm2))
    check_against(opened(smollm2), facts)
    assert facts.devices[0].fits[-1].rows == 0 < facts.devices[0].fits[0].rows < 64  # by memory, not by the limit
    held = facts.stored_bytes
    assert 0.99 * smollm2.stat().st_size < held + (4 << 20) and held < smollm2.stat().st_size


def test_an_encoder(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.BertConfig(vocab_size=96, max_position_embeddings=70, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    facts = inspect_model(EngineConfig(model=tmp_path))
    info = opened(tmp_path)
    (device,) = facts.devices
    assert facts.runs and facts.shape is not None and facts.shape.kind == "encoder"
    assert (device.weights, device.kv_bytes_per_token, device.fits) == (info.weights, None, ())
    assert facts.shape.max_context == info.max_context == 70


@pytest.mark.rotated(3)
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "fp8"}, {"quantize": "int4", "quantize_head": True}], ids=str)
def test_a_gpu(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_family("qwen3", tmp_path)
    with emulated():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        config = EngineConfig(model=tmp_path, device="cuda", **options)
        facts = importlib.import_module("headrace.engine.inspection.inspect").inspect_model(config)
        made = importlib.import_module("headrace.engine.life.build").open_engine(config)
        made.runner.close()
    check_against(made.info, facts)
    assert facts.devices[0].device == "cuda:0" and "H200" in facts.devices[0].name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_draft_model_is_counted(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, small = tiny_models.chat_folder(tmp_path / "model"), small_folder(tmp_path / "small", num_hidden_layers=3)
    options = {"device": device, "speculation": f"draft:{small},quantize=int8", "max_rows": 8, "max_context": 128}
    with emulated() if device == "cuda" else nullcontext():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
        config = EngineConfig(model=model, **options)
        facts = importlib.import_module("headrace.engine.inspection.inspect").inspect_model(config)
        made = importlib.import_module("headrace.engine.life.build").open_engine(config)
        made.runner.close()
    check_against(made.info, facts)
    (found,) = facts.devices
    assert [part.nbytes for part in found.weights if part.part == "draft model"]
    code, told = facts_of(model, "--device", "cpu", "--speculate", f"draft:{tmp_path / 'nowhere'}")
    assert code == 1 and told["problems"][0]["field"] == "speculation.path"


def test_a_draft_model_that_is_quantised_already_is_refused_as_when_it_is_opened(smollm2: Path, tmp_path: Path) -> None:
    model = tiny_models.chat_folder(tmp_path)
    code, told = facts_of(model, "--device", "cpu", "--speculate", f"draft:{smollm2},quantize=int8")
    assert code == 1 and told["devices"][0]["problem"]["field"] == "speculation.quantize"


def test_a_gpu_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_family("qwen3", tmp_path)
    with emulated() as gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        gpu.free_bytes = 1 << 20
        inspecting = importlib.import_module("headrace.engine.inspection.inspect").inspect_model
        facts = inspecting(EngineConfig(model=tmp_path))
    cpu, small = facts.devices
    assert facts.runs and cpu.problem is None and small.problem is not None
    assert small.problem.error == "DeviceUnavailable" and "too little memory for this model" in small.problem.message
    assert small.weight_bytes and small.kv_bytes_per_token == cpu.kv_bytes_per_token and not small.fits


def test_an_unknown_architecture_is_refused_with_what_is_known(tmp_path: Path) -> None:
    tiny_models.whole_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GrokForCausalLM"]}))
    code, facts = facts_of(tmp_path)
    assert code == 1 and not facts["runs"] and facts["devices"] == []
    assert [(each["error"], each["message"]) for each in facts["problems"]] == [failure(tmp_path)]
    assert (facts["shape"]["architecture"], facts["shape"]["layers"]) == ("GrokForCausalLM", 2)
    held = sum(tensor.nbytes for tensor in safetensors_of(tmp_path).values())
    assert facts["stored_bytes"] == held and facts["stored"] == []


def safetensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def test_an_unknown_gguf_architecture(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", Kind.F16, "gptneox")
    code, facts = facts_of(tmp_path)
    assert code == 1 and facts["problems"][0]["field"] == "general.architecture"
    assert facts["shape"]["architecture"] == "gptneox" and facts["shape"]["hidden_size"] == 256
    assert facts["stored_bytes"] > 0


@pytest.mark.parametrize("how", ["truncated", "a tensor missing", "no weights", "no tokenizer"])
def test_what_is_damaged_is_told_as_opening_tells_it(how: str, tmp_path: Path) -> None:
    tiny_models.whole_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "a tensor missing":
        data = weights.read_bytes()
        weights.write_bytes(data.replace(b"layers.1.mlp.up_proj", b"layers.7.mlp.up_proj"))
    elif how == "no weights":
        weights.unlink()
    else:
        (tmp_path / "tokenizer.json").unlink()
    code, facts = facts_of(tmp_path)
    assert code == 1
    assert failure(tmp_path) in [(each["error"], each["message"]) for each in facts["problems"]]
    assert facts["shape"]["layers"] == 2 and facts["devices"][0]["kv_bytes_per_token"] == tiny_models.PAGE_BYTES // 32
    assert bool(facts["devices"][0]["weights"]) == (how == "no tokenizer")


def test_options_that_cannot_be_are_told_as_opening_tells_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["awq"])
    for options, arguments in (
        ({"quantize": "int4"}, ["--quantize", "int4"]),
        ({"max_context": 1000}, ["--context", "1000"]),
        ({"kv_dtype": "fp8", "device": "cpu"}, ["--kv-dtype", "fp8"]),
    ):
        code, facts = facts_of(tmp_path, *arguments)
        problem = facts["devices"][0]["problem"]
        assert code == 1 and (problem["error"], problem["message"]) == failure(tmp_path, **options)
        assert facts["stored_bytes"] and facts["devices"][0]["kv_bytes_per_token"]
    assert facts["devices"][0]["weights"]
    code, facts = facts_of(tmp_path, "--device", "cuda")
    if not torch.cuda.is_available():
        assert code == 1 and facts["problems"][0]["error"] == "DeviceUnavailable" and facts["stored"]


def test_what_is_not_there(tmp_path: Path) -> None:
    code, facts = facts_of(tmp_path / "nowhere")
    assert code == 1 and facts["path"] is None and facts["problems"][0]["error"] == "ModelRejected"
    with pytest.raises(InvalidParams, match="^quantize_head: needs quantize="):
        run(str(tmp_path), "--quantize-head")


def test_a_model_of_the_hub_that_is_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    tiny_models.whole_folder(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **options: str(tmp_path))
    code, text = run("somebody/tiny")
    assert not code and f"found at: {tmp_path}" in text


def test_a_model_that_is_too_large_unless_it_is_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_family("llama 3", tmp_path)
    small = sum(part.nbytes for part in opened(tmp_path, quantize="int8").weights)
    free = small + (1 << 16)
    for module in ("model.cpu.sizing", "inspection.devices"):
        monkeypatch.setattr(f"headrace.engine.{module}.free_host_bytes", lambda: free)
    code, text = run(str(tmp_path))
    assert code == 1 and f'With quantize="int8" the weights take {small:,} of the {free:,} bytes' in text


def test_headers_are_read_once_however_many_ways_to_quantise_are_weighed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family("llama 3", tmp_path)
    read: list[str] = []
    read_header = safetensors.read_header
    monkeypatch.setattr(safetensors, "read_header", lambda file, name: [read.append(name), read_header(file, name)][1])
    opened(tmp_path)
    assert read == ["model.safetensors"]
    for module in ("model.cpu.sizing", "inspection.devices"):
        monkeypatch.setattr(f"headrace.engine.{module}.free_host_bytes", lambda: 1)
    facts = inspect_model(EngineConfig(model=tmp_path))
    assert "A smaller model would run" in (facts.devices[0].advice or "") and facts.devices[0].weights
    assert read == ["model.safetensors"] * 2


def test_seventy_billion_weights_are_described_without_reading_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    tiny_models.random_folder(tmp_path, **sizes, tie_word_embeddings=False)
    tiny_models.write_tokenizer(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        state = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + 2 * tensor.numel()]}
        end += 2 * tensor.numel()
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    monkeypatch.setattr(safetensors, "_read_into", lambda *_: pytest.fail("a weight was read"))
    facts = inspect_model(EngineConfig(model=tmp_path, quantize="int4"))
    assert facts.stored_bytes == end > 140 * 10**9 and facts.shape is not None and facts.shape.layers == 80
    assert facts.devices[0].kv_bytes_per_token == 80 * 2 * 8 * 128 * 2
    assert 0.29 < facts.devices[0].weight_bytes / end < 0.36
    problem, advice = facts.devices[0].problem, facts.devices[0].advice
    assert problem is not None and problem.error == "DeviceUnavailable" and not facts.runs
    assert advice == f"A smaller model would run, or a device with more than the {1 << 30:,} bytes that are free here."


def test_a_terminal_gets_tables_and_a_pipe_lines(tmp_path: Path) -> None:
    tiny_models.whole_folder(tmp_path)
    facts = inspect_model(EngineConfig(model=tmp_path))
    out = io.StringIO()
    print_facts(facts, Console(file=out, force_terminal=True, width=100))
    assert "│" in out.getvalue() and "Weights in the files" in out.getvalue()
    code, text = run(str(tmp_path))
    lines = dict(line.strip().split(": ", 1) for line in text.splitlines() if ": " in line)
    assert not code and "│" not in text and lines["layers"] == "2"
    assert lines["keys and values"] == f"{tiny_models.PAGE_BYTES // 32:,} bytes a token"


def test_it_starts_no_engine_and_prints_no_more_than_the_object(tmp_path: Path) -> None:
    tiny_models.whole_folder(tmp_path)
    code = "import sys; sys.argv[0] = 'headrace'; from headrace.server.cli import main; main()"
    command = [sys.executable, "-c", code, "inspect", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["runs"] and done.stderr == ""
