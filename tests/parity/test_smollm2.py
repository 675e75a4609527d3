"""Greedy tokens of SmolLM2 equal those of transformers in float32, whatever the engine does to serve them.

Across batch shapes the last bits of logits differ, so tokens are compared up to the first place where the two largest
logits of transformers are closer than `CLOSE`; nearly every prompt is compared to its end, which is asserted, too.
What transformers says is kept in a file. HEADRACE_PARITY=all, which `make soak` sets, computes it again and compares,
and takes every prompt where one of several is enough for each commit: alone, in chunks, and in a full batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import smollm2_reference
from smollm2_reference import NEW_TOKENS, Prompt, Reference, prompts

from headrace.engine import Completion, Engine, EngineStats, SamplingParams

EVERYTHING = os.environ.get("HEADRACE_PARITY") == "all"


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    kept = smollm2_reference.kept()
    assert kept.model == smollm2_reference.digest(smollm2), "another model: run `python tests/smollm2_reference.py`"
    return kept


@pytest.mark.skipif(not EVERYTHING, reason="takes a minute; make soak does it")
def test_what_is_kept_is_what_transformers_says(reference: Reference, smollm2: Path) -> None:
    """Tokens as far as they are sure on both machines; log-probabilities as far as the order of additions allows."""
    computed = smollm2_reference.compute(smollm2)
    assert computed.prompts == reference.prompts and computed.echoed == reference.echoed
    for index, tokens in enumerate(computed.tokens):
        sure = min(computed.comparable[index], reference.comparable[index])
        assert tokens[:sure] == reference.tokens[index][:sure], index
    assert sum(computed.comparable) == pytest.approx(sum(reference.comparable), rel=0.02)
    assert computed.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
    for found, wanted in zip(computed.likeliest, reference.likeliest, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)


def serve(
    path: Path, batches: Sequence[Sequence[Prompt]], n: int = 1, **options: Any
) -> tuple[list[list[Completion]], EngineStats]:
    """One engine: each batch together, one batch after another."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, n=n)

    async def run() -> tuple[list[list[Completion]], EngineStats]:
        found: list[list[Completion]] = []
        async with Engine(path, **{"dtype": "float32", "kv_memory": "768MiB", **options}) as engine:
            for batch in batches:
                done: dict[int, Completion] = {}

                async def one(index: int, prompt: Prompt, done: dict[int, Completion] = done) -> None:
                    done[index] = await engine.generate(prompt, params)

                async with anyio.create_task_group() as group:
                    for index, prompt in enumerate(batch):
                        group.start_soon(one, index, prompt)
                found.append([done[index] for index in range(len(batch))])
            return found, engine.stats()

    return anyio.run(run)


def check(reference: Reference, completions: Sequence[Completion], indices: Sequence[int] | None = None) -> None:
    """Every choice equals the reference as far as that is sure."""
    whole = 0
    indices = range(len(reference.prompts)) if indices is None else indices
    for index, completion in zip(indices, completions, strict=True):
        assert completion.prompt_token_ids == reference.prompts[index]
        sure = reference.comparable[index]
        for choice in completion.choices:
            assert choice.token_ids[:sure] == reference.tokens[index][:sure], index
            if sure == len(reference.tokens[index]):
                assert choice.token_ids == reference.tokens[index]
                assert sure == NEW_TOKENS or choice.finish_reason == "stop"
                whole += 1
    assert whole >= 0.9 * sum(len(completion.choices) for completion in completions)


def test_the_prompts_are_many_and_of_mixed_length(reference: Reference) -> None:
    lengths = sorted(map(len, reference.prompts))
    assert len(lengths) >= 32 and lengths[0] <= 8 and lengths[-1] >= 250
    assert sum(reference.comparable) >= 0.95 * sum(map(len, reference.tokens))


def test_alone(reference: Reference, smollm2: Path) -> None:
    indices = range(0, len(reference.prompts), 1 if EVERYTHING else 6)
    completions, stats = serve(smollm2, [[prompts()[index]] for index in indices], prefix_cache=False)
    check(reference, [completion for (completion,) in completions], indices)
    assert stats.cached_tokens == 0 and stats.preemptions == 0


def test_in_a_full_batch_and_again_from_the_prefix_cache(reference: Reference, smollm2: Path) -> None:
    indices = range(0, len(reference.prompts), 1 if EVERYTHING else 2)
    asked = [prompts()[index] for index in indices]
    (first, second), stats = serve(smollm2, [asked, asked], max_rows=len(asked))
    check(reference, first, indices)
    check(reference, second, indices)
    assert stats.preemptions == 0
    for completion in second:
        full_pages = (len(completion.prompt_token_ids) - 1) // 16
        assert completion.usage.cached_tokens == full_pages * 16
    assert sum(completion.usage.cached_tokens for completion in second) > (1500 if EVERYTHING else 700)


def test_with_prompts_in_chunks(reference: Reference, smollm2: Path) -> None:
    indices = range(0, len(reference.prompts), 1 if EVERYTHING else 3)
    asked = [prompts()[index] for index in indices]
    (completions,), stats = serve(smollm2, [asked], max_batched_tokens=48, max_rows=8, prefix_cache=False)
    check(reference, completions, indices)
    assert stats.prompt_tokens > 48 * len(completions)


def test_after_preemption(reference: Reference, smollm2: Path) -> None:
    """Pages for little more than the longest prompt: younger requests lose theirs and are computed again."""
    page_bytes = 30 * 2 * 3 * 64 * 16 * 4
    pages = max(map(len, reference.prompts)) // 16 + 6
    indices = [index for index, ids in enumerate(reference.prompts) if len(ids) <= 120]
    wanted = [prompts()[index] for index in indices]
    (completions,), stats = serve(smollm2, [wanted], kv_memory=pages * page_bytes, max_rows=16)
    assert stats.pages == pages and stats.preemptions > 0
    check(reference, completions, indices)


def test_forks_of_one_prompt(reference: Reference, smollm2: Path) -> None:
    """Two choices share the prompt's pages; the page that both go on writing is copied."""
    indices = [index for index, ids in enumerate(reference.prompts) if len(ids) <= 70][::2]
    (completions,), stats = serve(smollm2, [[prompts()[index] for index in indices]], n=2)
    check(reference, completions, indices)
    assert all(len(completion.choices) == 2 for completion in completions)
    assert stats.preemptions == 0
