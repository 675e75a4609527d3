"""`headrace bench startup`: times a new Python process from its start to its first token, by phase."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

from rich.progress import track

from headrace.engine.bench.opening import BenchmarkFailed, Target
from headrace.engine.bench.report import conditions, show, spread
from headrace.engine.bench.shapes import located

__all__ = ["measure_once", "run"]

_TIMEOUT = 900.0
_PHASES = ("start Python", "import headrace.engine", "open", "first token")

# CLOCK_MONOTONIC is one clock for all processes, so the child's marks continue the parent's.
_CHILD = """
import json, sys, time
marks = [time.monotonic()]
import anyio
from headrace.engine import Engine, SamplingParams
marks.append(time.monotonic())
model, options, tokens = json.loads(sys.argv[1])
async def main():
    async with Engine(model, **options) as engine:
        marks.append(time.monotonic())
        prompt = [index * 37 % engine.info.vocab_size for index in range(tokens)]
        async for token in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)):
            marks.append(time.monotonic())
            break
        print(json.dumps([marks, engine.info.device, engine.info.model]), flush=True)
anyio.run(main)
"""


def run(target: Target, *, prompt_tokens: int, repeats: int, json_path: str | None) -> None:
    """Measure and print medians over `repeats` processes."""
    phases: list[list[float]] = []
    with located(target.model) as (path, only_shape):
        options = target.options(only_shape=only_shape)
        for _ in track(range(repeats), description="starting", transient=True):
            taken, device, model = measure_once(path, options, prompt_tokens)
            phases.append(taken)
    totals = [sum(taken) for taken in phases]
    columns = list(zip(*phases, strict=True))
    rows = [[phase, spread(column, ".2f")] for phase, column in zip(_PHASES, columns, strict=True)]
    rows.append(["start to first token", spread(totals, ".2f")])
    rows.append(["the first of the runs", f"{totals[0]:.2f}"])
    data = {
        "conditions": conditions(
            **{
                **target.describe(),
                "model": model,
                "device": device,
                "prompt_tokens": prompt_tokens,
                "repeats": repeats,
            }
        ),
        "seconds": {**dict(zip(_PHASES, columns, strict=True)), "total": totals},
        "median": median(totals),
    }
    show("start to first token, s (median, lowest to highest)", ("phase", "seconds"), rows, data, json_path)


def measure_once(path: str, options: dict[str, Any], prompt_tokens: int) -> tuple[list[float], str, str]:
    """Return the seconds of each phase in a new process, the device and the model's name.

    Raises:
        BenchmarkFailed: The process failed; the message has the last line that it wrote.
    """
    command = [sys.executable, "-c", _CHILD, json.dumps([path, options, prompt_tokens])]
    started = time.monotonic()
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"no first token within {_TIMEOUT:.0f} s") from error
    if child.returncode:
        *_, told = child.stderr.strip().splitlines() or ["it wrote nothing"]
        raise BenchmarkFailed(f"the started process failed: {told[-1000:]}")
    marks, device, model = json.loads(child.stdout.strip().splitlines()[-1])
    return [later - earlier for earlier, later in zip([started, *marks], marks, strict=False)], device, model
