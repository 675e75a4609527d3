"""Breaks the device under an open engine and prints, as JSON, what its users get; run by test_faults.py, never by hand.

Usage: crash.py DEVICE FOLDER. On "cpu", which has no such fault, the runner says that the device is lost.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import torch
from gpu.driving import Meddler, draw, greedy, open_engine

from headrace.engine import Engine, EngineCrashed
from headrace.engine.scheduling.plan import StepPlan


def break_device(device: str) -> None:
    if device == "cpu":
        raise EngineCrashed("the device is lost")
    torch._assert_async(torch.zeros((), dtype=torch.bool, device="cuda"))


async def name_of(action: Any) -> str:
    try:
        result = action()
        if hasattr(result, "__await__"):
            await result
    except Exception as error:
        return type(error).__name__
    return "nothing"


async def crash(engine: Engine, device: str) -> dict[str, Any]:
    meddler = Meddler(engine)
    streams = [engine.stream(draw(20 + 10 * number, number), greedy(200)) for number in range(6)]
    ends: dict[int, str] = {}

    async def read(number: int) -> None:
        async def to_the_end() -> None:
            async for _ in streams[number]:
                pass

        ends[number] = await name_of(to_the_end)

    def fault(plan: StepPlan) -> None:
        if plan.step > 20:
            break_device(device)

    async with anyio.create_task_group() as tasks:
        for number in range(len(streams)):
            tasks.start_soon(read, number)
        meddler.on_launch = fault
    return {
        "streams": [ends[number] for number in range(len(streams))],
        "later stream": await name_of(lambda: engine.stream([1], greedy(1))),
        "later stats": await name_of(engine.stats),
    }


async def main(device: str, folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    start = time.perf_counter()
    try:
        async with open_engine(folder, device, max_context=256, max_rows=4) as engine:
            start = time.perf_counter()
            report = await crash(engine, device)
    except Exception as error:
        report |= {"leaving": type(error).__name__, "cause": device == "cpu" or error.__cause__ is not None}
    report["seconds"] = round(time.perf_counter() - start, 2)
    report["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace")]
    return report


if __name__ == "__main__":
    print(json.dumps(anyio.run(main, sys.argv[1], Path(sys.argv[2]))))
