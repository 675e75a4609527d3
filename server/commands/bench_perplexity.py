"""The command `headrace bench perplexity`: parses arguments and calls the benchmark; never holds logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.server.commands.arguments import JsonOption
from headrace.server.commands.bench_options import DeviceOption, KvOption, SetOption, ShapeArgument, target_of

__all__ = ["bench_perplexity"]


def bench_perplexity(
    model: ShapeArgument = None,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file; left out, Python's own help.", exists=True, dir_okay=False),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text's beginning.", min=2)] = 4096,
    row_tokens: Annotated[int, typer.Option(help="Tokens that are predicted from each other.", min=2)] = 1024,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Compute the perplexity of a fixed text, as the model is and with --set quantize=... beside it."""
    from headrace.engine.bench.engine.perplexity import run

    target = target_of(model, device, kv_memory, None, None, more)
    run(target, text=text, tokens=tokens, row_tokens=row_tokens, json_path=json_path)
