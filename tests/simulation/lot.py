"""`Lot`: what falls to a simulated engine by its seed - sizes, options, faults, callers, end; never does any of it."""

from __future__ import annotations

import random
from typing import Any

from simulation.callers import Settings
from simulation.engine_device import FIRST, LETTERS, Faults
from simulation.rig import capacity
from simulation.world import NARROW

from headrace.engine.scheduling.plan import Capacity
from headrace.engine.scheduling.policies import POLICIES

__all__ = ["HANG", "NAMES", "Lot"]

HANG = 300.0
"""Seconds after which a step is given up, where it is."""
NAMES = ["x", "y", "z"]
"""Of adapters."""

_CHANGES = 15  # of adapters, and of memory, by each operator
_RARE = Faults(slow=0.005, step=0.005, launch=0.005, memory=0.005, row=0.01, move=0.1)
"""In a long life, where a step that hangs would leave time for nothing else."""


class Lot:
    """The circumstances of one life, short or so many seconds long."""

    def __init__(self, seed: int, seconds: float) -> None:
        chance = random.Random(f"engine {seed}")
        self.capacity = _draw_capacity(chance) if not seconds else _capacity(pages=40, rows=8, budget=24)
        """That it opens with."""
        self.faults = _draw_faults(chance) if not seconds else _RARE
        self.slots = chance.choice([0, 0, 1, 2, 4]) if not seconds else 2
        """Of adapters."""
        self.options = _draw_options(chance, seed, self.capacity)
        """Of the engine."""
        self.settings = _draw_settings(chance, self.slots)
        """Of its callers."""
        self.seconds = seconds or chance.choice([0.1, 1.0, 5.0])
        """For which callers come."""
        self.callers = chance.randint(4, 16) if not seconds else int(seconds * 6)
        closes = chance.choice(["at the end"] * 5 + ["at once", "drains", "drains in vain"])
        self.closes = closes if not seconds else "at the end"
        self.drains_at = chance.choice([1, self.callers - 1]) if self.closes.startswith("drains") else -1
        """The caller before whom it is drained."""
        self.jumps = chance.random() < 0.2 and not seconds
        """Whether clocks do."""
        self.elastic = seconds > 0 or random.Random(f"elastic {seed}").random() < 0.3
        """Whether its memory changes."""
        self.changes = range(_CHANGES if not seconds else int(seconds))
        chance = random.Random(f"router {seed}")
        self.routers = chance.choice([0, 0, 1, 2]) if not seconds else 2
        """Who read what comes to and goes from the prefix cache."""
        self.route_stalls = chance.choice([0.0, 0.1])
        self.pace = min(self.seconds, 5.0)
        """Seconds, of those changes."""


def _capacity(**sizes: int) -> Capacity:
    """A small device, whose vocabulary is that of bytes."""
    return capacity(**sizes, vocab=257)


def _draw_capacity(chance: random.Random) -> Capacity:
    rows = chance.choice([1, 2, 4, 8])
    return _capacity(
        pages=chance.choice([8, 12, 20, 60]),
        size=chance.choice([1, 2, 4, 16]),
        rows=rows,
        budget=chance.choice([rows, rows + 3, rows + 64]),
        context=chance.choice([30, 60, 200]),
    )


def _draw_faults(chance: random.Random) -> Faults:
    if chance.random() < 0.3:
        return Faults(slow=0.02)
    rates = [0.0, 0.0, 0.02, 0.1]
    return Faults(
        slow=0.02,
        hung=chance.choice([0.0, 0.0, 0.02]),
        step=chance.choice(rates),
        launch=chance.choice(rates),
        memory=chance.choice(rates),
        row=chance.choice(rates),
        move=chance.choice([0.0, 0.0, 0.3]),
        crash=0.005 if chance.random() < 0.1 else 0.0,
    )


def _draw_options(chance: random.Random, seed: int, size: Capacity) -> dict[str, Any]:
    policy = chance.choice(["first_come", *POLICIES])
    return {
        "launch_ahead": chance.choice([1, 2, None, 3, 4]),
        "max_unread_tokens": chance.choice([1, 2, 8, 512]),
        "prefix_cache": chance.random() < 0.8,
        "swap_memory": chance.choice([0, 0, 3, 100]) * size.page_size,
        "policy": {"name": policy, **(NARROW.get(policy, {}) if seed % 2 else {})},
        "itl_target_ms": chance.choice([None, None, 20.0]),
        "max_adapters": 4,
        "adapter_host_memory": chance.choice([64, 200, 10_000]),
        "max_step_adapters": chance.choice([None, 1]),
        "hook_seconds": 60.0,
        "hang_seconds": random.Random(f"hang {seed}").choice([None, None, HANG]),
        "seed": seed,
    }


def _draw_settings(chance: random.Random, slots: int) -> Settings:
    shared = [[FIRST + chance.randrange(LETTERS) for _ in range(chance.randrange(24))] for _ in range(2)]
    return Settings(
        prompts=shared,
        longest=chance.choice([3, 10, 24]),
        stalls=chance.choice([0.0, 0.05, 0.3]),
        leaves=chance.choice([0.0, 0.4, 0.8]),
        deadlines=chance.choice([0.0, 0.0, 0.4]),
        hooks=chance.choice([0.0, 0.3]),
        formats=chance.choice([0.0, 0.0, 0.2, 0.8]),
        tenants=chance.choice([[None], [None, "a", "a", "b"]]),
        adapters=[*NAMES, "nobody"] if slots else [],
    )
