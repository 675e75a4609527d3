"""`headrace bench options`: the time that each kind of option adds to a decode step in which all rows ask for it.

The time is that from token to token, as readers see it while all rows decode at temperature 1; kinds take turns in each
round, and a round warms up first. Then one row or half of the rows ask for options that the host must act on, or that
need steps of their own, and the times of both groups of rows are measured. Last, one thread finds the masks along the
text of a schema.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

import anyio
import numpy as np
from rich.progress import Progress

from headrace.engine import Engine, InvalidParams, ResponseFormat, SamplingParams
from headrace.engine.bench.engine.latency import reached_tokens
from headrace.engine.bench.opening import BenchmarkFailed, Subject, Target, opened, require_room
from headrace.engine.bench.report import percentile, show, spread, table
from headrace.engine.bench.workload import random_prompts
from headrace.engine.intake.messages import Message
from headrace.engine.scheduling.shaping import LogitsProcessor
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["BESIDE", "KINDS", "Beside", "ByteLevelTokenizer", "run"]

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
"""Options of a row in a schema; the stop string, which never comes, keeps forced tokens from being taken at once."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "penalties": _PENALTIES,
    "top-k and top-p": _FILTERS,
    "logprobs=5": {"logprobs": 5},
    "JSON schema": _IN_FORMAT,
    "all of these": {**_PENALTIES, **_FILTERS, "logprobs": 5, **_IN_FORMAT},
}
_MASKS = 2000
_TRIES = 5


def _as_they_are(tokens: list[int], logits: Any) -> Any:
    return logits


class Beside(NamedTuple):
    """Options of some rows, beside rows that ask for nothing."""

    asked: Mapping[str, Any]
    hook: LogitsProcessor | None = None
    by_half: bool = False
    """Whether half of the rows ask, and not one alone."""


_AT_ONCE = {"response_format": _FORMAT, "ignore_eos": False}
BESIDE: Mapping[str, Beside] = {
    "one: nothing more": Beside({}),
    "one: logits_processor": Beside({}, _as_they_are),
    "one: JSON schema, token by token": Beside(_IN_FORMAT),
    "one: JSON schema, forced tokens at once": Beside(_AT_ONCE),
    "one: deterministic": Beside({"deterministic": True}),
    "half: JSON schema, token by token": Beside(_IN_FORMAT, by_half=True),
    "half: JSON schema, forced tokens at once": Beside(_AT_ONCE, by_half=True),
}


class ByteLevelTokenizer:
    """A tokenizer for random weights whose vocabulary can say any JSON: bytes, then words and signs, then an end."""

    chat_template = ""
    special_tokens: Mapping[str, Any] = {}

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

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        """Return one token for each byte of `text`."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message], *options: Any, **named: Any) -> list[int]:
        """Refuse any chat.

        Raises:
            InvalidParams: Always.
        """
        raise InvalidParams("prompt: random weights have no chat template", field="prompt", value=messages)

    encode_more, encode_reply = encode, encode_chat

    def close(self) -> None:
        """Do nothing: the tokenizer holds no resources."""


def run(
    target: Target, *, batches: Sequence[int], context: int, steps: int, repeats: int, json_path: str | None
) -> None:
    """Measure, print and save the figures.

    Raises:
        BenchmarkFailed: The rows never decoded together, or they do not fit.
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
                rounds: dict[str, list[dict[str, float]]] = {name: [] for name in KINDS}
                for turn in range(repeats + 1):
                    for name, asked in KINDS.items():
                        rounds[name] += [await _alike(subject.engine, batch, context, steps, asked, turn)]
                        progress.advance(task)
                beside: dict[str, list[dict[str, float]]] = {name: [] for name in BESIDE}
                for turn in range(repeats + 1):
                    for name, some in BESIDE.items():
                        beside[name] += [await _beside(subject.engine, batch, context, steps, some, turn)]
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
        one_rows = [row for figure in figures for row in _beside_rows(figure)]
        table("some rows beside others, ms", _BESIDE_COLUMNS, one_rows)
        rows = [row for figure in figures for row in _rows(figure)]
        show("from token to token with options in all rows, ms", _COLUMNS, rows, data, json_path)


_COLUMNS = ("rows and what they ask", "p50 (lowest to highest)", "p99", "mean", "p50 over none, %", "mean, %")
_BESIDE_COLUMNS = ("rows and what some ask", "p50 of the others' steps", "p99", "slowest", "their own tokens, mean")


def _conditions(subject: Subject, target: Target, context: int, steps: int, repeats: int) -> dict[str, object]:
    return subject.conditions(target, context=context, steps=steps, repeats=repeats, temperature=1.0)


