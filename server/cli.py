"""The command line `headrace`: parses arguments and calls the public API; never holds logic of its own."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import anyio
import typer
from rich.console import Console

from headrace.engine import HeadraceError
from headrace.server.arguments import FileOption, ModelArgument, chosen_model
from headrace.server.bench_cli import bench
from headrace.server.flags import AnsweringCommand
from headrace.server.kernels_cli import kernels
from headrace.server.serve_cli import serve

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


_INTERRUPTED = 130  # the exit code that typer makes of KeyboardInterrupt


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {version('headrace')}")
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
    max_tokens: Annotated[int, typer.Option(help="Tokens of each chat, at most.", min=1)] = 120,
) -> None:
    """Stream several chats side by side.

    Speed, time to first token, pages in use and prefix-cache hits are shown live.
    """
    from headrace.server.demo import run_demo

    console = Console()
    anyio.run(lambda: run_demo(chosen_model(model), file=file, max_tokens=max_tokens, console=console))


@app.command(cls=AnsweringCommand)
def chat(
    model: ModelArgument = None,
    file: FileOption = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "You are a helpful assistant.",
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer, at most.", min=1)] = 512,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of an adapter to choose with /adapter; repeatable.")
    ] = None,
) -> None:
    """Chat with a model in the terminal.

    /help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat. From a pipe each line is a turn, and the answers
    alone are printed; what is refused goes to stderr, and the exit code is 1.
    """
    from headrace.server.chat import run_chat

    adapters = {}
    for entry in adapter or ():
        name, separator, folder = entry.partition("=")
        if not separator:
            raise typer.BadParameter(f"--adapter {entry}: give NAME=FOLDER")
        adapters[name] = folder
    if not run_chat(
        chosen_model(model),
        file=file,
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        adapters=adapters,
    ):
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
