"""Requests that keep to a format have drafts on an emulated GPU, too, and give what they give without."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from drafting_engines import always_deep, small_folder
from emulated_cuda import Gpu, emulated
from formatted import JSON, ask_all
from gpu.conftest import Zoo
from gpu.drafting import draft_by_answers, random_depths
from gpu.test_speculation import check_formats
from speculating import Answers, wholes
from tiny_models import chat_folder

from headrace.engine import Completion, Engine, SamplingParams
from headrace.engine.grammar.compiled import _Matcher
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.speculation import DraftModel, Ngram

WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "far ahead": {"launch_ahead": 4},
    "short of pages": {"kv_memory": 14 * 2048, "max_context": 160, "max_batched_tokens": 24},
}


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


def told(answers: Answers) -> list[Any]:
    return [[(each.token_ids, each.finish_reason) for each in answers[index].choices] for index in sorted(answers)]


@pytest.fixture(scope="module")
def alone(model: Path, gpu: Gpu) -> Answers:
    """What an engine without speculation answers."""

    async def run() -> Answers:
        async with Engine(model, **options()) as engine:
            return await ask_all(engine)

    return anyio.run(run)


@pytest.mark.rotated(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", ["told", "n-gram", "draft model"])
def test_drafts_change_no_token(
    drafter: str, way: str, model: Path, alone: Answers, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of every format beside one without, at any depth, with forced tokens taken at once where there are any."""
    random_depths(monkeypatch, 0)
    monkeypatch.setattr(Pace, "is_worth", lambda *_: True)
    speculation: Ngram | DraftModel = Ngram(k=4)
    if drafter == "told":
        draft_by_answers(monkeypatch, wholes(alone))
    if drafter == "draft model":
        speculation = DraftModel(small_folder(tmp_path / "small"), k=4)

    async def run() -> None:
        async with Engine(model, speculation=speculation, **options(**WAYS[way])) as engine:
            for _ in range(2):  # behind prefix hits, too
                assert told(await ask_all(engine)) == told(alone)
            counts = engine.stats()
            assert counts.drafted_tokens > 100
            assert counts.preemptions or "kv_memory" not in WAYS[way]
            if drafter == "told":
                assert counts.accepted_tokens > 0.5 * counts.drafted_tokens

    anyio.run(run)


def test_right_drafts_of_a_formatted_row_save_steps(model: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone in its engine; what the grammar forces is chosen token by token, which log-probabilities ask for."""
    always_deep(monkeypatch)

    async def run(**more: Any) -> tuple[Completion, int, int]:
        params = SamplingParams(temperature=0.0, max_tokens=60, response_format=JSON, logprobs=0)
        async with Engine(model, **options(**more)) as engine:
            answer = await engine.generate("a", params)
            counts = engine.stats()
            return answer, counts.steps, counts.accepted_tokens

    answer, many, _ = anyio.run(run)
    draft_by_answers(monkeypatch, wholes({0: answer}))
    again, few, accepted = anyio.run(lambda: run(speculation=Ngram(k=4)))
    assert again.choices[0].token_ids == answer.choices[0].token_ids
    assert accepted > 30 and few < many * 0.7


@pytest.mark.rotated(2)
@pytest.mark.parametrize("least", [4, 0], ids=["deep", "any depth"])
def test_what_a_gpu_is_tested_with(least: int, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_formats(Zoo(tmp_path, "cuda").folder("speaking"), "cuda", least, monkeypatch)


def masks_are_those_of_the_first_position(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = importlib.import_module("headrace.engine.model.cuda.sampling")
    shape = sampling.shape
    monkeypatch.setattr(sampling, "shape", lambda *args, ahead, **more: shape(*args, ahead=0, **more))


def a_draft_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rollback = _Matcher.rollback
    monkeypatch.setattr(_Matcher, "rollback", lambda self, count: rollback(self, max(0, count - 1)))


def drafts_are_those_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = importlib.import_module("headrace.engine.model.cuda.drafting.drafts").CudaDrafts
    read = drafts._read

    def turned(self: Any, rows: Any, depth: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = read(self, rows, depth)
        return dict(zip(found, [*list(found.values())[1:], *list(found.values())[:1]], strict=True))

    monkeypatch.setattr(drafts, "_read", turned)


@pytest.mark.parametrize(
    "plant", [masks_are_those_of_the_first_position, a_draft_is_not_taken_back, drafts_are_those_of_another_row]
)
def test_answers_tell_planted_bugs(
    plant: Callable[[pytest.MonkeyPatch], None],
    model: Path,
    alone: Answers,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random_depths(monkeypatch, 4)
    draft_by_answers(monkeypatch, wholes(alone))
    plant(monkeypatch)

    async def run() -> bool:
        async with Engine(model, speculation=Ngram(), **options()) as engine:
            try:
                return told(await ask_all(engine)) == told(alone)
            except BaseExceptionGroup:  # a grammar that stands elsewhere may leave no token
                return False

    assert not anyio.run(run)
