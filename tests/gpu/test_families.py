"""Every family's greedy tokens on the device are transformers' best: alone, batched, chunked, cached and preempted."""

from __future__ import annotations

import anyio
import pytest
import torch
from gpu.checkpoints import CONTEXT, FAMILIES, SCALED, kv_bytes
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, one_by_one, open_engine, together
from gpu.judge import Output

from headrace.ops.cuda.arch import Arch

LENGTHS = (1, 2, 15, 16, 17, 33, 37, 38, 64, 65, 100, 127, 128, 129, 200, 301)
"""Around pages and the window, up to several of both; as many as the engine has rows."""


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [draw(length, 1000 * seed + length) for length in lengths]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def roomy(zoo: Zoo, family: str) -> dict[str, list[Output]]:
    """What an engine with room for all gives: alone, in a full batch, after a prefix hit."""

    async def run() -> dict[str, list[Output]]:
        found = {}
        async with open_engine(zoo.folder(family), zoo.device, max_context=CONTEXT) as engine:
            found["alone"] = await one_by_one(engine, prompts(1, 16, 45, 150, 260, seed=1), 24)
            found["full batch"] = await together(engine, prompts(*LENGTHS), greedy(24))
            before = engine.stats().cached_tokens
            follow_ups = [[*ids, *tokens, *draw(9, len(ids))] for ids, tokens in found["full batch"][-5:]]
            again = [list(ids) for ids, _ in found["full batch"][-3:]]
            found["prefix hit"] = await together(engine, follow_ups + again, greedy(24))
            cached = engine.stats().cached_tokens - before
            assert cached >= 0.8 * sum(len(ids) for ids, _ in found["full batch"][-5:]), "hardly a prefix was found"
            await at_rest(engine)
        return found

    return anyio.run(run)


@pytest.fixture(scope="module")
def cramped(zoo: Zoo, family: str) -> dict[str, list[Output]]:
    """What an engine gives whose steps take few tokens and whose pages do not suffice."""
    pages = 20 if family == "mistral" else 44  # where every layer has a window, rows hold few pages
    options = {"max_rows": 8, "max_batched_tokens": 24, "kv_memory": kv_bytes(zoo.folder(family), pages)}

    async def run() -> dict[str, list[Output]]:
        found = {}
        async with open_engine(zoo.folder(family), zoo.device, max_context=CONTEXT, **options) as engine:
            found["chunked prefill"] = await one_by_one(engine, prompts(24, 25, 90, 200, seed=2), 16)
            assert not engine.stats().preemptions
            lengths = (100, 90, 80, 70, 60, 50, 40, 30, 20, 110, 120, 130)
            found["preemption"] = await together(engine, prompts(*lengths, seed=3), greedy(48))
            # Rows give back as many pages as they take where every layer has a window.
            assert engine.stats().preemptions or family == "mistral", "nothing was preempted, so nothing was tested"
            await at_rest(engine)
        return found

    return anyio.run(run)


@pytest.mark.parametrize("scenario", ["alone", "full batch", "prefix hit"])
def test_greedy_with_room_for_all(zoo: Zoo, family: str, roomy: dict[str, list[Output]], scenario: str) -> None:
    zoo.judge(family).check(roomy[scenario], f"{family}, {scenario}")


@pytest.mark.parametrize("scenario", ["chunked prefill", "preemption"])
def test_greedy_under_pressure(zoo: Zoo, family: str, cramped: dict[str, list[Output]], scenario: str) -> None:
    zoo.judge(family).check(cramped[scenario], f"{family}, {scenario}")


def test_outputs_are_worth_judging(roomy: dict[str, list[Output]]) -> None:
    """A model that repeats one token, or gives the same after every prompt, would be right by accident."""
    outputs = [output.tokens for output in roomy["full batch"]]
    assert len({tuple(tokens) for tokens in outputs}) >= 0.9 * len(outputs)
    assert sum(len(set(tokens)) for tokens in outputs) >= 4 * len(outputs)


