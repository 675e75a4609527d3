"""The command `headrace bench speculation`: parses its arguments and calls the benchmark; holds no logic of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.server.commands.arguments import JsonOption, sizes_of
from headrace.server.commands.bench_options import (
    BatchesOption,
    DeviceOption,
    FormatOption,
    KvOption,
    RowsOption,
    SetOption,
    ShapeArgument,
    target_of,
)

__all__ = ["bench_speculation"]

_RatesOption = Annotated[
    str | None,
    typer.Option(
        help="Share of drafts that count as right at each place, among those behind right ones, such as 0.8,0.7,0.6; "
        "left out, so many that a step with three drafts gives 2.9 tokens."
    ),
]
_DrafterOption = Annotated[
    str,
    typer.Option(
        help="What makes drafts: eagle3 is a head of random weights, ngram finds hardly any in random text, and free "
        "takes no time."
    ),
]
_ModesOption = Annotated[
    str,
    typer.Option(
        help="What to measure, separated by commas: off is no speculation, idle requests without drafts, on drafts "
        "that are right by the rates, and wrong drafts that never are."
    ),
]


def bench_speculation(
    model: ShapeArgument = None,
    batches: BatchesOption = "1,16,64",
    k: Annotated[int, typer.Option("--k", help="Most drafts of a row in one step.", min=1, max=16)] = 3,
    rates: _RatesOption = None,
    drafter: _DrafterOption = "eagle3",
    modes: _ModesOption = "off,idle,on,wrong",
    context: Annotated[int, typer.Option(help="Mean tokens of a row while it is measured.", min=1)] = 1000,
    tokens: Annotated[int, typer.Option(help="Tokens of a row in each measured window.", min=8)] = 256,
    warm_up: Annotated[int, typer.Option(help="Tokens of a row before the first window.", min=1)] = 64,
    repeats: Annotated[int, typer.Option(help="Measured windows.", min=1)] = 3,
    temperature: Annotated[float, typer.Option(help="Temperature of all rows; 0 is greedy.", min=0.0)] = 0.7,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    max_rows: RowsOption = None,
    load_format: FormatOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure tokens a second of rows whose drafts are right by chance, as often as --rates says, never right, or not
    asked for, beside an engine without speculation."""
    from headrace.engine.bench.engine.speculation import Plan, rates_of, run

    plan = Plan(
        batches=sizes_of(batches),
        k=k,
        rates=rates_of(rates, k),
        drafter=drafter,
        modes=modes.split(","),
        context=context,
        tokens=tokens,
        warm_up=warm_up,
        repeats=repeats,
        temperature=temperature,
    )
    run(target_of(model, device, kv_memory, max_rows, load_format, more), plan, json_path)
