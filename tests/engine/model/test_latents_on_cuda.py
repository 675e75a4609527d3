"""Latent attention on an emulated GPU: its pages in all that a scheduler does with pages, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from emulated_cuda import emulated
from gpu import drafting
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, one_by_one, open_engine, together
from gpu.judge import Judge, Output
from gpu.test_resize import check_resizing, opened_on

from headrace.engine.bench.shapes import SHAPES
from headrace.engine.model.cuda.listed import list_kernels
from headrace.engine.model.families.registry import from_hf
from headrace.engine.stats import EngineStats
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.kernels import KERNELS
from headrace.ops.cuda.latents.shape import LatentShape

FAMILY = "glm 4.7 flash"
SMALL = {"max_context": 256, "max_rows": 8}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"), "cuda")


@pytest.fixture(scope="module")
def folder(zoo: Zoo) -> Path:
    return zoo.folder(FAMILY)


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return Judge(folder, "cpu")


def test_prefixes_are_found_and_a_sleep_changes_nothing(folder: Path, judge: Judge) -> None:
    prompts = [draw(length, length) for length in (90, 33)]

    async def run() -> list[Output]:
        async with open_engine(folder, "cuda", **SMALL) as engine:
            assert engine.info.page_bytes == kv_bytes(folder, 1) == 16 * 3 * (96 + 16) * 2
            found = await one_by_one(engine, prompts, 8)
            found += await together(engine, [[*ids, *tokens, 9] for ids, tokens in found], greedy(8))
            assert engine.stats().cached_tokens >= 96
            for level in (1, 2):
                await engine.sleep(level)
                await engine.wake()
                found += (again := await one_by_one(engine, prompts, 8))
                assert [each.tokens for each in again] == [each.tokens for each in found[:2]]
            await at_rest(engine)
        return found

    with emulated() as gpu:
        outputs = anyio.run(run)
    assert {"_latent_decode_kernel", "_latent_merge_kernel", "_latent_prefill_kernel"} <= gpu.launches.keys()
    judge.check(outputs, "found prefixes, sleeps")


@pytest.mark.parametrize("swaps", [False, True])
def test_chunks_beside_decodes_and_pages_that_run_out(folder: Path, judge: Judge, swaps: bool) -> None:
    page = kv_bytes(folder, 1)
    options = {"kv_memory": 16 * page, "swap_memory": 200 * page if swaps else 0, "max_batched_tokens": 24}

    async def run() -> list[Output]:
        async with open_engine(folder, "cuda", **SMALL, **options) as engine:
            assert engine._life.loop is not None
            engine._life.loop.scheduler.swaps.host.page_seconds = 1e-9  # so that swapping is chosen, where it can be
            lengths = (50, 20, 16, 25, 40, 10)
            found = await together(engine, [draw(length, length) for length in lengths], greedy(40))
            stats = engine.stats()
            assert stats.preemptions and bool(stats.swaps) is swaps
            await at_rest(engine)
        return found

    with emulated():
        outputs = anyio.run(run)
    judge.check(outputs, "chunks and preemption")


@pytest.mark.parametrize("name", ["deepseek v3", FAMILY])
def test_ngrams_change_nothing(name: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row repeats itself, several lines attend to the latent vectors of one row."""
    drafting.random_depths(monkeypatch, 1)
    asked = [{"ignore_eos": True}] * 4

    def check(stats: EngineStats) -> None:
        assert stats.drafted_tokens > 40 and 0 < stats.accepted_tokens < stats.drafted_tokens

    with emulated() as gpu:
        (found,) = drafting.run(zoo.folder(name), "cuda", asked, count=30, check=check, **drafting.SPECULATING)
    assert gpu.launches["_ngram_kernel"] > 10 and gpu.launches["_latent_decode_kernel"] > 10
    outputs = [Output(each.prompt_token_ids, each.choices[0].token_ids) for each in found]
    Judge(zoo.folder(name), "cpu").check(outputs, f"{name} with drafts")


def test_tokens_do_not_depend_on_how_pages_come_and_go(zoo: Zoo) -> None:
    with emulated():
        opened = opened_on(zoo, "cuda", FAMILY)
        try:
            check_resizing(opened)
        finally:
            opened.runner.close()


def test_the_list_has_lines_for_latent_attention() -> None:
    spec = from_hf(SHAPES["deepseek-v2-lite"])
    for arch in ("sm_80", "sm_90", "sm_120"):
        lines = {line.what: line.kernels for line in list_kernels(spec, Arch.named(arch), rows=(1, 64)).lines}
        assert lines["decode, 1,024 tokens a row"] == lines["prefill"] == ("latent", "latent")
        assert {"q", "kv_a", "kv_b", "o", "experts", "shared_down"} <= lines.keys()


def test_what_no_kernel_attends_to_is_named() -> None:
    """Of three kinds of shapes each kernel takes its own."""
    arch = Arch.named("sm_90")
    latent = LatentShape(heads=4, latent_dim=512, rotated_dim=64, scale=0.1)
    wide = LatentShape(heads=4, latent_dim=576, rotated_dim=64, scale=0.1)
    for kernel in (*KERNELS.latent_decodes, *KERNELS.latent_prefills):
        assert kernel.refuses(latent, arch) is None
        assert "576 and 64, the kernel takes 512 and 64" in (kernel.refuses(wide, arch) or "")
        assert kernel.refuses(HeadShape(heads=4, kv_heads=1, head_dim=64), arch) is not None
    assert latent.page_bytes == 16 * 576 * 2
