"""The simulation finds bugs that other engines had: each is planted, and some seed of the first 500 must break.

A handful for each commit, chosen by its hash, so that a commit gives the same answer every day and on every machine.
`HEADRACE_MUTATIONS=all`, as in `make soak`, plants all of them, and prints which seed found which.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from commit import chosen, head
from simulation import draft_mutations  # noqa: F401 - plants its bugs in `MUTATIONS`
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


def planted() -> list[str]:
    """Return the mutations of this run."""
    if os.environ.get("HEADRACE_MUTATIONS") == "all":
        return sorted(PLAYS)
    return sorted(chosen(list(PLAYS), _HANDFUL, head(Path(__file__).parent)))


def test_there_are_enough_of_them() -> None:
    assert len(MUTATIONS) >= 20 and len(ENGINE_MUTATIONS) >= 20


def test_a_commit_chooses_them_and_nothing_else_does(tmp_path: Path) -> None:
    names = [str(number) for number in range(60)]
    assert chosen(names, 8, "a") == chosen(names[::-1], 8, "a") != chosen(names, 8, "b")
    assert len(set(chosen(names, 8, "a"))) == 8
    assert {name for commit in range(100) for name in chosen(names, 8, str(commit))} == set(names)
    assert head(tmp_path) == "", "a folder without git"
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, env=environment)
    assert len(head(tmp_path)) >= 40


@pytest.mark.parametrize("name", planted())
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
