"""The public workload of the throughput and streaming benchmarks, drawn as nano-vllm draws it; runs nothing.

256 requests; prompts uniform in 100 to 1,024 tokens of ids uniform in 0 to 10,000; then, after all prompts, output
lengths uniform in 100 to 1,024. One generator seeded with 0 draws all: 142,827 prompt and 133,966 output tokens.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from headrace.engine import SamplingParams

__all__ = ["Workload", "public_workload", "random_prompts"]

_SHORTEST, _LONGEST = 100, 1024
_LARGEST_ID = 10_000
_TEMPERATURE = 0.6


class Workload(NamedTuple):
    """Requests that all arrive at once."""

    prompts: list[list[int]]
    outputs: list[int]
    """Tokens to generate for each prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(self.outputs)

    def params(self) -> list[SamplingParams]:
        """Return parameters for each request: temperature 0.6, end-of-sequence ignored."""
        return [SamplingParams(temperature=_TEMPERATURE, max_tokens=count, ignore_eos=True) for count in self.outputs]


def public_workload(*, requests: int = 256, scale: float = 1.0, vocab_size: int, variant: int = 0) -> Workload:
    """Draw the workload.

    Args:
        requests: Number of requests; 256 is the published one.
        scale: Factor on every length, for slow machines; 1 is the published one.
        vocab_size: Size of the vocabulary, modulo which ids are taken.
        variant: Number added to every id, so that a repeat finds none of its prompts in the prefix cache; the lengths
            stay the same.
    """
    generator = random.Random(0)
    prompts = []
    for _ in range(requests):
        length = generator.randint(_SHORTEST, _LONGEST)
        prompts.append([generator.randint(0, _LARGEST_ID) for _ in range(length)])
    outputs = [generator.randint(_SHORTEST, _LONGEST) for _ in range(requests)]
    return Workload(
        [[(token + variant) % vocab_size for token in prompt[: _scaled(len(prompt), scale)]] for prompt in prompts],
        [_scaled(count, scale) for count in outputs],
    )


def random_prompts(count: int, tokens: int, *, vocab_size: int, seed: int) -> list[list[int]]:
    """Return `count` random prompts of `tokens` ids each; another seed gives other prompts."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))
