"""One engine through a long life of chaos in virtual time: what it holds does not grow.

`HEADRACE_SOAK_SECONDS` is how long callers come, 30 by default; `make soak` makes it an hour.
"""

from __future__ import annotations

import os
import time
from statistics import median

import psutil
from leftovers import settle
from simulation.engine_world import live

_SECONDS = float(os.environ.get("HEADRACE_SOAK_SECONDS", "30"))


def test_a_long_life_holds_no_more_in_the_end() -> None:
    settle()
    process, began = psutil.Process(), time.perf_counter()
    before = process.memory_info().rss
    world = live(5, seconds=_SECONDS)
    grown = process.memory_info().rss - before
    assert world.sampled is not None and world.machine.loop.now >= _SECONDS
    held = [objects for _, objects in world.sampled]
    third = len(held) // 3
    middle, last = median(held[third : 2 * third]), median(held[-third:])
    took = time.perf_counter() - began
    print(
        f"\n{world.machine.loop.now:.0f} s of chaos in {took:.0f} s: {world.requests} requests; {dict(world.reached)}"
    )
    print(f"Python objects: {middle:.0f} in the middle third, {last:.0f} in the last; RSS {grown / 2**20:+.1f} MiB")
    assert last < 1.2 * middle + 3000, held
    assert grown < 64 * 2**20
