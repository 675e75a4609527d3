"""Trained draft heads on the device: right where they know the model, and without a say in what it answers."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import anyio
import pytest
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, open_engine
from gpu.heads import KNOWING, counting_folder, write_head

from headrace.engine import Engine, SamplingParams
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.engine.speculation import Eagle, Medusa

COUNT = 40
STARTS = (100, 130, 101, 160, 200, 111)
LENGTHS = (1, 16, 70, 33, 2, 150)


@pytest.fixture(autouse=True)
def always_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DepthRule, "choose", lambda self, rows, context: self._most)


def method_of(kind: str) -> type[Eagle | Medusa]:
    return Medusa if kind == "medusa" else Eagle


async def ask_all(engine: Engine, prompts: list[list[int]], asked: list[dict[str, Any]]) -> list[list[int]]:
    found: dict[int, list[int]] = {}

    async def one(index: int) -> None:
        params = SamplingParams(**({"temperature": 0, "max_tokens": COUNT, "ignore_eos": True} | asked[index]))
        found[index] = (await engine.generate(prompts[index], params)).choices[0].token_ids

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for index in range(len(asked)):
                tasks.start_soon(one, index)
    return [found[index] for index in range(len(asked))]


@pytest.mark.parametrize("kind", KNOWING)
def test_a_head_that_knows_the_model_is_always_right(device: str, kind: str, tmp_path: Path) -> None:
    """Alone and beside others, behind prompts in parts and behind pages that another row has left."""
    folder, k = counting_folder(tmp_path / "model"), KNOWING[kind]
    speculation = method_of(kind)(write_head(tmp_path / "head", kind), k=k)
    prompts = [[*draw(length - 1, length), start] for start, length in zip(STARTS, LENGTHS, strict=True)]

    async def run() -> None:
        async with open_engine(folder, device, speculation=speculation, max_batched_tokens=64) as engine:
            for batch in ([prompts[1]], prompts, prompts):
                before = engine.stats()
                answers = await ask_all(engine, batch, [{}] * len(batch))
                assert answers == [list(range(each[-1] + 1, each[-1] + 1 + COUNT)) for each in batch]
                counts = engine.stats()
                drafted = counts.drafted_tokens - before.drafted_tokens
                accepted = counts.accepted_tokens - before.accepted_tokens
                assert accepted >= len(batch) * (COUNT * k // (k + 1) - 3), (kind, drafted, accepted)
                assert drafted - accepted <= 2 * k * len(batch), "drafts in front of the last token were wrong"
            await at_rest(engine)

    anyio.run(run)


@pytest.mark.parametrize("kind", KNOWING)
def test_a_head_is_right_behind_steps_without_drafts(
    device: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind fewer than a GPU leaves unread, as many and more; in rows whose requests end at various times."""
    folder, k = counting_folder(tmp_path / "model"), KNOWING[kind]
    speculation = method_of(kind)(write_head(tmp_path / "head", kind), k=k)
    depths = cycle([k, *[0] * 5, k, *[0] * 15, k, *[0] * 16, k, k, 0, k, *[0] * 17, k, *[0] * 40])
    monkeypatch.setattr(DepthRule, "choose", lambda self, rows, context: next(depths))
    prompts = [[*draw(length - 1, length), start] for start, length in zip(STARTS, LENGTHS, strict=True)]
    asked: list[dict[str, Any]] = [{"max_tokens": 120 + 7 * at} for at in range(len(prompts))]

    async def run() -> None:
        async with open_engine(folder, device, speculation=speculation, max_batched_tokens=64) as engine:
            for _ in range(2):
                answers = await ask_all(engine, prompts, asked)
                assert answers == [
                    list(range(each[-1] + 1, each[-1] + 1 + len(said)))
                    for each, said in zip(prompts, answers, strict=True)
                ]
            counts = engine.stats()
            assert counts.drafted_tokens > 20 * k
            assert counts.drafted_tokens - counts.accepted_tokens <= 3 * k * len(prompts), "drafts were wrong"
            await at_rest(engine)

    anyio.run(run)


def test_a_head_that_knows_the_model_is_right_where_tokens_are_drawn(device: str, tmp_path: Path) -> None:
    """The logits of both are the same to the last bit, and so is the noise."""
    folder, k = counting_folder(tmp_path / "model"), KNOWING["eagle"]
    speculation = Eagle(write_head(tmp_path / "head", "eagle"), k=k)
    prompts = [[*draw(length - 1, length), start] for start, length in zip(STARTS, LENGTHS, strict=True)]
    asked: list[dict[str, Any]] = [{"temperature": 2.5, "seed": seed} for seed in range(len(prompts))]

    async def run() -> None:
        async with open_engine(folder, device, speculation=speculation, max_batched_tokens=64) as engine:
            answers = await ask_all(engine, prompts, asked)
            counted = [list(range(start + 1, start + 1 + COUNT)) for start in STARTS]
            assert not any(said == sure for said, sure in zip(answers, counted, strict=True))
            counts = engine.stats()
            assert counts.accepted_tokens >= len(prompts) * (COUNT * k // (k + 1) - 3)
            assert counts.drafted_tokens - counts.accepted_tokens <= 2 * k * len(prompts)
            await at_rest(engine)

    anyio.run(run)


@pytest.mark.parametrize("kind", KNOWING)
def test_wrong_drafts_change_nothing(zoo: Zoo, device: str, kind: str, tmp_path: Path) -> None:
    """A checkpoint whose logits follow from the last token alone, to the last bit."""
    folder = zoo.folder("exact")
    speculation = method_of(kind)(write_head(tmp_path / "head", kind, knows=False), k=3)
    asked: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "seed": 5}, {"temperature": 0.6, "seed": 6, "top_k": 8},
        {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3}, {"speculate": False}, {"max_tokens": 3},
    ]  # fmt: skip
    prompts = [draw(length, length) for length in LENGTHS]

    async def run(**options: Any) -> list[list[int]]:
        async with open_engine(folder, device, max_batched_tokens=64, **options) as engine:
            found = await ask_all(engine, prompts, asked)
            assert found == await ask_all(engine, prompts, asked)
            assert not options or engine.stats().drafted_tokens > 100
            return found

    assert anyio.run(lambda: run(speculation=speculation)) == anyio.run(run)
