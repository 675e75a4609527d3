"""The command `headrace quantize`: parses arguments, shows how far the copy is, and prints what it became."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams
from headrace.server.commands.flags import flags_named

if TYPE_CHECKING:
    import torch

    from headrace.engine.model.quantising.run import Report

__all__ = ["quantize"]

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
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts to calibrate with, by GPTQ: plain text, or .jsonl with text, messages or prompt. "
            "Left out, the weights alone decide.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Most sequences of tokens to take from the data.", min=1)] = 128,
    sequence_tokens: Annotated[int, typer.Option(help="Tokens of a sequence.", min=2)] = 512,
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

    with flags_named():
        path = find_model(EngineConfig(model=os.path.expanduser(model))).path
        place, out = _device(device), out.expanduser()
        ids = None if data is None else _ids(path, data.expanduser(), sequences, sequence_tokens)
        options: dict[str, Any] = {"head": quantize_head, "symmetric": symmetric, "group": group_size}
        options |= {"ids_ST": ids, "device": place}
        with _Bar(Console()) as bar:
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
    tokenizer = Tokenizer.from_folder(model)
    try:
        return torch.tensor(calibration_ids(data, tokenizer, sequences=sequences, tokens=tokens))
    finally:
        tokenizer.close()


class _Bar:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._told = console, 0
        columns = (
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("reading")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def advance(self, doing: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=escape(doing), completed=done, total=total)
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
