"""The commands `headrace kernels ...`: parse arguments and print answers of the engine; hold no logic of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from headrace.engine.config import EngineConfig
from headrace.engine.errors import ModelRejected
from headrace.server.commands.arguments import QuantizeHeadOption, QuantizeOption, SpeculateOption, sizes_of
from headrace.server.commands.kernel_tables import print_kernels

__all__ = ["kernels"]

kernels = typer.Typer(
    help="List GPU kernels, or compile them ahead of a start.", no_args_is_help=True, rich_markup_mode=None
)


@kernels.callback()
def group() -> None:
    """List GPU kernels, or compile them ahead of a start."""


@kernels.command("build")
def build(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Model folders or .gguf files. config.json is enough of a folder whose weights are not quantised.",
        ),
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
    quantize: QuantizeOption = None,
    quantize_head: QuantizeHeadOption = False,
    max_rows: Annotated[int | None, typer.Option(help="Requests in one step, if not the default.", min=1)] = None,
    adapter_slots: Annotated[int, typer.Option(help="More than 0 for engines that take adapters.", min=0)] = 0,
    speculate: SpeculateOption = None,
) -> None:
    """Compile all that engines of some models need on this GPU.

    Give the options of the engines that will use the kernels. Weights that are quantised in their files need none.

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
            options |= {"quantize": quantize, "quantize_head": quantize_head}
            options |= {"adapter_slots": adapter_slots, "kernel_cache": cache, "speculation": speculate}
            config = EngineConfig(model=model, load_format="random", kv_memory="256MiB", **options)
            with console.status(f"compiling kernels of {model}: up to a few minutes the first time"):
                built = build_kernels(config)
            console.print(f"{model}: kernels for weights in {' and '.join(built.formats)}", soft_wrap=True)
        place = built.folder if wheel is None else write_wheel(built.folder, Path(wheel).expanduser())
    console.print(f"{built.count} kernels in {place} after {time.perf_counter() - started:.0f} s", soft_wrap=True)


@kernels.command("list")
def list_of(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model folder (of a model that is not quantised, config.json is enough), .gguf file, hub id on this "
            "machine, or a name that `headrace bench` knows, such as qwen3-0.6b.",
        ),
    ],
    arch: Annotated[
        str | None,
        typer.Option(help="GPU to choose for, such as sm_89. Default: this machine's, or sm_90 without one."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Numbers of rows in a step to list a kernel for, such as 1,16,64,256. Default: ranges of rows.",
        ),
    ] = None,
    kv_dtype: Annotated[Literal["auto", "fp8"], typer.Option(help="Keys and values in 16 bits or in 8.")] = "auto",
    quantize: QuantizeOption = None,
    quantize_head: QuantizeHeadOption = False,
) -> None:
    """Print which kernel computes what for a model, and why.

    The choice is made by number of rows: tokens that a step computes at once. Of a quantised model the headers of its
    files say which weights have which format. Needs no GPU, and reads no weights.
    """
    import torch

    from headrace.engine.bench.shapes import source_of, spec_of
    from headrace.engine.model.checkpoint.weights import describe_weights
    from headrace.engine.model.cuda.listed import list_kernels
    from headrace.ops.cuda.arch import Arch

    sizes = [] if rows is None else sizes_of(rows, "--rows")
    try:
        found = torch.cuda.is_available() and arch is None
        gpu = Arch.of("cuda") if found else Arch.named(arch or "sm_90")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--arch") from None
    config = EngineConfig(model=model, quantize=quantize, quantize_head=quantize_head)
    with _found(config) as path:
        spec = spec_of(path)
        weights = describe_weights(
            source_of(path),
            spec,
            dtype=torch.bfloat16,
            keep_packed=True,
            keep_embedding=True,
            quantize=quantize,
            quantize_head=quantize_head,
        )
    listed = list_kernels(spec, gpu, rows=sizes, fp8=kv_dtype == "fp8", weights=weights)
    tuning = gpu.tuning
    measured = "measured" if tuning.is_measured else "nobody has measured it"
    print_kernels(listed, sizes, f"{model} on {gpu.name} ({measured}: numbers of {tuning.chip})")
    if (why := gpu.lacks("bf16")) is not None:
        Console().print(f"The engine does not open on such a GPU: {why}.")


@contextmanager
def _found(config: EngineConfig) -> Iterator[str]:
    """Give the path of the model that `config` names, or of a folder with the config.json of a named shape."""
    from headrace.engine.bench.shapes import SHAPES, located
    from headrace.engine.life.model_files import find_model

    path = Path(config.model)
    if config.model not in SHAPES and not path.is_file() and not (path / "config.json").exists():
        try:
            config = config.model_copy(update={"model": str(find_model(config).path)})
        except ModelRejected:
            if path.exists():
                raise
            raise typer.BadParameter(
                f"{config.model}: neither a file, a folder, a hub id on this machine nor one of {', '.join(SHAPES)}",
                param_hint="MODEL",
            ) from None
    with located(config.model) as (found, _):
        yield found


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot keep kernels, before they take minutes to compile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written: {error}", param_hint="--cache") from error