@pytest.mark.parametrize("name", ["llama 3", "smollm2", "mistral", "gemma2", "gemma4", "gpt-oss"])
def test_keys_and_values_in_8_bits(zoo: Zoo, cuda_8_bits: str, name: str) -> None:
    """The margin is then measured against transformers with keys and values rounded to e4m3."""

    async def run() -> list[Output]:
        options = {"kv_dtype": "fp8", "max_context": CONTEXT, "max_batched_tokens": 64}
        async with open_engine(zoo.folder(name), cuda_8_bits, **options) as engine:
            assert engine.info.page_bytes <= kv_bytes(zoo.folder(name), 1) * 0.6
            first = await together(engine, prompts(*LENGTHS), greedy(24))
            hits = await together(engine, [[*ids, *tokens] for ids, tokens in first[-4:]], greedy(24))
            await at_rest(engine)
        return first + hits

    zoo.judge(name, fp8=True).check(anyio.run(run), f"{name}, fp8")


async def scaled_outputs(zoo: Zoo, device: str, attention: str) -> list[Output]:
    """Prefilled, in chunks and on cached pages; decoded alone and together."""
    memory = kv_bytes(zoo.folder(SCALED), 200)  # transformers reads no config that names a quantiser it lacks
    options = {"kv_dtype": "fp8", "max_context": CONTEXT, "max_batched_tokens": 64, "decode_attention": attention}
    async with open_engine(zoo.folder("scaled"), device, kv_memory=memory, **options) as engine:
        first = await together(engine, prompts(*LENGTHS), greedy(16))
        hits = await one_by_one(engine, [[*ids, *tokens] for ids, tokens in first[-2:]], 16)
        await at_rest(engine)
    return first + hits


@pytest.mark.parametrize("attention", ["auto", "xqa"])
def test_scales_of_an_8_bit_cache_are_those_of_the_checkpoint(zoo: Zoo, cuda_8_bits: str, attention: str) -> None:
    """Judged by the model whose keys and values need no scales; XQA rounds queries and its weights to e4m3, too."""
    if attention == "xqa" and not Arch.of(cuda_8_bits).has("xqa"):
        pytest.skip("needs a GPU that runs XQA")
    outputs = anyio.run(scaled_outputs, zoo, cuda_8_bits, attention)
    flips_to_peer = 4 if attention == "xqa" else 2
    zoo.judge(SCALED, fp8=True).check(outputs, f"scaled, fp8, {attention}", flips_to_peer=flips_to_peer)


def test_a_context_is_used_to_its_last_token(zoo: Zoo) -> None:
    async def run() -> list[Output]:
        async with open_engine(zoo.folder("llama 3"), zoo.device, max_context=80) as engine:
            return await together(engine, prompts(79, 64, 50, 1, seed=4), greedy(500))

    outputs = anyio.run(run)
    assert [len(prompt) + len(tokens) for prompt, tokens in outputs] == [80] * 4
    zoo.judge("llama 3").check(outputs, "at the end of the context")


def test_two_requests_of_60_percent_of_the_pool(zoo: Zoo) -> None:
    async def run() -> list[Output]:
        memory = kv_bytes(zoo.folder("qwen3"), 20)
        async with open_engine(zoo.folder("qwen3"), zoo.device, max_context=CONTEXT, kv_memory=memory) as engine:
            outputs = await together(engine, prompts(100, 101, seed=5), greedy(92))
            assert 1 <= engine.stats().preemptions <= 20
            await at_rest(engine)
        return outputs

    zoo.judge("qwen3").check(anyio.run(run), "two that do not fit together")


def test_the_judge_rejects_wrong_outputs(zoo: Zoo, family: str, roomy: dict[str, list[Output]]) -> None:
    """The third best of every step must not pass, nor a batch of outputs each of which saw one page of other tokens."""
    judge = zoo.judge(family)
    prompt, tokens = roomy["full batch"][-1]
    third = torch.topk(judge.logits(Output(prompt, tokens)), 3).indices[:, 2].tolist()
    with pytest.raises(AssertionError, match="outputs are wrong"):
        judge.check([Output(prompt, [*tokens[:place], third[place]]) for place in range(len(tokens))])
    longer = [(list(ids), tokens) for ids, tokens in roomy["full batch"] if len(ids) > 60]
    confused = [Output(ids[:-32] + draw(16, len(ids)) + ids[-16:], tokens) for ids, tokens in longer]
    with pytest.raises(AssertionError, match="outputs are wrong"):
        judge.check(confused)
