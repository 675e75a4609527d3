"""Draft heads on a CPU that read late: whatever becomes of rows, pages, adapters and weights before they do."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from adapter_folders import lora_folder
from draft_heads import EagleHead
from drafting_engines import check_drafts, fit, recorded
from speculating import native, options
from tiny_models import chat_folder

from headrace.engine import Engine, SamplingParams
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.engine.speculation import Eagle

pytestmark = native

PLAIN: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture
def depth(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of drafts in steps from now on, in a list of one."""
    found = [0]
    monkeypatch.setattr(DepthRule, "choose", lambda self, rows, context: found[0])
    torch.manual_seed(3)
    return found


def test_an_adapter_may_go_before_a_head_reads_what_used_it(model: Path, tmp_path: Path, depth: list[int]) -> None:
    head = fit(EagleHead()).write(tmp_path / "head")
    adapter = lora_folder(tmp_path / "adapter", 1)

    async def run(resized: bool, **more: Any) -> list[list[int]]:
        async with Engine(model, **options(adapter_slots=1, **more)) as engine:
            await engine.adapters.load("a", adapter)
            answers = [await engine.generate("hello", SamplingParams(**PLAIN, max_tokens=10), adapter="a")]
            await engine.adapters.unload("a")
            if resized:
                await engine.resize_kv(20 * engine.info.page_bytes)
            answers += [await engine.generate("other", SamplingParams(**PLAIN, max_tokens=5)) for _ in range(2)]
            return [answer.choices[0].token_ids for answer in answers]

    for resized in (False, True):
        assert anyio.run(lambda to=resized: run(to, speculation=Eagle(head))) == anyio.run(run, resized)


def test_pages_that_move_are_not_written_by_what_is_read_later(
    model: Path, tmp_path: Path, depth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached pages move to those of an ended row, of which positions are unread."""
    head = fit(EagleHead())
    drafts = recorded(monkeypatch)
    long = list(range(40, 140))

    async def run() -> None:
        async with Engine(model, speculation=Eagle(head.write(tmp_path / "head")), **options()) as engine:
            begun = anyio.Event()

            async def shorter() -> None:
                async with engine.stream("a", SamplingParams(**PLAIN, max_tokens=30)) as stream:
                    for _ in range(14):
                        await anext(stream)
                    begun.set()
                    assert len([token async for token in stream]) == 16

            async with anyio.create_task_group() as group:
                group.start_soon(shorter)
                await begun.wait()
                await engine.generate(long, SamplingParams(**PLAIN, max_tokens=25))
            await engine.resize_kv(7 * engine.info.page_bytes)
            depth[0] = 3
            again = await engine.generate(long, SamplingParams(**PLAIN, max_tokens=7))
            assert again.usage.cached_tokens == 96

    anyio.run(run)
    assert drafts
    check_drafts(drafts, head, model)


def test_neither_head_nor_model_stay_in_memory_in_a_sleep_without_weights(
    model: Path, tmp_path: Path, depth: list[int]
) -> None:
    async def run() -> None:
        async with Engine(model, speculation=Eagle(fit(EagleHead()).write(tmp_path / "head")), **options()) as engine:
            await engine.generate("hello", SamplingParams(max_tokens=4))
            runner = engine._serving.parts().opened.runner
            held = [weakref.ref(runner._decoder), weakref.ref(runner._head)]
            await engine.sleep(2)
            gc.collect()
            assert [each() for each in held] == [None, None]
            await engine.wake()
            assert len((await engine.generate("hello", SamplingParams(**PLAIN, max_tokens=4))).choices) == 1

    anyio.run(run)
