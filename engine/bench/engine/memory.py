"""`headrace bench memory`: the live share of reserved page memory, and the pages that a shared prompt saves.

The real engine and model are measured; lengths and prompts are random and seeded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import anyio
from rich.console import Console

from headrace.engine import Engine, EngineStats, SamplingParams
from headrace.engine.bench.report import conditions, show

__all__ = ["run"]

_REQUESTS = 96
_SHORTEST, _LONGEST = 20, 400
_OUTPUT = 16
_CHATS = 16
_SYSTEM = 512
_QUESTION = 24


def run(model: str, *, json_path: str | None) -> None:
    """Measure and print both figures."""
    anyio.run(_run, model, json_path)


async def _run(model: str, json_path: str | None) -> None:
    console = Console(stderr=True)
    with console.status("mixed lengths ..."):
        mixed = await _mixed(model)
    shared = {}
    for name, together in (("together", True), ("one after another", False)):
        with console.status(f"shared system prompt, chats arriving {name} ..."):
            shared[name] = await _shared(model, together=together)
    with console.status("the same chats without sharing ..."):
        alone = await _shared(model, together=True, prefix_cache=False)
    rows = [
        [f"live over reserved bytes, lengths {_SHORTEST} to {_LONGEST}", f"{mixed['paged']:.3f}"],
        [f"the same with {_LONGEST} tokens reserved for each request", f"{mixed['longest']:.3f}"],
        [f"the same with the whole context of {mixed['context']} reserved", f"{mixed['whole']:.3f}"],
    ]
    saved = {name: 1 - pages / alone for name, pages in shared.items()}
    rows += [
        [
            f"pages saved, {_CHATS} chats on a {_SYSTEM}-token prompt, {name}",
            f"{saved[name]:.1%} ({pages} of {alone})",
        ]
        for name, pages in shared.items()
    ]
    data = {
        "conditions": conditions(model=mixed["model"], requests=_REQUESTS),
        "mixed": mixed,
        "shared": {"pages_without_sharing": alone, "pages": shared, "saved": saved},
    }
    show("page memory", ("what", "figure"), rows, data, json_path)


async def _mixed(model: str) -> dict[str, Any]:
    generator = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True)
    paged, longest, whole = [], [], []
    async with Engine(model, max_rows=32) as engine:
        info = engine.info

        def sample(stats: EngineStats) -> None:
            if stats.pages_held and stats.running:
                paged.append(stats.live_tokens / (stats.pages_held * info.page_size))
                longest.append(stats.live_tokens / (stats.running * (_LONGEST + _OUTPUT)))
                whole.append(stats.live_tokens / (stats.running * info.max_context))

        prompts = [
            [generator.randrange(info.vocab_size) for _ in range(generator.randint(_SHORTEST, _LONGEST))]
            for _ in range(_REQUESTS)
        ]
        await _watch(engine, prompts, params, sample)
        return {
            "model": info.model,
            "context": info.max_context,
            "paged": mean(paged),
            "longest": mean(longest),
            "whole": mean(whole),
            "samples": len(paged),
        }


async def _shared(model: str, *, together: bool, prefix_cache: bool = True) -> int:
    """Return the most pages held at once by chats that share a system prompt."""
    generator = random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=4 * _OUTPUT, ignore_eos=True)
    held: list[int] = []
    async with Engine(model, max_rows=_CHATS, prefix_cache=prefix_cache) as engine:
        size = engine.info.vocab_size
        system = [generator.randrange(size) for _ in range(_SYSTEM)]
        prompts = [[*system, *(generator.randrange(size) for _ in range(_QUESTION))] for _ in range(_CHATS)]
        gap = 0.0 if together else 0.02
        await _watch(engine, prompts, params, lambda stats: held.append(stats.pages_held), gap)
    return max(held)


async def _watch(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    sample: Callable[[EngineStats], None],
    gap: float = 0.0,
) -> None:
    """Run all prompts, `gap` seconds apart, looking at the engine after every step."""
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            steps = -1
            while True:
                stats = engine.stats()
                if stats.steps != steps:
                    steps = stats.steps
                    sample(stats)
                await anyio.sleep(0.001)

        tasks.start_soon(watch)
        async with anyio.create_task_group() as work:
            for prompt in prompts:
                work.start_soon(engine.generate, prompt, params)
                await anyio.sleep(gap)
        tasks.cancel_scope.cancel()
