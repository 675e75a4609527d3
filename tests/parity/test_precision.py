"""Reduced precision stays close to float32, and sampled tokens depend on their seed and not on their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
from model_driver import OPERATIONS, ModelUnderTest
from torch import Tensor

from headrace.engine import Engine, SamplingParams
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("precision")

TEXT = (
    "The water wheel is one of the oldest machines. A stream is led through a channel, called the headrace, to the "
    "wheel, where its weight or its speed turns the paddles; the tailrace leads it back to the river. The Romans "
    "built wheels at Barbegal in what is now France, sixteen of them in two rows, which ground enough flour for the "
    "whole city of Arles. In the nineteenth century turbines took their place, since a turbine of the same power is "
    "smaller and turns faster, and today they make about one sixth of the electricity of the world."
)


@pytest.fixture(scope="module")
def ids(smollm2: Path) -> list[int]:
    with GgufFile(smollm2) as file:
        return Tokenizer.from_gguf(file.metadata).encode(TEXT)


@pytest.fixture(scope="module")
def exact(smollm2: Path, ids: list[int]) -> Tensor:
    return ModelUnderTest.open_gguf(smollm2, torch.float32, keep_packed=False).logits([ids], len(ids))[0]


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "4-bit"])
@pytest.mark.parametrize("native", OPERATIONS)
def test_logits_stay_close_to_float32(smollm2: Path, ids: list[int], exact: Tensor, packed: bool, native: bool) -> None:
    """In one piece, and in steps of few tokens, which multiply the 4-bit weights directly."""
    tested = ModelUnderTest.open_gguf(smollm2, torch.bfloat16, keep_packed=packed, native=native)
    for chunk in (len(ids), 4):
        found = tested.logits([ids], chunk)[0]
        cosine = torch.nn.functional.cosine_similarity(found, exact, dim=-1)
        same_first = (found.argmax(-1) == exact.argmax(-1)).float().mean()
        sure = exact.topk(2).values.diff(dim=-1).abs()[:, 0] > 0.5
        same_where_sure = (found.argmax(-1) == exact.argmax(-1))[sure].float().mean()
        assert cosine.mean() > 0.998 and cosine.min() > 0.95
        assert same_first > 0.93 and same_where_sure > 0.97


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_fact_survives_reduced_precision(smollm2: Path, dtype: str) -> None:
    async def run() -> list[str]:
        async with Engine(smollm2, dtype=dtype, kv_memory="64MiB") as engine:
            params = SamplingParams(temperature=0, max_tokens=24)
            texts = []
            for question in QUESTIONS:
                completion = await engine.generate([{"role": "user", "content": question}], params)
                texts.append(completion.choices[0].text)
            return texts

    for text in anyio.run(run):
        assert "Paris" in text


# Asked otherwise, the model has no clear first word in float32 either.
QUESTIONS = ["Tell me the capital of France.", "Which city is the capital of France? Answer in one sentence."]


def test_a_seed_gives_its_tokens_alone_and_among_neighbours(smollm2: Path) -> None:
    prompts = [TEXT[:80], TEXT[100:300], TEXT[50:90], "Once upon a time"]
    drawn = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=12, ignore_eos=True)

    async def run() -> None:
        async with Engine(smollm2, dtype="float32", kv_memory="256MiB", seed=5) as engine:

            async def ask(prompt: str, seed: int | None) -> Sequence[int]:
                completion = await engine.generate(prompt, drawn.model_copy(update={"seed": seed}))
                return completion.choices[0].token_ids

            alone = {seed: await ask(prompts[0], seed) for seed in (1, 2, -7)}
            assert len({tuple(tokens) for tokens in alone.values()}) == 3
            among: dict[int, Sequence[int]] = {}

            async def put(place: int, prompt: str, seed: int | None) -> None:
                among[place] = await ask(prompt, seed)

            async with anyio.create_task_group() as group:
                for place, prompt in enumerate(prompts * 2):
                    group.start_soon(put, place, prompt, 99 if prompt == prompts[2] else None)
                for place, seed in enumerate(alone):
                    group.start_soon(put, 100 + place, prompts[0], seed)
            assert [among[100], among[101], among[102]] == list(alone.values())
            assert among[2] == among[6], "the same prompt and seed, twice in a batch"
            assert among[0] != among[4], "no seed draws one each"
            several = await engine.generate(prompts[0], drawn.model_copy(update={"seed": 1, "n": 3}))
            assert several.choices[0].token_ids == alone[1]
            assert len({tuple(choice.token_ids) for choice in several.choices}) == 3

    anyio.run(run)


def test_the_engines_seed_decides_where_requests_name_none(smollm2: Path) -> None:
    async def run(seed: int) -> list[list[int]]:
        async with Engine(smollm2, kv_memory="32MiB", seed=seed) as engine:
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            return [(await engine.generate("Once upon", params)).choices[0].token_ids for _ in range(2)]

    first = anyio.run(run, 3)
    assert anyio.run(run, 3) == first and anyio.run(run, 4) != first and first[0] != first[1]
