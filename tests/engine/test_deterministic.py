"""`deterministic=True`: the same tokens and log-probabilities to the last bit, whatever else happens to the request."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import adapter_folders
import anyio
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import Completion, Engine, InvalidParams, ResponseFormat, SamplingParams

CONTEXT = 640
PAGE_BYTES = 2 * 2 * 2 * 32 * 16 * 2
"""Of bfloat16: layers, key and value, heads, head size, tokens, bytes."""
WANTED = {"deterministic": True, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, whose logits in bfloat16 lie so close that other shapes would change tokens."""
    import transformers

    made = tmp_path_factory.mktemp("close")
    torch.manual_seed(3)
    config = tiny_models.CONFIG | {"hidden_size": 128, "intermediate_size": 320, "max_position_embeddings": 2048}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | {"tie_word_embeddings": False}))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.bfloat16().save_pretrained(made)
    tiny_models.write_tokenizer(made)
    return made


def draw(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(5, 90) for _ in range(length)]


PROMPTS = [draw(length, 40 + length) for length in (3, 33, 256, 300, 517)]
ASKED = [SamplingParams(seed=at, **WANTED) for at in range(len(PROMPTS))]
ASKED[1] = SamplingParams(seed=1, frequency_penalty=0.6, repetition_penalty=1.1, top_p=0.95, **WANTED)


def bits(answer: Completion) -> list[Any]:
    """All that must be equal: tokens and log-probabilities, as they are."""
    return [
        (choice.token_ids, [(entry.logprob, entry.top_logprobs) for entry in choice.logprobs or []])
        for choice in answer.choices
    ]


def opened(folder: Path, **options: Any) -> Engine:
    sizes = {"max_context": CONTEXT, "max_rows": 8, "kv_memory": 400 * PAGE_BYTES, "cpu_threads": 1}
    return Engine(folder, device="cpu", dtype="bfloat16", **(sizes | options))


async def alone(folder: Path) -> list[list[Any]]:
    """Each in an engine that does nothing else."""
    async with opened(folder, prefix_cache=False) as engine:
        return [bits(await engine.generate(prompt, asked)) for prompt, asked in zip(PROMPTS, ASKED, strict=True)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[Any]]:
    return anyio.run(alone, folder)


class Load:
    """Requests of all kinds around those that are looked at."""

    def __init__(self, engine: Engine, seed: int, adapters: Sequence[str | None] = (None,)) -> None:
        self._engine, self._chance, self._adapters = engine, random.Random(seed), adapters

    async def run(self, count: int) -> None:
        async with anyio.create_task_group() as tasks:
            for at in range(count):
                tasks.start_soon(self._one, at)
                await anyio.sleep(self._chance.random() * 0.02)

    async def _one(self, at: int) -> None:
        shared = self._chance.choice([[], PROMPTS[3][: self._chance.randrange(300)], PROMPTS[4]])
        prompt = [*shared, *draw(self._chance.randrange(1, 60), at)]
        asked = SamplingParams(
            seed=at, max_tokens=self._chance.randrange(1, 30), deterministic=self._chance.random() < 0.2
        )
        await self._engine.generate(prompt, asked, adapter=self._chance.choice(self._adapters))


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([60, 90, 400]),
    budget=st.sampled_from([260, 400, 2048]),
    ahead=st.integers(1, 3),
    host=st.sampled_from([0, 60]),
)
def test_load_chunks_cache_and_preemption_change_no_bit(
    folder: Path, expected: list[list[Any]], seed: int, pages: int, budget: int, ahead: int, host: int
) -> None:
    async def run() -> None:
        options = {
            "kv_memory": pages * PAGE_BYTES,
            "max_batched_tokens": budget,
            "launch_ahead": ahead,
            "swap_memory": host * PAGE_BYTES,
        }
        found: dict[int, list[Any]] = {}
        chance = random.Random(seed)

        async def one(engine: Engine, at: int, wait: float) -> None:
            await anyio.sleep(wait)
            found[at] = bits(await engine.generate(PROMPTS[at], ASKED[at], priority=chance.choice([0, 0, 5])))

        async with opened(folder, **options) as engine:
            for _ in range(2):  # the second time with a cache that holds everything
                found.clear()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(Load(engine, seed).run, 14)
                    for at in range(len(PROMPTS)):
                        tasks.start_soon(one, engine, at, chance.random() * 0.2)
                for at, wanted in enumerate(expected):
                    assert found[at] == wanted, (at, engine.stats())

    anyio.run(run)


@pytest.mark.parametrize("host", [0, 60], ids=["computed again", "swapped"])
def test_a_preemption_in_the_middle_of_a_completion_changes_no_bit(
    folder: Path, expected: list[list[Any]], host: int
) -> None:
    """Its own tokens are computed again one by one, as they were; or come back as they were."""

    async def run() -> None:
        options = {"kv_memory": 37 * PAGE_BYTES, "swap_memory": host * PAGE_BYTES}
        async with opened(folder, **options) as engine:
            async with engine.stream(PROMPTS[3], ASKED[3], priority=5) as stream:
                begun = [await anext(stream) for _ in range(3)]
                await engine.generate(draw(250, 1), SamplingParams(max_tokens=60, ignore_eos=True))
                tokens = begun + [token async for token in stream]
            assert engine.stats().preemptions and bool(engine.stats().swaps) == bool(host)
        found = [(token.logprobs.logprob, token.logprobs.top_logprobs) for token in tokens if token.logprobs]
        assert ([token.id for token in tokens], found) == expected[3][0]

    anyio.run(run)


