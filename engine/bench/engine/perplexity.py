"""`headrace bench perplexity`: how well a model predicts a fixed text, as it is and with the options asked for.

The real engine computes, by the log-probabilities of prompts. What is fixed is the text: Python's own help, which every
Python has (`pydoc_data.topics`), or a file. Perplexities of two models or of two texts say nothing beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import anyio

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.opening import BenchmarkFailed, Target
from headrace.engine.bench.report import conditions, show
from headrace.engine.bench.shapes import located

__all__ = ["fixed_text", "run"]

_PARAMS = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
_CHARACTERS = 16
"""Characters for each token that are tokenized: more than any token of prose has on average."""


class _Figures(NamedTuple):
    device: str
    dtype: str
    predicted: int
    """Tokens that were predicted."""
    nats: float
    """Mean negative log-probability of these tokens."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


def fixed_text(path: Path | None) -> str:
    """Return the text of a file, or of the topics of Python's help in the order of their names."""
    if path is not None:
        return path.read_text(encoding="utf-8", errors="replace")
    return "\n\n".join(topics[name] for name in sorted(topics))


def run(target: Target, *, text: Path | None, tokens: int, row_tokens: int, json_path: str | None) -> None:
    """Print the perplexity of the text's first `tokens` tokens, in rows of `row_tokens`.

    Without `quantize` among the target's options the model is opened once, else once more without it.

    Raises:
        BenchmarkFailed: The text has too few tokens, or the model no tokenizer.
    """
    read = fixed_text(text)[: _CHARACTERS * tokens]
    quantizing = ("quantize", "quantize_head")
    plain = replace(target, more={name: value for name, value in target.more.items() if name not in quantizing})
    asked = {"as it is": plain}
    if target.more != plain.more:
        asked[f"quantize={target.more.get('quantize', '')}"] = target
    found = {name: anyio.run(_figures, each, read, tokens, row_tokens) for name, each in asked.items()}
    dense = next(iter(found.values()))
    rows = [
        [name, f"{each.perplexity:.3f}", f"{100 * (each.perplexity / dense.perplexity - 1):+.2f} %"]
        for name, each in found.items()
    ]
    known = {"device": dense.device, "dtype": dense.dtype, "row_tokens": row_tokens}
    data = {
        "conditions": conditions(**{**target.describe(), **known, "text": _name(text, read), "model": target.model}),
        "perplexity": {name: each.perplexity for name, each in found.items()},
        "predicted": dense.predicted,
    }
    show(f"perplexity of {dense.predicted:,} tokens", ("model", "perplexity", "more"), rows, data, json_path)


def _name(path: Path | None, text: str) -> str:
    """Return what the text is, with a digest: another version of Python has another help."""
    digest = blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{'pydoc_data.topics' if path is None else path.name} ({digest})"


async def _figures(target: Target, text: str, tokens: int, row_tokens: int) -> _Figures:
    with located(target.model) as (path, only_shape):
        async with Engine(path, **target.options(only_shape=only_shape)) as engine:
            ids = (await engine.tokenize(text))[:tokens]
            if len(ids) < tokens:
                raise BenchmarkFailed(f"the text has {len(ids):,} tokens of the {tokens:,} asked for: use --tokens")
            starts = range(0, tokens - tokens % row_tokens or tokens, row_tokens)
            nats = [each for start in starts for each in await _row(engine, ids[start : start + row_tokens])]
            return _Figures(engine.info.device, engine.info.dtype, len(nats), math.fsum(nats) / len(nats))


async def _row(engine: Engine, ids: Sequence[int]) -> list[float]:
    """Return the negative log-probability of each token but the first."""
    reports = (await engine.generate(list(ids), _PARAMS)).prompt_logprobs
    assert reports is not None
    return [-report.logprob for report in reports if report is not None]
