"""The command `headrace inspect`: parses arguments and prints what the engine finds out; holds no logic of its own."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer
from rich.console import Console

from headrace.engine import EngineConfig
from headrace.server.commands.arguments import (
    DeviceOption,
    FileOption,
    ImplementationOption,
    ModelArgument,
    QuantizeHeadOption,
    QuantizeOption,
    chosen_model,
)
from headrace.server.commands.flags import flags_named
from headrace.server.commands.model_facts import print_facts

__all__ = ["inspect"]


def inspect(
    model: ModelArgument = None,
    file: FileOption = None,
    device: DeviceOption = "auto",
    model_impl: ImplementationOption = "auto",
    quantize: QuantizeOption = None,
    quantize_head: QuantizeHeadOption = False,
    kv_dtype: Annotated[Literal["auto", "fp8"], typer.Option(help="Keys and values in 16 bits, or in 8 on GPUs.")] = (
        "auto"
    ),
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt and its answer together, as an engine opened with max_context.", min=2),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            "--speculate",
            help="As an engine that drafts, such as by a smaller model (draft:MODEL,k=3), whose memory is counted, "
            "while that of draft heads is not.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a model takes and what fits here.

    It tells the architecture, the formats of the weights, and for each device of this machine the memory of weights
    and of keys and values, and how many requests fit at once. Only configs and headers are read; draft heads and
    draft models (`--speculate` of `headrace serve`) are not counted. The exit code is 1 where no device of this machine
    can run the model; what is known is printed all the same, with the reasons.
    """
    from headrace.engine.inspection.inspect import inspect_model

    with flags_named():
        config = EngineConfig(
            model=chosen_model(model),
            file=file,
            device=device,
            model_impl=model_impl,
            quantize=quantize,
            quantize_head=quantize_head,
            kv_dtype=kv_dtype,
            max_context=context,
            speculation=speculate,
        )
    facts = inspect_model(config)
    if as_json:
        print(json.dumps(facts.as_dict(), indent=2))
    else:
        print_facts(facts, Console())
    if not facts.runs:
        raise typer.Exit(1)
