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
    str | None,
    typer.Option(
        help="What makes drafts: eagle3 (a head of random weights, quantised by eagle3:quantize=int4), free (takes no "
        "time), or as --speculate of other commands takes it, such as ngram or draft:MODEL; left out, eagle3, or ngram "
        "with --task."
    ),
]
_ModesOption = Annotated[
    str,
    typer.Option(
        help="What to measure, separated by commas: off is no speculation, idle requests without drafts, on drafts "
        "that are right by the rates, and wrong drafts that never are."
    ),
]
_TaskOption = Annotated[
    str | None,
    typer.Option(
        help="Measure answers of a real model instead, with its own drafts and without: copy (rewrite a text with one "
        "change) or chat; then --rates, --modes, --context and --warm-up do not count."
    ),
]


def bench_speculation(
    model: ShapeArgument = None,
    task: _TaskOption = None,
    batches: BatchesOption = "1,16,64",
    k: Annotated[
        int | None, typer.Option("--k", help="Most drafts of a row; left out, 3, or 4 with --task.", min=1, max=16)
    ] = None,
    rates: _RatesOption = None,
    drafter: _DrafterOption = None,
    modes: _ModesOption = "off,idle,on,wrong",
    context: Annotated[int, typer.Option(help="Mean tokens of a row while it is measured.", min=1)] = 1000,
    tokens: Annotated[
        int, typer.Option(help="Tokens of a row in each measured window, or of an answer of --task.", min=8)
    ] = 256,
    warm_up: Annotated[int, typer.Option(help="Tokens of a row before the first window.", min=1)] = 64,
    repeats: Annotated[int, typer.Option(help="Measured windows, or rounds of --task.", min=1)] = 3,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of all rows; left out, 0.7, or 0, which is greedy, with --task.", min=0.0),
    ] = None,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    max_rows: RowsOption = None,
    load_format: FormatOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure tokens a second of rows whose drafts are right by chance, as often as --rates says, never right, or not
    asked for, beside an engine without speculation; or, with --task, of real answers."""
    sizes, target = sizes_of(batches), target_of(model, device, kv_memory, max_rows, load_format, more)
    from headrace.engine.bench.engine import drafted_answers, speculation

    if task is not None:
        asked = drafted_answers.Asked(
            task=task, batches=sizes, tokens=tokens, repeats=repeats, temperature=temperature or 0.0
        )
        drafted_answers.run(target, speculation.drafter_of(drafter or "ngram", k or 4), asked, json_path)
        return
    k = k or 3
    plan = speculation.Plan(
        batches=sizes,
        k=k,
        rates=speculation.rates_of(rates, k),
        drafter=drafter or "eagle3",
        modes=modes.split(","),
        context=context,
        tokens=tokens,
        warm_up=warm_up,
        repeats=repeats,
        temperature=0.7 if temperature is None else temperature,
    )
    speculation.run(target, plan, json_path)
