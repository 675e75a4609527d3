"""Draft heads on a CPU that read late: whatever becomes of rows, pages, adapters and weights before they do."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import formatted
import pytest
import torch
from adapter_folders import lora_folder
from draft_heads import Eagle3Head, EagleHead
from drafting_engines import HEADS, check_drafts, fit, recorded
from speculating import native, options, told
from tiny_models import chat_folder

from headrace.engine import Engine, RequestFailed, SamplingParams
from headrace.engine.model.cpu.grammars import CpuMasks
from headrace.engine.model.cpu.heads import CpuDraftHead
from headrace.engine.model.drafting.heads.recurrent import RecurrentHead
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import Work
from headrace.engine.scheduling.request import Request
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


@pytest.mark.parametrize("name", HEADS)
def test_unread_positions_keep_the_memory_of_no_others(
    name: str, model: Path, tmp_path: Path, depth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row beside prompts, whose positions are many more, and then the row that has ended."""
    make, method = HEADS[name]
    held: list[tuple[int, int]] = []
    take_up = CpuDraftHead.take_up

    def measured(self: CpuDraftHead, *step: Any) -> None:
        take_up(self, *step)
        runs = self._untaken._of.values()
        tensors = [each for run in runs for hidden, _ in run.places for each in (hidden.final_NE, *hidden.inputs)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        each_bytes = 4 * 32 * (1 + len(self.inputs))
        held.append((sum(len(run.places) for run in runs), sum(storages.values()) // each_bytes))

    monkeypatch.setattr(CpuDraftHead, "take_up", measured)
    chance = random.Random(2)

    async def run() -> None:
        speculation = method(fit(make()).write(tmp_path / "head"))
        async with Engine(model, speculation=speculation, **options(max_batched_tokens=512)) as engine:

            async def feed() -> None:
                for _ in range(8):
                    prompt = [chance.randrange(200) for _ in range(200)]
                    await engine.generate(prompt, SamplingParams(**PLAIN, max_tokens=1))

            async with anyio.create_task_group() as group:
                group.start_soon(engine.generate, "a", SamplingParams(**PLAIN, max_tokens=60))
                for _ in range(3):
                    group.start_soon(feed)

    anyio.run(run)
    assert [tokens for unread, tokens in held if tokens > unread] == []
    most = max(unread for unread, _ in held)
    assert most <= 4 if name == "Medusa" else 50 < most <= 60, "the last state of a row is enough for Medusa"


def test_an_error_in_reading_late_does_not_come_again(
    model: Path, tmp_path: Path, depth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = RecurrentHead.advance

    def failing(self: Any, tokens_N: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(tokens_N) == 9:
            raise RuntimeError("these cannot be read")
        return advance(self, tokens_N, *rest)

    monkeypatch.setattr(RecurrentHead, "advance", failing)

    async def run() -> None:
        speculation = Eagle(fit(EagleHead()).write(tmp_path / "head"))
        async with Engine(model, speculation=speculation, **options(max_rows=1, launch_ahead=1)) as engine:
            first = await engine.generate("a", SamplingParams(**PLAIN, max_tokens=9))
            assert len(first.prompt_token_ids) == 1
            with pytest.raises(RequestFailed):  # takes the row, so that what is unread is read
                await engine.generate("other", SamplingParams(**PLAIN, max_tokens=2))
            await engine.generate("other", SamplingParams(**PLAIN, max_tokens=2))

    anyio.run(run)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_head_reads_no_position_behind_which_a_mask_was_late(
    drafts: int, model: Path, tmp_path: Path, depth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads all others, also where a grammar forces the token that was not chosen."""
    depth[0] = drafts
    reads: list[tuple[Request, int, list[int]]] = []
    read, missing, late = CpuDraftHead._catch_up, CpuMasks.missing, list[int]()
    chance = random.Random(4)

    def noted(self: CpuDraftHead, rows: Sequence[int]) -> None:
        rows = list(rows)
        for row in rows:
            start, end = self._untaken.span(row)
            if end > start:
                work: Work = self._works[row]
                reads.append((work.request, start, self._rows.tokens_RN[row, start + 1 : end + 1].tolist()))
        read(self, rows)

    def misses(self: CpuMasks, rows: Sequence[int], seconds: float) -> list[int]:
        truly = missing(self, rows, seconds)
        found = [row for row in rows if row in truly or chance.random() < 0.1]
        late.extend(found)
        return found

    async def run(**more: Any) -> dict[int, Any]:
        async with Engine(model, **options(**more)) as engine:
            return told(await formatted.ask_all(engine))

    alone = anyio.run(run)
    monkeypatch.setattr("headrace.engine.model.cpu.heads.KEPT", 1)
    monkeypatch.setattr(CpuDraftHead, "_catch_up", noted)
    monkeypatch.setattr(CpuMasks, "missing", misses)
    monkeypatch.setattr(Pace, "is_worth", lambda *_: True)
    speculation = Eagle(fit(Eagle3Head()).write(tmp_path / "head"))
    assert anyio.run(lambda: run(speculation=speculation, prefix_cache=False)) == alone
    assert len(late) > 20
    ends: dict[Request, int] = {}
    for request, start, tokens in reads:
        known = request.tokens[start + 1 : start + 1 + len(tokens)]
        assert tokens[: len(known)] == known
        assert start <= ends.get(request, start), "no position is left out"  # branches begin where they fork
        ends[request] = start + len(tokens)
    assert len(ends) >= len(formatted.ASKED)
