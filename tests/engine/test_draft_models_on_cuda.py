"""Engines on an emulated GPU that draft by a smaller model: the same tokens as without, and right drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from drafting_engines import ASKED, always_deep, ask_all
from emulated_cuda import Gpu, emulated
from tiny_models import chat_folder

from headrace.engine import Completion, Engine, SamplingParams
from headrace.engine.speculation import DraftModel

LONG: list[dict[str, Any]] = [{"max_tokens": 50, **each} for each in ASKED]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("target"))


def options(**more: Any) -> dict[str, Any]:
    sizes = {"kv_memory": "4MiB", "max_rows": 8, "max_context": 256, "max_batched_tokens": 256}
    return {"device": "cuda", "seed": 3} | sizes | more


def told(answers: list[Completion]) -> list[Any]:
    return [[(choice.token_ids, choice.finish_reason) for choice in answer.choices] for answer in answers]


@pytest.fixture(scope="module")
def alone(model: Path, gpu: Gpu) -> list[Any]:
    async def run() -> list[Any]:
        async with Engine(model, **options()) as engine:
            return told(await ask_all(engine, LONG))

    return anyio.run(run)


def test_itself(model: Path, alone: list[Any], gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    always_deep(monkeypatch)

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(model, k=3), **options()) as engine:
            assert told(await ask_all(engine, LONG)) == alone
            assert told(await ask_all(engine, LONG)) == alone  # behind prefix hits
            counts = engine.stats()
            print(counts.drafted_tokens, counts.accepted_tokens, counts.accepted_by_position, counts.draft_runs)
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            await engine.generate("hello there", params)
            after = engine.stats()
            print(after.drafted_tokens - counts.drafted_tokens, after.accepted_tokens - counts.accepted_tokens)
            print(engine.info)

    anyio.run(run)
