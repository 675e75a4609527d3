"""A model that transformers' module computes over pages gives what transformers gives, however its tokens are cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from against_transformers import all_at_once, check_cuts, greedily
from fallback_models import FAMILIES, made, saved
from model_driver import OPERATIONS, ModelUnderTest, capacity
from torch import Tensor

from headrace.engine import Engine, EngineStats
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cpu.runner import CpuDecoder
from headrace.engine.model.cpu.sizing import runs_native
from headrace.engine.model.fallback.model import FallbackModel
from headrace.engine.model.families.registry import read_hf_config
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.native.library import Context

LENGTHS = (61, 40, 17)
pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to fix


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def reference(family: str) -> tuple[Any, list[list[int]], list[Tensor]]:
    """A model, sequences, and their logits in one piece by transformers."""
    model = made(family)
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in LENGTHS]
    with torch.inference_mode():
        logits = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences]
    return model, sequences, logits


@pytest.mark.rotated(2)
@pytest.mark.parametrize("native", OPERATIONS)
def test_logits_equal_those_of_transformers_for_any_cut(family: str, native: bool, tmp_path: Path) -> None:
    model, sequences, expected = reference(family)
    model.save_pretrained(tmp_path)
    fallback = FallbackModel.read(read_hf_config(tmp_path), tmp_path)
    if native and not runs_native(fallback.spec):
        pytest.skip("a variant of attention, which torch's operations compute")
    size = capacity(fallback.spec.vocab_size)
    sizes = {"page_size": size.page_size, "max_positions": size.max_context}
    ops = cpu_ops(fallback.spec, **sizes, dtype=torch.float32, context=Context(1) if native else None)
    decoder: CpuDecoder = fallback.open(
        ops, lambda step: step.positions_N, dtype=torch.float32, device=torch.device("cpu")
    )
    kv = CpuKv.allocate(kv_layout(fallback.spec, ops), size.num_pages, torch.float32)
    tested = ModelUnderTest(decoder, ops, kv, size)
    check_cuts(tested, sequences, expected)


@pytest.mark.rotated(2)
def test_an_engine_generates_what_transformers_generates(family: str, tmp_path: Path) -> None:
    """Side by side in too few pages, so that requests are preempted, and once more behind a cached prefix."""
    model, sequences, _ = reference(family)
    prompts = [ids[:length] for ids, length in zip(sequences, (17, 15, 13), strict=True)]
    saved(model, tmp_path)
    spec = FallbackModel.read(read_hf_config(tmp_path), "random").spec
    page = spec.cached_elements * 4 * 4  # bytes of 4 tokens in float32
    options: dict[str, Any] = {"dtype": "float32", "page_size": 4, "max_batched_tokens": 16, "max_rows": 3}

    async def run() -> tuple[list[list[int]], EngineStats]:
        async with Engine(tmp_path, **options, kv_memory=20 * page, model_impl="transformers") as engine:
            assert engine.info.model_impl == "transformers"
            together, before = await all_at_once(engine, prompts, 24), engine.stats()
            (again,) = await all_at_once(engine, prompts[2:], 24)
            assert again.usage.cached_tokens, "the prompt's start is found in pages"
            return [each.choices[0].token_ids for each in (*together, again)], before

    found, stats = anyio.run(run)
    for ids, tokens in zip([*prompts, prompts[2]], found, strict=True):
        assert len(tokens) == 24 and tokens == greedily(model, ids, tokens)
    assert stats.preemptions > 0, "requests have lost their pages and have come back"
