"""Gemma 4 on an emulated GPU: pages of several shapes in all that is done with pages, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import emulated_cuda
import emulated_kernels
import pytest
import torch
from emulated_cuda import emulated
from emulated_experts import EmulatedExpertsRun
from gpu import drafting
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, one_by_one, open_engine, together
from gpu.judge import Judge, Output
from gpu.test_resize import check_resizing, opened_on
from gpu.wearing import make
from torch import Tensor

from headrace.engine import EngineConfig, InvalidParams
from headrace.engine.inspection.inspect import inspect_model
from headrace.engine.model.cuda.listed import list_kernels
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.ops.cuda.arch import Arch

FAMILIES = ("gemma4", "gemma4 experts", "gemma4 small")
ELEMENTS = {
    "gemma4": 2 * 2 * 256 + 2 * (2 * 1 * 512),
    "gemma4 experts": 2 * 2 * 64 + 2 * (2 * 2 * 128),
    "gemma4 small": 2 * 256 + 2 * 512,
}
"""Elements that a token adds to the cache: one layer has a window, and of the small model two alone store any."""
SMALL = {"max_context": 256, "max_rows": 8}
RUN = EmulatedExpertsRun.run


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"), "cuda")


@pytest.fixture(scope="module")
def judges(zoo: Zoo) -> Callable[[str], Judge]:
    return cache(lambda name: Judge(zoo.folder(name), "cpu"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.rotated(3)
def test_prefixes_are_found_and_a_sleep_changes_nothing(zoo: Zoo, judges: Callable[[str], Judge], family: str) -> None:
    prompts = [draw(length, length) for length in (90, 33)]

    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **SMALL) as engine:
            assert engine.info.page_bytes == kv_bytes(zoo.folder(family), 1) == 16 * ELEMENTS[family] * 2
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
    if family != "gemma4 experts":  # layers without a window have heads of 512, the others of 256
        assert {"decode: split", "decode: fa2", "prefill: grouped", "prefill: FlashInfer"} <= gpu.launches.keys()
    judges(family).check(outputs, f"{family}: found prefixes, sleeps")


@pytest.mark.rotated(3)
@pytest.mark.parametrize("swaps", [False, True])
def test_chunks_beside_decodes_and_pages_that_run_out(
    zoo: Zoo, judges: Callable[[str], Judge], family: str, swaps: bool
) -> None:
    page = kv_bytes(zoo.folder(family), 1)
    options = {"kv_memory": 16 * page, "swap_memory": 200 * page if swaps else 0, "max_batched_tokens": 24}

    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **SMALL, **options) as engine:
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
    judges(family).check(outputs, f"{family}: chunks and preemption")


@pytest.mark.rotated(3)
def test_tokens_do_not_depend_on_how_pages_come_and_go(zoo: Zoo, family: str) -> None:
    with emulated():
        opened = opened_on(zoo, "cuda", family)
        try:
            check_resizing(opened)
        finally:
            opened.runner.close()


def test_no_pool_grows_where_another_one_cannot(zoo: Zoo) -> None:
    with emulated() as gpu:
        gpu.free_bytes = 64 << 20
        opened = opened_on(zoo, "cuda", "gemma4")
        try:
            runner: Any = opened.runner
            before, shapes = gpu.addresses.backed, [pool.shape[2:] for pool in runner._memory.pools]
            assert shapes == [(2, 16, 2, 256), (2, 16, 1, 512)]
            assert len({pool.shape[1] for pool in runner._memory.pools}) == 1, "a scratch page for each pool"
            with pytest.raises(torch.OutOfMemoryError):
                runner.resize(runner.most_pages)
            assert gpu.addresses.backed == before
        finally:
            opened.runner.close()


@pytest.mark.rotated(2)
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_cache_of_8_bits(zoo: Zoo, family: str) -> None:
    """Rounding moves the small model too much for a judge."""

    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **SMALL, kv_dtype="fp8") as engine:
            assert engine.info.page_bytes == 16 * ELEMENTS[family]
            outputs = await together(engine, [draw(length, length) for length in (3, 17, 64, 127)], greedy(8))
            await at_rest(engine)
        return outputs

    with emulated():
        outputs = anyio.run(run)
    Judge(zoo.folder(family), "cpu", fp8=True).check(outputs, f"{family}, fp8")


MODULES = {
    "gemma4": ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gemma4 experts": ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gemma4 small": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@pytest.mark.rotated(3)
@pytest.mark.filterwarnings("ignore")
def test_adapters_update_layers_of_different_sizes(zoo: Zoo, family: str, tmp_path: Path) -> None:
    own = rf".*layers\.\d+\.(self_attn|mlp)\.({'|'.join(MODULES[family])})"
    made = make(zoo.folder(family), tmp_path, family, {"r": 8, "target_modules": own})

    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **SMALL, adapter_slots=1) as engine:
            await engine.adapters.load("one", made.folder)
            prompts = [draw(length, length) for length in (1, 45, 100)]
            found = [await engine.generate(list(prompt), greedy(8), adapter="one") for prompt in prompts]
            return [Output(prompt, each.choices[0].token_ids) for prompt, each in zip(prompts, found, strict=True)]

    with emulated():
        outputs = anyio.run(run)
    Judge(made.merged, "cpu").check(outputs, family)


def run_without_factors(self: Any, x: Tensor, routed: Tensor, weights: Any, out: Tensor, padding: Any) -> None:
    RUN(self, x, routed, weights._replace(scales_X=None), out, padding)


def run_with_one_input(self: Any, x: Tensor, routed: Tensor, weights: Any, out: Tensor, padding: Any) -> None:
    RUN(self, x, x, weights, out, padding)


BUGS = {
    "values that are not normed": (emulated_kernels, "normed_values", lambda v_NKD, _: v_NKD),
    "experts without factors": (EmulatedExpertsRun, "run", run_without_factors),
    "a router that reads what experts read": (EmulatedExpertsRun, "run", run_with_one_input),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_judge_notices_a_bug(
    zoo: Zoo, judges: Callable[[str], Judge], bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were these without effect on the checkpoints, the tests above would prove nothing."""
    name = "gemma4" if "values" in bug else "gemma4 experts"
    monkeypatch.setattr(*BUGS[bug])

    async def run() -> list[Output]:
        async with open_engine(zoo.folder(name), "cuda", **SMALL) as engine:
            return await together(engine, [draw(length, length) for length in (3, 17, 64, 127)], greedy(8))

    with emulated():
        outputs = anyio.run(run)
    with pytest.raises(AssertionError, match="outputs are wrong"):
        judges(name).check(outputs, bug)


