"""Draft heads that are quantised as they are loaded: drafts of the rounded weights, unchanged answers, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from draft_driver import Drafting, Row, states_of
from draft_heads import HEADS as FORMATS
from draft_heads import VOCABULARY, EagleHead, random_target, rounded, rounded_matrix
from drafting_engines import HEADS, always_deep, answers_alone, ask_all, fit, small_folder, told
from model_driver import OPERATIONS
from mtp_models import LAYERS, with_module
from safetensors.torch import load_file, save_file
from tiny_models import chat_folder

from headrace.engine import DeviceUnavailable, Engine, InvalidParams
from headrace.engine.speculation import DraftModel, Eagle, Medusa, Mtp, Speculation, speculation_of
from headrace.ops.cpu.native.library import library
from headrace.ops.quantise import Method

COUNT = 3


def drawn() -> list[Row]:
    generator = torch.Generator().manual_seed(2)
    return [Row(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()) for length in (21, 9, 16, 5)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize(
    ("name", "method"),
    [("EAGLE", "int8"), ("EAGLE-3", "fp8"), ("EAGLE-3", "int4"), ("Medusa of two blocks", "int4")],
)
def test_drafts_are_those_of_the_rounded_weights(
    name: str, method: Method, native: bool, target: Path, tmp_path: Path
) -> None:
    """In float32, where no activation is rounded."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    torch.manual_seed(3)
    head, rows = FORMATS[name](), drawn()
    drafting = Drafting(target, head.write(tmp_path / "head"), native=native, quantize=method)
    states = [states_of(model, row.ids) for row in rows]
    expected, dense = (
        [each.drafts(state, row.ids[1:], COUNT) for state, row in zip(states, rows, strict=True)]
        for each in (rounded(head, method), head)
    )
    assert drafting.side_by_side(rows, 5, None, COUNT) == expected
    assert method != "int4" or expected != dense, "rounding has to be seen"


@pytest.mark.parametrize("native", OPERATIONS)
def test_drafts_of_a_module_are_those_of_its_rounded_weights(native: bool, tmp_path: Path) -> None:
    """Embeddings and output head, which are the model's, are not rounded."""
    model, head = with_module("GLM-4.5", tmp_path, first_k_dense_replace=LAYERS + 1)
    rows = drawn()
    states = [states_of(model, row.ids, LAYERS) for row in rows]
    for each in model.model.layers[LAYERS].modules():
        if isinstance(each, torch.nn.Linear):
            each.weight.data = rounded_matrix(each.weight.data, "int4")
    head.mtp["eh_proj.weight"] = rounded_matrix(head.mtp["eh_proj.weight"], "int4")
    expected = [head.drafts(state, row.ids[1:], COUNT) for state, row in zip(states, rows, strict=True)]
    drafting = Drafting(tmp_path, None, native=native, quantize="int4")
    assert drafting.side_by_side(rows, 64, None, COUNT) == expected


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "cpu_threads": 1, "kv_memory": "1MiB", "seed": 3} | more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Any]:
    return answers_alone(model, **options())


@pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2")
@pytest.mark.parametrize(("name", "method"), [("EAGLE", "int8"), ("EAGLE-3", "int4"), ("Medusa", "int4")])
def test_quantised_heads_change_no_answer_and_take_less(
    name: str, method: Method, model: Path, alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model's own dtype, beside dense matrices whose inputs are no whole groups, and also after a sleep."""
    always_deep(monkeypatch)
    torch.manual_seed(3)
    make, of = HEADS[name]
    dense = of(fit(make()).write(tmp_path / "head"), k=3)
    asked = replace(dense, quantize=method)

    async def taken(speculation: Speculation) -> dict[str, int]:
        async with Engine(model, speculation=speculation, **options()) as engine:
            if speculation is asked:
                assert told(await ask_all(engine)) == alone
                await engine.sleep(2)
                await engine.wake()
                assert told(await ask_all(engine)) == alone
                assert engine.stats().drafted_tokens > 200
            assert all(each.format == "bfloat16" for each in engine.info.weights if each.part != "draft head")
            found = {"all": engine.info.weight_bytes, "bfloat16": 0, method: 0}
            for each in engine.info.weights:
                if each.part == "draft head" and each.format != "int64":
                    found[each.format.partition("-")[0]] += each.nbytes
            return found

    before, after = anyio.run(taken, dense), anyio.run(taken, asked)
    gone = before["bfloat16"] - after["bfloat16"]
    assert 0 == before[method] < after[method] < (0.8 if method == "int8" else 0.5) * gone
    assert before["all"] - after["all"] == gone - after[method]
    monkeypatch.setattr("headrace.engine.model.cpu.sizing.free_host_bytes", lambda: after["all"] - 1)
    with pytest.raises(DeviceUnavailable, match=f"the weights take {after['all']} bytes"):
        anyio.run(taken, asked)


def store_in_8_bits(folder: Path, name: str) -> None:
    """Store a matrix of a folder in 8-bit floats with one scale."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{name}.weight_scale"] = torch.ones(1)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))


async def open_with(model: Path, speculation: Speculation) -> None:
    async with Engine(model, speculation=speculation, **options()):
        pass


def test_what_is_quantised_already_is_refused_before_the_model_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = fit(EagleHead(biased=False)).write(tmp_path / "head")
    store_in_8_bits(head, "layers.0.mlp.down_proj")
    module = chat_folder(tmp_path / "module")
    with_module("GLM-4.5", module, vocab_size=257)
    store_in_8_bits(module, f"model.layers.{LAYERS}.eh_proj")
    small = small_folder(tmp_path / "small")
    store_in_8_bits(small, "model.layers.0.mlp.down_proj")
    cases: list[tuple[Path, Speculation, str]] = [
        (model, Eagle(head, quantize="int4"), r"layers\.0\.mlp\.down_proj\.weight"),
        (module, Mtp(quantize="int8"), r"model\.layers\.3\.eh_proj\.weight"),
        (model, DraftModel(small, quantize="int8"), r"model\.layers\.0\.mlp\.down_proj\.weight"),
    ]
    for folder, speculation, _ in cases[:2]:
        anyio.run(open_with, folder, replace(speculation, quantize=None))
    monkeypatch.setattr("headrace.engine.model.cpu.opening._open", lambda *rest: pytest.fail("weights were read"))
    for folder, speculation, name in cases:
        why = rf"^speculation\.quantize: {name} is stored as fp8 already; leave quantize out"
        with pytest.raises(InvalidParams, match=why) as caught:
            anyio.run(open_with, folder, speculation)
        assert caught.value.field == "speculation.quantize"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eagle:path/to/head,quantize=int4", Eagle("path/to/head", quantize="int4")),
        ("medusa:path/to/heads,k=2,quantize=int8", Medusa("path/to/heads", k=2, quantize="int8")),
        ("mtp:quantize=fp8", Mtp(quantize="fp8")),
    ],
)
def test_formats_are_named_by_text(text: str, expected: Speculation) -> None:
    assert speculation_of(text) == expected
    for wrong in ("int3", ""):
        with pytest.raises(InvalidParams, match=r"^speculation\.quantize: must be fp8, int8, int4 or None") as caught:
            speculation_of(f"{text.rpartition('=')[0]}={wrong}")
        assert caught.value.field == "speculation.quantize"
