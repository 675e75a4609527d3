"""Draft models on the device: right where they are their own target, and without a say in what it answers."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import anyio
import pytest
from gpu.checkpoints import EXACT, build, kv_bytes, save
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, open_engine

from headrace.engine import Engine, ResponseFormat, SamplingParams
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.engine.speculation import DraftModel

COUNT = 40
LENGTHS = (1, 16, 70, 33, 2, 150)
K = 3


@pytest.fixture(autouse=True)
def always_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DepthRule, "choose", lambda self, rows, context: self._most)


async def ask_all(engine: Engine, prompts: list[list[int]], asked: list[dict[str, Any]]) -> list[list[int]]:
    found: dict[int, list[int]] = {}

    async def one(index: int) -> None:
        options = {"temperature": 0, "max_tokens": COUNT} | asked[index]
        options |= {} if {"response_format", "beam_width"} & options.keys() else {"ignore_eos": True}
        hook = options.pop("hook", None)
        completion = await engine.generate(prompts[index], SamplingParams(**options), logits_processor=hook)
        found[index] = completion.choices[0].token_ids

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for index in range(len(asked)):
                tasks.start_soon(one, index)
    return [found[index] for index in range(len(asked))]


def small_folder(folder: Path, **sizes: Any) -> Path:
    """A model of random numbers with the tokens of the checkpoints, and heads of another shape."""
    save(
        build("Llama", EXACT | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2} | sizes),
        folder,
    )
    return folder


WAYS: dict[str, dict[str, Any]] = {"roomy": {}, "swapped": {"swap_memory": "64MiB", "prefix_cache": False}}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_drafts_for_itself_is_right(zoo: Zoo, device: str, way: str, temperature: float) -> None:
    """Alone and beside others, behind prompts in parts, behind pages of another row, and behind swaps.

    Drafts of rows that sample have the noise of their places.
    """
    folder = zoo.folder("llama 3")
    prompts = [draw(length, length) for length in LENGTHS]
    options = WAYS[way] | ({"kv_memory": 2 * kv_bytes(folder, 30)} if way == "swapped" else {})

    async def run() -> None:
        speculation = DraftModel(folder, k=K)
        async with open_engine(folder, device, speculation=speculation, max_batched_tokens=64, **options) as engine:
            for batch in ([prompts[2]], prompts, prompts):
                before = engine.stats()
                await ask_all(engine, batch, [{"temperature": temperature, "seed": seed} for seed in range(len(batch))])
                counts = engine.stats()
                drafted = counts.drafted_tokens - before.drafted_tokens
                accepted = counts.accepted_tokens - before.accepted_tokens
                assert drafted > len(batch) * COUNT // 2
                assert accepted > 0.7 * drafted, (accepted, drafted)  # but for close calls, and behind the last token
            assert "swap_memory" not in options or engine.stats().swaps
            await at_rest(engine)

    anyio.run(run)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_right_behind_steps_without_drafts(
    zoo: Zoo, device: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind fewer than a GPU leaves unread, as many and more."""
    folder = zoo.folder("llama 3")
    prompts = [draw(length, length) for length in LENGTHS]
    options = WAYS[way] | ({"kv_memory": 2 * kv_bytes(folder, 30)} if way == "swapped" else {})
    depths = cycle([K, *[0] * 5, K, *[0] * 15, K, *[0] * 16, K, K, 0, K, *[0] * 17, K, *[0] * 33])
    monkeypatch.setattr(DepthRule, "choose", lambda self, rows, context: next(depths))

    async def run() -> None:
        speculation = DraftModel(folder, k=K)
        async with open_engine(folder, device, speculation=speculation, max_batched_tokens=64, **options) as engine:
            for _ in range(2):
                await ask_all(engine, prompts, [{"max_tokens": 100 + 9 * at} for at in range(len(prompts))])
            counts = engine.stats()
            assert counts.drafted_tokens > 60
            assert counts.accepted_tokens > 0.7 * counts.drafted_tokens, counts  # but for close calls
            await at_rest(engine)

    anyio.run(run)


def test_wrong_drafts_change_nothing(zoo: Zoo, device: str, tmp_path: Path) -> None:
    """A checkpoint whose logits follow from the last token alone, to the last bit; the drafts' context is short."""
    folder = zoo.folder("exact")
    speculation = DraftModel(small_folder(tmp_path / "small", max_position_embeddings=128), k=K)
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


def test_rows_that_wait_for_the_host_let_others_draft(zoo: Zoo, device: str) -> None:
    """Every step has a row with a grammar, and one with a hook: the others have drafts all the same."""
    folder = zoo.folder("speaking")
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 2, "response_format": ResponseFormat.regex("[a-f]{200}"), "max_tokens": 2 * COUNT},
        {"max_tokens": 2 * COUNT, "hook": lambda tokens, logits: logits * 2},
        {}, {"temperature": 0.8, "seed": 5}, {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3},
        {"beam_width": 2, "max_tokens": 8},
    ]  # fmt: skip
    prompts = [draw(length, length, 250) for length in LENGTHS]

    async def run(**options: Any) -> list[list[int]]:
        async with open_engine(folder, device, **options) as engine:
            found = await ask_all(engine, prompts, asked)
            counts = engine.stats()
            if options:  # its own target is right but where a token is drawn
                assert counts.accepted_tokens > COUNT // 2, counts
            await at_rest(engine)
            return found

    assert anyio.run(lambda: run(speculation=DraftModel(folder, k=K))) == anyio.run(run)
