"""The simulation finds bugs that other engines had: each is planted, and some seed of the first 500 must break.

A handful a day, in turn; `HEADRACE_MUTATIONS=all` plants all of them, and prints which seed found which.
"""

from __future__ import annotations

import os
from datetime import date

import pytest
from simulation.mutations import MUTATIONS
from simulation.world import Broken, play

SEEDS = 500
_HANDFUL = 6


def todays() -> list[str]:
    """The mutations to plant."""
    names = sorted(MUTATIONS)
    if os.environ.get("HEADRACE_MUTATIONS") == "all":
        return names
    first = date.today().toordinal() * _HANDFUL
    return [names[(first + place) % len(names)] for place in range(_HANDFUL)]


def test_there_are_enough_of_them() -> None:
    assert len(MUTATIONS) >= 20


@pytest.mark.parametrize("name", todays())
def test_a_planted_bug_is_found(name: str) -> None:
    for seed in range(SEEDS):
        try:
            play(seed, MUTATIONS[name])
        except Broken as broken:
            print(f"{name}: seed {seed}: {str(broken).splitlines()[0]}")
            return
    raise AssertionError(f"no seed of {SEEDS} finds it")
