"""Beam search finds the sequences that transformers finds, on shared pages, whatever else runs, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import tiny_models
import torch
from model_driver import ENGINE_OPS
from scripted import CAPACITY, Unable

from headrace.engine import Completion, Engine, InvalidParams, RequestFailed, SamplingParams
from headrace.ops.cpu.block import CpuOps

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": 64 * tiny_models.PAGE_BYTES}
Backend = tuple[str, dict[str, Any]]
PROMPTS = [[5, 6, 7], [(at * 7) % 89 + 1 for at in range(40)], [1], [8] * 15]
SEARCHES: list[dict[str, Any]] = [
    {"beam_width": 1, "max_tokens": 9},
    {"beam_width": 4, "max_tokens": 20},
    {"beam_width": 3, "n": 3, "max_tokens": 1},
    {"beam_width": 5, "n": 5, "max_tokens": 25, "length_penalty": 0.0},
    {"beam_width": 4, "n": 2, "max_tokens": 18, "length_penalty": -1.5, "early_stopping": True},
    {"beam_width": 3, "n": 3, "max_tokens": 30, "length_penalty": 2.0, "early_stopping": "never"},
]
PAD = 1000
STOPS = [[], [17], [11, 30, 45, 60, 71]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.whole_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    import transformers

    yield transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[list[int]]]:
    """For each of `CASES` the sequences that transformers finds."""
    return [transformers_beams(model, *case) for case in CASES]


def transformers_beams(model: Any, prompt: list[int], asked: dict[str, Any], stops: list[int]) -> list[list[int]]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=asked["beam_width"],
            num_return_sequences=asked.get("n", 1),
            max_new_tokens=asked["max_tokens"],
            length_penalty=asked.get("length_penalty", 1.0),
            early_stopping=asked.get("early_stopping", False),
            do_sample=False,
            eos_token_id=stops or None,
            pad_token_id=PAD,
        )
    sequences = [row[len(prompt) :].tolist() for row in found]
    if asked["beam_width"] == 1:  # which transformers takes for greedy search
        return sequences
    return [row[: row.index(PAD)] if PAD in row else row for row in sequences]


def params_of(asked: dict[str, Any], stops: list[int]) -> SamplingParams:
    return SamplingParams(stop_token_ids=stops, ignore_eos=True, **asked)


def check(found: Completion, expected: list[list[int]], asked: dict[str, Any], stops: list[int]) -> None:
    assert [choice.token_ids for choice in found.choices] == expected, asked
    for choice in found.choices:
        ended = choice.token_ids[-1] in stops
        assert choice.finish_reason == ("stop" if ended else "length")
        shown = choice.token_ids[: len(choice.token_ids) - ended]
        assert choice.text == "".join(chr(token + 33) for token in shown if token < 94)
    assert found.usage.completion_tokens == sum(map(len, expected))


CASES = [(prompt, asked, stops) for prompt in PROMPTS for asked in SEARCHES for stops in STOPS]


def test_a_search_that_outgrows_smaller_memory_ends_with_length(folder: Path) -> None:
    async def run() -> None:
        async with Engine(folder, **OPTIONS) as engine:
            found: list[Completion] = []

            async def search() -> None:
                found.append(await engine.generate(PROMPTS[0], params_of({"beam_width": 3, "max_tokens": 100}, [])))

            async with anyio.create_task_group() as group:
                group.start_soon(search)
                while engine.stats().steps < 8:  # noqa: ASYNC110 - it has no event
                    await anyio.sleep(0.001)
                await engine.resize_kv(2 * tiny_models.PAGE_BYTES)
            (choice,) = found[0].choices
            assert choice.finish_reason == "length"
            assert len(choice.token_ids) == 2 * 16 + 1 - len(PROMPTS[0])  # the last is never written

    anyio.run(run)


@pytest.mark.parametrize(
    ("sizes", "preempts"),
    [
        ({"kv_memory": 256 * tiny_models.PAGE_BYTES}, False),
        ({"prefix_cache": False, "launch_ahead": 1, "page_size": 4}, False),
        ({"kv_memory": 10 * tiny_models.PAGE_BYTES, "page_size": 4, "max_rows": 16, "max_batched_tokens": 21}, True),
        ({"max_rows": 4, "launch_ahead": 3}, True),
    ],
    ids=["roomy", "no cache", "few pages", "few rows"],
)
@pytest.mark.xdist_group("beams")
def test_sequences_are_those_of_transformers(
    folder: Path, expected: list[list[list[int]]], sizes: dict[str, Any], preempts: bool
) -> None:
    """Several searches at once, beside requests that sample."""

    async def run() -> None:
        async with Engine(folder, **(OPTIONS | sizes)) as engine:
            plain = SamplingParams(temperature=0, max_tokens=12)
            alone = [await engine.generate(prompt, plain) for prompt in PROMPTS]

            async def search(case: int) -> None:
                prompt, asked, stops = CASES[case]
                check(await engine.generate(prompt, params_of(asked, stops)), expected[case], asked, stops)

            async def sample(index: int) -> None:
                found = await engine.generate(PROMPTS[index], plain)
                assert found.choices[0].token_ids == alone[index].choices[0].token_ids

            for start in range(0, len(CASES), 6):
                async with anyio.create_task_group() as tasks:
                    for case in range(start, start + 6):
                        tasks.start_soon(search, case)
                    tasks.start_soon(sample, start % len(PROMPTS))
                assert engine.stats().pages_held == 0
            assert bool(engine.stats().preemptions) == preempts
            assert engine._life.loop is not None
            engine._life.loop.scheduler.roster.check()
            assert not engine._life.loop.scheduler.roster.requests and not engine._life.loop._generations

    anyio.run(run)


def test_a_round_computes_one_token_a_beam_and_copies_the_page_it_writes(folder: Path) -> None:
    """Nothing is computed twice: the prompt once, then each beam's own token on pages that it shares."""

    async def run() -> None:
        async with Engine(folder, **OPTIONS, prefix_cache=False) as engine:
            assert engine._life.loop is not None
            scheduler = engine._life.loop.scheduler
            plan, tokens, copies = scheduler.plan, 0, 0

            def watched(now: float) -> Any:
                nonlocal tokens, copies
                made = plan(now)
                if made is not None:
                    tokens += made.tokens
                    copies += len(made.copies)
                return made

            scheduler.plan = watched  # type: ignore[method-assign]
            found = await engine.generate(PROMPTS[1], SamplingParams(beam_width=4, max_tokens=10, ignore_eos=True))
            assert len(found.choices[0].token_ids) == 10
            assert tokens == len(PROMPTS[1]) + 9 * 4
            assert 0 < copies <= 9 * 4

    anyio.run(run)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_cancelled_search_gives_everything_back(folder: Path, after: int, anyio_backend: Backend) -> None:
    async def run() -> None:
        async with Engine(folder, **OPTIONS) as engine:
            stream = engine.stream(PROMPTS[1], SamplingParams(beam_width=4, n=2, max_tokens=150, ignore_eos=True))
            with anyio.fail_after(20):
                while engine.stats().steps < after:
                    await anyio.lowlevel.checkpoint()
                stream.cancel()
                assert [token.finish_reason async for token in stream] == ["cancelled"] * 2
                while engine.stats().pages_held or engine.stats().steps_in_flight:  # noqa: ASYNC110 - it has no event
                    await anyio.sleep(0.001)
            assert engine._life.loop is not None
            engine._life.loop.scheduler.roster.check()
            assert not engine._life.loop.scheduler.roster.requests and not engine._life.loop._generations

    anyio.run(run, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_a_step_that_fails_ends_the_search_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ENGINE_OPS.embed
    fails = False

    def embed(self: CpuOps, *args: Any) -> torch.Tensor:
        nonlocal fails
        if fails:
            fails = False
            raise ValueError("broken")
        return real(self, *args)

    monkeypatch.setattr(ENGINE_OPS, "embed", embed)

    async def run() -> None:
        nonlocal fails
        async with Engine(folder, **OPTIONS) as engine:
            asked = SamplingParams(beam_width=4, max_tokens=12, ignore_eos=True)
            before = await engine.generate(PROMPTS[1], asked)
            stream = engine.stream(PROMPTS[1], asked)
            with anyio.fail_after(20):
                first = engine.stats().steps
                while engine.stats().steps < first + 3:
                    await anyio.lowlevel.checkpoint()
                fails = True
                with pytest.raises(RequestFailed):
                    _ = [token async for token in stream]
                while engine.stats().pages_held or engine.stats().steps_in_flight:  # noqa: ASYNC110 - nor has this
                    await anyio.sleep(0.001)
            assert engine._life.loop is not None
            engine._life.loop.scheduler.roster.check()
            assert not engine._life.loop.scheduler.roster.requests and not engine._life.loop._generations
            assert (await engine.generate(PROMPTS[1], asked)).choices[0].token_ids == before.choices[0].token_ids

    anyio.run(run)


def test_a_search_ends_with_the_engine(folder: Path, anyio_backend: Backend) -> None:
    async def run() -> None:
        async with Engine(folder, **OPTIONS) as engine:
            stream = engine.stream(PROMPTS[0], SamplingParams(beam_width=2, max_tokens=200, ignore_eos=True))
            await stream.admitted()
            await engine.aclose()
        assert [token.finish_reason async for token in stream] == ["cancelled"]

    anyio.run(run, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_a_search_ends_at_the_context(folder: Path, model: Any) -> None:
    async def run() -> None:
        async with Engine(folder, **OPTIONS, max_context=20) as engine:
            found = await engine.generate([8] * 15, SamplingParams(beam_width=3, ignore_eos=True))
            expected = transformers_beams(model, [8] * 15, {"beam_width": 3, "max_tokens": 5}, [])
            assert [choice.token_ids for choice in found.choices] == expected

    anyio.run(run)


def test_more_beams_than_the_vocabulary_can_feed_are_refused(folder: Path) -> None:
    async def run() -> None:
        async with Engine(folder, **OPTIONS) as engine:
            with pytest.raises(InvalidParams, match="beam_width"):
                await engine.generate([1], SamplingParams(beam_width=16, stop_token_ids=range(1, 9)))

    anyio.run(run)


def test_a_device_without_logprobs_refuses() -> None:
    async def run() -> None:
        async with Unable(CAPACITY) as engine:
            with pytest.raises(InvalidParams, match="beam_width"):
                await engine.generate("a", SamplingParams(beam_width=2))

    anyio.run(run)


def test_many_searches_take_the_rows_that_their_rounds_need(folder: Path) -> None:
    async def ask() -> None:
        async with Engine(folder, **OPTIONS, max_rows=8) as engine:
            steps: list[int] = []

            def prompts() -> Iterator[list[int]]:
                for prompt in PROMPTS[:2] * 3:
                    steps.append(engine.stats().steps)
                    yield prompt

            asked = SamplingParams(beam_width=4, max_tokens=6, ignore_eos=True)
            assert len(await engine.generate_many(prompts(), asked)) == 6
            assert steps[1] == 0 and steps[2] >= 6, "two searches of twice four rows are two for each of eight rows"

    anyio.run(ask)


def test_scores_are_those_of_transformers(folder: Path, model: Any) -> None:
    asked: dict[str, Any] = {"beam_width": 4, "n": 3, "max_tokens": 12, "length_penalty": 0.7}
    prompt, stops = PROMPTS[1], STOPS[2]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=4, num_return_sequences=3, max_new_tokens=12,
            length_penalty=0.7, do_sample=False, eos_token_id=stops, pad_token_id=PAD,
            return_dict_in_generate=True, output_scores=True,
        ).sequences_scores.tolist()  # fmt: skip

    async def run() -> None:
        async with Engine(folder, **OPTIONS) as engine:
            found = await engine.generate(prompt, params_of(asked, stops))
            assert [choice.score for choice in found.choices] == pytest.approx(expected, abs=1e-4)
            tokens = [token async for token in engine.stream(prompt, params_of(asked, stops))]
            assert [token.score for token in tokens if token.score is not None] == pytest.approx(expected, abs=1e-4)
            assert all((token.score is None) == (token.finish_reason is None) for token in tokens)
            sampled = await engine.generate(prompt, SamplingParams(max_tokens=3))
            assert sampled.choices[0].score is None

    anyio.run(run)
