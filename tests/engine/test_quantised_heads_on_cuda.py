"""Draft heads that are quantised as they are loaded, on an emulated GPU: drafts of the rounded weights, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from cuda_draft_driver import CudaDrafting
from draft_driver import states_of
from draft_heads import HEADS as FORMATS
from draft_heads import VOCABULARY, rounded, widen
from drafting_engines import HEADS, always_deep, ask_all, fit, small_folder
from drafting_engines import cuda_options as options
from drafting_engines import told_tokens as told
from emulated_cuda import Gpu, emulated

from headrace.engine import Engine
from headrace.engine.speculation import Speculation
from headrace.ops.quantise import Method

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16
}  # fmt: skip
TOKENS = 264
DEPTH = 3


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.mark.parametrize(("name", "method"), [("EAGLE", "fp8"), ("EAGLE-3", "int4"), ("Medusa of two blocks", "int8")])
def test_drafts_are_those_of_the_rounded_weights(
    name: str, method: Method, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    widen(monkeypatch)
    target = small_folder(tmp_path / "target", **SIZES, num_hidden_layers=7, vocab_size=VOCABULARY)
    model = transformers.LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    torch.manual_seed(3)
    head = FORMATS[name]()
    rows = [torch.randint(0, VOCABULARY, (length,)).tolist() for length in (21, 9, 40, 4)]
    expected = [rounded(head, method).drafts(states_of(model, ids), ids[1:], DEPTH) for ids in rows]
    with torch.inference_mode():
        drafting = CudaDrafting(gpu, target, head.write(tmp_path / "head"), DEPTH, method)
        drafting.start(rows, 64, 5)
        assert drafting.drafts(range(len(rows)), DEPTH) == expected, "behind prompts"
        assert drafting.verified(rows, 0, 2) == expected, "behind steps with drafts and without"


@pytest.mark.rotated(2)
@pytest.mark.parametrize(("name", "method"), [("EAGLE-3", "int4"), ("Medusa", "int8")])
def test_quantised_heads_change_no_token_and_are_kept_in_codes(
    name: str, method: Method, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of the dense head, whose steps have as many lines, also after a sleep without weights."""
    always_deep(monkeypatch)
    widen(monkeypatch)
    model = small_folder(tmp_path / "model", **SIZES, num_hidden_layers=2, vocab_size=TOKENS)
    torch.manual_seed(3)
    make, of = HEADS[name]
    head = fit(make(), TOKENS)
    dense = of(head.write(tmp_path / "head"), k=3)
    matrices = 2 * sum(each.numel() for each in head.tensors.values() if each.dim() == 2)

    async def run(speculation: Speculation) -> list[Any]:
        async with Engine(model, speculation=speculation, **options()) as engine:
            answers = told(await ask_all(engine))
            if speculation is dense:
                return answers
            found = {part.format: part.nbytes for part in engine.info.weights if part.part == "draft head"}
            packed = sum(nbytes for format, nbytes in found.items() if format.startswith(method))
            assert packed < 0.65 * matrices and found["bfloat16"] < 0.02 * matrices, "scales come in whole tiles"
            await engine.sleep(2)
            await engine.wake()
            assert told(await ask_all(engine)) == answers
            assert engine.stats().drafted_tokens > 100
            return answers

    assert anyio.run(run, replace(dense, quantize=method)) == anyio.run(run, dense)
