"""What composes with a plain model composes with a quantised one: on any device, in one engine or a few; no tests."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from drafting_engines import always_deep
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, open_engine, together
from gpu.judge import Judge, Output
from gpu.quantised import dense_twin
from gpu.wearing import make

from headrace.engine import Engine, ResponseFormat, SamplingParams
from headrace.engine.speculation import Ngram
from headrace.ops.quantise import Method

__all__ = ["check_composition"]

_DETERMINISTIC = SamplingParams(
    deterministic=True, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2
)  # fmt: skip
_END = 505
"""Token with which answers of a format end; prompts have none."""
_COMPANY = [draw(length, 200 + length) for length in (4, 60, 17, 33, 90, 8, 25, 41)]


def check_composition(zoo: Zoo, device: str, judge_on: str, method: Method, root: Path) -> None:
    """Assert that a model quantised as it is loaded is in everything the model of its numbers.

    With adapters, before and after its pages are resized; as vectors; held to a format; deterministic alone and beside
    others; swapped to host memory and back; with drafts.
    """
    folder = shutil.copytree(zoo.folder("llama 3"), root / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": _END}))
    twin = dense_twin(folder, root / "twin", method, head=False)
    made = make(twin, root, "all")
    plain, worn = Judge(twin, judge_on), Judge(made.merged, judge_on)
    page = kv_bytes(folder, 1)

    async def in_one() -> None:
        options = {"adapter_slots": 2, "adapter_memory": "8MiB", "kv_memory": 60 * page, "max_rows": 9}
        async with open_engine(folder, device, quantize=method, max_context=256, **options) as engine:
            await engine.adapters.load("worn", made.folder)
            await _check_adapter(engine, plain, worn, "with an adapter")
            for pages in (30, 120):
                await engine.resize_kv(pages * page)
                await _check_adapter(engine, plain, worn, f"in {pages} pages")
            await _check_vector(engine, plain)
            await _check_format(engine)
            await _check_deterministic(engine)
            await at_rest(engine)

    async def swapped() -> None:
        options = {"kv_memory": 24 * page, "swap_memory": 200 * page, "max_rows": 8}
        async with open_engine(folder, device, quantize=method, max_context=256, **options) as engine:
            assert engine._life.loop is not None
            engine._life.loop.scheduler.swaps.host.page_seconds = 1e-9  # so small a model is else computed again
            plain.check(await together(engine, _COMPANY, _greedy(30)), "swapped")
            assert engine.stats().swaps > 0
            await at_rest(engine)

    async def drafted() -> None:
        options: dict[str, Any] = {"speculation": Ngram(k=2), "max_rows": 4}
        async with open_engine(folder, device, quantize=method, max_context=256, **options) as engine:
            prompts = [draw(7, seed) * 4 for seed in range(4)]
            plain.check(await together(engine, prompts, _greedy(16)), "with drafts")
            assert engine.stats().drafted_tokens > 0
            await at_rest(engine)

    with pytest.MonkeyPatch.context() as patch:
        always_deep(patch)
        for run in (in_one, swapped, drafted):
            anyio.run(run)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


async def _check_adapter(engine: Engine, plain: Judge, worn: Judge, what: str) -> None:
    found: dict[int, Output] = {}

    async def ask(place: int) -> None:
        adapter = "worn" if place % 2 else None
        completion = await engine.generate(list(_COMPANY[place]), _greedy(8), adapter=adapter)
        found[place] = Output(_COMPANY[place], completion.choices[0].token_ids)

    async with anyio.create_task_group() as tasks:
        for place in range(6):
            tasks.start_soon(ask, place)
    plain.check([found[place] for place in (0, 2, 4)], what)
    worn.check([found[place] for place in (1, 3, 5)], what)


async def _check_vector(engine: Engine, plain: Judge) -> None:
    found = torch.from_numpy((await engine.embed([_COMPANY[3]], pooling="last")).vectors[0])
    ids = torch.tensor([_COMPANY[3]], device=plain._device)
    with torch.inference_mode():
        wanted = plain._exact.model(ids).last_hidden_state[0, -1].cpu()
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.998


async def _check_format(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, response_format=ResponseFormat.regex("[a-f]{8}x"))
    (choice,) = (await engine.generate(_COMPANY[0], params)).choices
    assert re.fullmatch("[a-f]{8}x", choice.text)


async def _check_deterministic(engine: Engine) -> None:
    """Assert that tokens and log-probabilities alone are those beside eight others."""

    async def asked() -> list[Any]:
        (choice,) = (await engine.generate(_COMPANY[1], _DETERMINISTIC)).choices
        return [choice.token_ids, [(entry.logprob, entry.top_logprobs) for entry in choice.logprobs or []]]

    alone = await asked()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(together, engine, _COMPANY, _greedy(20))
        assert await asked() == alone
