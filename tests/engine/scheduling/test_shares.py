"""Fair shares: tokens and rows by weight, across tenants and adapters; what is charged, and what is not saved up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from simulation.rig import Rig, capacity

from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.plan import Work
from headrace.engine.scheduling.policies import FairShare
from headrace.engine.scheduling.request import Request


def words(name: int, length: int) -> list[int]:
    """A prompt that shares nothing with another name's."""
    return [name // 97, *((name * 31 + position * 7) % 97 for position in range(length - 1))]


def tokens_by(rig: Rig, of: Callable[[Request], str | None], turns: int) -> Counter[str | None]:
    """Tokens that each got in so many turns, prompts once and output twice."""

    def given() -> Counter[str | None]:
        counts: Counter[str | None] = Counter()
        for request in rig.requests:
            counts[of(request)] += min(request.planned, request.prompt_len) + 2 * len(rig.output(request))
        return counts

    before = given()
    for _ in range(turns):
        rig.turn()
    return given() - before


def tenant(request: Request) -> str | None:
    return request.asked.tenant


def test_a_flood_leaves_a_tenant_with_few_requests_its_share() -> None:
    rig = Rig(capacity(rows=4, pages=400, budget=32), depth=2, policy=FairShare())
    for name in range(200):
        rig.submit(words(name, 10 + name % 7), 12, tenant="loud")
    for name in range(30):
        rig.submit(words(1000 + name, 10 + name % 7), 12, tenant="quiet")
    counts = tokens_by(rig, tenant, 150)
    assert counts["quiet"] == pytest.approx(counts["loud"], rel=0.1)


def test_shares_follow_the_weights_and_adapters_share_within_a_tenant() -> None:
    rig = Rig(capacity(rows=4, pages=400, budget=32), depth=2, policy=FairShare(weights={"a": 3.0}))
    for name in range(140):
        rig.submit(words(name, 10), 12, tenant="a", adapter=None if name % 3 else "x")
        rig.submit(words(5000 + name, 10), 12, tenant="b")
    counts = tokens_by(rig, lambda request: f"{request.asked.tenant}{request.asked.adapter or ''}", 140)
    assert counts["a"] + counts["ax"] == pytest.approx(3 * counts["b"], rel=0.1)
    assert counts["a"] == pytest.approx(counts["ax"], rel=0.15)


def test_adapters_of_a_tenant_share_by_their_weights() -> None:
    rig = Rig(capacity(rows=4, pages=400, budget=32), policy=FairShare(adapter_weights={"x": 3.0}))
    for name in range(120):
        rig.submit(words(name, 10), 12, tenant="a", adapter="x" if name % 2 else None)
    counts = tokens_by(rig, lambda request: request.asked.adapter, 100)
    assert counts["x"] == pytest.approx(3 * counts[None], rel=0.15)


def test_nobody_saves_up_and_nothing_stands_idle() -> None:
    rig = Rig(capacity(rows=4, pages=400, budget=32), policy=FairShare())
    rig.submit(words(0, 10), 200, tenant="late")
    for name in range(1, 200):
        rig.submit(words(name, 10), 12, tenant="busy")
    alone = tokens_by(rig, tenant, 60)
    assert alone["busy"] > 2 * alone["late"]
    for name in range(200, 300):
        rig.submit(words(name, 10), 12, tenant="new")
    counts = tokens_by(rig, tenant, 120)
    assert counts["new"] < 1.3 * counts["busy"]


def test_accounts_are_gone_when_all_is_idle() -> None:
    policy = FairShare()
    rig = Rig(capacity(), policy=policy)
    for name in range(20):
        rig.submit(words(name, 5), 3, tenant=f"t{name}", adapter=f"a{name % 3}")
    rig.finish(rig.requests[3])
    rig.run()
    rig.check_empty()
    assert not policy._tenants.accounts


def test_who_asks_for_little_saves_up_no_more_than_a_burst() -> None:
    """A tenant with one long answer beside a busy one does not get the time back when it floods, too."""
    rig = Rig(capacity(rows=4, pages=400, budget=32), policy=FairShare(burst=50.0))
    for name in range(80):
        rig.submit(words(name, 10), 12, tenant="busy")
    rig.submit(words(1000, 10), 250, tenant="slow")
    for _ in range(150):
        rig.turn()
    for name in range(2000, 2040):
        rig.submit(words(name, 10), 12, tenant="slow")
    counts = tokens_by(rig, tenant, 60)
    assert counts["slow"] <= counts["busy"] + 50 + 4 * 34  # and what rows are ahead by


def flooded(
    policy: FairShare, depth: int = 2, *, prefix_cache: bool = True, quiet: str = "quiet"
) -> tuple[Rig, Request]:
    """Six rows that `loud` holds, and the turn after one of `quiet` has come."""
    rig = Rig(capacity(rows=6, pages=400, size=4, budget=64), depth=depth, policy=policy, prefix_cache=prefix_cache)
    for name in range(12):
        rig.submit(words(name, 10), 60, tenant="loud")
    for _ in range(8):
        rig.turn()
    (request,) = rig.submit(words(100, 10), 4, tenant=quiet)
    for _ in range(1 + depth):
        rig.turn()
    return rig, request


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_where_no_row_is_free_the_tenant_with_most_gives_one_up(depth: int) -> None:
    rig, quiet = flooded(FairShare(burst=80.0), depth)
    assert quiet.row >= 0 and [request.id for request in rig.requests if request.preemptions] == [5]
    for name in range(101, 105):
        rig.submit(words(name, 10), 60, tenant="quiet")
    for _ in range(20):
        rig.turn()
    holders = Counter(request.asked.tenant for request in rig.requests if request.row >= 0)
    assert 3 <= holders["quiet"] <= 4 and holders.total() == 6  # it catches up
    rig.run()
    rig.check_empty()  # among the rest, that every answer is what it would be alone
    assert max(request.preemptions for request in rig.requests) <= 2


def test_rows_follow_weights() -> None:
    rig, quiet = flooded(FairShare(weights={"loud": 5.0}, burst=40.0))
    assert quiet.row >= 0
    for name in range(101, 105):
        rig.submit(words(name, 10), 100, tenant="quiet")
    for _ in range(20):
        rig.turn()
    assert Counter(request.asked.tenant for request in rig.requests if request.row >= 0)["quiet"] <= 2


def test_who_is_ahead_leaves_the_last_free_row_to_others_unless_the_step_has_prompts() -> None:
    rig = Rig(capacity(rows=64, pages=2000, budget=128), policy=FairShare(burst=80.0), prefix_cache=False)
    (slow,) = rig.submit(words(0, 10), 200, tenant="quiet")
    for name in range(1, 100):
        rig.submit(words(name, 10), 10 if name == 5 else 100, tenant="loud")
    while rig.scheduler.roster.free_rows:
        rig.turn()
    while not rig.scheduler.roster.free_rows:
        rig.turn()
    for _ in range(4):
        rig.turn()
    assert len(rig.scheduler.roster.free_rows) == 1 and slow.id not in rig.ends
    rig.finish(rig.requests[6])
    rig.turn()
    assert not rig.scheduler.roster.free_rows  # two start together
    rig.finish(slow)
    rig.finish(rig.requests[7])
    rig.turn()
    rig.turn()
    assert not rig.scheduler.roster.free_rows  # nobody is there to leave one to


def test_a_row_is_not_given_up_where_its_tokens_would_be_computed_again_or_to_the_same_tenant() -> None:
    for rig, quiet in (
        flooded(FairShare(burst=80.0), prefix_cache=False),
        flooded(FairShare(burst=80.0), quiet="loud"),
    ):
        assert quiet.row < 0 and not any(request.preemptions for request in rig.requests)


def test_forced_tokens_are_charged_once_as_prompts_are() -> None:
    policy = FairShare(prompt_cost=1.0, output_cost=2.0)
    request = Request(Asked(limit=90, tenant="a"), [1] * 10, id=0)

    def served(start: int, count: int, samples: bool = True) -> float:
        before = policy._tenants.accounts["a"].served
        policy.served([Work(request, 0, start, count, samples)])
        return policy._tenants.accounts["a"].served - before

    policy.arrived(request)
    policy.started(request)
    assert [served(0, 4, False), served(4, 6), served(10, 1)] == [0, 2, 2]
    assert served(11, 8) == 2 + 7  # one sampled before, seven forced behind it
    request.preemptions, request.known, request.planned = 1, 20, 0
    policy.started(request)
    assert [served(0, 16, False), served(16, 4)] == [0, 2]  # computed again
    assert served(20, 3) == 2 + 2
    policy.ended(request)
    assert not policy._paid
