"""The scheduler under seeded chaos: every output is what the request would have generated alone, and nothing is lost.

`HEADRACE_SEEDS=20000` plays more seeds, `HEADRACE_SEEDS=1234:1235` replays one.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from simulation.rig import Rig
from simulation.world import Broken, play

from headrace.engine.scheduling.plan import StepPlan

_DEFAULT = "400"
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


def test_the_seeds_reach_what_they_are_meant_to_reach() -> None:
    ends: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    for seed in range(150):
        world = play(seed)
        rig = world.rig
        ends.update(rig.ends.values())
        reached.update(world.talks)
        reached["tokens of the host"] += sum(len(rig.output(r)) for r in rig.requests if r.asked.processor is not None)
        reached["late masks"] += rig.runner.left_out
        reached["preemptions"] += rig.scheduler.roster.preemptions
        reached["slid pages"] += rig.slid
        reached["cached tokens"] += rig.scheduler.cached_tokens
        reached["forks that copied"] += rig.copies
        reached["alone"] += sum(len(rig.output(request)) for request in rig.requests if request.asked.alone)
        reached["alone, again"] += sum(request.preemptions for request in rig.requests if request.asked.alone)
        reached["beams"] += sum(request.origin >= 0 and request.row < 0 for request in rig.requests)
    assert ends.keys() == {"length", "stop", "cancelled", "deadline", "RequestFailed", "NonFiniteLogits"}
    assert min(ends.values()) > 30 and min(reached[name] for name in ("preemptions", "forks that copied", "beams")) > 50
    assert min(reached["sends"], reached["branches"]) > 50 and reached["tokens of the host"] > 300
    assert reached["late masks"] > 100 and reached["slid pages"] > 2000
    assert reached["cached tokens"] > 1000 and reached["alone"] > 300 and reached["alone, again"] > 20


@pytest.mark.parametrize("seed", range(0, 200, 40))
def test_a_seed_replays_exactly(seed: int) -> None:
    first, second = play(seed).rig, play(seed).rig
    assert first.trace() == second.trace() != ""
    assert first.ends == second.ends and first.computed_tokens == second.computed_tokens
    assert [request.tokens for request in first.requests] == [request.tokens for request in second.requests]


def break_a_page(rig: Rig) -> None:
    """Let the device lose one write in every fourth step."""
    write = rig.runner._write

    def forgetful(plan: StepPlan) -> None:
        if plan.step % 4 != 3:
            write(plan)

    rig.runner._write = forgetful  # type: ignore[method-assign]


def test_a_broken_seed_names_itself_and_shows_its_last_events_and_again_on_replay() -> None:
    messages = []
    for _ in range(2):
        with pytest.raises(Broken, match=r"^seed 7, tick \d+: AssertionError: r\d+: token \d+ at \d+, alone") as broken:
            play(7, break_a_page)
        messages.append(str(broken.value))
    assert messages[0] == messages[1]
    lines = messages[0].splitlines()
    assert len(lines) < 50 and max(map(len, lines)) < 250
    assert lines[-1] == "replay: HEADRACE_SEEDS=7:8"
    assert any(line.startswith("  commit     step 3:") for line in lines)
