"""The scheduler under seeded chaos: every output is what the request would have generated alone, and nothing is lost.

`HEADRACE_SEEDS=20000` plays more seeds, `HEADRACE_SEEDS=1234:1235` replays one.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from simulation.rig import Rig
from simulation.world import Broken, play

_DEFAULT = "2000"
_CHUNK = 100


def chunks() -> list[range]:
    """The seeds to play, in chunks of one test each."""
    first, _, end = os.environ.get("HEADRACE_SEEDS", _DEFAULT).rpartition(":")
    seeds = range(int(first or 0), int(end))
    return [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]


@pytest.mark.parametrize("seeds", chunks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_every_seed_ends_well(seeds: range) -> None:
    for seed in seeds:
        play(seed)
