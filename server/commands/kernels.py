"""The commands `headrace kernels ...`: parse arguments and call the engine's builder; never hold logic of their own."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Any

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
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Model folders (config.json is enough) or .gguf files.")
    ],
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Where to keep the kernels, for engines that open with kernel_cache=FOLDER. Default: the user's cache "
            "folder, where every engine looks, or with --wheel none.",
        ),
    ] = None,
    wheel: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Where to write a wheel of all kernels of this machine's kind that the cache then holds. Engines find "
            "it when pip has installed it.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    kv_dtype: Annotated[str, typer.Option(help="auto or fp8, as the engines that will use them.")] = "auto",
    max_rows: Annotated[int | None, typer.Option(help="Requests in one step, if not the default.", min=1)] = None,
    adapter_slots: Annotated[int, typer.Option(help="More than 0 for engines that take adapters.", min=0)] = 0,
) -> None:
    """Compile all that engines of some models need on this GPU.

    A wheel is for machines with the same GPU and the same versions of Python, torch, Triton and FlashInfer: there no
    kernel is compiled, and neither nvcc nor a C compiler is needed.
    """
    from headrace.engine.life.build import build_kernels
    from headrace.ops.cuda.compiling.wheel import write_wheel

    console = Console()
    started = time.perf_counter()
    if cache is not None:
        _check_folder(Path(cache).expanduser())
    with ExitStack() as stack:
        if wheel is not None and cache is None:
            cache = stack.enter_context(TemporaryDirectory(prefix="headrace-kernels-"))
        for model in models:
            options: dict[str, Any] = {"device": device, "kv_dtype": kv_dtype, "max_rows": max_rows}
            options |= {"adapter_slots": adapter_slots, "kernel_cache": cache}
            config = EngineConfig(model=model, load_format="random", kv_memory="256MiB", **options)
            with console.status(f"compiling kernels of {model}: up to a few minutes the first time"):
                folder, count = build_kernels(config)
        place = folder if wheel is None else write_wheel(folder, Path(wheel).expanduser())
    console.print(f"{count} kernels in {place} after {time.perf_counter() - started:.0f} s", soft_wrap=True)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot keep kernels, before they take minutes to compile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written: {error}", param_hint="--cache") from error
