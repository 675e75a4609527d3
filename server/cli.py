"""The command line `headrace`: parses arguments and calls the public API; never holds logic of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import anyio
import typer
from rich.console import Console

from headrace.engine import HeadraceError, SamplingParams
from headrace.engine.version import headrace_version
from headrace.server.commands.arguments import (
    ContextOption,
    DeviceOption,
    DtypeOption,
    FileOption,
    ModelArgument,
    SeedOption,
    SpeculateOption,
    chosen_model,
)
from headrace.server.commands.bench import bench
from headrace.server.commands.flags import AnsweringCommand, flags_named
from headrace.server.commands.inspecting import inspect
from headrace.server.commands.kernels import kernels
from headrace.server.commands.quantize import quantize
from headrace.server.commands.serve import serve

__all__ = ["app", "main"]

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")
app.add_typer(kernels, name="kernels")
app.command(cls=AnsweringCommand)(serve)
app.command(cls=AnsweringCommand)(inspect)
app.command(cls=AnsweringCommand)(quantize)

TemperatureOption = Annotated[
    float, typer.Option(help="Temperature of sampling; 0 takes the likeliest token.", min=0.0, max=2.0)
]
_TOP_P = "Choose among the likeliest tokens that have this share of probability together; above 0, at most 1."

_INTERRUPTED = 130  # the exit code that typer makes of KeyboardInterrupt


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {headrace_version()}")
        raise typer.Exit


@app.callback()
def group(
    told: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """An LLM inference engine that lives inside your own event loop."""


@app.command(cls=AnsweringCommand)
def demo(
    model: ModelArgument = None,
    file: FileOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    max_model_len: ContextOption = None,
    seed: SeedOption = 0,
    speculate: SpeculateOption = None,
    temperature: TemperatureOption = 0.6,
    top_p: Annotated[float, typer.Option(help=_TOP_P)] = 0.9,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each chat, at most.", min=1)] = 120,
) -> None:
    """Stream several chats side by side.

    Speed, time to first token, pages in use and prefix-cache hits are shown live.
    """
    from headrace.server.demo import run_demo

    options = {
        "file": file, "device": device, "dtype": dtype, "max_context": max_model_len, "seed": seed,
        "speculation": speculate,
    }  # fmt: skip
    with flags_named():
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        anyio.run(lambda: run_demo(chosen_model(model), params=params, console=Console(), **options))


@app.command(cls=AnsweringCommand)
def chat(
    model: ModelArgument = None,
    file: FileOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    max_model_len: ContextOption = None,
    seed: SeedOption = 0,
    speculate: SpeculateOption = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "You are a helpful assistant.",
    temperature: TemperatureOption = 0.7,
    top_p: Annotated[float | None, typer.Option(help=f"{_TOP_P} Left out, what the model recommends.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer, at most.", min=1)] = 512,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of an adapter to choose with /adapter; repeatable.")
    ] = None,
) -> None:
    """Chat with a model in the terminal.

    /help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat. From a pipe each line is a turn, and the answers
    alone are printed; what is refused goes to stderr, and the exit code is 1.
    """
    from headrace.server.commands.chat import run_chat

    adapters = {}
    for entry in adapter or ():
        name, separator, folder = entry.partition("=")
        if not separator:
            raise typer.BadParameter(f"--adapter {entry}: give NAME=FOLDER")
        adapters[name] = folder
    options = {
        "file": file, "device": device, "dtype": dtype, "max_context": max_model_len, "seed": seed,
        "speculation": speculate,
    }  # fmt: skip
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    with flags_named():
        done = run_chat(chosen_model(model), system=system, sampling=sampling, adapters=adapters, **options)
    if not done:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; an error that headrace names, and Ctrl-C, are told in one line, without a traceback."""
    failure: BaseException | None = None
    try:
        _run()
    except* (HeadraceError, FileNotFoundError) as group:
        failure = group
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:
        text = " ".join([f"headrace: {failure}", *getattr(failure, "__notes__", ())])
        Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _run() -> None:
    try:
        app()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            sys.stderr.write("headrace: interrupted\n")
        raise
