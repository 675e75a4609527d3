"""The CPU runner carries out any plan the scheduler makes, in order, outlives a step that raises, and ends clean."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import tiny_models
import torch
from gpu.conftest import Zoo
from gpu.test_stops import check_stops
from leftovers import Threads
from model_driver import ENGINE_OPS, request

from headrace.engine import Engine, EngineStats, InvalidParams, RequestFailed, SamplingParams
from headrace.engine.config import EngineConfig
from headrace.engine.life.build import open_engine
from headrace.engine.life.opened import Opened
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.ops.cpu.block import CpuOps

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": 64 * tiny_models.PAGE_BYTES}
PROMPTS = [[index + 1 + at * at % 89 for at in range(length)] for index, length in enumerate((3, 40, 17, 1, 90))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.whole_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def opened(folder: Path) -> Iterator[Opened]:
    made = open_engine(EngineConfig(model=folder, **OPTIONS))
    yield made
    made.runner.close()


def run_all(opened: Opened, ahead: int, **limits: int) -> list[list[int]]:
    """Eight tokens after every prompt, with so many steps launched before the oldest is waited for."""
    capacity = opened.capacity
    sizes = {name: getattr(capacity, name) for name in capacity.__slots__} | limits
    scheduler = Scheduler(type(capacity)(**sizes), secret=b"s")
    requests = [request(ids, 8) for ids in PROMPTS]
    for each in requests:
        scheduler.submit(each)
    launched: list[tuple[Any, Any]] = []
    while scheduler.roster.requests:
        plan = scheduler.plan()
        if plan is not None:
            launched.append((plan, opened.runner.launch(plan)))
        if launched and (plan is None or len(launched) == ahead):
            oldest, step = launched.pop(0)
            scheduler.commit(oldest, step.wait())
            scheduler.roster.check()
    return [each.tokens[each.prompt_len :] for each in requests]


def test_tokens_do_not_depend_on_how_steps_are_cut_or_launched_ahead(opened: Opened) -> None:
    alone = run_all(opened, 1, max_rows=1)
    assert all(len(tokens) == 8 for tokens in alone) and len({tuple(tokens) for tokens in alone}) == len(alone)
    assert run_all(opened, 1) == alone
    assert run_all(opened, 3) == alone
    assert run_all(opened, 2, max_rows=3, max_batched_tokens=5) == alone
    assert run_all(opened, 2, num_pages=8) == alone, "with preemptions"


def test_a_prompt_behind_a_cached_prefix_gives_the_same_bits(tmp_path: Path) -> None:
    """However few of its tokens are left to compute: with AMX, oneDNN sums few rows of bfloat16 in another order."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 9}
    folder = tiny_models.random_folder(tmp_path, **sizes, num_key_value_heads=3, vocab_size=512)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)

    async def run() -> None:
        async with Engine(folder, load_format="random", dtype="bfloat16", kv_memory="4MiB") as engine:
            for length in (18, 27, 36, 47, 60, 90, 119):
                prompt = [1 + length + at * at % 311 for at in range(length)]
                first, again = [await engine.generate(prompt, params) for _ in range(2)]
                assert again.usage.cached_tokens == (length - 1) // 16 * 16
                assert first.choices[0].logprobs == again.choices[0].logprobs

    anyio.run(run)


def test_pages_come_and_go(opened: Opened) -> None:
    """What those that stay hold is kept; those that come serve requests."""
    runner: Any = opened.runner
    assert runner.most_pages > 64
    alone = run_all(opened, 2)
    expected = run_all(opened, 1, num_pages=60)
    assert expected == alone
    runner.resize(500)
    assert run_all(opened, 2, num_pages=500) == alone
    runner.resize(64)
    assert run_all(opened, 2) == alone


@pytest.mark.parametrize("keep", [True, False])
def test_a_sleeping_runner_has_no_pages_and_weights_only_if_they_are_kept(opened: Opened, keep: bool) -> None:
    runner: Any = opened.runner
    before = run_all(opened, 2)
    weights, pages = weakref.ref(runner._decoder), weakref.ref(runner._kv.pools[0])
    runner.sleep(keep_weights=keep)
    assert pages() is None and (weights() is not None) is keep
    runner.wake(64)
    assert run_all(opened, 2) == before


def test_a_row_that_has_stopped_is_left_alone(tmp_path: Path) -> None:
    check_stops(Zoo(tmp_path, "cpu"), "cpu")


