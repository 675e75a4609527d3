"""Engines on an emulated GPU that draft by a smaller model: the same tokens as without, right drafts, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from drafting_engines import ASKED, always_deep, answers_alone, ask_all, small_folder
from drafting_engines import cuda_options as options
from drafting_engines import told_tokens as told
from emulated_cuda import Gpu, emulated
from gpu.conftest import Zoo
from gpu.test_hosted import check_late_masks
from tiny_models import chat_folder

from headrace.engine import Completion, Engine, InvalidParams, SamplingParams
from headrace.engine.speculation import DraftModel, Ngram

LONG: list[dict[str, Any]] = [{"max_tokens": 50, **each} for each in ASKED]
PAGE = 2 * 16 * 2 * 8 * 2
"""Bytes of a layer's keys and values in a page of the target."""
SMALL_PAGE = 2 * 16 * 1 * 8 * 2
"""Those of the one layer of the draft model."""
PAGES = 12 * (2 * PAGE + SMALL_PAGE)
WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "short of pages": {"kv_memory": PAGES, "max_context": 128, "max_batched_tokens": 24},
    "swapped": {"kv_memory": PAGES, "max_context": 128, "swap_memory": "1MiB", "prefix_cache": False},
}
PROMPTS = [list(range(3, 3 + length)) for length in (1, 2, 16, 40, 33)]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def alone(model: Path, gpu: Gpu) -> list[Any]:
    return answers_alone(model, LONG, told, **options())


@pytest.mark.rotated(4)
@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_token(
    way: str, model: Path, alone: list[Any], gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    small = small_folder(tmp_path / "small")

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(small, k=3), **options(**WAYS[way])) as engine:
            assert engine.info.page_bytes == 2 * PAGE + SMALL_PAGE
            assert told(await ask_all(engine, LONG)) == alone
            assert told(await ask_all(engine, LONG)) == alone  # behind prefix hits
            counts = engine.stats()
            assert counts.drafted_tokens > 100
            if "kv_memory" in WAYS[way]:
                assert counts.preemptions > 0
            if "swap_memory" in WAYS[way]:
                assert counts.swaps > 0

    anyio.run(run)


async def drafted(engine: Engine, prompts: list[list[int]], count: int, temperature: float) -> tuple[int, int]:
    """Drafted and accepted tokens of answers to prompts, all at once."""
    before = engine.stats()
    async with anyio.create_task_group() as group:
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=count, ignore_eos=True)
            group.start_soon(engine.generate, prompt, params)
    counts = engine.stats()
    return counts.drafted_tokens - before.drafted_tokens, counts.accepted_tokens - before.accepted_tokens


