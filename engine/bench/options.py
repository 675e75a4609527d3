"""`headrace bench options`: what each kind of option adds to a decode step in which all rows ask for it.

Steps are timed as `headrace bench latency` does, kinds in turn in each round, sampled at temperature 1; a round warms
up first. Then one thread goes through the text of a JSON schema alone and finds its masks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import anyio
import numpy as np
from rich.progress import Progress

from headrace.engine import Engine, InvalidParams, ResponseFormat
from headrace.engine.bench.latency import decode, reached_tokens
from headrace.engine.bench.opening import Subject, Target, opened, require_room
from headrace.engine.bench.report import percentile, show, spread, table
from headrace.engine.bench.workload import random_prompts
from headrace.engine.messages import Message
from headrace.engine.text import TokenTable

__all__ = ["KINDS", "ByteLevelTokenizer", "run"]

_SCHEMA = {
    "type": "array",
    "minItems": 10_000,  # so that no row ends while it is measured
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["river", "lake", "sea"]},
            "km": {"type": "integer", "minimum": 0, "maximum": 7000},
            "depth": {"type": ["number", "null"]},
            "towns": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 5},
        },
        "required": ["name", "kind", "km", "depth", "towns"],
        "additionalProperties": False,
    },
}
_FORMAT = ResponseFormat.json_schema(_SCHEMA)
_PENALTIES = {"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.05}
_FILTERS = {"top_k": 50, "top_p": 0.9}
_IN_FORMAT = {"response_format": _FORMAT, "ignore_eos": False, "stop": "\0"}
"""The stop string, which never comes, keeps forced tokens from being taken at once: every step has all rows then."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "penalties": _PENALTIES,
    "top-k and top-p": _FILTERS,
    "logprobs=5": {"logprobs": 5},
    "JSON schema": _IN_FORMAT,
    "all of these": {**_PENALTIES, **_FILTERS, "logprobs": 5, **_IN_FORMAT},
}
_MASKS = 2000


class ByteLevelTokenizer:
    """Gives a model of random weights a vocabulary that can say any JSON: bytes, then words and signs, then an end."""

    chat_template = ""

    def __init__(self, size: int) -> None:
        """Invent `size` tokens, always the same."""
        chance = random.Random(0)
        pieces = [bytes([code]) for code in range(256)]
        known = set(pieces)
        while len(pieces) < size - 1:
            letters = chance.choice(["abcdefghijklmnopqrstuvwxyz"] * 8 + ['{}[]",: 0123456789'])
            word = ("", " ")[chance.random() < 0.5] + "".join(chance.choices(letters, k=chance.randint(2, 8)))
            if word.encode() not in known:
                known.add(word.encode())
                pieces.append(word.encode())
        self.table = TokenTable([*pieces, b""], frozenset([size - 1]))
        self.eos_ids = (size - 1,)

    def encode(self, text: str) -> list[int]:
        """One token a byte."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Refuse.

        Raises:
            InvalidParams: Always.
        """
        raise InvalidParams("prompt: random weights have no chat template", field="prompt", value=messages)

    encode_more, encode_reply = encode, encode_chat


def run(
    target: Target, *, batches: Sequence[int], context: int, steps: int, repeats: int, json_path: str | None
) -> None:
    """Measure and print.

    Raises:
        BenchmarkFailed: The rows never decoded together for long enough, or they do not fit.
    """
    anyio.run(_run, target, batches, context, steps, repeats, json_path)


async def _run(
    target: Target, batches: Sequence[int], context: int, steps: int, repeats: int, json_path: str | None
) -> None:
    async with opened(target, rows=max(batches), tokenizer=ByteLevelTokenizer) as subject:
        for batch in batches:
            require_room(subject.engine, [reached_tokens(subject.engine, batch, context, steps)] * batch)
        with Progress(transient=True) as progress:
            task = progress.add_task("measuring", total=len(batches) * (repeats + 1) * len(KINDS))
            figures = []
            for batch in batches:
                rounds: dict[str, list[float]] = {name: [] for name in KINDS}
                for turn in range(repeats + 1):
                    for name, asked in KINDS.items():
                        rounds[name] += [await _step(subject.engine, batch, context, steps, asked, turn)]
                        progress.advance(task)
                figures.append({"batch": batch, "step_ms": {name: each[1:] for name, each in rounds.items()}})
        seconds = _mask_seconds(subject.engine)
        masks = {"p50": 1e6 * median(seconds), "p99": 1e6 * percentile(seconds, 0.99), "count": len(seconds)}
        data = {
            "conditions": _conditions(subject, target, context, steps, repeats),
            "options": figures,
            "mask_us": masks,
        }
        table("one mask of the schema, one thread, us", ("p50", "p99"), [[f"{masks[at]:.1f}" for at in ("p50", "p99")]])
        rows = [row for figure in figures for row in _rows(figure)]
        show("decode step with options in all rows, ms", _COLUMNS, rows, data, json_path)


_COLUMNS = ("rows and what they ask", "median (lowest to highest)", "more than none, %")


def _conditions(subject: Subject, target: Target, context: int, steps: int, repeats: int) -> dict[str, object]:
    return subject.conditions(target, context=context, steps=steps, repeats=repeats, temperature=1.0)


def _rows(figure: Mapping[str, Any]) -> list[list[str]]:
    found = figure["step_ms"]
    least = median(found["none"])
    return [
        [f"{figure['batch']}, {name}", spread(each, ".3f"), f"{100 * (median(each) / least - 1):+.1f}"]
        for name, each in found.items()
    ]


async def _step(engine: Engine, batch: int, context: int, steps: int, asked: Mapping[str, Any], seed: int) -> float:
    """Median milliseconds of a decode step."""
    prompts = random_prompts(batch, context, vocab_size=engine.info.vocab_size, seed=seed)
    intervals = await decode(engine, prompts, steps, {"temperature": 1.0, "seed": seed, **asked})
    return 1000 * median(intervals)


def _mask_seconds(engine: Engine) -> list[float]:
    """How long it took to go on with a token and find the next mask, along random text of the schema just used."""
    grammars: Any = engine._grammars
    state, chance = grammars._kept[_FORMAT].begin([]), random.Random(0)
    mask, seconds = state.allowed(), []
    for _ in range(_MASKS):
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        token = int(chance.choice(np.flatnonzero(bits)))
        started = time.perf_counter()
        state.advance(token)
        mask = state.allowed()
        seconds.append(time.perf_counter() - started)
    return seconds
