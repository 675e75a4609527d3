"""Greedy tokens of SmolLM2 equal those of transformers in float32, whatever the engine does to serve them.

Across batch shapes the last bits of logits differ, so tokens are compared up to the first place where the two largest
logits of transformers are closer than `CLOSE`; nearly every prompt is compared to its end, which is asserted, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from headrace.engine import Completion, Engine, EngineStats, SamplingParams

pytestmark = pytest.mark.xdist_group("smollm2")

CLOSE = 1e-3
NEW_TOKENS = 16
TEXT = (
    "The river rises in the hills north of the town and falls four hundred metres before it meets the sea. In 1861 the "
    "first mill was built on its bank; by 1890 there were nineteen, and a canal three kilometres long led the water to "
    "their wheels. def gate(level: float, limit: float = 2.5) -> bool:\n    return level < limit\n\nThe keeper wrote "
    "every day: 'Monday, 12 March. Rain. Level 2.31 m, two gates open.' Die Müller lasen es am Abend, et le meunier "
    "aussi. 1, 1, 2, 3, 5, 8, 13, 21, 34. What the keeper did not write down is how often he closed a gate by hand, in "
    "the dark, because the wheel of the last mill turned too fast. Question: why does a wheel turn faster when the "
    "canal is full? Answer: because the weight of the water on it is greater, and because less of it is lost beside "
    "the wheel. The second book of the keeper begins with a list of repairs: planks, forty; nails, two pounds; "
    "rope, sixty metres; one lamp. It ends with a drawing of the gate that the town has kept in its museum. "
)
CHATS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about rain.",
    "What is 12 + 30?",
    "Translate 'good morning' into Spanish.",
    "Explain in one sentence why the sky is blue.",
    "List the planets of the solar system.",
    "Who wrote Hamlet?",
    "Summarise this text: " + TEXT[:700],
    "Continue: " + TEXT[300:620],
]
LENGTHS = [5, 8, 13, 15, 16, 17, 21, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80, 96, 112, 129, 150, 200, 250, 300]
"""In tokens, of the prompts that are raw text: a page has 16."""

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True)
class Reference:
    """What transformers says."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    comparable: list[int]
    """How many of the tokens come before the two largest logits are too close."""


def prompts() -> list[Prompt]:
    """Chats, and pieces of text that start at different words."""
    chats: list[Prompt] = [[{"role": "user", "content": chat}] for chat in CHATS]
    starts = [at + 1 for at, char in enumerate(TEXT) if char == " "]
    return chats + [(TEXT[starts[place] :] + TEXT)[: 4 * length] for place, length in enumerate(LENGTHS)]


@pytest.fixture(scope="session")
def reference(smollm2_of_transformers: Any, smollm2: Path) -> Reference:
    """Greedy generation by transformers over prompts of like length, padded on the left."""

    async def tokenise() -> list[list[int]]:
        async with Engine(smollm2, dtype="bfloat16", kv_memory="16MiB") as engine:
            return [await engine.tokenize(prompt) for prompt in prompts()]

    ids, model = anyio.run(tokenise), smollm2_of_transformers
    by_length = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    tokens: list[list[int]] = [[]] * len(ids)
    comparable = [0] * len(ids)
    for first in range(0, len(ids), 6):
        group = by_length[first : first + 6]
        for index, made, margins in zip(group, *generate(model, [ids[index] for index in group]), strict=True):
            end = made.index(model.config.eos_token_id) + 1 if model.config.eos_token_id in made else len(made)
            tokens[index] = made[:end]
            comparable[index] = next((at for at in range(end) if margins[at] < CLOSE), end)
    return Reference(ids, tokens, comparable)


def generate(model: Any, group: Sequence[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """For each prompt its new tokens, and at each the distance of the two largest logits."""
    width = max(map(len, group))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in group])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in group])
    with torch.inference_mode():
        made = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack(made.logits, 1).topk(2).values
    return made.sequences[:, width:].tolist(), (top[..., 0] - top[..., 1]).tolist()


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
    indices = range(0, len(reference.prompts), 3)
    completions, stats = serve(smollm2, [[prompts()[index]] for index in indices], prefix_cache=False)
    check(reference, [completion for (completion,) in completions], indices)
    assert stats.cached_tokens == 0 and stats.preemptions == 0


def test_in_a_full_batch_and_again_from_the_prefix_cache(reference: Reference, smollm2: Path) -> None:
    everything = prompts()
    (first, second), stats = serve(smollm2, [everything, everything], max_rows=len(everything))
    check(reference, first)
    check(reference, second)
    assert stats.preemptions == 0
    for completion in second:
        full_pages = (len(completion.prompt_token_ids) - 1) // 16
        assert completion.usage.cached_tokens == full_pages * 16
    assert sum(completion.usage.cached_tokens for completion in second) > 1500


def test_with_prompts_in_chunks(reference: Reference, smollm2: Path) -> None:
    indices = range(0, len(reference.prompts), 2)
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
