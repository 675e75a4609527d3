"""`headrace bench transformers` and `bench llama-cpp`: both engines in one process, on the same prompts, in turn.

Decoding is greedy to fixed lengths, end-of-sequence ignored, everything warmed up. Each repeat has fresh random
prompts, so that no prefix is cached, and both engines get the same ones. Medians are reported, and ratios, also of
processor time, which other work on the machine affects less.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

import anyio
import torch
from rich.progress import Progress

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.engine.llama_cpp import LlamaCpp
from headrace.engine.bench.report import conditions, show

__all__ = ["run"]


class _Peer(Protocol):
    """Protocol of the engine to compare with."""

    name: str

    def time(self, prompts: Sequence[list[int]], output_tokens: int) -> float: ...


def run(
    model: str,
    *,
    peer: Literal["transformers", "llama-cpp"],
    batches: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    cpu_threads: int | None,
    json_path: str | None,
) -> None:
    """Measure and print tokens a second of both engines for each batch size."""
    anyio.run(_run, model, peer, batches, prompt_tokens, output_tokens, repeats, cpu_threads, json_path)


async def _run(
    model: str,
    kind: Literal["transformers", "llama-cpp"],
    batches: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    cpu_threads: int | None,
    json_path: str | None,
) -> None:
    peer: _Peer = _Transformers(Path(model)) if kind == "transformers" else LlamaCpp(Path(model), cpu_threads or 1)
    generator = random.Random(0)
    rows: list[list[str]] = []
    figures: list[dict[str, Any]] = []
    async with Engine(model, max_rows=max(batches), cpu_threads=cpu_threads) as engine:
        with Progress(transient=True) as progress:
            task = progress.add_task("measuring", total=len(batches) * (repeats + 1) * 2)
            for batch in batches:
                seconds: dict[str, list[float]] = {"headrace": [], peer.name: []}
                processor: dict[str, list[float]] = {"headrace": [], peer.name: []}
                for repeat in range(repeats + 1):
                    prompts = [
                        [generator.randrange(engine.info.vocab_size) for _ in range(prompt_tokens)]
                        for _ in range(batch)
                    ]
                    before = time.process_time()
                    ours = await _time_headrace(engine, prompts, output_tokens)
                    between = time.process_time()
                    progress.advance(task)
                    theirs = peer.time(prompts, output_tokens)
                    after = time.process_time()
                    progress.advance(task)
                    if repeat:  # the first round warms both up
                        for name, took, used in (
                            ("headrace", ours, between - before),
                            (peer.name, theirs, after - between),
                        ):
                            seconds[name].append(took)
                            processor[name].append(used)
                rates, used_rates = (
                    {name: [batch * output_tokens / value for value in values] for name, values in each.items()}
                    for each in (seconds, processor)
                )
                rows.append([str(batch), *_cells(rates), *_cells(used_rates)])
                figures.append({"batch": batch, "tokens_per_second": rates, "per_processor_second": used_rates})
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
    columns = ("batch", "headrace", peer.name, "ratio", "headrace, a processor second", peer.name, "ratio")
    show("tokens/s generated, prefill included (median, lowest to highest)", columns, rows, data, json_path)


def _cells(rates: dict[str, list[float]]) -> list[str]:
    cells = [f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})" for values in rates.values()]
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    return [*cells, f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]


async def _time_headrace(engine: Engine, prompts: Sequence[list[int]], output_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(engine.generate, prompt, params)
    return time.perf_counter() - started


class _Transformers:
    """`transformers.generate` in plain bfloat16, as transformers usually runs a model, whatever the file holds."""

    name = "transformers.generate, bfloat16"

    def __init__(self, path: Path) -> None:
        import transformers

        options: dict[str, Any] = {"dtype": torch.bfloat16}
        if path.suffix != ".gguf":
            options["local_files_only"] = True
        else:
            options["gguf_file"] = path.name
            if hasattr(transformers, "GgufConfig"):  # newer versions may keep the blocks packed, in float32 kernels
                options["quantization_config"] = transformers.GgufConfig(gguf_file=path.name, dequantize=True)
            path = path.parent
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, **options)

    def time(self, prompts: Sequence[list[int]], output_tokens: int) -> float:
        """Generate greedily, and return the seconds."""
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_tokens,
                max_new_tokens=output_tokens,
                pad_token_id=0,
            )
        elapsed = time.perf_counter() - started
        if made.shape[1] != ids.shape[1] + output_tokens:
            raise RuntimeError(f"{self.name} made {made.shape[1] - ids.shape[1]} tokens instead of {output_tokens}")
        return elapsed
