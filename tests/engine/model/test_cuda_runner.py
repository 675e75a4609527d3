"""The host side of the CUDA path, whole and unchanged, on a GPU that is emulated: see tests/emulated_cuda.py.

Tokens are right, by transformers or exactly; no pinned memory, plan or graph is used wrongly, or `emulated` raises; and
what goes wrong on the device costs what it should. Kernels themselves are tested on a GPU (tests/gpu, tests/ops).
"""

from __future__ import annotations

import contextlib
import importlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from emulated_cuda import Gpu, emulated, kernels_on
from gpu.checkpoints import SCALED, exact_logits, kv_bytes
from gpu.choosing import choose, random_sampling
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, one_by_one, open_engine, together
from gpu.judge import Judge, Output
from gpu.options import KINDS, Answer, answers, check_same
from gpu.shaping import SideBySide
from gpu.test_elastic import check_resizing_under_load, check_sleeping_under_load
from gpu.test_families import scaled_outputs
from gpu.test_hosted import check_late_masks
from gpu.test_options import mixed
from gpu.test_resize import check_resizing, opened_on
from gpu.test_soak import soak
from gpu.test_stops import check_stops
from leftovers import Threads
from numpy.typing import NDArray

from headrace.engine import (
    Engine,
    EngineCrashed,
    HeadraceError,
    RequestFailed,
    ResponseFormat,
    SamplingParams,
)
from headrace.engine.grammar.compiled import CompiledGrammar
from headrace.engine.scheduling.asked import Sampling
from headrace.engine.scheduling.plan import Capacity, PageEntry, StepPlan
from headrace.ops.formats import Stored

LENGTHS = (1, 2, 16, 17, 37, 65, 127, 128)
"""As many as an engine has rows."""
LAUNCHER = "headrace-launcher"
SMALL = {"max_context": 256, "max_batched_tokens": 256, "max_rows": 8}


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"), "cuda")


@pytest.fixture(scope="session")
def judges(zoo: Zoo) -> Callable[[str], Judge]:
    made: dict[str, Judge] = {}

    def judge(name: str) -> Judge:
        if name not in made:
            made[name] = Judge(zoo.folder(name), "cpu")
        return made[name]

    return judge


def engine_on(zoo: Zoo, name: str, **options: Any) -> Engine:
    return open_engine(zoo.folder(name), "cuda", **(SMALL | options))


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [draw(length, 1000 * seed + length) for length in lengths]


def params_of(sampling: Sampling, count: int, **fields: Any) -> SamplingParams:
    fields |= {name: getattr(sampling, name) for name in Sampling.__slots__}
    return SamplingParams(**fields, max_tokens=count)


def tune(monkeypatch: pytest.MonkeyPatch, **numbers: Any) -> None:
    """Choose between kernels by other numbers."""
    arch = importlib.import_module("headrace.ops.cuda.arch").Arch
    monkeypatch.setattr(arch, "tuning", replace(arch.named("sm_90").tuning, **numbers))


def fused_up_to(tokens: int) -> dict[str, Any]:
    """Ways to attend in decodes: up to four rows of so many tokens in one kernel, all others by plan."""
    table = importlib.import_module("headrace.ops.cuda.tuning.table")
    return {"fused": (table.Span(range(1, 5), range(tokens + 1)),), "fa2": (table.Span(table.ANY),)}


def expected(asked: Sequence[tuple[Sequence[int], Sampling]], count: int) -> list[list[int]]:
    """What the exact checkpoint gives: its logits follow from the last token alone, to the last bit."""
    table_VV = exact_logits().bfloat16()
    known = [list(prompt) for prompt, _ in asked]
    for _ in range(count):
        rows = table_VV[[ids[-1] for ids in known]]
        for ids, token in zip(
            known, choose("cpu", rows, [each for _, each in asked], [len(ids) for ids in known]), strict=True
        ):
            ids.append(token)
    return [ids[-count:] for ids in known]


# -- right tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.rotated(2)
@pytest.mark.parametrize(("name", "attention"), [("mistral", "fa2"), ("qwen3", "xqa"), ("qwen2 windowed", "even")])
def test_greedy_tokens_are_transformers_best(
    zoo: Zoo, judges: Callable[[str], Judge], gpu: Gpu, name: str, attention: str
) -> None:
    """Alone, in a full batch whose rows end one after another, in chunks, on cached pages, and preempted."""
    counts = [greedy(4 + 2 * at) for at in range(len(LENGTHS))]

    async def roomy() -> list[Output]:
        async with engine_on(zoo, name, decode_attention=attention) as engine:
            outputs = await one_by_one(engine, prompts(1, 45, 150, seed=1), 16)
            outputs += await together(engine, prompts(*LENGTHS), counts)
            follow_ups = [[*ids, *tokens, *draw(9, len(ids))] for ids, tokens in outputs[-5:]]
            before = engine.stats().cached_tokens
            hits = await together(engine, follow_ups, greedy(8))
            assert engine.stats().cached_tokens - before >= 0.8 * sum(len(ids) for ids, _ in outputs[-5:])
            await at_rest(engine)
        return outputs + hits

    async def cramped() -> list[Output]:
        options = {"max_batched_tokens": 24, "kv_memory": kv_bytes(zoo.folder(name), 30)}
        async with engine_on(zoo, name, decode_attention=attention, **options) as engine:
            outputs = await together(engine, prompts(60, 50, 40, 35, 30, 25, 20, 55, seed=3), greedy(36))
            # Rows give back as many pages as they take where every layer has a window.
            assert engine.stats().preemptions or name == "mistral"
            await at_rest(engine)
        return outputs

    judges(name).check(anyio.run(roomy), f"{name}, room for all")
    judges(name).check(anyio.run(cramped), f"{name}, chunked and preempted")
    assert gpu.launches[{"xqa": "decode: xqa", "fa2": "decode: fa2", "even": "decode: even"}[attention]] and gpu.replays
    assert gpu.launches["product: even"]


