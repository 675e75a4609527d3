"""Heads and draft models that read steps without drafts late, on an emulated GPU: the drafts are those of engines that
read every step at once, whatever becomes of the rows in between, and steps without drafts do without them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import emulated_cuda
import pytest
import torch
from drafting_engines import HEADS, ask_all, fit, small_folder, talk
from emulated_cuda import Gpu, emulated
from gpu.driving import at_rest
from tiny_models import chat_folder
from torch import Tensor

from headrace.engine import Engine, SamplingParams
from headrace.engine.speculation import DraftModel, Speculation

PAGE = 2 * 16 * 2 * 8 * 2
"""Bytes of a layer's keys and values in a page."""
K = 3
LAG = 16
DEPTHS = [*[3] * 2, *[0] * 5, 2, *[0] * 15, 3, 3, *[0] * 16, 1, 0, 3, *[0] * 17, 3, 3, 3, *[0] * 40, 2]
"""Depths of steps, one after the other, over and over: after fewer steps without drafts than may be unread of a row, as
many, and more."""
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": 90},
    {"temperature": 1.0, "seed": 5, "top_k": 8, "max_tokens": 60},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3, "max_tokens": 70},
    {"temperature": 0.0, "stop_token_ids": list(range(100, 110)), "max_tokens": 60},
    {"temperature": 1.0, "seed": 12, "n": 2, "ignore_eos": True, "max_tokens": 80},
    {"temperature": 1.0, "seed": 11, "response_format": {"type": "json_object"}, "max_tokens": 40},
]


