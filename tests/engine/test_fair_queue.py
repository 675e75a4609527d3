"""`FairQueue`: turns by tenant whatever each of them queues, the cheapest first within one, and no work lost."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.concurrency.fair_queue import FairQueue


def order(queue: FairQueue[str], seconds: float = 1.0) -> list[str]:
    """All work that waits, in the order of its turns, each of which takes so long."""
    taken = []
    while (turn := queue.take()) is not None:
        taken.append(turn.item)
        queue.finish(turn, seconds)
    return taken


def test_who_queues_much_gets_one_turn_for_each_of_another() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(32):
        queue.put("many", f"many {number}")
    first = queue.take()
    assert first is not None
    for number in range(3):
        queue.put("few", f"few {number}", cost=1000.0)
    queue.finish(first, 1.0)
    taken = order(queue)
    assert [taken.index(f"few {number}") for number in range(3)] == [0, 2, 4]
    assert len(taken) == 34


def test_turns_are_weighed_by_the_time_they_took() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(30):
        queue.put("slow", f"slow {number}")
        queue.put("quick", f"quick {number}")
    given: Counter[str | None] = Counter()
    for _ in range(22):
        turn = queue.take()
        assert turn is not None
        given[turn.tenant] += 1
        queue.finish(turn, 10.0 if turn.tenant == "slow" else 1.0)
    assert given == {"slow": 2, "quick": 20}


def test_an_idle_tenant_saves_nothing_up_and_owes_what_it_was_given_ahead() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("a", "a first")
    queue.put("b", "b first")
    assert order(queue, 100.0) == ["a first", "b first"]
    for tenant in "abc":
        for number in range(3):
            queue.put(tenant, f"{tenant}{number}")
    assert order(queue) == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
    queue.put("a", "long")
    turn = queue.take()
    assert turn is not None
    queue.put("b", "b3")
    queue.finish(turn, 5.0)
    queue.put("a", "a3")  # begins behind what it was given, although it had nothing waiting
    for number in range(4, 6):
        queue.put("b", f"b{number}")
    assert order(queue) == ["b3", "b4", "b5", "a3"]


def test_the_cheapest_is_next_but_passes_dearer_work_only_for_a_time() -> None:
    queue: FairQueue[str] = FairQueue()
    for number, cost in enumerate([9.0, 1.0, 5.0, 1.0]):
        queue.put(None, str(number), cost)
    assert order(queue) == ["1", "3", "2", "0"]
    queue.put(None, "dear", 10.0)
    taken: list[str] = []
    for number in range(1000):  # as somebody sends who asks again as soon as one is done
        queue.put(None, f"cheap {number}", 2.0)
        turn = queue.take()
        assert turn is not None
        taken.append(turn.item)
        queue.finish(turn, 1.0)
        if turn.item == "dear":
            break
    assert taken.index("dear") in (4, 5), "five of cost 2 are as much work as one of cost 10"


def test_one_tenant_has_no_more_turns_at_once_than_it_may() -> None:
    queue: FairQueue[str] = FairQueue(most_of_one=1)
    for number in range(3):
        queue.put("a", f"a{number}")
    queue.put("b", "b0")
    first, second = queue.take(), queue.take()
    assert first is not None and second is not None
    assert [first.item, second.item] == ["a0", "b0"]
    assert queue.take() is None and len(queue) == 2
    queue.finish(second, 1.0)
    assert queue.take() is None
    queue.finish(first, 1.0)
    assert order(queue) == ["a1", "a2"]


Action = tuple[str, str, float]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "take", "finish"]), st.sampled_from("abc"), st.floats(0, 9)), max_size=120
)


@given(ACTIONS, st.sampled_from([None, 1, 2]))
def test_all_work_has_its_turn_once_and_nothing_stays_behind(actions: list[Action], most: int | None) -> None:
    queue: FairQueue[int] = FairQueue(most)
    waiting: dict[str, set[int]] = defaultdict(set)
    begun = []
    for number, (action, tenant, cost) in enumerate(actions):
        if action == "put":
            queue.put(tenant, number, cost)
            waiting[tenant].add(number)
        elif action == "finish" and begun:
            queue.finish(begun.pop(), cost)
        elif action == "take":
            running = Counter(turn.tenant for turn in begun)
            may = [name for name, work in waiting.items() if work and (most is None or running[name] < most)]
            turn = queue.take()
            assert (turn is not None) == bool(may)
            if turn is not None:
                waiting[str(turn.tenant)].remove(turn.item)
                begun.append(turn)
        assert len(queue) == sum(map(len, waiting.values()))
    assert sorted(queue.clear()) == sorted(set().union(*waiting.values()))
    for turn in begun:
        queue.finish(turn, 1.0)
    assert queue.take() is None and not queue._accounts and not queue._order


@given(st.lists(st.lists(st.floats(0.1, 9), min_size=40, max_size=60), min_size=2, max_size=4))
def test_busy_tenants_never_drift_apart_by_more_than_a_turn_of_each(turns: list[list[float]]) -> None:
    queue: FairQueue[float] = FairQueue()
    for tenant, seconds in enumerate(turns):
        for each in seconds:
            queue.put(str(tenant), each, each)
    given = {str(tenant): 0.0 for tenant in range(len(turns))}
    left = {str(tenant): len(seconds) for tenant, seconds in enumerate(turns)}
    while all(left.values()):
        turn = queue.take()
        assert turn is not None and turn.tenant is not None
        queue.finish(turn, turn.item)
        given[turn.tenant] += turn.item
        left[turn.tenant] -= 1
        assert max(given.values()) - min(given.values()) <= 9.0 + 1e-6
