"""A model that transformers' module computes over pages gives what transformers gives, however its tokens are cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from fallback_models import FAMILIES, made, saved
from model_driver import OPERATIONS, ModelUnderTest, capacity
from torch import Tensor

from headrace.engine import Completion, Engine, EngineStats, SamplingParams
from headrace.engine.model.cpu.runner import CpuDecoder, cpu_ops
from headrace.engine.model.cpu.sizing import runs_native
from headrace.engine.model.fallback.model import FallbackModel
from headrace.engine.model.families.registry import read_hf_config
from headrace.ops.cpu.native.library import Context

LENGTHS = (61, 40, 17)
CUTS = {
    "in one piece": (128, None),
    "in chunks": (7, None),
    "in chunks of a page": (4, None),
    "decode after a prefill": (128, 15),
    "decode after chunks": (5, 11),
}
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
    kv = next(iter(ops.values())).allocate_kv(fallback.spec.num_layers, size.num_pages)
    tested = ModelUnderTest(decoder, ops, kv, size)
    assert max(float(logits.std()) for logits in expected) > 0.1, "the model says something"
    for cut, (chunk, prompt) in CUTS.items():
        for wanted, found in zip(expected, tested.logits(sequences, chunk, prompt), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4, msg=lambda text: f"{cut}: {text}")  # noqa: B023


def test_an_engine_generates_what_transformers_generates(family: str, tmp_path: Path) -> None:
    """Side by side in too few pages, so that requests are preempted, and once more behind a cached prefix."""
    model, sequences, _ = reference(family)
    prompts = [ids[:length] for ids, length in zip(sequences, (17, 15, 13), strict=True)]
    saved(model, tmp_path)
    expected = [greedy(model, ids, 24) for ids in prompts]
    params = SamplingParams(temperature=0, max_tokens=24)
    spec = FallbackModel.read(read_hf_config(tmp_path), "random").spec
    page = spec.num_layers * spec.uniform_attention.state.elements * 4 * 4  # bytes of 4 tokens in float32
    options: dict[str, Any] = {"dtype": "float32", "page_size": 4, "max_batched_tokens": 16, "max_rows": 3}

    async def run() -> tuple[list[Completion], Completion, EngineStats]:
        found: dict[int, Completion] = {}
        async with Engine(tmp_path, **options, kv_memory=20 * page, model_impl="transformers") as engine:
            assert engine.info.model_impl == "transformers"
            async with anyio.create_task_group() as group:

                async def ask(index: int) -> None:
                    found[index] = await engine.generate(prompts[index], params)

                for index in range(len(prompts)):
                    group.start_soon(ask, index)
            before = engine.stats()
            again = await engine.generate(prompts[2], params)
            assert engine.stats().cached_tokens > before.cached_tokens, "the prompt's start is found in pages"
            return [found[index] for index in range(len(prompts))], again, before

    completions, again, stats = anyio.run(run)
    assert [each.choices[0].token_ids for each in completions] == expected
    assert again.choices[0].token_ids == expected[2]
    assert stats.preemptions > 0, "requests have lost their pages and have come back"


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    made = model.generate(torch.tensor([ids]), attention_mask=mask, **options)
    return [int(token) for token in made[0, len(ids) :]]
