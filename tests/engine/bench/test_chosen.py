"""Experts that steps choose are counted as they are: by routers that are rigged so that the numbers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from emulated_cuda import emulated
from expert_models import expert_model
from tiny_models import random_folder, write_tokenizer

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.chosen import counting
from headrace.engine.bench.engine.latency import decode
from headrace.engine.model.cpu import sizing
from headrace.ops.cpu.native import block as native_block

EXPERTS = 8
WIDE: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 64, "num_attention_heads": 2}


def rigged_folder(folder: Path) -> Path:
    """A mixture of 8 experts, 2 a token, whose tokens t stay of the class c = t % 8, since no layer adds anything.

    In layer 0 a token chooses the experts c and (c + 4) % 8. In layer 1 all score alike: each token chooses 0 and 1.
    """
    model = expert_model(num_experts=EXPERTS, num_experts_per_tok=2, **WIDE)
    own = torch.eye(EXPERTS, WIDE["hidden_size"])
    of_tokens = own[torch.arange(model.config.vocab_size) % EXPERTS]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.gate.weight.zero_()
            for name, parameter in layer.mlp.experts.named_parameters():
                if "down" in name:
                    parameter.zero_()
        model.model.layers[0].mlp.gate.weight.copy_(own + 0.5 * own.roll(4, 0))
        model.model.embed_tokens.weight.copy_(of_tokens)
        model.lm_head.weight.copy_(of_tokens)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def prompts_of(classes: list[int]) -> list[list[int]]:
    """Prompts that end with tokens of these classes, behind tokens of all classes."""
    return [[*range(20 + number, 40 + number), 40 + of_class] for number, of_class in enumerate(classes)]


async def counts(engine: Engine, classes: list[int]) -> list[float]:
    prompts, steps = prompts_of(classes), 6
    with counting(engine, len(prompts)) as seen:
        await decode(engine, prompts, steps, {})
    return seen.by_layer(2, steps)


async def check(folder: Path, device: str, **options: Any) -> None:
    async with Engine(folder, device=device, max_rows=8, max_context=128, **options) as engine:
        assert await counts(engine, [5, 5, 5]) == [2, 2], "all rows choose the same"
        assert await counts(engine, [1, 2, 3]) == [6, 2], "each row chooses others; 3 rows have a fourth as padding"
        assert await counts(engine, [0, 1, 2, 3, 4]) == [8, 2]
        assert await counts(engine, [7]) == [2, 2]
        assert await counts(engine, [0, 4]) == [2, 2], "the same two, in another order"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_shows_what_its_steps_choose(dtype: str, tmp_path: Path) -> None:
    anyio.run(lambda: check(rigged_folder(tmp_path), "cpu", dtype=dtype))


def test_plain_torch_shows_what_its_steps_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "library", lambda: None)
    monkeypatch.setattr(native_block, "NativeExperts", None)  # an error if they were used
    anyio.run(lambda: check(rigged_folder(tmp_path), "cpu"))


def test_a_gpu_shows_what_its_steps_choose_without_graphs(tmp_path: Path) -> None:
    with emulated():
        anyio.run(lambda: check(rigged_folder(tmp_path), "cuda"))


def test_graphs_and_operations_are_put_back(tmp_path: Path) -> None:
    async def run() -> None:
        from headrace.ops.cuda.experts.packed import CudaExperts

        async with Engine(rigged_folder(tmp_path), device="cuda", max_rows=8, max_context=128) as engine:
            prompts = prompts_of([1, 2, 3])
            before = await texts(engine, prompts)
            loop: Any = engine._life.loop
            runner = loop._runner
            graphs, call = dict(runner._graphs._graphs), CudaExperts.__call__
            assert graphs, "decodes are captured"
            attributes = set(vars(runner))
            assert await counts(engine, [1, 2, 3]) == [6, 2]
            assert runner._graphs._graphs == graphs and runner._graphs._is_capturing
            assert CudaExperts.__call__ is call and set(vars(runner)) == attributes
            assert await texts(engine, prompts) == before

    with emulated():
        anyio.run(run)


async def texts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return [list((await engine.generate(prompt, greedy)).choices[0].token_ids) for prompt in prompts]


def test_a_model_without_experts_shows_none(tmp_path: Path) -> None:
    async def run() -> None:
        async with Engine(random_folder(tmp_path), load_format="random", device="cpu") as engine:
            assert await counts(engine, [1, 2]) == []

    anyio.run(run)
