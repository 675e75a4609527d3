"""`headrace bench options`: what each kind of option adds to a decode step in which all rows ask for it.

Steps are timed as `headrace bench latency` does, kinds in turn in each round, sampled at temperature 1; a round warms
up first. Then one row asks for what the host must act on, or for steps of its own, beside rows that ask for nothing:
what it costs them, and what it gets. And one thread goes through the text of a JSON schema and finds its masks.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import anyio
import numpy as np
from rich.progress import Progress

from headrace.engine import Engine, InvalidParams, ResponseFormat, SamplingParams
from headrace.engine.bench.latency import decode, reached_tokens
from headrace.engine.bench.opening import Subject, Target, opened, require_room
from headrace.engine.bench.report import percentile, show, spread, table
from headrace.engine.bench.workload import random_prompts
from headrace.engine.messages import Message
from headrace.engine.scheduling.shaping import LogitsProcessor
from headrace.engine.text import TokenTable

__all__ = ["BESIDE", "KINDS", "ByteLevelTokenizer", "run"]

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


def _as_they_are(tokens: list[int], logits: Any) -> Any:
    return logits


BESIDE: Mapping[str, tuple[Mapping[str, Any], LogitsProcessor | None]] = {
    "nothing more": ({}, None),
    "logits_processor": ({}, _as_they_are),
    "JSON schema, one by one": (_IN_FORMAT, None),
    "JSON schema, forced tokens at once": ({"response_format": _FORMAT, "ignore_eos": False}, None),
    "deterministic": ({"deterministic": True}, None),
}
"""What one row asks beside rows that ask for nothing."""


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
            task = progress.add_task("measuring", total=len(batches) * (repeats + 1) * (len(KINDS) + len(BESIDE)))
            figures = []
            for batch in batches:
                rounds: dict[str, list[float]] = {name: [] for name in KINDS}
                for turn in range(repeats + 1):
                    for name, asked in KINDS.items():
                        rounds[name] += [await _step(subject.engine, batch, context, steps, asked, turn)]
                        progress.advance(task)
                beside: dict[str, list[tuple[float, float]]] = {name: [] for name in BESIDE}
                for turn in range(repeats + 1):
                    for name, (asked, hook) in BESIDE.items():
                        beside[name] += [await _beside(subject.engine, batch, context, steps, asked, hook, turn)]
                        progress.advance(task)
                steps_ms = {name: each[1:] for name, each in rounds.items()}
                figures.append({"batch": batch, "step_ms": steps_ms, "beside": {k: v[1:] for k, v in beside.items()}})
        seconds = _mask_seconds(subject.engine)
        masks = {"p50": 1e6 * median(seconds), "p99": 1e6 * percentile(seconds, 0.99), "count": len(seconds)}
        data = {
            "conditions": _conditions(subject, target, context, steps, repeats),
            "options": figures,
            "mask_us": masks,
        }
        table("one mask of the schema, one thread, us", ("p50", "p99"), [[f"{masks[at]:.1f}" for at in ("p50", "p99")]])
        one_rows = [row for figure in figures for row in _one_rows(figure)]
        table("one row among others, ms", ("rows and what one asks", "step of the others", "its own token"), one_rows)
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


def _one_rows(figure: Mapping[str, Any]) -> list[list[str]]:
    return [
        [f"{figure['batch']}, {name}", *(spread([each[at] for each in found], ".3f") for at in (0, 1))]
        for name, found in figure["beside"].items()
    ]


async def _beside(
    engine: Engine,
    batch: int,
    context: int,
    steps: int,
    asked: Mapping[str, Any],
    hook: LogitsProcessor | None,
    seed: int,
) -> tuple[float, float]:
    """Median milliseconds between tokens of rows that ask for nothing, while one asks; its own mean ones."""
    prompts = random_prompts(batch, context, vocab_size=engine.info.vocab_size, seed=seed)
    usual = {"temperature": 1.0, "seed": seed, "ignore_eos": True, "max_tokens": steps}
    times: list[list[float]] = [[] for _ in prompts]

    async def read(place: int) -> None:
        params = SamplingParams(**{**usual, **asked}) if not place else SamplingParams(**usual)
        async for _ in engine.stream(prompts[place], params, logits_processor=hook if not place else None):
            times[place].append(1000 * time.perf_counter())

    async with anyio.create_task_group() as tasks:
        for place in range(batch):
            tasks.start_soon(read, place)
    own, *others = times
    begun, ended = max(each[0] for each in times), min(each[-1] for each in times)
    both = [b - a for each in others for a, b in itertools.pairwise(each) if begun <= a and b <= ended]
    return median(both or [0.0]), (own[-1] - own[0]) / (len(own) - 1)


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