def test_long_prefills_take_the_activation_into_the_product(
    zoo: Zoo, judges: Callable[[str], Judge], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 65 tokens or more here."""
    tune(monkeypatch, tile_rows=range(65, 1000))

    async def run() -> list[Output]:
        async with engine_on(zoo, "qwen3") as engine:
            return await together(engine, prompts(*LENGTHS), greedy(4))

    judges("qwen3").check(anyio.run(run), "products of many rows")
    assert gpu.launches["product: tile"] and gpu.launches["prefill: tile"] and "prefill: FlashInfer" not in gpu.launches


def test_choices_of_one_prompt_copy_the_page_that_they_share(
    zoo: Zoo, judges: Callable[[str], Judge], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They sample different tokens, each among the three best after what it has itself written.

    Copying waits for the device, so the event loop's thread must not do it.
    """
    judge = judges("qwen3")
    copies = importlib.import_module("headrace.ops.cuda.memory.copies")
    copy, copied_in = copies.copy_pages, set()

    def copy_pages(pools: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            copied_in.add(threading.current_thread().name)
        copy(pools, pairs)

    monkeypatch.setattr(copies, "copy_pages", copy_pages)

    async def run() -> list[Output]:
        async with engine_on(zoo, "qwen3") as engine:
            outputs = []
            for length in (5, 24):
                params = SamplingParams(temperature=1.5, top_k=3, seed=length, n=4, max_tokens=20)
                completion = await engine.generate(draw(length, length), params)
                outputs += [Output(completion.prompt_token_ids, each.token_ids) for each in completion.choices]
            await at_rest(engine)
        return outputs

    outputs = anyio.run(run)
    assert copied_in == {LAUNCHER}
    assert len({tuple(tokens) for _, tokens in outputs}) == len(outputs)
    for output in outputs:
        logits_TV = judge.logits(output)
        third_T = logits_TV.topk(3).values[:, 2]
        gap_T = third_T - logits_TV.gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
        assert float(gap_T.max()) <= judge.margin


def test_engines_of_one_process_open_one_after_another(zoo: Zoo, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measures what the other has left, and captures graphs while nobody else opens."""
    module = importlib.import_module("headrace.engine.model.cuda.opening")
    opens, inside, most = module._open, list[int](), 0

    def counted(*args: Any) -> object:
        nonlocal most
        inside.append(1)
        most = max(most, len(inside))
        try:
            return opens(*args)
        finally:
            inside.pop()

    async def one() -> None:
        async with engine_on(zoo, "mistral", **SMALL):
            pass

    async def both() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(one)

    monkeypatch.setattr(module, "_open", counted)
    anyio.run(both)
    assert most == 1


@pytest.mark.rotated(2)
@pytest.mark.parametrize("launch_ahead", [1, 4])
def test_random_requests_under_launch_ahead(
    zoo: Zoo, judges: Callable[[str], Judge], gpu: Gpu, launch_ahead: int
) -> None:
    """Cancelled, sampled, forked, prefixed and preempted, as on a GPU, but fewer."""
    made = anyio.run(soak, zoo, "qwen3", 25, launch_ahead)
    judges("qwen3").check(made.greedy_outputs(), f"launch_ahead {launch_ahead}")


@pytest.mark.rotated(2)
@pytest.mark.parametrize("launch_ahead", [1, 4])
def test_sampled_tokens_are_those_of_the_cpu(
    zoo: Zoo, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, launch_ahead: int
) -> None:
    """With filters or without, through little pinned memory, while the way of attention changes with the context."""
    rows, exchange = (importlib.import_module(f"headrace.engine.model.cuda.{name}") for name in ("rows", "exchange"))
    monkeypatch.setattr(rows, "MOST_PAIRS", 8)
    monkeypatch.setattr(exchange, "_MOST_SENT", 20)
    for name in ("engine.model.cuda.exchange", "engine.model.cuda.prefills", "ops.cuda.attention.paged"):
        monkeypatch.setattr(importlib.import_module(f"headrace.{name}"), "_RING", 1)
    monkeypatch.setattr(exchange, "_TURNS", launch_ahead)
    tune(monkeypatch, decode=fused_up_to(4096 // 20))
    generator = random.Random(launch_ahead)
    asked = [(draw(generator.randrange(1, 90), generator.random()), random_sampling(generator)) for _ in range(40)]
    options = {"max_rows": 12, "max_batched_tokens": 40, "max_context": 128, "launch_ahead": launch_ahead}

    async def run() -> list[Output]:
        memory = kv_bytes(zoo.folder("exact"), 30)
        async with engine_on(zoo, "exact", kv_memory=memory, **options) as engine:
            outputs = await together(engine, [ids for ids, _ in asked], [params_of(each, 24) for _, each in asked])
            assert engine.stats().preemptions
            await at_rest(engine)
        return outputs

    assert [list(output.tokens) for output in anyio.run(run)] == expected(asked, 24)
    assert gpu.launches["decode: fa2"] and gpu.launches["decode: fused"]


@pytest.mark.parametrize("launch_ahead", [1, 3])
def test_swapped_pages_come_back(zoo: Zoo, gpu: Gpu, launch_ahead: int) -> None:
    """In turn with steps that write to the pages they left."""
    asked = [(ids, Sampling()) for ids in prompts(60, 50, 40, 35, 30, 25, 20, 55)]
    page = kv_bytes(zoo.folder("exact"), 1)
    options = {"kv_memory": 30 * page, "swap_memory": 200 * page, "launch_ahead": launch_ahead, "prefix_cache": False}

    async def run() -> list[Output]:
        async with engine_on(zoo, "exact", **options) as engine:
            assert engine._life.loop is not None
            engine._life.loop.scheduler.swaps.host.page_seconds = 1e-9  # emulated copies are slower than these steps
            outputs = await together(engine, [ids for ids, _ in asked], [params_of(each, 36) for _, each in asked])
            assert engine.stats().swaps > 1 and engine.stats().swaps == engine.stats().preemptions
            await at_rest(engine)
        return outputs

    assert [list(output.tokens) for output in anyio.run(run)] == expected(asked, 36)


def test_filters_that_appear_late_are_captured_by_the_launcher(zoo: Zoo, gpu: Gpu) -> None:
    """And not again: the event loop's thread captures nothing, and enqueues most decodes."""
    plain, filtered = Sampling(temperature=1.0, seed=3), Sampling(temperature=1.0, top_k=4, top_p=0.9, seed=2**63 - 5)
    asked = [(ids, each) for ids in prompts(5, 20, 33) for each in (plain, filtered)]

    async def run() -> list[list[int]]:
        async with engine_on(zoo, "exact") as engine:
            opened = len(gpu.captured_in)
            found = []
            for ids, sampling in [*asked, *asked]:
                found += await together(engine, [ids], params_of(sampling, 10))
            assert gpu.captured_in[opened:] == [LAUNCHER]
            await together(engine, [ids for ids, _ in asked], [params_of(each, 10) for _, each in asked])
            assert set(gpu.captured_in[opened:]) == {LAUNCHER}
        return [list(output.tokens) for output in found]

    assert anyio.run(run) == expected([*asked, *asked], 10)


def test_an_engine_takes_the_pages_that_fit_beside_all_else(zoo: Zoo, gpu: Gpu) -> None:
    page = kv_bytes(zoo.folder("exact"), 1)
    gpu.free_bytes = int((1 << 30) + 8 * 4 * 512 + 100.5 * page / 0.9)

    async def run() -> None:
        async with engine_on(zoo, "exact", kv_memory=None, max_rows=4, max_context=512) as engine:
            assert engine.info.num_pages == 100
            assert [output.tokens for output in await one_by_one(engine, prompts(20), 5)] == expected(
                [(ids, Sampling()) for ids in prompts(20)], 5
            )

    anyio.run(run)


@pytest.mark.rotated(2)
@pytest.mark.parametrize("attention", ["fused", "fa2", "xqa", "even"])
def test_scales_of_an_8_bit_cache_are_those_of_the_checkpoint(zoo: Zoo, gpu: Gpu, attention: str) -> None:
    outputs = anyio.run(scaled_outputs, zoo, "cuda", attention)
    Judge(zoo.folder(SCALED), "cpu", fp8=True).check(outputs, f"scaled, fp8, {attention}")


@pytest.mark.parametrize("attention", ["fused", "fa2"])
@torch.inference_mode()
def test_a_row_that_has_stopped_is_left_alone(zoo: Zoo, gpu: Gpu, attention: str) -> None:
    check_stops(zoo, "cuda", decode_attention=attention)


@pytest.mark.parametrize("attention", ["fa2", "even"])
def test_pages_come_and_go_under_graphs_that_stay(zoo: Zoo, gpu: Gpu, attention: str) -> None:
    """Memory is what was asked for, to a piece; what the device has not is refused, and nothing changes."""
    gpu.free_bytes = 64 << 20
    opened = opened_on(zoo, "cuda", decode_attention=attention)
    runner: Any = opened.runner
    graphs = len(gpu.captured_in)
    check_resizing(opened)
    assert len(gpu.captured_in) == graphs
    before = gpu.addresses.backed
    for number in (runner.most_pages, runner.most_pages + 1):
        with pytest.raises(torch.OutOfMemoryError):
            runner.resize(number)
        assert gpu.addresses.backed == before
    runner.resize(200)
    assert abs(gpu.addresses.backed - before - kv_bytes(zoo.folder("qwen3"), 160)) <= kv_bytes(zoo.folder("qwen3"), 20)
    runner.close()


def test_a_step_waits_for_no_page_on_its_way_out_but_those_it_writes(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    device, waits = torch.device("cuda", 0), []
    stream = torch.cuda.Stream(device)
    kv = torch.arange(2 * 40 * 8, dtype=torch.float32).view(2, 40, 8)
    was = kv.clone()
    moves = importlib.import_module("headrace.engine.model.cuda.moves").PageMoves((kv,), stream, device)
    moves.open(20, 40, lambda: None)
    monkeypatch.setattr(stream, "wait_stream", lambda other: waits.append("all"), raising=False)
    monkeypatch.setattr(stream, "wait_event", lambda event: waits.append("those that leave"), raising=False)

    def plan(**fields: Any) -> list[str]:
        waits.clear()
        moves.enqueue(StepPlan(0, **fields))
        return list(waits)

    out = [(page, 19 - page) for page in range(5, 15)]
    assert plan(spills=out, entries=[PageEntry(0, 0, 30)]) == []
    moves.before([PageEntry(0, 1, 4), PageEntry(0, 2, 15)])
    assert waits == []
    moves.before([PageEntry(0, 3, 9)])
    assert waits == ["those that leave"]
    moves.before([PageEntry(0, 3, 10)])
    assert waits == ["those that leave"], "all of them have left by then"
    assert plan(spills=[(20, 0), (21, 1)], entries=[PageEntry(0, 4, 21)]) == ["all"]
    gpu.wait(gpu.mark())  # whose host reads pinned memory as soon as a copy from it is enqueued
    assert plan(copies=[(30, 20)], fetches=[(0, 3)]) == ["those that leave", "all"]
    kv[:, 5:15] = 0
    assert plan(fetches=[(place, page) for page, place in out]) == ["all"]
    gpu.wait(gpu.mark())
    assert torch.equal(kv[:, 5:15], was[:, 5:15]) and torch.equal(kv[:, 3], was[:, 20])
    assert torch.equal(kv[:, 20], was[:, 30])


def test_streams_go_on_after_memory_went_and_came_back(zoo: Zoo, gpu: Gpu) -> None:
    check_resizing_under_load(zoo, "cuda", 3, swaps=True)
    check_sleeping_under_load(zoo, "cuda", swaps=True)


def test_weights_come_back_to_where_they_were_or_not_at_all(gpu: Gpu) -> None:
    memory = importlib.import_module("headrace.ops.cuda.memory.weights").WeightMemory(torch.device("cuda", 0))
    shapes = [(3, 5), (1,), (300, 700), (8, 8)]

    def make() -> list[torch.Tensor]:
        return [memory.empty(shape, torch.float32) for shape in shapes]

    made = make()
    for number, each in enumerate(made):
        each.fill_(number)
    backed = gpu.addresses.backed
    for _ in range(2):
        memory.release(keep=True)
        assert gpu.addresses.backed == 0 and memory.has_copy
        gpu.free_bytes, whole = backed // 4, gpu.free_bytes
        with pytest.raises(torch.OutOfMemoryError):
            memory.restore()
        assert gpu.addresses.backed == 0 and memory.has_copy
        gpu.free_bytes = whole
        assert memory.restore() and gpu.addresses.backed == backed
        memory.drop_copy()
        assert all((each == number).all() for number, each in enumerate(made))
    memory.release(keep=True)
    memory.release(keep=False)
    assert not memory.restore()
    memory.rewind()
    assert [each.data_ptr() for each in make()] == [each.data_ptr() for each in made]
    memory.close()
    assert gpu.addresses.backed == 0


# -- what only some rows ask ----------------------------------------------------------------------------------------


@pytest.mark.rotated(2)
@pytest.mark.parametrize(("launch_ahead", "room"), [(1, "chunked and preempted"), (2, "room")])
def test_rows_with_options_are_those_of_the_cpu_beside_rows_that_ask_nothing(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, launch_ahead: int, room: str
) -> None:
    """Twice: the second time on cached pages, in rows whose last requests asked for something else."""
    cases, again = mixed(launch_ahead, 16)
    cramped = {"kv_memory": kv_bytes(zoo.folder("speaking"), 10), "max_batched_tokens": 40} if room != "room" else {}

    async def run(**options: Any) -> tuple[list[Answer], int]:
        async with open_engine(zoo.folder("speaking"), **(SMALL | {"max_rows": 7} | options)) as engine:
            found = await answers(engine, cases) + await answers(engine, again)
            assert engine.stats().cached_tokens > 0
            await at_rest(engine)
            return found, engine.stats().preemptions

    wanted, _ = anyio.run(lambda: run(device="cpu"))
    with emulated() as gpu:
        monkeypatch.setattr(importlib.import_module("headrace.engine.model.cuda.prefills"), "MOST_POSITIONS", 16)
        found, preemptions = anyio.run(lambda: run(device="cuda", launch_ahead=launch_ahead, **cramped))
    check_same(found, wanted)
    assert preemptions or room == "room"
    assert gpu.launches["_shape_kernel"] < gpu.launches["_scores_kernel"] and gpu.launches["_merge_kernel"]
    assert LAUNCHER in gpu.captured_in and threading.main_thread().name not in gpu.captured_in


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
@torch.inference_mode()
def test_logits_leave_the_head_in_float32(gpu: Gpu, rows: int) -> None:
    """Two logits that are closer than a step of bfloat16 stay apart in every kernel that multiplies by the head."""
    cuda, arch, shape, hazards, linear, packed, registry = (
        importlib.import_module(f"headrace.ops.cuda.{name}")
        for name in (
            "block", "arch", "attention.shape", "hazards", "products.linear", "products.packed", "products.registry",
        )
    )  # fmt: skip
    hopper = arch.Arch.named("sm_90")
    room = registry.ProductRoom(linear.LinearScratch("cpu", hopper), 1e-5, pdl=True, chain=hazards.Chain())
    heads = shape.HeadShape(heads=2, kv_heads=1, head_dim=64)
    ops = cuda.CudaOps(
        heads, cos_sin_PD=torch.ones(8, 64), products=packed.Products(hopper, room, kernels_on(gpu).products)
    )
    weight_VE = torch.ones(128, 64)
    weight_VE[100, 0] += 1 / 128
    logits_SV = ops.logits(torch.ones(rows, 64).bfloat16(), ops.pack_head(Stored.from_dense(weight_VE.bfloat16())))
    assert logits_SV.dtype is torch.float32
    assert torch.equal(logits_SV.argmax(-1), torch.full((rows,), 100))


@pytest.mark.parametrize("seed", range(6))
@torch.inference_mode()
def test_rows_of_random_options_are_shaped_as_on_the_cpu(gpu: Gpu, seed: int) -> None:
    """Given away again and again, with other options or none; the last bits too."""
    generator = random.Random(seed)
    both = SideBySide(generator, "cpu", generator.choice([6, 50, 300]), 5)
    for _ in range(20):
        for row in generator.sample(range(5), 2):
            both.give(row)
        for _ in range(4):
            both.step()


def test_vectors_and_hidden_states_are_those_of_the_cpu(zoo: Zoo, gpu: Gpu) -> None:
    """In chunks, from the prefix cache, with single tokens left to compute, and beside generations."""
    asked = prompts(1, 2, 17, 33, 50, seed=9)
    asked += [[*asked[4][:16], 8], [*asked[4][:32], 9], asked[4]]

    async def run(device: str, dtype: str) -> list[NDArray[np.float32]]:
        options = SMALL | {"max_batched_tokens": 20, "max_rows": 4}
        async with open_engine(zoo.folder("llama 3"), device, **(options | {"dtype": dtype})) as engine:
            beside = engine.stream(draw(12, 1), greedy(30))
            last = await engine.embed(asked * 2)
            mean = await engine.embed(asked, pooling="mean", normalize=False)
            states = [(await engine.hidden_states(ids)).float().numpy() for ids in asked]
            assert len([token async for token in beside]) == 30
            assert last.usage.cached_tokens > 0 and mean.usage.cached_tokens == 0
            await at_rest(engine)
        return [last.vectors, mean.vectors, np.concatenate(states)]

    for found, wanted in zip(anyio.run(run, "cuda", "bfloat16"), anyio.run(run, "cpu", "float32"), strict=True):
        cosines = (found * wanted).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(wanted, axis=-1)
        assert cosines.min() > 0.99


def test_masks_that_come_to_leave_nothing_fail_their_own_request_alone(zoo: Zoo, gpu: Gpu) -> None:
    """In the prefill and, after a token, in the decode graph."""
    nothing = SamplingParams(allowed_token_ids=[64], bad_words=["aa"], max_tokens=9)

    async def run() -> None:
        async with engine_on(zoo, "exact") as engine:
            with anyio.fail_after(60):
                for prompt in ([5, 64], [5]):
                    with pytest.raises(RequestFailed, match="no token to choose"):
                        await engine.generate(prompt, nothing)
            asked = [(ids, Sampling()) for ids in prompts(5, 20)]
            check_outcomes(await outcomes(engine, asked, 10), asked)
            await at_rest(engine)

    anyio.run(run)


IN_FORMAT = SamplingParams(max_tokens=40, response_format=ResponseFormat.regex("[a-z]{20,30}"), temperature=1.0, seed=1)


@pytest.mark.parametrize("fails", ["begin", "fill"])
def test_a_grammar_that_fails_costs_its_own_request(
    zoo: Zoo, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*values: Any) -> None:
        raise RuntimeError("not this time")

    async def run() -> None:
        async with engine_on(zoo, "speaking") as engine:
            with anyio.fail_after(60):
                with monkeypatch.context() as patch:
                    patch.setattr(CompiledGrammar, fails, fail)
                    with pytest.raises(RequestFailed, match="no token to choose"):
                        await engine.generate([5], IN_FORMAT)
                    asked = [(ids, Sampling()) for ids in prompts(5, 20)]
                    check_outcomes(await outcomes(engine, asked, 10), asked)
                assert (await engine.generate([5], IN_FORMAT)).choices[0].text.islower()
            await at_rest(engine)

    anyio.run(run)


@pytest.mark.rotated(2)
@pytest.mark.parametrize(("device", "launch_ahead"), [("cuda", 3), ("cpu", 2)])
def test_nobody_waits_for_masks_of_others(
    zoo: Zoo, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, device: str, launch_ahead: int
) -> None:
    options = {"launch_ahead": launch_ahead, "max_rows": 20, "max_context": 512}
    anyio.run(partial(check_late_masks, zoo.folder("speaking"), device, monkeypatch, **options))


def test_a_device_that_is_lost_while_masks_are_awaited_ends_everything(zoo: Zoo, gpu: Gpu) -> None:
    threads = Threads()

    async def run() -> None:
        async with engine_on(zoo, "speaking", launch_ahead=2) as engine:
            with anyio.fail_after(60):
                async for token in engine.stream([5], IN_FORMAT):
                    gpu.lost = gpu.lost or token.position == 3

    with pytest.raises(EngineCrashed):
        anyio.run(run)
    threads.check_ended()


@pytest.mark.rotated(3)
@pytest.mark.parametrize("fails", ["_count_known_kernel", "_shape_kernel", "memory"])
def test_shaping_without_memory_costs_the_requests_of_its_step(
    zoo: Zoo, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """And the rows that they had, whose options were perhaps half written, serve others as ever."""
    shaping = importlib.import_module("headrace.engine.model.cuda.shaping")
    arrays, tried = shaping.ShapeArrays, []

    def allocate(*sizes: Any) -> Any:
        tried.append(sizes)
        if fails == "memory" and len(tried) == 1:
            raise torch.OutOfMemoryError("no memory")
        return arrays(*sizes)

    monkeypatch.setattr(shaping, "ShapeArrays", allocate)
    cases = [(ids, {"repetition_penalty": 5.0, "max_tokens": 8}) for ids in prompts(5, 20, 33)]
    asked = [(ids, TOP) for ids in prompts(7, 9, 11)]

    async def run() -> None:
        async with engine_on(zoo, "exact", max_rows=3, prefix_cache=False) as engine:
            before = await answers(engine, cases) if fails != "memory" else None
            hit = failing(gpu, fails, torch.OutOfMemoryError("no memory"), LAUNCHER)
            await engine.generate([5], SamplingParams(repetition_penalty=5.0, max_tokens=8))
            assert engine.stats().memory_retries == 1
            assert hit == ([LAUNCHER] if before else [])
            after = await answers(engine, cases)
            assert before in (None, after)
            check_outcomes(await outcomes(engine, asked, 10), asked)
            await at_rest(engine)

    anyio.run(run)


def test_every_variant_is_captured_where_kernels_are_built(zoo: Zoo, gpu: Gpu) -> None:
    async def run() -> None:
        async with engine_on(zoo, "exact") as engine:
            assert engine._life.loop is not None
            runner: Any = engine._life.loop._runner
            runner.warm_up(everything=True)
            opened = len(gpu.captured_in)
            asked = [(ids, TOP) for ids in prompts(7, 9, 11)]
            check_outcomes(await outcomes(engine, asked, 10), asked)
            await answers(engine, [(ids, each) for (ids, _), each in zip(asked, KINDS[1:4], strict=True)])
            assert len(gpu.captured_in) == opened

    anyio.run(run)


# -- rows, and what the emulation sees ------------------------------------------------------------------------------


def test_more_entries_than_one_send_holds(gpu: Gpu) -> None:
    """And places that are set twice: the last one holds."""
    rows_module = importlib.import_module("headrace.engine.model.cuda.rows")
    size = Capacity(
        num_pages=5000, page_size=16, max_rows=64, max_batched_tokens=64, max_context=1 << 15, vocab_size=512
    )
    generator = np.random.default_rng(4)
    with torch.inference_mode():
        rows = rows_module.DeviceRows(size, size.num_pages, torch.device("cpu"))
        wanted = rows.table_RP.numpy().copy()
        for count in (3, 2000, 2049, 70_000, 150_000, 1):
            places = generator.integers(0, 64, count), generator.integers(0, 2048, count)
            pages = generator.integers(0, 5000, count)
            for row, place, page in zip(*places, pages, strict=True):
                wanted[row, place] = page
            rows.add([], [PageEntry(*map(int, each)) for each in zip(*places, pages, strict=True)])
            rows.flush()
        assert (rows.table_RP.numpy() == wanted).all() and (rows.pages == wanted).all()


def reuse_too_early() -> None:
    """Write over pinned memory before anybody knows that it was read."""
    pinned = torch.empty(4, dtype=torch.int32, pin_memory=True)
    pinned.numpy()[:] = 1
    torch.zeros(4, dtype=torch.int32).copy_(pinned, non_blocking=True)
    pinned.numpy()[:] = 2
    torch.cuda.current_stream().synchronize()


def set_twice() -> None:
    """Send one word twice."""
    words = importlib.import_module("headrace.ops.cuda.memory.scatter")
    words.scatter_words(torch.zeros(8, dtype=torch.int32), torch.tensor([0, 5, 1, 5, 2], dtype=torch.int32), 2)


@pytest.mark.parametrize("misuse", [reuse_too_early, set_twice])
def test_the_emulation_sees_what_a_gpu_might_survive(misuse: Callable[[], None]) -> None:
    def use() -> None:
        with emulated() as gpu:
            with contextlib.suppress(torch.AcceleratorError):
                misuse()
            assert gpu.faults

    with pytest.raises(AssertionError, match="pinned memory was written|a place comes twice"):
        use()


def test_a_result_is_nonsense_until_it_is_waited_for(gpu: Gpu) -> None:
    pinned = torch.empty(3, dtype=torch.int32, pin_memory=True)
    done = torch.cuda.Event()
    pinned.copy_(torch.arange(3, dtype=torch.int32), non_blocking=True)
    done.record()
    assert (pinned.numpy() < -1).all()
    done.synchronize()
    assert pinned.numpy().tolist() == [0, 1, 2]


def test_a_graph_replays_what_was_captured_and_runs_nothing_before(gpu: Gpu) -> None:
    total, factor = torch.ones(2), 3
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    total.add_((total * factor)[:1].expand(2))
    graph.capture_end()
    factor = 5
    assert total.tolist() == [1.0, 1.0]
    graph.replay()
    graph.replay()
    assert total.tolist() == [16.0, 16.0]


# -- faults ---------------------------------------------------------------------------------------------------------


def failing(gpu: Gpu, kernel: str, error: Exception, thread: str | None = None, skip: int = 0) -> list[str]:
    """Fail one launch of `kernel`, after `skip` more; names the thread in the list that it returns."""
    hit: list[str] = []
    seen: list[str] = []

    def fail(name: str) -> Exception | None:
        here = threading.current_thread().name
        if name != kernel or hit or thread not in (None, here):
            return None
        seen.append(here)
        if len(seen) <= skip:
            return None
        hit.append(here)
        return error

    gpu.fail_at = fail
    return hit


async def outcomes(
    engine: Engine, asked: Sequence[tuple[Sequence[int], Sampling]], count: int
) -> list[list[int] | type[HeadraceError]]:
    """What becomes of requests that are submitted at once: tokens, or the type of their error."""
    found: dict[int, list[int] | type[HeadraceError]] = {}

    async def one(index: int) -> None:
        ids, sampling = asked[index]
        try:
            completion = await engine.generate(list(ids), params_of(sampling, count))
            found[index] = list(completion.choices[0].token_ids)
        except HeadraceError as error:
            found[index] = type(error)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for index in range(len(asked)):
                tasks.start_soon(one, index)
    return [found[index] for index in range(len(asked))]


def check_outcomes(
    found: Sequence[list[int] | type[HeadraceError]],
    asked: Sequence[tuple[Sequence[int], Sampling]],
    error: type[HeadraceError] | None = None,
) -> None:
    """Assert that each has its right tokens or failed with `error`; one does if there is an `error`."""
    right = expected(asked, max(len(each) for each in found if isinstance(each, list)))
    assert all(each is error or each == wanted for each, wanted in zip(found, right, strict=True)), found
    assert (error in found) is (error is not None)


TOP = Sampling(temperature=1.0, top_k=5, seed=9)


@pytest.mark.rotated(2)
@pytest.mark.parametrize("kernel", ["prefill: FlashInfer", "_choose_kernel", "_prepare_kernel"])
@pytest.mark.parametrize(("skip", "launch_ahead"), [(0, 1), (1, 4)])
def test_a_step_without_memory_is_tried_again(zoo: Zoo, gpu: Gpu, kernel: str, launch_ahead: int, skip: int) -> None:
    """In the launcher's thread: in a prefill, at its end, or while a graph is captured for filters that appear late."""
    asked = [(ids, [Sampling(), TOP][at % 2]) for at, ids in enumerate(prompts(16, 40, 7, 33, 90, 12, 64, 50))]

    async def run() -> None:
        options = {"max_rows": 4, "max_batched_tokens": 16, "launch_ahead": launch_ahead}
        async with engine_on(zoo, "exact", **options) as engine:
            hit = failing(gpu, kernel, torch.OutOfMemoryError("no memory"), LAUNCHER, skip)
            check_outcomes(await outcomes(engine, asked, 12), asked)
            assert hit == [LAUNCHER] and engine.stats().memory_retries == 1
            check_outcomes(await outcomes(engine, asked, 12), asked)
            await at_rest(engine)

    anyio.run(run)


def test_a_kernel_that_cannot_be_compiled_is_done_without(
    zoo: Zoo,
    judges: Callable[[str], Judge],
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*values: Any, **options: Any) -> None:
        raise RuntimeError("Could not find nvcc")

    source = importlib.import_module("headrace.ops.cuda.compiling.source")
    monkeypatch.setattr(source, "gen_jit_spec", fail)
    source.compiled.cache_clear()

    async def run() -> list[Output]:
        async with engine_on(zoo, "qwen3") as engine:
            return await together(engine, prompts(*LENGTHS), greedy(8))

    judges("qwen3").check(anyio.run(run), "without the kernels of our own")
    ours = {"decode: even", "product: even heads", "product: even", "prefill: tile", "product: tile"}
    assert ours.isdisjoint(gpu.launches) and "decode: fa2" in gpu.launches
    assert "nvcc" in caplog.text


def test_a_plan_that_was_made_for_nothing_serves_no_batch(
    zoo: Zoo, judges: Callable[[str], Judge], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FA2's plans share memory on the device: a graph that cannot be set up may have left its plan there."""
    paged = importlib.import_module("headrace.ops.cuda.attention.paged")
    runner = importlib.import_module("headrace.engine.model.cuda.runner")
    tune(monkeypatch, decode=fused_up_to(60))
    monkeypatch.setattr(runner, "_USUAL_CONTEXT", 1)
    real, made = paged.PlannedDecode, []

    class Planned(real):  # type: ignore[misc,valid-type]
        def __init__(self, *values: Any) -> None:
            made.append(values)
            if len(made) == 2:  # that of the other window
                raise torch.OutOfMemoryError("no memory")
            super().__init__(*values)

    async def run() -> list[Output]:
        async with engine_on(zoo, "qwen2 windowed", launch_ahead=1, prefix_cache=False) as engine:
            short = prompts(3, 5, 6, 8, 10, 12)
            outputs = await together(engine, short, greedy(8))
            monkeypatch.setattr(paged, "PlannedDecode", Planned)
            await together(engine, prompts(70), greedy(4))
            assert engine.stats().memory_retries == 1 and engine._life.loop is not None
            engine._life.loop.scheduler.failures._allow(256, 8192)  # which many steps more would come to
            outputs += await together(engine, short, greedy(8))
            assert [output.tokens for output in outputs[:6]] == [output.tokens for output in outputs[6:]]
            outputs += await one_by_one(engine, prompts(70), 4)
        return outputs

    judges("qwen2 windowed").check(anyio.run(run), "after a graph could not be set up")
    assert len(made) == 4


FAULTS = {
    "prefill": ("prefill: FlashInfer", torch.AcceleratorError("CUDA error: device-side assert triggered")),
    "prefill, by Triton": ("_rms_norm_kernel", RuntimeError("Triton Error [CUDA]: device-side assert triggered")),
    "capture": ("_prepare_kernel", torch.AcceleratorError("CUDA error: an illegal memory access was encountered")),
    "capture, by Triton": ("_prepare_kernel", RuntimeError("Triton Error [CUDA]: an illegal memory access")),
}


@pytest.mark.parametrize("how", ["unseen", *FAULTS])
def test_a_lost_device_ends_everything_as_engine_crashed(zoo: Zoo, gpu: Gpu, how: str) -> None:
    """And closing raises nothing else, joins all threads and frees no pinned memory, which would end the process."""
    threads = Threads()
    asked = [(ids, Sampling()) for ids in prompts(16, 40, 7, 33, 90, 12)]
    found: list[list[int] | type[HeadraceError]] = []
    later: list[Exception] = []

    async def run() -> None:
        async with engine_on(zoo, "exact", launch_ahead=3) as engine:
            async with anyio.create_task_group() as tasks:

                async def ask(what: Sequence[tuple[Sequence[int], Sampling]]) -> None:
                    found.extend(await outcomes(engine, what, 150))

                tasks.start_soon(ask, asked)
                with anyio.fail_after(30):
                    while engine.stats().steps < 5:  # noqa: ASYNC110 - it has no event
                        await anyio.sleep(0.001)
                if how == "unseen":
                    gpu.lost = True
                else:
                    failing(gpu, *FAULTS[how], LAUNCHER)
                    tasks.start_soon(ask, [(draw(9, 1), TOP)])
            for action in (lambda: engine.stream([1], greedy(1)), engine.stats):
                with pytest.raises(EngineCrashed) as caught:
                    action()
                later.append(caught.value)

    with pytest.raises(EngineCrashed):
        anyio.run(run)
    assert all(each is EngineCrashed for each in found) and len(later) == 2, found
    threads.check_ended()