@pytest.mark.rotated(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_drafts_for_itself_is_always_right(
    way: str, temperature: float, model: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it has read every token: behind prompts in parts, other depths, prefix hits, swaps and preemptions.

    Where tokens are drawn, drafts have the noise of their places.
    """
    depths = [0, 3, 1, 0, 0, 2, 3, 3]

    def choose(rule: Any, rows: int, context: int) -> int:
        depths.append(depths.pop(0))
        return depths[-1]

    monkeypatch.setattr("headrace.engine.scheduling.speculation.depth.DepthRule.choose", choose)
    more = dict(WAYS[way])
    if "kv_memory" in more:
        more["kv_memory"] = 10 * 4 * PAGE

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(model, k=3), **options(**more)) as engine:
            for _ in range(2):
                guessed, accepted = await drafted(engine, PROMPTS, 60, temperature)
                assert guessed > 100 and guessed - accepted <= 3 * 2 * len(PROMPTS)  # but for those behind the last
            counts = engine.stats()
            assert counts.cached_tokens or not more.get("prefix_cache", True)
            assert counts.preemptions or "kv_memory" not in more

    anyio.run(run)


def test_drafts_end_where_the_draft_model_does(model: Path, gpu: Gpu, tmp_path: Path, monkeypatch: Any) -> None:
    """It can read fewer positions, and knows fewer tokens: prompts beyond either are no trouble."""
    always_deep(monkeypatch)
    short = small_folder(tmp_path / "short", "GPT2", "LMHeadModel", max_position_embeddings=32, vocab_size=200)

    async def run(**more: Any) -> list[Any]:
        async with Engine(model, **options(max_batched_tokens=24, **more)) as engine:
            answers = told([await engine.generate(prompt, SamplingParams(max_tokens=40)) for prompt in PROMPTS])
            if more:
                before = engine.stats().drafted_tokens
                assert before > 20
                await engine.generate(list(range(210, 250)), SamplingParams(max_tokens=10))
                assert engine.stats().drafted_tokens == before
            return answers

    assert anyio.run(lambda: run(speculation=DraftModel(short))) == anyio.run(run)


def last_twice(tokens: Any, logits: Any) -> Any:
    return logits * 1.5


@pytest.mark.parametrize("other", ["grammar", "hook"])
def test_rows_that_wait_for_the_host_let_others_draft(
    other: str, model: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 60}
    hook: Callable[[Any, Any], Any] | None = last_twice
    if other == "grammar":
        fields["response_format"], hook = {"type": "json_object"}, None
    else:
        fields["ignore_eos"] = True

    async def run(**more: Any) -> list[Any]:
        found: dict[int, Completion] = {}
        async with Engine(model, **options(**more)) as engine:

            async def one(index: int, params: SamplingParams, hook: Any = None) -> None:
                found[index] = await engine.generate(PROMPTS[index], params, logits_processor=hook)

            async with anyio.create_task_group() as group:
                group.start_soon(one, 0, SamplingParams(**fields), hook)
                for index in range(1, len(PROMPTS)):
                    group.start_soon(one, index, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
            if more:
                assert len(found[0].choices[0].token_ids) >= 12, "too short to be in every step"
                counts = engine.stats()
                assert counts.accepted_tokens > 60
                if other == "hook":  # whose row has no drafts; a grammar's has some, and many that are wrong
                    assert counts.accepted_tokens > 0.6 * counts.drafted_tokens
                    assert counts.draft_runs < 4 * 30 // 2
        return told([found[index] for index in range(len(PROMPTS))])

    assert anyio.run(lambda: run(speculation=DraftModel(model, k=3))) == anyio.run(run)


def test_masks_may_be_late_where_others_draft(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_deep(monkeypatch)
    folder = Zoo(tmp_path, "cuda").folder("speaking")
    options = {"speculation": Ngram(k=3), "launch_ahead": 2, "max_rows": 30, "max_context": 512}
    anyio.run(partial(check_late_masks, folder, "cuda", monkeypatch, **options))


def test_a_draft_model_comes_back_after_sleep_and_is_told_of(
    model: Path, alone: list[Any], gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    small = small_folder(tmp_path / "small")

    async def run() -> None:
        async with Engine(small, **options()) as engine:
            own = sum(part.nbytes for part in engine.info.weights)
        async with Engine(model, speculation=DraftModel(small), **options()) as engine:
            assert sum(part.nbytes for part in engine.info.weights if part.part == "draft model") == own
            for level in (1, 2):
                await engine.sleep(level)
                await engine.wake()
                before = engine.stats()
                assert told(await ask_all(engine, LONG)) == alone
                assert engine.stats().drafted_tokens > before.drafted_tokens

    anyio.run(run)


def test_the_depth_that_is_told_is_that_of_a_step(
    model: Path, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)

    async def run() -> None:
        small = DraftModel(small_folder(tmp_path / "small"), k=3)
        async with Engine(model, speculation=small, **options()) as engine:
            assert engine.stats().speculation_depth == 0
            await engine.generate(PROMPTS[1], SamplingParams(max_tokens=8, ignore_eos=True))
            assert engine.stats().speculation_depth == 3
            await engine.generate(PROMPTS[1], SamplingParams(max_tokens=8, ignore_eos=True, speculate=False))
            assert engine.stats().speculation_depth == 0

    anyio.run(run)


@pytest.mark.parametrize("is_target", [True, False], ids=["target", "draft model"])
def test_models_with_latent_vectors_are_refused(is_target: bool, gpu: Gpu, tmp_path: Path) -> None:
    zoo = Zoo(tmp_path, "cuda")
    plain, latent = zoo.folder("exact"), zoo.folder("deepseek v2")
    target, draft = (latent, plain) if is_target else (plain, latent)

    async def run() -> None:
        async with Engine(target, speculation=DraftModel(draft), **options()):
            pass

    with pytest.raises(InvalidParams, match="speculation: on a GPU, a model that keeps latent vectors"):
        anyio.run(run)
