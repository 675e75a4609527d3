"""`DepthRule` over devices whose steps take what a table says, what it measures, and which depths really run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from simulation.rig import Rig, capacity

from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.speculation.counts import FixedDepths, Speculation
from headrace.engine.scheduling.speculation.depth import DepthRule, StepRows
from headrace.engine.scheduling.speculation.measured import DraftRates, StepTimes


class Device:
    """Steps that take as long as their positions, and drafts that are right at a rate."""

    def __init__(self, seconds: float, further: float, rate: float) -> None:
        self.rule = DepthRule(4)
        self.further = further
        self.seconds = seconds
        self.rate = rate
        self.depths: list[int] = []

    def run(self, steps: int, rows: int = 1) -> None:
        for _ in range(steps):
            depth = self.rule.choose(StepRows(rows, rows), 100)
            self.depths.append(depth)
            self.rule.observe(StepRows(rows, rows), 100, depth, self.seconds + depth * rows * self.further)
            right = [0] * rows
            for row in range(rows):
                while right[row] < depth and (len(self.depths) * 7919 + right[row] * 104729) % 100 < 100 * self.rate:
                    right[row] += 1
            if depth:
                self.rule.observe_runs([depth] * rows, [depth] * rows, [1 + each for each in right])

    @property
    def switches(self) -> list[int]:
        """Steps at each depth, until the next."""
        changes = [0, *(at for at in range(1, len(self.depths)) if self.depths[at] != self.depths[at - 1])]
        return [end - start for start, end in zip(changes, [*changes[1:], len(self.depths)], strict=True)]


def test_the_depth_follows_what_drafts_gain() -> None:
    gains, loses = Device(1.0, 0.1, 0.9), Device(1.0, 0.3, 0.05)
    for device in (gains, loses):
        device.run(3000)
    assert gains.depths[100:].count(4) > 0.95 * len(gains.depths[100:])
    assert loses.depths[100:].count(0) > 0.95 * len(loses.depths[100:])
    between = Device(1.0, 0.45, 0.6)  # the first draft pays, the fourth does not
    between.run(3000)
    assert 0 < sum(between.depths[500:]) / 2500 < 3


def test_the_depth_changes_with_its_rows_and_tries_again_after_a_change() -> None:
    device = Device(1.0, 0.05, 0.6)
    device.run(200)
    assert device.depths[-1] > 0
    device.run(200, rows=60)  # every further token costs as much as 60 do
    assert device.depths[-1] == 0
    device.run(200)
    assert device.depths[-1] > 0, "the times of one row are still known"
    device.rate = 0.0
    device.run(400)
    assert device.depths[-1] == 0
    device.rate = 1.0
    device.run(600)
    assert device.depths[-400:].count(4) > 0.95 * 400


def test_depths_are_held_but_for_short_trials() -> None:
    device = Device(1.0, 0.2, 0.5)
    device.run(2000)
    assert all(steps <= 8 or steps >= 32 for steps in device.switches[3:-1])


def test_drafts_that_never_pay_are_tried_more_and_more_rarely() -> None:
    device = Device(1.0, 0.3, 0.05)
    for _ in range(10):  # requests of 150 tokens
        device.rule.note_request()
        device.run(150)
    assert 0 < sum(depth > 0 for depth in device.depths[300:]) <= 24


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("further", [0.1, 0.5, 3.0])
def test_trials_lose_no_more_than_a_hundredth_however_dear_drafts_are(further: float, rows: int) -> None:
    device = Device(1.0, further / rows, 0.0)
    device.run(200, rows)  # learns what drafts cost
    begin = len(device.depths)
    for _ in range(200):  # requests of 100 tokens
        device.rule.note_request()
        device.run(100, rows)
    tried = sum(device.depths[begin:])
    assert tried > 0, "drafts are still tried"
    assert tried * further <= 0.011 * 20_000, f"{tried} drafts a row in 20,000 steps"


class Gpu:
    """Steps of a few depths, each of which takes so much longer than one without drafts, and two in flight.

    Of `rows` rows `drafting` may have drafts, or all; it takes as long for all, however many these are.
    """

    def __init__(self, longer: dict[int, float], rate: float, rows: int, drafting: int | None = None) -> None:
        self.rule = DepthRule(max(longer), lambda rows: sorted(longer))
        self._seconds = {0: 1.0} | {depth: 1.0 + further for depth, further in longer.items()}
        self.rate, self._rows, self._drafting = rate, rows, drafting or rows
        self._chance = random.Random(7)
        self._flying: deque[Callable[[], None]] = deque()
        self.depths: list[int] = []
        self.seconds, self.tokens = 0.0, 0.0
        for _ in range(rows):
            self.rule.note_request()

    def longer(self, depth: int, further: float) -> None:
        self._seconds[depth] = 1.0 + further

    def run(self, steps: int, context: int = 450, prompts: float = 0.0) -> None:
        """Run `steps` steps from a length of the contexts on; each takes as much longer as its prompts do."""
        for step in range(steps):
            depth = self.rule.choose(StepRows(self._rows, self._drafting), context + step)
            right = [self._right(depth) for _ in range(self._drafting)]
            seconds = self._seconds[depth]
            self._flying.append(partial(self._end, context + step, depth, right, seconds, timed=not prompts))
            if len(self._flying) > 2:
                self._flying.popleft()()
            self.depths.append(depth)
            self.seconds += seconds + prompts
            self.tokens += 1 + sum(right) / self._rows

    def _right(self, depth: int) -> int:
        wrong = (ahead for ahead in range(depth) if self._chance.random() >= self.rate)
        return next(wrong, depth)

    def _end(self, context: int, depth: int, right: list[int], seconds: float, *, timed: bool) -> None:
        if depth:
            allowed, tokens = [depth] * self._drafting, [1 + each for each in right]
            others = self._rows - self._drafting
            self.rule.observe_runs(allowed + [0] * others, allowed + [0] * others, tokens + [1] * others)
        if timed:
            noise = self._chance.gauss(1.0, 0.03)
            self.rule.observe(StepRows(self._rows, self._drafting), context, depth, seconds * noise)


def evenly(longest: float) -> dict[int, float]:
    return {depth: longest * depth / 3 for depth in (1, 2, 3)}


LONGER = {1: 0.1, 16: 0.27, 64: 0.6, 256: 1.4}
"""What three drafts a row add to a step of so many rows on an H200, about (docs/speculation.md)."""


@pytest.mark.parametrize("rows", LONGER)
@pytest.mark.parametrize("prompts", [0, 32], ids=["at once", "behind prompts"])
def test_drafts_that_are_never_right_cost_a_fiftieth_of_the_first_steps_at_most(rows: int, prompts: int) -> None:
    gpu = Gpu(evenly(LONGER[rows]), 0.0, rows)
    gpu.run(prompts, prompts=2.0)
    before = gpu.seconds
    gpu.run(120)  # into longer contexts, of which nothing is known
    assert any(gpu.depths), "drafts are tried"
    assert 120 / (gpu.seconds - before) >= 0.98
    assert (3.0 * prompts + 120) / gpu.seconds >= 0.98


@pytest.mark.parametrize("rows", LONGER)
def test_drafts_that_are_right_are_soon_as_deep_as_pays(rows: int) -> None:
    gpu = Gpu(evenly(LONGER[rows]), 0.9, rows)
    gpu.run(200)
    best = (1 + 0.9 + 0.9**2 + 0.9**3) / (1 + LONGER[rows])
    assert gpu.tokens / gpu.seconds > 0.93 * best


@pytest.mark.parametrize(("drafting", "pays"), [(1, False), (8, False), (16, False), (32, True), (63, True)])
@pytest.mark.parametrize("waited", [0, 300], ids=["at once", "behind rows that all have drafts"])
def test_rows_without_drafts_do_not_wait_for_those_of_few_others(drafting: int, pays: bool, waited: int) -> None:
    """A graph computes lines for the drafts of every row. Of 64 rows 16 that nearly always guess right gain 1.6."""
    gpu = Gpu(evenly(0.6), 0.9, 64)
    gpu.run(waited)
    gpu._drafting = drafting
    before = gpu.seconds, gpu.tokens, len(gpu.depths)
    gpu.run(300)
    gain = (gpu.tokens - before[1]) / (gpu.seconds - before[0])
    yielded = 1 + (0.9 + 0.9**2 + 0.9**3) * drafting / 64
    best = max(1.0, yielded / 1.6)
    assert gain > 0.95 * best and (pays or gain > 0.98)
    assert (gpu.depths[-64:].count(3) >= 56) == pays
    if 3 * drafting / 64 < 0.03:
        assert not any(gpu.depths[before[2] + 32 :]), "nothing could pay, and is not tried"


def test_few_rows_with_drafts_pay_where_only_these_take_longer() -> None:
    """On a CPU a step takes longer by the drafts that there are."""
    rule, depths = DepthRule(4), []
    for _ in range(1000):
        depths.append(rule.choose(StepRows(8, 1), 100))
        rule.observe(StepRows(8, 1), 100, depths[-1], 1.0 + 0.05 * depths[-1])
        if depths[-1]:
            rule.observe_runs([depths[-1]], [depths[-1]], [1 + depths[-1]])
    assert depths[-500:].count(4) > 480, "a twentieth of a step longer by each draft, and an eighth of a token more"


def test_a_change_of_what_is_right_is_noticed_at_many_rows() -> None:
    gpu = Gpu(evenly(0.6), 0.0, 64)
    gpu.run(300)
    gpu.rate = 0.9
    gpu.run(300)
    assert gpu.depths[-64:].count(3) >= 60
    gpu.rate = 0.0
    gpu.run(200)
    assert gpu.depths[-64:].count(0) >= 60


def test_the_depth_is_that_whose_own_time_pays() -> None:
    """A fourth draft needs another tile, say: no line through the times of few depths tells that."""
    gpu = Gpu({1: 0.05, 2: 0.1, 4: 2.5}, 0.9, 64)
    gpu.run(600)
    assert gpu.depths[100:].count(2) > 0.95 * 500
    cheap = Gpu({1: 0.5, 2: 0.52, 4: 0.54}, 0.75, 64)  # the first is dear, and others next to nothing
    cheap.run(600)
    assert cheap.depths[100:].count(4) > 0.95 * 500


def test_only_depths_that_the_device_has_are_chosen() -> None:
    for rows, depths in ((1, [1, 2, 4, 8, 12]), (64, [1, 2, 4]), (700, [])):
        rule = DepthRule(12, lambda rows: [depth for depth in (1, 2, 4, 8, 12) if rows * (depth + 1) <= 400])
        chosen = set()
        for step in range(1500):
            depth = rule.choose(StepRows(rows, rows), 100)
            chosen.add(depth)
            rule.observe(StepRows(rows, rows), 100, depth, 1.0 + 0.01 * depth)
            if depth:
                rule.observe_runs([depth] * rows, [depth] * rows, [1 + min(depth, step % 12)] * rows)
        assert chosen <= {0, *depths} and max(chosen) == max(depths, default=0)


def test_depths_are_probed_while_one_is_held() -> None:
    gpu = Gpu({1: 0.1, 2: 0.2, 4: 3.0}, 0.9, 4)
    gpu.run(300)
    assert gpu.depths[-100:].count(2) == 100
    gpu.longer(4, 0.25)  # such steps are faster now
    for _ in range(35):
        gpu.run(400)
    assert gpu.depths[-300:].count(4) > 250


def test_times_between_and_beyond_what_was_measured_lie_on_lines() -> None:
    times = StepTimes()
    assert times.most == 0 and not times.has(0)
    for drafts, seconds in ((0, 2.0), (0, 2.0), (1, 2.2), (1, 2.2), (4, 4.0), (4, 4.0), (8, 100.0)):
        times.add(drafts, seconds)
    assert (times.most, times.has(0), times.has(2), times.has(8)) == (4, True, False, False), "once is not enough"
    assert [times.ratio(drafts) for drafts in (0, 0.5, 1, 2, 4, 8)] == pytest.approx([1.0, 1.05, 1.1, 1.4, 2.0, 3.0])
    assert [times.ratio_before(depth) for depth in (1, 2, 8)] == pytest.approx([1.0, 1.1, 2.0])
    for _ in range(3):
        times.add(1, 1.8)
    assert times.ratio(1) >= 1.0, "no draft makes a step shorter"


def test_rates_of_places_that_were_not_drafted_are_those_before_them() -> None:
    rates = DraftRates(4)
    assert rates.rows == 0 and rates.tokens(4) == 1.0
    rates.add([1] * 4 + [0], [1, 1, 0, 0, 0], [2, 1, 1, 1, 1])  # half of the rows have a draft, of which half are right
    assert rates.rows == 4
    assert rates.drafts(1) == 0.5 and rates.drafts(3) == 1.5
    assert rates.tokens(1) == 1.25 and rates.tokens(3) == pytest.approx(1.25 + 0.25 / 2 + 0.25 / 4)
    rates.add([2] * 4, [2] * 4, [3, 3, 1, 1])
    assert rates.tokens(2) == pytest.approx(1 + 0.375 + 0.375 * 1.0), "the second were right where the first were"


def test_places_that_were_long_not_drafted_are_learnt_anew() -> None:
    rates = DraftRates(2)
    for _ in range(100):
        rates.add([2], [2], [2])
    assert rates.tokens(2) == pytest.approx(2.0)
    for _ in range(100):
        rates.add([1], [1], [2])
    rates.add([2], [2], [3])
    assert rates.tokens(2) > 2.9


def drafting(
    rows: Sequence[int], planned: Sequence[int], depths: Callable[[int], Sequence[int]] | None, late: float = 0.0
) -> list[Any]:
    """What the rule is told of a step whose rows had `rows` drafts, of the `planned` ones."""
    told: list[Any] = []
    speculation = Speculation(4, lambda rows, context: 4, depths=depths)
    speculation.rule.observe = lambda *values: told.append(values)  # type: ignore[method-assign]
    plan = StepPlan(0, depth=max(planned), starts=[100] * len(planned), drafts=list(planned))
    plan.decodes = [SimpleNamespace(asked=SimpleNamespace(speculates=True)) for _ in planned]  # type: ignore[misc]
    speculation.observe(plan, StepResult([7] * len(planned), drafted=list(rows), late_seconds=late), 0.5)
    return told


def test_drafts_are_counted_at_each_place_however_many_a_step_verifies() -> None:
    speculation = Speculation(4)
    for drafted, counts in (([4, 2], [3, 3]), ([1, 0], [1, 1]), ([3], [4]), ([], [1, 1])):
        plan: Any = SimpleNamespace(
            depth=4, drafts=[4] * len(counts), size=len(counts), decodes=[], starts=[], others=[]
        )
        speculation.observe(plan, StepResult([7] * sum(counts), counts, drafted=drafted), 0.5)
    assert (speculation.drafted_at, speculation.accepted_at) == ([4, 3, 2, 1], [3, 3, 1, 0])
    assert (speculation.runs, speculation.drafted, speculation.accepted) == (4, 10, 7)


def test_the_rule_is_told_of_the_depth_that_ran() -> None:
    assert drafting([3, 0], [3, 1], lambda rows: [1, 2, 4]) == [((2, 2), 100, 4, 0.5)], "there is no graph of depth 3"
    assert drafting([2, 2], [4, 4], lambda rows: [1, 2]) == [((2, 2), 100, 2, 0.5)], "more lines do not fit"
    assert drafting([], [4, 4], lambda rows: [1, 2, 4]) == [((2, 2), 100, 0, 0.5)], "the device could draft nothing"
    assert drafting([3, 0], [3, 1], None) == [((2, 2), 100, 1.5, 0.5)], "others compute what is there"


def test_what_was_read_late_is_no_time_of_a_depth() -> None:
    assert drafting([2, 2], [2, 2], lambda rows: [1, 2], late=0.125) == [((2, 2), 100, 2, 0.375)]
    assert drafting([2, 2], [2, 2], lambda rows: [1, 2], late=0.75) == [((2, 2), 100, 2, 0.0)], "clocks differ a little"


def test_a_budget_leaves_a_depth_that_the_device_has() -> None:
    for depths, expected in ((None, 3), (lambda rows: [1, 2, 4], 2), (lambda rows: [4], 0)):
        speculation = Speculation(4, lambda rows, context: 4, depths=depths)
        running: Any = [SimpleNamespace(planned=9, asked=SimpleNamespace(speculates=True)) for _ in range(2)]
        assert speculation.depth(running, 2 + 2 * 2 * 3) == expected


def test_room_for_drafts_shrinks_with_the_rows_that_ask_for_them() -> None:
    """Half of what decodes leave is for prompts, and on a device with graphs one of them has to be small enough."""
    every = Speculation(4)
    assert [every.room(1, tokens) for tokens in (1, 2, 3, 6, 8, 9, 99)] == [0, 0, 1, 2, 3, 4, 4]
    assert [every.room(rows, 24) for rows in (2, 3, 8, 9, 24)] == [4, 3, 1, 0, 0]
    fixed = Speculation(4, depths=lambda rows: [depth for depth in (1, 2, 4) if rows * (depth + 1) <= 8])
    assert [fixed.room(rows, 99) for rows in range(1, 6)] == [4, 2, 1, 1, 0]
    assert [fixed.room(1, tokens) for tokens in (2, 3, 8, 9)] == [0, 1, 2, 4]


def test_a_runner_without_graphs_has_every_depth() -> None:
    assert not isinstance(Rig(capacity(), drafts=2).runner, FixedDepths)
