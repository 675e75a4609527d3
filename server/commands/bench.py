"""The commands `headrace bench ...`: parse arguments and call one benchmark each; never hold logic of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.server.commands.arguments import JsonOption, ModelArgument, chosen_model, shares_of, sizes_of
from headrace.server.commands.bench_options import (
    AnswerOption,
    BatchesOption,
    DeviceOption,
    FormatOption,
    KvOption,
    ParamsOption,
    PeerOption,
    PrefillOption,
    ProfileOption,
    PromptOption,
    RepeatsOption,
    RequestsOption,
    RoutingOption,
    RowsOption,
    ScaleOption,
    SetOption,
    ShapeArgument,
    StepsOption,
    ThreadsOption,
    target_of,
)
from headrace.server.commands.bench_perplexity import bench_perplexity
from headrace.server.commands.bench_speculation import bench_speculation

__all__ = ["bench"]

bench = typer.Typer(help="Measure headrace on this machine.", no_args_is_help=True, rich_markup_mode=None)
bench.command("perplexity", short_help="How well a model predicts a fixed text, quantised and not.")(bench_perplexity)


@bench.command("latency", short_help="Time of decode steps and prompts, beside the least that this machine allows.")
def bench_latency(
    model: ShapeArgument = None,
    batches: BatchesOption = "1,16,64,256",
    context: Annotated[int, typer.Option(help="Mean tokens of a row while it is measured.", min=1)] = 1000,
    steps: StepsOption = 128,
    prefill: PrefillOption = None,
    params: ParamsOption = None,
    routing: RoutingOption = "uniform",
    repeats: RepeatsOption = 3,
    peer: PeerOption = None,
    profile: ProfileOption = False,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    max_rows: RowsOption = None,
    load_format: FormatOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure a decode step's time by batch size, and the rate of prompts, beside the least that memory and arithmetic
    of this machine allow."""
    sizes = sizes_of(batches) if batches or not prefill else []
    from headrace.engine.bench.engine.latency import run

    run(
        target_of(model, device, kv_memory, max_rows, load_format, more),
        batches=sizes,
        context=context,
        steps=steps,
        prefill=prefill,
        repeats=repeats,
        peer=peer,
        profile=profile,
        json_path=json_path,
        params=params,
        routing=routing,
    )


