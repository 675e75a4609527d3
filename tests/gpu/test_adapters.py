"""Adapters beside each other and beside rows that wear none: each says what its merged model, or PEFT, would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, open_engine
from gpu.judge import Judge, Output
from gpu.wearing import KINDS, VIRTUAL, make, make_virtual, mixed

from headrace.engine import Engine

BASE = "llama 3"
LENGTHS = (1, 40, 70, 17, 130, 33, 64, 20, 90)
OPTIONS: dict[str, Any] = {
    "max_rows": 9, "max_context": 256, "adapter_slots": 4, "adapter_memory": "24MiB", "prefix_cache": False,
    "adapter_host_memory": "16MiB",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_each_of_a_batch_says_what_it_wears(device: str, zoo: Zoo, tmp_path: Path) -> None:
    check_batches(zoo.folder(BASE), device, device, tmp_path)


def check_batches(base: Path, device: str, judging: str, root: Path) -> None:
    """More adapters than slots at once, then a batch that mostly wears one; prompts whole and in chunks."""
    anyio.run(_check_batches, base, device, judging, root)


async def _check_batches(base: Path, device: str, judging: str, root: Path) -> None:
    folders = {kind: make(base, root, kind) for kind in KINDS}
    virtual = {kind: make_virtual(base, root, kind) for kind in VIRTUAL}
    judges = {None: Judge(base, judging)} | {kind: Judge(made.merged, judging) for kind, made in folders.items()}
    everybody = [*KINDS, None, *VIRTUAL, None, "all"]
    mostly = ["all", "all", "all", None, "all", "all", "all", "q and v", "all"]
    for tokens, worn in ((40, everybody), (512, mostly)):
        async with open_engine(base, device, **OPTIONS, max_batched_tokens=tokens) as engine:
            for kind, made in (folders | virtual).items():
                await engine.adapters.load(_name(kind), made.folder)
            outputs = await _together(engine, worn)
            await at_rest(engine)
        for kind, judge in judges.items():
            if mine := [output for output, wears in zip(outputs, worn, strict=True) if wears == kind]:
                judge.check(mine, f"{kind}, {tokens} tokens a step")
        for kind, made in virtual.items():
            mine = [output for output, wears in zip(outputs, worn, strict=True) if wears == kind]
            assert not mine or float(made.gaps(mine).max()) <= judges[None].margin, f"{kind}, {tokens} tokens a step"


@pytest.mark.filterwarnings("ignore")
def test_many_of_mixed_ranks_in_one_batch(device: str, zoo: Zoo, tmp_path: Path) -> None:
    """32 adapters, each with a rank and modules of its own, beside rows that wear none."""
    base = zoo.folder(BASE)
    made = {f"number {number}": make(base, tmp_path, f"number {number}", mixed(number)) for number in range(32)}
    everybody = [None, *made, None, *list(made)[:6]]

    async def run() -> list[Output]:
        options = OPTIONS | {"max_rows": len(everybody), "adapter_slots": len(made), "adapter_memory": "192MiB"}
        async with open_engine(base, device, **options) as engine:
            for kind, each in made.items():
                await engine.adapters.load(_name(kind), each.folder)
            return await _together(engine, everybody)

    outputs = anyio.run(run)
    for kind, folder in {None: base, **{kind: each.merged for kind, each in made.items()}}.items():
        mine = [output for output, wears in zip(outputs, everybody, strict=True) if wears == kind]
        Judge(folder, device).check(mine, str(kind))


@pytest.mark.filterwarnings("ignore")
def test_each_alone(cuda: str, zoo: Zoo, tmp_path: Path) -> None:
    """One row, for which other kernels serve."""
    base = zoo.folder(BASE)
    made = {kind: make(base, tmp_path, kind) for kind in KINDS}

    async def run() -> dict[str, list[Output]]:
        async with open_engine(base, cuda, **OPTIONS) as engine:
            for kind, each in made.items():
                await engine.adapters.load(_name(kind), each.folder)
            return {kind: await _together(engine, [kind]) for kind in made}

    for kind, mine in anyio.run(run).items():
        Judge(made[kind].merged, cuda).check(mine, kind)


ATTENTION = r"self_attn\.(q|k|v|o)_proj"
LATENT = r"self_attn\.(q|q_a|q_b|o)_proj|kv_a_proj_with_mqa"
UPDATED: dict[str, str] = {
    "qwen2 experts": rf"{ATTENTION}|shared_expert\.(gate|up|down)_proj",
    "glm 4.5 experts": rf"{ATTENTION}|mlp\.(gate|up|down)_proj|shared_experts\.(gate|up|down)_proj",
    "deepseek v2": rf"{LATENT}|mlp\.(gate|up|down)_proj|shared_experts\.(gate|up|down)_proj",
    "deepseek v3": rf"{LATENT}|mlp\.(gate|up|down)_proj|shared_experts\.(gate|up|down)_proj",
    "gemma4 experts": rf"{ATTENTION}|layers\.\d\.mlp\.(gate|up|down)_proj",
    "arcee": rf"{ATTENTION}|mlp\.(up|down)_proj",
}
"""Models with experts or without gates, and the ends of the names of all modules that take updates."""

ASKED = ((45, 4), (3, 9), (70, 6), (9, 9), (8, 9), (40, 9), (33, 9), (6, 9))
"""Lengths of prompts and of completions, as many as there are rows."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", UPDATED)
def test_every_module_but_experts(device: str, zoo: Zoo, family: str, tmp_path: Path) -> None:
    check_modules(zoo.folder(family), device, device, tmp_path, family, rows=8 if family == "arcee" else 3)


def check_modules(base: Path, device: str, judging: str, root: Path, family: str, rows: int = 3) -> None:
    """Rows that share an adapter, ever fewer of them, and at last one alone."""
    made = make(base, root, family, {"r": 8, "target_modules": rf".*({UPDATED[family]})"})
    outputs: list[Output] = []

    async def ask(engine: Engine, length: int, tokens: int) -> None:
        prompt = draw(length, length)
        choice = (await engine.generate(prompt, greedy(tokens), adapter="one")).choices[0]
        outputs.append(Output(prompt, choice.token_ids))

    async def run() -> None:
        async with open_engine(base, device, **OPTIONS | {"adapter_slots": 1}) as engine:
            await engine.adapters.load("one", made.folder)
            with anyio.fail_after(120):
                async with anyio.create_task_group() as group:
                    for length, tokens in ASKED[:rows]:
                        group.start_soon(ask, engine, length, tokens)
            await at_rest(engine)

    anyio.run(run)
    Judge(made.merged, judging, loose=8.0).check(outputs, family)


async def _together(engine: Engine, worn: list[str | None]) -> list[Output]:
    """One greedy output for each, of prompts that no two share, all at once."""
    outputs: dict[int, Output] = {}

    async def ask(place: int, kind: str | None) -> None:
        prompt = draw(LENGTHS[place % len(LENGTHS)], place)
        adapter = None if kind is None else _name(kind)
        # At last nobody wears anything else, in a batch as large as it was and then in one of two.
        tokens = 8 if kind != "all" else 12 if place > 1 else 18
        choice = (await engine.generate(list(prompt), greedy(tokens), adapter=adapter)).choices[0]
        outputs[place] = Output(prompt, choice.token_ids)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:
            for place, kind in enumerate(worn):
                group.start_soon(ask, place, kind)
    return [outputs[place] for place in range(len(worn))]


def _name(kind: str) -> str:
    return kind.replace(" ", "-")