class Noted(NamedTuple):
    """What steps that verify drafts found."""

    drafts: dict[tuple[Any, ...], int]
    """Drafts by the tokens before them, the place behind those that are known, and how the row samples."""
    entries: dict[tuple[int, ...], Tensor]
    """Keys and values that the drafter had of a position, by the tokens up to the one behind it."""
    contradictions: list[int]
    """Positions of entries that were others at another time."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Speculation]:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("drafters")
    found: dict[str, Speculation] = {
        name: HEADS[name][1](fit(HEADS[name][0]()).write(folder / name), k=K) for name in ("EAGLE", "EAGLE-3")
    }
    return {**found, "draft model": DraftModel(small_folder(folder / "small"), k=K)}


def options(**more: Any) -> dict[str, Any]:
    sizes = {"kv_memory": "4MiB", "max_rows": 8, "max_context": 256, "max_batched_tokens": 256}
    return {"device": "cuda", "seed": 3} | sizes | more


def scripted_depths(patch: pytest.MonkeyPatch) -> None:
    depths = cycle(DEPTHS)
    patch.setattr(
        "headrace.engine.scheduling.speculation.depth.DepthRule.choose", lambda self, rows, context: next(depths)
    )


def lag_of(patch: pytest.MonkeyPatch, lag: int) -> None:
    for name in ("catching_up", "heads", "model", "unread"):
        patch.setattr(importlib.import_module(f"headrace.engine.model.cuda.drafting.{name}"), "LAG", lag)


def is_close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= 0.05 * float(other.abs().max())


def noting(patch: pytest.MonkeyPatch) -> Noted:
    """What steps that verify drafts find from now on."""
    found = Noted({}, {}, [])
    module = importlib.import_module("headrace.engine.model.cuda.drafting.drafts")
    row_table, tables = module.RowTable, list[Any]()

    def table(*parts: Any) -> Any:
        tables.append(row_table(*parts))
        return tables[-1]

    patch.setattr(module, "RowTable", table)
    prepare = emulated_cuda.EVERY_KERNEL["_prepare_lines_kernel"]

    def noted(at: Any) -> None:
        prepare(at)
        if int(at.most[at.padding_row]):  # not of a step that verifies drafts
            return
        asks, pages, read, kv = tables[-1].asks, tables[-1].table_RP, tables[-1].read_R, tables[-1].kv[-1]
        for place, row in enumerate(at.rows.tolist()):
            length, count = int(at.lengths[row]), min(int(at.counts[place]), int(at.most[row]), at.LINES - 1)
            if row == at.padding_row:
                continue
            tokens = at.pool[row, : length + count + 1].tolist()
            how = float(asks.temperature_R[row]), int(asks.seed_R[row])
            for ahead in range(1, count + 1):
                found.drafts[*tokens[: length + ahead], ahead, *how] = tokens[length + ahead]
            for position in range(min(length, int(read[row])) if count else 0):
                if position % 16 == 15:  # a page may be of a row that went on with another token
                    continue
                entry = kv[int(pages[row, position // 16]), :, position % 16].float()
                if not is_close(entry, found.entries.setdefault(tuple(tokens[: position + 2]), entry)):
                    found.contradictions.append(position)

    patch.setitem(emulated_cuda.EVERY_KERNEL, "_prepare_lines_kernel", noted)
    return found


async def asked_twice(engine: Engine) -> list[Any]:
    return [[(each.choices, each.usage.completion_tokens) for each in await ask_all(engine, ASKED)] for _ in range(2)]


async def spoken(engine: Engine) -> list[Any]:
    return [await talk(engine) for _ in range(2)]


async def resized(engine: Engine) -> list[Any]:
    """Long streams in an engine whose pages become fewer and more meanwhile, and that sleeps."""
    found: dict[int, list[int]] = {}

    async def one(seed: int) -> None:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=150, ignore_eos=True)
        async with engine.stream("once upon a time", params) as stream:
            found[seed] = [token.id async for token in stream]

    async with anyio.create_task_group() as group:
        for seed in range(3):
            group.start_soon(one, seed)
        for size in (40, 30, 200, 36):
            await anyio.sleep(0.2)
            await engine.resize_kv(size * engine.info.page_bytes)
    await engine.sleep(1)
    await engine.wake()
    await one(4)
    return [found[seed] for seed in sorted(found)]


TASKS: dict[str, tuple[Callable[[Engine], Any], dict[str, Any]]] = {
    "roomy": (asked_twice, {}),
    "one ahead": (asked_twice, {"launch_ahead": 1}),
    "far ahead": (asked_twice, {"launch_ahead": 8, "max_rows": 3}),
    "short of pages": (asked_twice, {"kv_memory": 18 * 3 * PAGE, "max_context": 128, "max_batched_tokens": 24}),
    "swapped": (asked_twice, {"kv_memory": 18 * 3 * PAGE, "max_context": 128, "swap_memory": "1MiB",
                              "prefix_cache": False, "launch_ahead": 1}),
    "turns and forks": (spoken, {}),
    "resized": (resized, {}),
}  # fmt: skip


def run(
    task: Callable[[Engine], Any], folder: Path, speculation: Speculation | None, more: dict[str, Any], lag: int
) -> tuple[Any, Noted]:
    async def within() -> Any:
        async with Engine(folder, speculation=speculation, **options(**more)) as engine:
            answers = await task(engine)
            await at_rest(engine)
            return answers

    with pytest.MonkeyPatch.context() as patch:
        scripted_depths(patch)
        lag_of(patch, lag)
        noted = noting(patch)
        return anyio.run(within), noted


@pytest.mark.rotated(12)
@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "draft model"])
@pytest.mark.parametrize("way", TASKS)
def test_drafts_are_those_of_an_engine_that_reads_at_once(
    way: str, name: str, model: Path, drafters: dict[str, Speculation], gpu: Gpu
) -> None:
    task, more = TASKS[way]
    plain, _ = run(task, model, None, more, LAG)
    at_once, expected = run(task, model, drafters[name], more, 2 if name == "draft model" else 1)
    late, found = run(task, model, drafters[name], more, LAG)
    assert at_once == plain
    assert late == plain
    keys = found.entries.keys() & expected.entries.keys()
    assert len(keys) > 200
    others = {len(key) - 2 for key in keys if not is_close(found.entries[key], expected.entries[key])}
    others.update(expected.contradictions, found.contradictions)
    assert len(others) <= (1 if name == "draft model" else 0), "more than where a row ended behind a step with drafts"
    drafts = found.drafts.keys() & expected.drafts.keys()
    wrong = [key for key in drafts if found.drafts[key] != expected.drafts[key]]
    assert len(drafts) > 50
    assert len(wrong) <= len(drafts) // 50, "more than roundings of another order can explain"


@pytest.mark.rotated(2)
@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("name", ["EAGLE-3", "draft model"])
def test_steps_without_drafts_do_without_what_drafts(
    name: str, speculate: bool, model: Path, drafters: dict[str, Speculation], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of their graphs attends in the target's two layers alone; a pass reads `LAG` of them, if anybody may ask."""
    monkeypatch.setattr("headrace.engine.scheduling.speculation.depth.DepthRule.choose", lambda *asked: 0)

    def attended() -> int:
        return sum(count for kernel, count in gpu.launches.items() if kernel.startswith("decode"))

    async def within() -> tuple[int, int]:
        async with Engine(model, speculation=drafters[name], **options()) as engine:
            asked = SamplingParams(max_tokens=1 + 3 * LAG, ignore_eos=True, speculate=speculate)
            await engine.generate("once", asked)
            await at_rest(engine)
            before, steps = attended(), engine.stats().steps
            await engine.generate("upon a time", asked)
            await at_rest(engine)
            return attended() - before, engine.stats().steps - steps

    launches, steps = anyio.run(within)
    assert steps >= 1 + 3 * LAG
    passes = launches - 2 * (steps - 1)
    assert (2 <= passes <= 4) if speculate else passes == 0