def test_inspect_tells_what_an_engine_takes(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kv_dtype, size in (("auto", 2), ("fp8", 1)):
        config = EngineConfig(model=zoo.folder(family), device="cuda", kv_memory="1MiB", kv_dtype=kv_dtype)
        with emulated():
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            facts = inspect_model(config)
        assert facts.runs
        (gpu,) = facts.devices
        assert gpu.kv_bytes_per_token == ELEMENTS[family] * size
        assert gpu.pages == (1 << 20) // (16 * ELEMENTS[family] * size)


def test_the_list_of_kernels_has_a_line_for_each_shape(zoo: Zoo, family: str) -> None:
    spec = from_hf(read_hf_config(zoo.folder(family)))
    lines = {line.what: line.kernels for line in list_kernels(spec, Arch.named("sm_90"), rows=(1, 64)).lines}
    sizes = (64, 128) if family == "gemma4 experts" else (256, 512)
    prefills = {what: kernels[0] for what, kernels in lines.items() if what.startswith("prefill")}
    whole, windowed = (f"prefill, heads of {sizes[1]}", f"prefill, heads of {sizes[0]}, window of 37")
    assert prefills == {whole: "tile" if sizes[1] == 128 else "grouped", windowed: "fa3"}
    decode = lines[f"decode, 16,384 tokens a row, heads of {sizes[1]}"]
    assert decode == (("xqa", "even") if sizes[1] == 128 else ("split", "split"))
    products = [what for what in lines if what.startswith("qkv")]
    assert len(products) == len({(kind.head_dim, kind.state.elements > 0) for kind in spec.mixer_kinds})  # type: ignore[attr-defined]
    assert ("own_gate" in lines) == ("per_layer" in lines) == (family == "gemma4 small")
    assert ("experts" in lines) == (family == "gemma4 experts")


def test_a_way_to_decode_that_a_shape_rules_out_is_refused_by_name(zoo: Zoo) -> None:
    async def run(way: str) -> None:
        options: dict[str, Any] = {**SMALL, "decode_attention": way}
        async with open_engine(zoo.folder("gemma4"), "cuda", **options):
            raise AssertionError("opened")

    for way, why in (("fa2", "heads are of 512"), ("fused", "stores values as they are")):
        with emulated(), pytest.raises(InvalidParams, match=why):
            anyio.run(run, way)


def check_drafts(folder: Path, judge: Judge, pages: int, swap: int, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Assert that greedy tokens are the best ones where steps verify drafts, most of which are right."""
    page, count, greedily = kv_bytes(folder, 1), 50 if pages else 24, [{"ignore_eos": True}] * len(drafting.PROMPTS)
    options: dict[str, Any] = {"launch_ahead": 3} | ({"kv_memory": pages * page} if pages else {})
    if swap:
        options |= {"swap_memory": swap * page, "prefix_cache": False}

    def check(stats: Any) -> None:
        assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 25
        assert not pages or stats.preemptions > 0

    (plain,) = drafting.run(folder, "cuda", greedily, count=count)
    drafting.draft_by_answers(monkeypatch, drafting.told(plain))
    drafting.random_depths(monkeypatch, 0)
    (found,) = drafting.run(folder, "cuda", greedily, count=count, check=check, **options, **drafting.SPECULATING)
    judge.check([Output(each.prompt_token_ids, each.choices[0].token_ids) for each in found], what)


@pytest.mark.rotated(5)
@pytest.mark.parametrize(("pages", "swap"), [(0, 0), (16, 0), (16, 200)], ids=["roomy", "short of pages", "swapped"])
def test_drafts_change_nothing(
    zoo: Zoo,
    judges: Callable[[str], Judge],
    family: str,
    pages: int,
    swap: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers whose heads have other sizes see the lines of a row, too."""
    with emulated() as gpu:
        check_drafts(zoo.folder(family), judges(family), pages, swap, monkeypatch, f"{family} with drafts")
    assert gpu.launches["_accept_kernel"] > 0


def test_the_judge_notices_lines_that_see_too_much(
    zoo: Zoo, judges: Callable[[str], Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = emulated_cuda.EVERY_KERNEL["_prepare_lines_kernel"]

    def shifted(at: Any) -> None:
        shift(at)
        at.seq_lens[at.LINES - 1 :: at.LINES] += 1

    monkeypatch.setitem(emulated_cuda.EVERY_KERNEL, "_prepare_lines_kernel", shifted)
    with emulated(), pytest.raises(AssertionError, match="outputs are wrong"):
        check_drafts(zoo.folder("gemma4"), judges("gemma4"), 0, 0, monkeypatch, "one key too many")