def test_who_computes_alone_and_all_others_take_turns(folder: Path) -> None:
    """Neither keeps the other waiting for more than a step."""

    async def run() -> None:
        ordinary = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
        async with opened(folder) as engine:
            order: list[int] = []

            async def read(at: int, asked: SamplingParams) -> None:
                async for _ in engine.stream(PROMPTS[0], asked):
                    order.append(at)  # noqa: PERF401 - as they come

            async with anyio.create_task_group() as tasks:
                for at in range(2):
                    tasks.start_soon(read, at, ordinary)
                tasks.start_soon(read, 2, ASKED[0])
            counts = [order[: len(order) // 2].count(at) for at in range(3)]
            assert min(counts) > 0.6 * max(counts)

    anyio.run(run)


def adapters_of(folder: Path) -> dict[str, Path]:
    """Two adapters for the model of `folder`."""
    made = {}
    for seed, name in enumerate(("one", "two")):
        drawn = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(2):
            for module, outputs in (("q_proj", 128), ("v_proj", 64)):
                place = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                tensors[f"{place}.lora_A.weight"] = torch.randn(4, 128, generator=drawn) * 0.2
                tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, 4, generator=drawn) * 0.2
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
        made[name] = adapter_folders.write_folder(folder / name, config, tensors)
    return made


@pytest.mark.parametrize("host", [0, 60], ids=["computed again", "swapped"])
def test_adapters_grammars_and_memory_that_goes_and_comes_back_change_no_bit(
    folder: Path, tmp_path: Path, host: int
) -> None:
    """Of requests that wear something, keep to a format or both, among others that do; the engine sleeps meanwhile."""
    digits = {"response_format": ResponseFormat.regex("[0-9]{20,60}(ab|cd)+"), "ignore_eos": False}
    asked = [
        (PROMPTS[1], "one", SamplingParams(seed=1, **WANTED)),
        (PROMPTS[2], None, SamplingParams(seed=2, **(WANTED | digits))),
        (PROMPTS[3], "two", SamplingParams(seed=3, frequency_penalty=0.4, **(WANTED | digits))),
    ]
    adapters = adapters_of(tmp_path)

    async def run(slots: int, during: Callable[[Engine, int], Awaitable[None]] | None, **options: Any) -> list[Any]:
        found: list[Any] = [None] * len(asked)
        async with opened(folder, adapter_slots=slots, **options) as engine:
            for name, path in adapters.items():
                await engine.adapters.load(name, path)

            async def one(at: int) -> None:
                prompt, adapter, params = asked[at]
                found[at] = bits(await engine.generate(prompt, params, adapter=adapter))

            async with anyio.create_task_group() as tasks:
                for at in range(len(asked)):
                    if during is None:
                        await one(at)
                    else:
                        tasks.start_soon(one, at)
                        tasks.start_soon(during, engine, at)
            assert during is None or engine.stats().preemptions > 3
        return found

    async def disturb(engine: Engine, at: int) -> None:
        if at:
            await Load(engine, at, ["one", "two", None]).run(8)
            return
        for pages in (60, 90, 400):
            await anyio.sleep(0.05)
            await engine.resize_kv(pages * PAGE_BYTES)
            await engine.sleep(1 if pages > 60 else 2)
            await engine.wake()

    expected = anyio.run(lambda: run(2, None, prefix_cache=False, launch_ahead=1))
    assert anyio.run(lambda: run(1, disturb, swap_memory=host * PAGE_BYTES)) == expected
    assert not all(token in range(15, 25) for choice in expected[0] for token in choice[0])


def test_choices_turns_and_branches_are_deterministic_as_well(folder: Path) -> None:
    async def talk(engine: Engine) -> list[Any]:
        several = await engine.generate(PROMPTS[1], SamplingParams(seed=4, n=3, **WANTED))
        async with engine.stream(PROMPTS[2], ASKED[2]) as stream:
            heard = [(await anext(stream)).id for _ in range(5)]
            async with stream.fork(seed=9) as other:
                heard += [token.id async for token in stream]
                heard += [token.id async for token in other]
            await stream.send(PROMPTS[0], ASKED[0])
            heard += [token.id async for token in stream]
        return [bits(several), heard]

    async def run(**options: Any) -> list[Any]:
        async with opened(folder, **options) as engine:
            if options:
                return await talk(engine)
            found: list[Any] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Load(engine, 5).run, 14)
                found = await talk(engine)
            return found

    assert anyio.run(run) == anyio.run(lambda: run(prefix_cache=False, launch_ahead=1))


def test_a_search_with_beams_is_not_deterministic() -> None:
    with pytest.raises(InvalidParams) as refused:
        SamplingParams(beam_width=2, deterministic=True)
    assert refused.value.field == "deterministic"
