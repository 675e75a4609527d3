"""Opens the engine that a benchmark measures, with what the floor needs to know of it; measures nothing itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from anyio import to_thread

from headrace.engine import Engine, EngineConfig, HeadraceError, InvalidParams
from headrace.engine.bench.floor import Cost, Speed, measure, model_cost
from headrace.engine.bench.report import conditions
from headrace.engine.bench.shapes import located
from headrace.engine.intake.messages import Message
from headrace.engine.life.build import open_engine
from headrace.engine.life.opened import Opened
from headrace.engine.tokens.interface import TokenizerLike
from headrace.engine.tokens.token_table import TokenTable

if TYPE_CHECKING:
    from headrace.engine.model.cuda.drafting.drafts import ChangeDrafts

__all__ = ["BenchmarkFailed", "Subject", "Target", "opened", "require_room", "synthetic_table"]

_WORDS = (b" the", b" of", b"ing", b"ation", b".", b" a", b"er", b" in", "é".encode(), b" wheel", b"\n", b" water")
_BYTE_SHARE = 50  # one id in so many is half a character, as in byte-level vocabularies


class BenchmarkFailed(HeadraceError):
    """The benchmark cannot run, or its figures would not mean what the table says."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to measure, and the options to open it with."""

    model: str
    """A name of `shapes.SHAPES`, a folder or a `.gguf` file."""
    device: str = "auto"
    kv_memory: str | None = None
    max_rows: int | None = None
    load_format: str | None = None
    """Load format; None is `random` for a named shape, else `auto`."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Other fields of `EngineConfig`, as text or as their values."""

    def options(self, *, only_shape: bool, rows: int | None = None) -> dict[str, Any]:
        """Return the arguments of `Engine` besides the model; `rows` are the rows that the benchmark needs."""
        chosen: dict[str, Any] = {"device": self.device, "generation_defaults": "none", **self.more}
        chosen["load_format"] = self.load_format or ("random" if only_shape else "auto")
        if self.kv_memory is not None:
            chosen["kv_memory"] = self.kv_memory
        if self.max_rows is not None or rows is not None:
            chosen["max_rows"] = self.max_rows or rows
        return chosen

    def describe(self) -> dict[str, object]:
        """Return the options beyond the defaults, for the conditions of a table."""
        asked = {"kv_memory": self.kv_memory, "max_rows": self.max_rows, **self.more}
        return {name: value for name, value in asked.items() if value is not None}


class Subject(NamedTuple):
    """An open engine with its floor."""

    engine: Engine
    path: str
    cost: Cost
    speed: Speed
    random: bool
    """Whether the weights are invented, and with them the text of tokens."""

    def conditions(self, target: Target, **more: object) -> dict[str, object]:
        """Return the conditions to print below a table."""
        info = self.engine.info
        device = torch.cuda.get_device_name(info.device) if info.device.startswith("cuda") else info.device
        asked = target.describe()
        found = {"model": info.model, "device": device, "dtype": info.dtype, **self.speed.describe()}
        return conditions(**{**asked, **found, **more})


class _SyntheticTokenizer:
    """A tokenizer that gives random weights text to stream; prompts are token ids."""

    eos_ids = ()
    chat_template = ""
    special_tokens: Mapping[str, Any] = {}

    def __init__(self, size: int) -> None:
        self.table = synthetic_table(size)

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        raise InvalidParams("prompt: random weights have no tokenizer; give token ids", field="prompt", value=text)

    def encode_chat(self, messages: Sequence[Message], *options: Any, **named: Any) -> list[int]:
        raise InvalidParams("prompt: random weights have no tokenizer; give token ids", field="prompt", value=messages)

    encode_more, encode_reply = encode, encode_chat

    def close(self) -> None:
        """Do nothing: the tokenizer holds no resources."""


def _changed(change: Callable[[Opened], Opened], change_drafts: ChangeDrafts | None) -> type[Engine]:
    """Return a class of engines that call `change` on the open model before they use it."""

    class ChangedEngine(Engine):
        def _open(self) -> Opened:
            return change(open_engine(self.config, change_drafts=change_drafts))

    return ChangedEngine


def synthetic_table(size: int) -> TokenTable:
    """Return a byte-level vocabulary: words of a few characters, and at times half a character."""
    pieces = [_WORDS[index % len(_WORDS)] + b"%d" % (index % 100) for index in range(size)]
    for index in range(0, size, _BYTE_SHARE):
        pieces[index] = bytes([0xC3 if index // _BYTE_SHARE % 2 else 0xA9])
    return TokenTable(pieces, frozenset())


@asynccontextmanager
async def opened(
    target: Target,
    *,
    rows: int | None = None,
    tokenizer: Callable[[int], TokenizerLike] = _SyntheticTokenizer,
    change: Callable[[str, Opened], Opened] | None = None,
    change_drafts: ChangeDrafts | None = None,
) -> AsyncIterator[Subject]:
    """Measure the machine, then open `target`.

    Args:
        target: The model and its options.
        rows: Rows that the benchmark needs.
        tokenizer: Function that makes a tokenizer for random weights, so that their tokens have text to stream too.
        change: Function that changes the open model, given its path.
        change_drafts: Function that changes how drafts are made, on a GPU.

    Raises:
        BenchmarkFailed: The engine chose another device than the floor was measured on.
        HeadraceError: The engine does not open.
    """
    device = "cpu"
    if torch.cuda.is_available() and target.device != "cpu":
        device = "cuda" if target.device == "auto" else target.device
    speed = await to_thread.run_sync(measure, device)  # before the engine takes the memory
    with located(target.model) as (path, only_shape):
        options = target.options(only_shape=only_shape, rows=rows)
        random = options["load_format"] == "random"

        def changed(found: Opened) -> Opened:
            if random:
                found = replace(found, tokenizer=tokenizer(found.info.vocab_size))
            return found if change is None else change(path, found)

        async with _changed(changed, change_drafts)(path, **options) as engine:
            if torch.device(engine.info.device).type != torch.device(device).type:
                raise BenchmarkFailed(
                    f"the engine runs on {engine.info.device}, the floor is of {device}: use --device"
                )
            config = EngineConfig(model=path, **options)
            cost = model_cost(path, engine.info, config.quantize, quantize_head=config.quantize_head)
            yield Subject(engine, path, cost, speed, random)


def require_room(engine: Engine, lengths: Sequence[int]) -> None:
    """Check that requests of `lengths` tokens (prompt and output) can all run at once.

    Raises:
        BenchmarkFailed: The requests cannot; preemption or waiting would be measured instead.
    """
    info = engine.info
    if len(lengths) > info.max_rows:
        raise BenchmarkFailed(f"{len(lengths)} rows are needed and the engine has {info.max_rows}: use --max-rows")
    if max(lengths) > info.max_context:
        raise BenchmarkFailed(f"{max(lengths)} tokens do not fit the model's context of {info.max_context}")
    pages = sum(-(-length // info.page_size) + 1 for length in lengths)
    if pages > info.num_pages:
        needed = pages * info.page_bytes / 2**20
        raise BenchmarkFailed(
            f"{pages} pages are needed and the engine has {info.num_pages}: --kv-memory {needed:.0f}MiB"
        )
