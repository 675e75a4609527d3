"""The command `headrace quantize`: parses arguments, shows how far the copy is, and prints what it became."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headrace.engine import Engine, EngineConfig, InvalidParams
from headrace.server.commands.flags import flags_named

if TYPE_CHECKING:
    import torch

    from headrace.engine.model.quantising.own_texts import OwnTexts
    from headrace.engine.model.quantising.run import Report

__all__ = ["quantize"]

DataOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Texts to calibrate with, by GPTQ: plain text, or .jsonl with text, messages or prompt. "
        "Left out, the weights alone decide.",
    ),
]
SelfDataOption = Annotated[
    bool,
    typer.Option(
        "--self-data",
        help="Calibrate with texts that the model writes itself, for want of FILE. The device needs room for the whole "
        "model meanwhile.",
    ),
]
SequencesOption = Annotated[
    int, typer.Option(help="Sequences to calibrate with: the most to take from FILE, or those to write.", min=1)
]
SequenceTokensOption = Annotated[int, typer.Option(help="Tokens of a sequence.", min=2)]

_STEPS = 10
"""Lines that tell how far a copy is, where there is no terminal."""


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder with safetensors in bfloat16, float16 or float32, or a hub id in the cache."
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The folder to write. It is new or empty, and appears when it is whole."),
    ],
    format: Annotated[
        Literal["fp8", "int8", "int4"],
        typer.Option(
            help="fp8: 8-bit floats. int8: 8-bit integers. Both with a scale for each output. int4: 4-bit integers in "
            "groups of 128 inputs, or of 64 or 32 where 128 does not divide the inputs of every layer.",
        ),
    ],
    data: DataOption = None,
    self_data: SelfDataOption = False,
    sequences: SequencesOption = 128,
    sequence_tokens: SequenceTokensOption = 512,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--zero-points",
            help="Groups of int4 without zero points, or with them. Left out, models with experts alone have none, "
            "since other programs read no zero points of experts.",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="32|64|128",
            help="Inputs of a group of int4: fewer lose less and take more memory. Left out, the largest that divides "
            "the inputs of every layer.",
        ),
    ] = None,
    quantize_head: Annotated[
        bool, typer.Option("--quantize-head", help="Also quantise the output head, if it is no table of embeddings.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device that computes: cpu, cuda or cuda:N.")] = "cpu",
) -> None:
    """Write a quantised copy of a model.

    headrace and transformers read it, and it is in the layout of vLLM. Norms, embeddings and, unless asked for, the
    output head stay as they are. An interrupted run goes on where it stopped when the command is repeated, and a copy
    that is complete is left as it is.
    """
    from headrace.engine.life.model_files import find_model
    from headrace.engine.model.quantising.run import quantise_folder

    if self_data and data is not None:
        raise typer.BadParameter("--self-data stands in place of --data: give one of them")
    with flags_named():
        path = find_model(EngineConfig(model=os.path.expanduser(model))).path
        place, out = _device(device), out.expanduser()
        options: dict[str, Any] = {"head": quantize_head, "symmetric": symmetric, "group": group_size, "device": place}
        with _Bar(Console()) as bar:
            if data is not None:
                options["data"] = _ids(path, data.expanduser(), sequences, sequence_tokens)
            elif self_data:
                options["data"] = _own_texts(path, sequences, sequence_tokens, device, bar)
            try:
                report = quantise_folder(path, out, format, bar, **options)
            except KeyboardInterrupt:
                bar.note(f"stopped; the same command goes on from here ({out}.partial)")
                raise
    _print(report, path.name)


def _device(name: str) -> torch.device:
    import torch

    from headrace.engine.model.shared.find_gpu import find_gpu

    if name != "cpu" and name.partition(":")[0] != "cuda":
        raise InvalidParams(f"device: {name} is not known; wanted: cpu, cuda or cuda:N", field="device", value=name)
    return torch.device("cpu") if name == "cpu" else find_gpu(name)


def _ids(model: Path, data: Path, sequences: int, tokens: int) -> torch.Tensor:
    """Return the token ids to calibrate with, [S, T]."""
    import torch

    from headrace.engine.intake.calibration import calibration_ids
    from headrace.engine.model.quantising.files import read_plain_config
    from headrace.engine.tokens.tokenizer import Tokenizer

    read_plain_config(model)  # a model that cannot be quantised is refused before its tokenizer is read
    with closing(Tokenizer.from_folder(model)) as tokenizer:
        return torch.tensor(calibration_ids(data, tokenizer, sequences=sequences, tokens=tokens))


def _own_texts(model: Path, sequences: int, tokens: int, device: str, bar: _Bar) -> OwnTexts:
    """Return the sequences that the model will write when they are needed, by an engine that is open meanwhile."""
    from headrace.engine.intake.calibration import first_token
    from headrace.engine.many.own_texts import own_texts
    from headrace.engine.model.quantising.files import read_plain_config
    from headrace.engine.model.quantising.own_texts import OwnTexts
    from headrace.engine.tokens.tokenizer import Tokenizer

    bos = read_plain_config(model).get("bos_token_id")
    with closing(Tokenizer.from_folder(model)) as tokenizer:
        first = first_token(tokenizer, bos)

    async def write() -> list[list[int]]:
        bar.begin()
        engine = Engine(model, device=device, generation_defaults="none", max_unread_tokens=sequences * tokens)
        engine.on_weights = partial(bar.advance, "opening the model")
        async with engine:
            bar.begin()
            wrote = partial(bar.wrote, total=sequences * (tokens - 1))
            texts = await own_texts(engine, first, sequences=sequences, tokens=tokens, wrote=wrote)
        bar.begin()
        return texts

    return OwnTexts(sequences, tokens, partial(anyio.run, write))


class _Bar:
    """A bar on a terminal, a line now and then elsewhere; it fills once for each part of the work."""

    def __init__(self, console: Console) -> None:
        self._console, self._told = console, 0
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("reading", amount="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self) -> None:
        """Begin another part of the work."""
        self._told = 0
        self._progress.reset(self._task)

    def advance(self, doing: str, done: int, total: int) -> None:
        self._show(doing, done, total, f"{decimal(done)} of {decimal(total)}")

    def wrote(self, done: int, total: int) -> None:
        """Take the tokens of the model's own texts so far, and all of them."""
        self._show("writing texts", done, total, f"{done:,} of {total:,} tokens")

    def _show(self, doing: str, done: int, total: int, amount: str) -> None:
        self._progress.update(self._task, description=escape(doing), completed=done, total=total, amount=amount)
        step = done * _STEPS // max(total, 1)
        if not self._console.is_terminal and step > self._told:
            self._told = step
            self.note(f"{100 * done // total:3} %  {doing}")

    def note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print(report: Report, name: str) -> None:
    console = Console()
    share = 100 * report.after / report.before
    largest_first = sorted(report.dense.items(), key=lambda item: -item[1])
    kept = ", ".join(f"{what} ({decimal(size)})" for what, size in largest_first)
    lines = [
        f"{name}: {decimal(report.before)} before, {decimal(report.after)} after ({share:.0f} %), in {report.out}",
        f"{report.quantised} linear layers are quantised; as they were: {kept}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