@bench.command("lora", short_help="What adapters cost.")
def bench_lora(
    model: ShapeArgument = None,
    batches: BatchesOption = "1,8,64",
    context: Annotated[int, typer.Option(help="Tokens of a row when it begins to be measured.", min=1)] = 1000,
    steps: StepsOption = 128,
    rank: Annotated[int, typer.Option(help="Rank of the adapters.", min=1, max=256)] = 16,
    small: Annotated[
        bool, typer.Option("--attention-only", help="Adapt q, k, v and o alone, not every module.")
    ] = False,
    slots: Annotated[int, typer.Option(help="Adapters on the device at a time.", min=1)] = 64,
    registered: Annotated[int, typer.Option(help="Adapters among which traffic chooses.", min=1)] = 1000,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    load_format: FormatOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure what adapters cost: in steps, beside the least that reading them takes; with fewer slots than traffic
    needs; and while others load."""
    from headrace.engine.bench.engine.lora import Sizes, run

    sizes = Sizes(
        batches=sizes_of(batches),
        context=context,
        steps=steps,
        slots=slots,
        registered=registered,
        rank=rank,
        small=small,
    )
    run(target_of(model, device, kv_memory, None, load_format, more), sizes, json_path)


@bench.command("options", short_help="What penalties, filters, log-probabilities and schemas cost.")
def bench_options(
    model: ShapeArgument = None,
    batches: BatchesOption = "64,256",
    context: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    steps: StepsOption = 64,
    repeats: RepeatsOption = 3,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    max_rows: RowsOption = None,
    load_format: FormatOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure what penalties, filters, log-probabilities and a JSON schema in all rows add to a decode step.

    Then measure what a hook, a grammar or `deterministic` in one row costs that row and the others.
    """
    from headrace.engine.bench.engine.options import run

    target, sizes = target_of(model, device, kv_memory, max_rows, load_format, more), sizes_of(batches)
    run(target, batches=sizes, context=context, steps=steps, repeats=repeats, json_path=json_path)


bench.command("speculation", short_help="Tokens a second with drafts and without.")(bench_speculation)


@bench.command("throughput", short_help="nano-vllm's public workload through `engine.generate`.")
def bench_throughput(
    model: ShapeArgument = None,
    requests: RequestsOption = 256,
    scale: ScaleOption = 1.0,
    repeats: RepeatsOption = 3,
    peer: PeerOption = None,
    profile: ProfileOption = False,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    max_rows: RowsOption = None,
    load_format: FormatOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure nano-vllm's public workload of 256 requests through `engine.generate`, all at once."""
    from headrace.engine.bench.engine.throughput import run

    run(
        target_of(model, device, kv_memory, max_rows, load_format, more),
        requests=requests,
        scale=scale,
        repeats=repeats,
        peer=peer,
        profile=profile,
        json_path=json_path,
    )


@bench.command("stream", short_help="The same workload as one `async for` a request.")
def bench_stream(
    model: ShapeArgument = None,
    requests: RequestsOption = 256,
    scale: ScaleOption = 1.0,
    repeats: RepeatsOption = 3,
    profile: ProfileOption = False,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    max_rows: RowsOption = None,
    load_format: FormatOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure nano-vllm's public workload as one `async for` a request, text included, beside `engine.generate`."""
    from headrace.engine.bench.engine.stream import run

    target = target_of(model, device, kv_memory, max_rows, load_format, more)
    run(target, requests=requests, scale=scale, repeats=repeats, profile=profile, json_path=json_path)


@bench.command("startup", short_help="From starting Python to the first token, by phase.")
def bench_startup(
    model: ShapeArgument = None,
    prompt_tokens: PromptOption = 128,
    repeats: Annotated[int, typer.Option(help="Processes to start.", min=1)] = 3,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    max_rows: RowsOption = None,
    load_format: FormatOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure the time from starting a Python process to the first token, by phase."""
    from headrace.engine.bench.engine.startup import run

    target = target_of(model, device, kv_memory, max_rows, load_format, more)
    run(target, prompt_tokens=prompt_tokens, repeats=repeats, json_path=json_path)


@bench.command("transformers", short_help="The same prompts with headrace and with transformers.")
def bench_transformers(
    model: ModelArgument = None,
    batches: BatchesOption = "1,8,32",
    prompt_tokens: PromptOption = 128,
    output_tokens: AnswerOption = 128,
    repeats: Annotated[int, typer.Option(help="Measured runs of each engine and batch size.", min=1)] = 3,
    cpu_threads: ThreadsOption = None,
    json_path: JsonOption = None,
) -> None:
    """Generate the same prompts with headrace and with transformers.generate (bfloat16), in turn."""
    sizes = sizes_of(batches)
    from headrace.engine.bench.engine.pair import run

    run(
        chosen_model(model),
        peer="transformers",
        batches=sizes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        cpu_threads=cpu_threads,
        json_path=json_path,
    )


@bench.command("llama-cpp", short_help="The same prompts with headrace and with llama.cpp, on the CPU.")
def bench_llama_cpp(
    model: ModelArgument = None,
    batches: BatchesOption = "1,8",
    prompt_tokens: PromptOption = 128,
    output_tokens: AnswerOption = 128,
    repeats: Annotated[int, typer.Option(help="Measured runs of each engine and batch size.", min=1)] = 3,
    cpu_threads: ThreadsOption = None,
    json_path: JsonOption = None,
) -> None:
    """Generate the same prompts with headrace and with llama.cpp (the package llama-cpp-python), in turn."""
    sizes = sizes_of(batches)
    from headrace.engine.bench.engine.pair import run

    run(
        chosen_model(model),
        peer="llama-cpp",
        batches=sizes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        cpu_threads=cpu_threads,
        json_path=json_path,
    )


@bench.command("memory", short_help="How much of the reserved page memory holds tokens, on mixed-length traffic.")
def bench_memory(model: ModelArgument = None, json_path: JsonOption = None) -> None:
    """Measure how much of the reserved page memory holds tokens, on mixed-length traffic, and how many pages a shared
    system prompt saves."""
    from headrace.engine.bench.engine.memory import run

    run(chosen_model(model), json_path=json_path)


@bench.command("scheduler", short_help="Host time of one decode step, without a device.")
def bench_scheduler(
    rows: Annotated[int, typer.Option(help="Requests in each step.", min=1)] = 256,
    drafts: Annotated[int, typer.Option(help="Drafts of each request in steps that verify any.", min=1, max=16)] = 3,
    json_path: JsonOption = None,
) -> None:
    """Measure the host time of one decode step, plan and commit, without drafts and with them, without a device."""
    from headrace.engine.bench.host.scheduler import run

    run(rows=rows, drafts=drafts, json_path=json_path)


@bench.command("policies", short_help="What each scheduling policy does to those who wait.")
def bench_policies(json_path: JsonOption = None) -> None:
    """Simulate what each scheduling policy does to those who wait, with the steps of an H200; measure its host time."""
    from headrace.engine.bench.host.policies import run

    run(json_path=json_path)


@bench.command("flood", short_help="Quiet tenants beside one with ten times its share.")
def bench_flood(
    model: ShapeArgument = None,
    rows: Annotated[int, typer.Option(help="Rows of the engine.", min=4)] = 64,
    seconds: Annotated[float, typer.Option(help="Length of the measurement at each load.", min=1.0)] = 60.0,
    loads: Annotated[str, typer.Option(help="Parts of a fair share that quiet tenants ask for.")] = "1,0.87",
    scale: ScaleOption = 1.0,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    load_format: FormatOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure the time to first token of quiet tenants beside one that asks for ten times its share, under fair_share
    and under first_come."""
    shares = shares_of(loads)
    from headrace.engine.bench.engine.flood import run

    target = target_of(model, device, kv_memory, None, load_format, more)
    run(target, rows=rows, seconds=seconds, loads=shares, scale=scale, json_path=json_path)


@bench.command("swap", short_help="Requests that do not all fit the pages.")
def bench_swap(
    model: ModelArgument = None,
    requests: Annotated[int, typer.Option(help="Requests, whose prompts just fit the pages.", min=2)] = 8,
    prompt_tokens: PromptOption = 256,
    output_tokens: AnswerOption = 128,
    swap_memory: Annotated[str, typer.Option(help="Host memory for pages, as in `EngineConfig`.")] = "1GiB",
    json_path: JsonOption = None,
) -> None:
    """Measure requests that do not all fit the pages: preempted by computing again, and by swapping."""
    from headrace.engine.bench.engine.swap import run

    run(
        model=chosen_model(model),
        requests=requests,
        prompt=prompt_tokens,
        output=output_tokens,
        swap_memory=swap_memory,
        json_path=json_path,
    )


@bench.command("serve", short_help="Streams through a server in a process of its own.")
def bench_serve(
    model: ModelArgument = None,
    fake_device: Annotated[
        bool, typer.Option("--fake-device", help="Measure the server alone, over a device that only takes time.")
    ] = False,
    scenario: Annotated[
        list[str] | None, typer.Option(help="With --fake-device: one of its scenarios; repeatable; left out, all.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="With --fake-device: length of each scenario.", min=1)] = 60.0,
    load: Annotated[float, typer.Option(help="With --fake-device: factor on the load.", min=0.001)] = 1.0,
    requests: Annotated[int, typer.Option(help="Requests.", min=1)] = 64,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 16,
    prompt_tokens: PromptOption = 128,
    output_tokens: AnswerOption = 128,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    json_path: JsonOption = None,
) -> None:
    """Measure streams through a server in a process of its own: rates, time to first token and between events."""
    if fake_device:
        from headrace.server.bench import fake

        unknown = set(scenario or ()) - fake.SCENARIOS.keys()
        if unknown:
            raise typer.BadParameter(f"--scenario {min(unknown)}: give one of {', '.join(fake.SCENARIOS)}")
        fake.run(scenario or list(fake.SCENARIOS), seconds=seconds, scale=load, json_path=json_path)
        return
    from headrace.server.bench import serve

    serve.run(
        chosen_model(model),
        options={"device": device, **({"kv_memory": kv_memory} if kv_memory else {})},
        requests=requests,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        json_path=json_path,
    )


@bench.command("lag", short_help="How late other coroutines run while streams decode.")
def bench_lag(
    model: ModelArgument = None,
    streams: Annotated[int, typer.Option(help="Streams that decode meanwhile.", min=1)] = 8,
    json_path: JsonOption = None,
) -> None:
    """Measure how late the host application's own coroutines run while streams decode."""
    from headrace.engine.bench.host.lag import run

    run(chosen_model(model), streams=streams, json_path=json_path)


@bench.command("repeat", short_help="How many greedy answers change when they are asked in another way.")
def bench_repeat(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.", min=1)] = 16,
    device: DeviceOption = "auto",
    kv_memory: KvOption = None,
    more: SetOption = None,
    json_path: JsonOption = None,
) -> None:
    """Ask 40 chats alone, again behind the prefix cache, and all at once; count the greedy answers that change."""
    from headrace.engine.bench.engine.repeat import run

    run(target_of(model, device, kv_memory, None, None, more), tokens=tokens, json_path=json_path)
