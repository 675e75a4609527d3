"""With more adapters than slots every request is served, on the right slot, and none is overtaken for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.adapters.slots import AdapterVersion, Move, Residency, SlotTable
from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.order.overtaking import Overtaking
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.scheduler import Scheduler

ROWS = 4
CAPACITY = Capacity(num_pages=24, page_size=4, max_rows=ROWS, max_batched_tokens=32, max_context=40, vocab_size=50)


class Rig:
    """A scheduler, and a device that fills slots some ticks after it is told to."""

    def __init__(self, slots: SlotTable, delay: int) -> None:
        self.scheduler = Scheduler(CAPACITY, secret=b"s", slots=slots)
        self.slots = slots
        self.held: dict[int, AdapterVersion] = {}
        self.worn: dict[int, int] = {}
        self._delay = delay
        self._moves: list[tuple[int, Move]] = []
        self._tick = 0

    def request(self, version: AdapterVersion | None, length: int = 5, count: int = 3, prompt: int = 1) -> Request:
        tokens = [prompt] * length
        root = b"" if version is None else version.digest
        request = Request(Asked(limit=length + count, version=version, root=root), tokens)
        self.scheduler.submit(request)
        return request

    def tick(self) -> list[Request]:
        """One turn of the loop: move, plan, check, commit; the requests that the step computed."""
        self._tick += 1
        while self._moves and self._moves[0][0] <= self._tick:
            self._carry_out(self._moves.pop(0)[1])
        plan = self.scheduler.plan()
        self._moves += [(self._tick + self._delay, move) for move in self.slots.take_moves()]
        self.scheduler.roster.check()
        if plan is None:
            return []
        for new in plan.new_rows:
            self.worn[new.row] = new.slot
        for work in plan.works:
            version = work.request.asked.version
            slot = self.worn[work.row]
            assert (slot == -1) if version is None else (self.held.get(slot) is version), (
                "a row wears another's adapter"
            )
        self.scheduler.commit(plan, StepResult([7] * len(plan.works)))
        self.scheduler.roster.check()
        return [work.request for work in plan.works]

    def _carry_out(self, move: Move) -> None:
        assert not any(request.row >= 0 and self.worn[request.row] == move.slot for request in self._holders())
        self.held.pop(move.slot, None)
        if move.version is not None:
            self.held[move.slot] = move.version
            self.slots.arrived(move.version)

    def _holders(self) -> Iterator[Request]:
        return (request for request in self.scheduler.roster.requests.values() if request.row >= 0)


def versions(sizes: list[int]) -> list[AdapterVersion]:
    return [AdapterVersion(digest=b"%d" % number, granules=size) for number, size in enumerate(sizes)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_request_ends_on_the_right_slot(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8), "granules of the adapters")
    known = versions(sizes)
    slots = SlotTable(
        data.draw(st.integers(1, 4), "slots"),
        data.draw(st.integers(max(sizes), 12), "granules"),
        most_active=data.draw(st.one_of(st.none(), st.integers(1, 3)), "most active"),
        most_active_granules=data.draw(st.one_of(st.none(), st.integers(1, 8)), "most active granules"),
    )
    rig = Rig(slots, data.draw(st.integers(0, 4), "delay"))
    if data.draw(st.booleans(), "pin one"):
        known[0].pins = 1
    choices = st.tuples(st.sampled_from([None, *known]), st.integers(1, 9), st.integers(1, 12), st.integers(1, 3))
    asked = data.draw(st.lists(choices, max_size=25), "requests")
    paused = data.draw(st.sets(st.integers(0, 24)), "which pause when they have begun")
    requests = []
    for version, length, count, prompt in asked:
        requests.append(rig.request(version, length, count, prompt))
        for request in rig.tick():
            if request.id in paused:
                rig.scheduler.pause(request)
    for turn in range(500):
        for request in rig.tick():
            if request.id in paused and turn < 200:
                rig.scheduler.pause(request)
    assert all(request.state in (State.FINISHED, State.PAUSED) for request in requests), "some wait for ever"
    for request in requests:
        rig.scheduler.resume(request)
    for _ in range(400):
        rig.tick()
    assert all(request.finish_reason == "length" for request in requests)
    assert not any(version.users or version.holders for version in known)
    for version in known:
        slots.retire(version)
    for _ in range(9):
        rig.tick()
    assert all(version.residency is Residency.ABSENT for version in known) and not rig.held


def test_one_that_finds_no_slot_is_overtaken_only_so_often() -> None:
    """Two adapters keep both slots busy with requests that never stop coming; a third one gets its turn."""
    first, second, third = versions([1, 1, 1])
    rig = Rig(SlotTable(2, 2), delay=1)
    for _ in range(3):
        rig.request(first, count=6), rig.request(second, count=9)
        rig.tick()
    waiting = rig.request(third)
    started = 0
    for turn in range(200):
        rig.request((first, second)[turn % 2], count=7 + turn % 4)
        done = rig.tick()
        started += sum(request.asked.version is not third for request in done)
        if waiting.state is not State.WAITING:
            break
    assert waiting.state is not State.WAITING and 2 * ROWS < started < 150
    rig.request(first, count=1)
    for _ in range(400):
        rig.tick()
    assert not rig.scheduler.roster.num_waiting and not rig.scheduler.roster.num_running


@pytest.mark.parametrize(
    "slots", [SlotTable(3, 3), SlotTable(3, 9, most_active_granules=2)], ids=["memory", "memory of a step"]
)
def test_one_that_needs_the_room_of_several_is_not_overtaken_for_ever(slots: SlotTable) -> None:
    first, second, large = versions([1, 1, 3])
    rig = Rig(slots, delay=1)
    for _ in range(3):
        rig.request(first, count=6), rig.request(second, count=9)
        rig.tick()
    waiting = rig.request(large)
    for turn in range(100):
        rig.request((first, second)[turn % 2], length=2, count=7 + turn % 4)
        rig.tick()
        if waiting.state is not State.WAITING:
            break
    assert waiting.state is not State.WAITING


def test_two_that_change_places_in_the_order_are_not_overtaken_for_ever() -> None:
    """As they do where tenants share fairly."""
    worn, *others = versions([1, 1, 1])
    slots = SlotTable(1, 1)
    slots.enter(worn)
    slots.arrived(worn)
    slots.hold(worn)
    overtaking = Overtaking(slots, patience=4)
    waiting = [Request(Asked(limit=2, version=each), [1]) for each in others]
    newcomer = Request(Asked(limit=2, version=worn), [1])
    started = 0
    for look in range(20):
        overtaking.begin(idle=False)
        assert not overtaking.may_start(waiting[look % 2]) and not overtaking.may_start(waiting[1 - look % 2])
        if overtaking.may_start(newcomer):
            overtaking.starts(newcomer)
            started += 1
    assert started == 5


def test_a_reader_that_stalls_gives_its_slot_back() -> None:
    first, second = versions([1, 1])
    rig = Rig(SlotTable(1, 1), delay=0)
    stalled = rig.request(first, count=20)
    while not rig.tick():
        pass
    rig.scheduler.pause(stalled)
    other = rig.request(second)
    for _ in range(20):
        rig.tick()
    assert other.finish_reason == "length" and stalled.state is State.PAUSED and stalled.row < 0
    rig.scheduler.resume(stalled)
    for _ in range(40):
        rig.tick()
    assert stalled.finish_reason == "length"