def _rows(figure: Mapping[str, Any]) -> list[list[str]]:
    found = {
        name: {at: [each[at] for each in rounds] for at in rounds[0]} for name, rounds in figure["step_ms"].items()
    }
    least = {at: median(each) for at, each in found["none"].items()}
    return [
        [
            f"{figure['batch']}, {name}",
            *(spread(each[at], ".3f") for at in ("p50", "p99", "mean")),
            *(f"{100 * (median(each[at]) / least[at] - 1):+.1f}" for at in ("p50", "mean")),
        ]
        for name, each in found.items()
    ]


def _beside_rows(figure: Mapping[str, Any]) -> list[list[str]]:
    return [
        [f"{figure['batch']}, {name}", *(spread([each[at] for each in found], ".3f") for at in found[0])]
        for name, found in figure["beside"].items()
    ]


async def _beside(engine: Engine, batch: int, context: int, steps: int, some: Beside, seed: int) -> dict[str, float]:
    """Return milliseconds between tokens of rows that ask for nothing, and as `own` the mean of the asking rows."""
    asking = max(1, batch // 2) if some.by_half else 1
    spans = await _spans(engine, (batch, asking), context, steps, some, seed)
    theirs, own = list(itertools.chain(*spans[asking:])), list(itertools.chain(*spans[:asking]))
    return {"p50": median(theirs), "p99": percentile(theirs, 0.99), "most": max(theirs), "own": mean(own)}


async def _alike(engine: Engine, batch: int, context: int, steps: int, asked: Mapping[str, Any], seed: int) -> Any:
    """Return milliseconds between tokens of rows that all ask for the same; the mean shows steps without some rows."""
    spans = list(itertools.chain(*await _spans(engine, (batch, batch), context, steps, Beside(asked), seed)))
    return {"p50": median(spans), "p99": percentile(spans, 0.99), "mean": mean(spans)}


async def _spans(
    engine: Engine, rows: tuple[int, int], context: int, steps: int, some: Beside, seed: int
) -> list[list[float]]:
    """Return milliseconds between the tokens of each row while all decode; `rows` is the count and how many ask.

    On a busy machine tokens may come in bursts, so that few steps show none of one kind of rows beside the other; they
    are then measured again.

    Raises:
        BenchmarkFailed: The rows never decoded together.
    """
    asking = rows[1]
    for _ in range(_TRIES):
        spans = await _spans_once(engine, rows, context, steps, some, seed)
        if any(spans[:asking]) and any(spans[asking % len(spans) :]):
            return spans
    raise BenchmarkFailed(f"the rows never decoded together for two tokens: use more than --steps {steps}")


async def _spans_once(
    engine: Engine, rows: tuple[int, int], context: int, steps: int, some: Beside, seed: int
) -> list[list[float]]:
    """Return what one try measures; lists are empty for rows that had no two tokens while all decoded.

    Where some rows ask and others do not, the others start once every asking row has its first token, and the asking
    rows begin again when they are through, until the others have ended.
    """
    batch, asking = rows
    prompts = random_prompts(batch, context, vocab_size=engine.info.vocab_size, seed=seed)
    usual = {"temperature": 1.0, "ignore_eos": True, "max_tokens": steps}
    more = {"max_tokens": 4 * steps} if asking < batch else {}
    times: list[list[list[float]]] = [[] for _ in prompts]  # of each row's streams
    all_ask = anyio.Event()

    async def read(place: int) -> None:
        asked, hook = ({**more, **some.asked}, some.hook) if place < asking else ({}, None)
        params = SamplingParams(**{**usual, "seed": seed * batch + place, **asked})
        times[place].append([])
        async for _ in engine.stream(prompts[place], params, logits_processor=hook):
            times[place][-1].append(1000 * time.perf_counter())
            if all(each and each[0] for each in times[:asking]):
                all_ask.set()

    async def keep_asking(place: int) -> None:
        while True:
            await read(place)

    async with anyio.create_task_group() as asking_rows:
        for place in range(asking):
            asking_rows.start_soon(keep_asking if asking < batch else read, place)
        if asking < batch:
            await all_ask.wait()
            async with anyio.create_task_group() as others:
                for place in range(asking, batch):
                    others.start_soon(read, place)
            asking_rows.cancel_scope.cancel()
    begun, ended = max(each[0][0] for each in times), min(each[-1][-1] for each in times[asking % batch :])
    pairs = [list(itertools.chain(*map(itertools.pairwise, each))) for each in times]
    return [[b - a for a, b in each if begun <= a and b <= ended] for each in pairs]


def _mask_seconds(engine: Engine) -> list[float]:
    """Return the seconds to advance by a token and find the next mask, along random text of the schema just used."""
    grammars: Any = engine._life.grammars
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
