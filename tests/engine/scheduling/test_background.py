"""`BackgroundLast`: users come before background are fair among themselves, and leave background the rest."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.rig import Rig, capacity

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams
from headrace.engine.scheduling.order.background import BackgroundLast
from headrace.engine.scheduling.policies import policy_of
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request


def words(name: int, length: int) -> list[int]:
    """A prompt that shares nothing with another name's."""
    return [name // 97, *((name * 31 + position * 7) % 97 for position in range(length - 1))]


def background_last(name: str = "fair_share") -> Policy:
    return policy_of({"name": name, "burst": 80.0, "background_last": True})


def outputs(rig: Rig, requests: list[Request]) -> Counter[str | None]:
    counts: Counter[str | None] = Counter()
    for request in requests:
        counts[request.asked.tenant] += len(rig.output(request))
    return counts


@pytest.mark.parametrize("name", ["fair_share", "deadlines"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_background_gives_up_its_rows_and_its_turn_to_users(name: str, depth: int) -> None:
    rig = Rig(capacity(rows=4, pages=400, size=4, budget=64), depth=depth, policy=background_last(name))
    background = [rig.submit(words(at, 10), 40, tenant="ab"[at % 2], priority=1)[0] for at in range(12)]
    for _ in range(8):
        rig.turn()
    assert sum(request.row >= 0 for request in background) == 4
    users = [rig.submit(words(50 + at, 10), 20, tenant="a")[0] for at in range(6)]
    for _ in range(4 + depth):
        rig.turn()
    assert [request.row >= 0 for request in users] == [True] * 4 + [False] * 2
    assert not any(request.row >= 0 for request in background)
    while any(request.id not in rig.ends for request in users):
        rig.turn()
        if any(request.row < 0 and request.id not in rig.ends for request in users):
            assert not any(request.row >= 0 for request in background)
    rig.run()
    rig.check_empty()  # among the rest, that every answer is what it would be alone
    assert set(rig.ends.values()) == {"length"}


def test_users_are_fair_among_themselves_whatever_their_background_was_given() -> None:
    rig = Rig(capacity(rows=4, pages=400, budget=32), policy=background_last())
    for at in range(8):
        rig.submit(words(at, 10), 60, tenant="a", priority=5)
    for _ in range(40):
        rig.turn()
    loud = [rig.submit(words(50 + at, 10), 30, tenant="b")[0] for at in range(20)]
    quiet = [rig.submit(words(80 + at, 10), 30, tenant="a")[0] for at in range(6)]
    for _ in range(80):
        rig.turn()
    counts = outputs(rig, loud + quiet)
    assert counts["a"] > 0.8 * counts["b"] > 0
    rig.run()
    rig.check_empty()


def test_a_prompt_of_background_does_not_go_on_before_a_user_starts() -> None:
    rig = Rig(capacity(rows=4, pages=400, budget=16), policy=background_last())
    (slow,) = rig.submit(words(1, 200), 4, tenant="a", priority=1)
    rig.turn()
    (user,) = rig.submit(words(2, 10), 4, tenant="a")
    while user.id not in rig.ends:
        rig.turn()
    assert slow.planned < slow.prompt_len
    rig.run()
    rig.check_empty()


def test_it_is_a_setting_of_the_policies_that_share() -> None:
    for name in ("fair_share", "deadlines"):
        assert EngineConfig(model="m", policy={"name": name, "background_last": True})
        assert isinstance(background_last(name), BackgroundLast)
        assert not isinstance(policy_of({"name": name, "background_last": False}), BackgroundLast)
    for wanted in ({"name": "ageing", "background_last": True}, {"name": "fair_share", "background_last": "yes"}):
        with pytest.raises(InvalidParams) as refused:
            EngineConfig(model="m", policy=wanted)
        assert refused.value.field == "policy.background_last"
        with pytest.raises(InvalidParams, match="policy.background_last: (goes with fair_share or deadlines|must be)"):
            policy_of(wanted)
    with pytest.raises(InvalidParams, match=r"^policy.ratio: .*, got 0.5$"):
        policy_of({"name": "ageing", "ratio": 0.5, "background_last": False})
