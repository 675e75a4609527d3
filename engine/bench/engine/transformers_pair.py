"""`headrace bench transformers`: both engines in one process, on the same prompts, in turn; reports medians and ratios.

Decoding is greedy to fixed lengths, end-of-sequence ignored, everything warmed up. Each repeat has fresh random
prompts, so that no prefix is cached, and both engines get the same ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import torch
from rich.progress import Progress

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.report import conditions, show

__all__ = ["run"]

_PEER = "transformers.generate"


def run(
    model: str,
    *,
    batches: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    cpu_threads: int | None,
    json_path: str | None,
) -> None:
    """Measure and print tokens a second of both engines for each batch size."""
    anyio.run(_run, model, batches, prompt_tokens, output_tokens, repeats, cpu_threads, json_path)


async def _run(
    model: str,
    batches: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    cpu_threads: int | None,
    json_path: str | None,
) -> None:
    peer = _load_peer(Path(model))
    generator = random.Random(0)
    rows: list[list[str]] = []
    figures: list[dict[str, Any]] = []
    async with Engine(model, max_rows=max(batches), cpu_threads=cpu_threads) as engine:
        with Progress(transient=True) as progress:
            task = progress.add_task("measuring", total=len(batches) * (repeats + 1) * 2)
            for batch in batches:
                seconds: dict[str, list[float]] = {"headrace": [], _PEER: []}
                for repeat in range(repeats + 1):
                    prompts = [
                        [generator.randrange(engine.info.vocab_size) for _ in range(prompt_tokens)]
                        for _ in range(batch)
                    ]
                    ours = await _time_headrace(engine, prompts, output_tokens)
                    progress.advance(task)
                    theirs = _time_peer(peer, prompts, output_tokens)
                    progress.advance(task)
                    if repeat:  # the first round warms both up
                        seconds["headrace"].append(ours)
                        seconds[_PEER].append(theirs)
                rates = {name: [batch * output_tokens / value for value in times] for name, times in seconds.items()}
                rows.append(_row(batch, rates))
                figures.append({"batch": batch, "tokens_per_second": rates})
        data = {
            "conditions": conditions(
                model=engine.info.model,
                peer_threads=torch.get_num_threads(),
                cpu_threads=cpu_threads,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                repeats=repeats,
            ),
            "figures": figures,
        }
    show("tokens/s generated, prefill included (median, lowest to highest)", _COLUMNS, rows, data, json_path)


_COLUMNS = ("batch", "headrace", "transformers.generate, bfloat16", "ratio")


def _row(batch: int, rates: dict[str, list[float]]) -> list[str]:
    cells = [f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})" for values in rates.values()]
    ratios = [ours / theirs for ours, theirs in zip(rates["headrace"], rates[_PEER], strict=True)]
    return [str(batch), *cells, f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]


async def _time_headrace(engine: Engine, prompts: Sequence[list[int]], output_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(engine.generate, prompt, params)
    return time.perf_counter() - started


def _load_peer(path: Path) -> Any:
    """Load the model in plain bfloat16, as transformers usually runs it, whatever the file holds."""
    import transformers

    if path.suffix != ".gguf":
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True)
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # newer versions may keep the blocks packed, in float32 kernels
        options["quantization_config"] = transformers.GgufConfig(gguf_file=path.name, dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)


def _time_peer(peer: Any, prompts: Sequence[list[int]], output_tokens: int) -> float:
    ids = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        made = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=output_tokens,
            max_new_tokens=output_tokens,
            pad_token_id=0,
        )
    elapsed = time.perf_counter() - started
    if made.shape[1] != ids.shape[1] + output_tokens:
        raise RuntimeError(f"{_PEER} made {made.shape[1] - ids.shape[1]} tokens instead of {output_tokens}")
    return elapsed
