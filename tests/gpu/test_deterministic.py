"""On the device: a deterministic request is the same to the last bit under load, from chunks, and after a preemption.

The checkpoints are in bfloat16 and their logits lie close, so another shape of a batch changes tokens.
"""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.driving import PATIENCE, at_rest, draw, open_engine

from headrace.engine import Completion, Engine, SamplingParams

WANTED = {"deterministic": True, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "logprobs": 3}
PROMPTS = [draw(length, 60 + length) for length in (5, 33, 256, 300, 440)]
ASKED = [SamplingParams(seed=at, **WANTED) for at in range(len(PROMPTS))]
ASKED[1] = SamplingParams(seed=1, frequency_penalty=0.6, repetition_penalty=1.1, top_p=0.95, **WANTED)


def bits(answer: Completion) -> list[Any]:
    """Tokens and log-probabilities, as they are."""
    (choice,) = answer.choices
    return [choice.token_ids, [(entry.logprob, entry.top_logprobs) for entry in choice.logprobs or []]]


async def load(engine: Engine, seed: int, count: int = 40) -> None:
    """Requests of all kinds."""
    chance = random.Random(seed)

    async def one(at: int) -> None:
        prompt = [*chance.choice([[], PROMPTS[3], PROMPTS[4][:100]]), *draw(chance.randrange(1, 60), at)]
        asked = SamplingParams(
            seed=at, max_tokens=chance.randrange(1, 40), deterministic=chance.random() < 0.2, ignore_eos=True
        )
        await engine.generate(prompt, asked, priority=chance.choice([-1, 0, 1]))

    async with anyio.create_task_group() as tasks:
        for at in range(count):
            tasks.start_soon(one, at)
            await anyio.sleep(chance.random() * 0.004)


@pytest.mark.parametrize("name", ["llama 3", "smollm2", "mistral", "qwen3", "qwen3 experts"])
@pytest.mark.parametrize("pages", [500, 70], ids=["room", "cramped"])
def test_a_deterministic_request_is_the_same_to_the_last_bit(zoo: Zoo, device: str, name: str, pages: int) -> None:
    async def alone() -> list[Any]:
        async with open_engine(zoo.folder(name), device, max_context=512, prefix_cache=False) as engine:
            return [bits(await engine.generate(prompt, asked)) for prompt, asked in zip(PROMPTS, ASKED, strict=True)]

    async def under_load() -> None:
        found: dict[int, Any] = {}

        async def one(engine: Engine, at: int) -> None:
            await anyio.sleep(0.01 * at)
            found[at] = bits(await engine.generate(PROMPTS[at], ASKED[at]))

        memory = kv_bytes(zoo.folder(name), pages)
        options = {"max_context": 512, "kv_memory": memory, "max_batched_tokens": 300 if pages < 100 else 2048}
        async with open_engine(zoo.folder(name), device, **options) as engine:
            for turn in range(2):
                with anyio.fail_after(PATIENCE):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(load, engine, turn)
                        for at in range(len(PROMPTS)):
                            tasks.start_soon(one, engine, at)
                assert [found[at] for at in range(len(PROMPTS))] == wanted
            await at_rest(engine)

    wanted = anyio.run(alone)
    assert wanted == anyio.run(alone)
    anyio.run(under_load)


def test_its_own_tokens_are_computed_again_as_they_were(zoo: Zoo, device: str) -> None:
    """After a preemption in the middle of the completion, which a request that grows in its place brings about."""

    async def run(pages: int) -> list[Any]:
        memory = kv_bytes(zoo.folder("qwen3"), pages)
        async with open_engine(zoo.folder("qwen3"), device, max_context=512, kv_memory=memory) as engine:
            async with engine.stream(PROMPTS[3], ASKED[3], priority=5) as stream:
                begun = [await anext(stream) for _ in range(3)]
                await engine.generate(draw(250, 1), SamplingParams(max_tokens=60, ignore_eos=True))
                tokens = begun + [token async for token in stream]
            assert (engine.stats().preemptions > 0) == (pages < 100)
        return [(token.id, token.logprobs) for token in tokens]

    assert anyio.run(run, 37) == anyio.run(run, 500)