def test_swapped_pages_come_back(folder: Path) -> None:
    """A tenth of the tokens are computed of those that would be again, and the answers are the same."""

    async def run(**options: Any) -> tuple[list[list[int]], EngineStats]:
        async with Engine(folder, **(OPTIONS | options)) as engine:
            params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
            await engine.generate(PROMPTS[4], params)  # the pace of this machine is known from now on
            found = await engine.generate_many(PROMPTS * 2, params)
            with anyio.fail_after(10):
                while engine.stats().steps_in_flight:  # noqa: ASYNC110 - it has no event
                    await anyio.sleep(0.005)
            return [completion.choices[0].token_ids for completion in found], engine.stats()

    roomy, _ = anyio.run(run)
    cramped = {"kv_memory": 12 * tiny_models.PAGE_BYTES, "swap_memory": 50 * tiny_models.PAGE_BYTES}
    found, stats = anyio.run(lambda: run(**cramped))
    assert found == roomy
    assert stats.swaps > 0 and stats.host_pages == 50 and stats.swapped == 0


@pytest.mark.parametrize("swap_memory", [1, 2**62])
def test_host_memory_that_holds_no_page_or_is_not_there_is_refused(folder: Path, swap_memory: int) -> None:
    async def run() -> None:
        async with Engine(folder, swap_memory=swap_memory, **OPTIONS):
            pass

    with pytest.raises(InvalidParams, match="^swap_memory: ") as refused:
        anyio.run(run)
    assert refused.value.field == "swap_memory"


def test_the_threads_of_a_step_are_its_own_and_nobody_elses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps one count for threads to come and one for each thread, which a thread takes at its first look."""
    seen: dict[str, int] = {}
    attend = ENGINE_OPS.attend

    def watched(ops: CpuOps, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen["step"] = torch.get_num_threads()
        return attend(ops, *args)

    monkeypatch.setattr(ENGINE_OPS, "attend", watched)
    before = torch.get_num_threads()
    opened = open_engine(EngineConfig(model=folder, cpu_threads=before + 1, **OPTIONS))
    try:
        run_all(opened, 1)
        later = threading.Thread(target=lambda: seen.update(later=torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        opened.runner.close()
    assert seen == {"step": before + 1, "later": before}
    assert torch.get_num_threads() == before


def test_a_step_that_raises_is_told_to_its_waiter_and_the_next_one_runs(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_all(opened, 1)
    scheduler = Scheduler(opened.capacity, secret=b"s")
    scheduler.submit(request(PROMPTS[1], 2))
    plan = scheduler.plan()
    assert plan is not None
    with monkeypatch.context() as patch:
        patch.setattr(ENGINE_OPS, "attend", raising(ValueError("no such page")))
        step = opened.runner.launch(plan)
        for _ in range(2):  # whoever asks again hears it again
            with pytest.raises(ValueError, match="no such page"):
                step.wait()
    assert run_all(opened, 2) == expected


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("error", "failing"), [(ValueError("x"), 2), (MemoryError(), 0)], ids=["defect", "memory"])
@pytest.mark.parametrize("launch_ahead", [1, 2])
def test_a_failed_step_ends_its_own_requests_alone_and_none_if_it_found_no_memory(
    folder: Path, error: Exception, failing: int, launch_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prefill fails; the requests that waited for a row are served, and get what they always get."""
    real = ENGINE_OPS.attend
    calls = 0

    def attend(self: CpuOps, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error
        return real(self, *args)

    async def run(broken: bool) -> list[list[int] | BaseException]:
        nonlocal calls
        calls = 0 if broken else 1
        found: dict[int, list[int] | BaseException] = {}
        async with Engine(folder, **OPTIONS, max_rows=2, launch_ahead=launch_ahead) as engine:

            async def ask(index: int) -> None:
                try:
                    params = SamplingParams(temperature=0, max_tokens=5)
                    found[index] = (await engine.generate(PROMPTS[index], params)).choices[0].token_ids
                except RequestFailed as failed:
                    found[index] = failed

            async with anyio.create_task_group() as group:
                for index in range(len(PROMPTS)):
                    group.start_soon(ask, index)
            with anyio.fail_after(10):  # what a failed step held comes back once the steps after it are done
                while engine.stats().pages_held or engine.stats().running:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
        return [found[index] for index in range(len(PROMPTS))]

    expected = anyio.run(run, False)
    monkeypatch.setattr(ENGINE_OPS, "attend", attend)
    found = anyio.run(run, True)
    for index, tokens in enumerate(found):
        if index < failing:
            assert type(tokens) is RequestFailed and tokens.__cause__ is error
        else:
            assert tokens == expected[index]


def test_closing_joins_the_thread_and_drops_model_and_cache(folder: Path) -> None:
    threads = Threads()
    opened = open_engine(EngineConfig(model=folder, **OPTIONS))
    started = threads.running()
    # The one beside it restores torch's number of threads as the runner's starts, and ends at once.
    assert [name for thread in started if not (name := thread.name).startswith("headrace-torch")] == ["headrace-cpu"]
    runner: Any = opened.runner
    held = [weakref.ref(runner._decoder), weakref.ref(runner._kv.pools[0])]
    assert all(reference() is not None for reference in held)
    run_all(opened, 2)
    opened.runner.close()
    assert not any(thread.is_alive() for thread in started)
    gc.collect()
    assert [reference() for reference in held] == [None, None]
