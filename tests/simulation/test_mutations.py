"""The simulation finds bugs that other engines had: each is planted, and some seed of the first 500 must break.

A handful a day, in turn; `HEADRACE_MUTATIONS=all` plants all of them, and prints which seed found which.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import date
from functools import partial

import pytest
from simulation.engine_mutations import ENGINE_MUTATIONS
from simulation.engine_world import live
from simulation.mutations import MUTATIONS
from simulation.world import Broken, play

SEEDS = 500
_HANDFUL = 8


def _played(world: Callable[..., object], plant: Callable[..., None], seed: int) -> object:
    return world(seed, plant)


PLAYS: dict[str, Callable[[int], object]] = {
    **{name: partial(_played, play, plant) for name, plant in MUTATIONS.items()},
    **{name: partial(_played, live, plant) for name, plant in ENGINE_MUTATIONS.items()},
}
"""Name of a bug -> plays a seed with it."""


def todays() -> list[str]:
    """The mutations to plant."""
    names = sorted(PLAYS)
    if os.environ.get("HEADRACE_MUTATIONS") == "all":
        return names
    first = date.today().toordinal() * _HANDFUL
    return [names[(first + place) % len(names)] for place in range(_HANDFUL)]


def test_there_are_enough_of_them() -> None:
    assert len(MUTATIONS) >= 20 and len(ENGINE_MUTATIONS) >= 20


@pytest.mark.parametrize("name", todays())
def test_a_planted_bug_is_found(name: str) -> None:
    for seed in range(SEEDS):
        try:
            PLAYS[name](seed)
        except Broken as broken:
            first = str(broken).splitlines()[0]
            assert "AttributeError" not in first and "TypeError" not in first, f"not the bug, but its planting: {first}"
            print(f"{name}: seed {seed}: {first}")
            return
    raise AssertionError(f"no seed of {SEEDS} finds it")
