"""The commands `headrace kernels ...`: parse arguments and call the engine's builder; never hold logic of their own."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from headrace.engine.config import EngineConfig

__all__ = ["kernels"]

kernels = typer.Typer(help="Compile GPU kernels ahead of a start.", no_args_is_help=True, rich_markup_mode=None)


@kernels.callback()
def group() -> None:
    """Compile GPU kernels ahead of a start."""


@kernels.command("build")
def build(
    model: Annotated[str, typer.Argument(help="A model folder (its config.json is enough) or a .gguf file.")],
    cache: Annotated[str, typer.Option(help="Where they go; open engines with kernel_cache=FOLDER.")],
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    kv_dtype: Annotated[str, typer.Option(help="auto or fp8, as the engines that will use them.")] = "auto",
    max_rows: Annotated[int | None, typer.Option(help="Requests in one step, if not the default.", min=1)] = None,
) -> None:
    """Compile all that engines of a model need on this GPU."""
    from headrace.engine.build import build_kernels

    console = Console()
    started = time.perf_counter()
    config = EngineConfig(
        model=model, device=device, kv_dtype=kv_dtype, max_rows=max_rows, load_format="random", kv_memory="256MiB"
    )
    with console.status("compiling: up to a few minutes the first time"):
        count = build_kernels(config, cache)
    console.print(f"{count} kernels in {cache} after {time.perf_counter() - started:.0f} s")
