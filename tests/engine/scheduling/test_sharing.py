"""What prefix sharing saves, and that it never crosses tenants: counted in tokens computed and pages held."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.rig import Rig, capacity

from headrace.engine.scheduling.request import Request, State

SHARED = [position % 89 for position in range(512)]
OWN = 5
CROWD = 16


def crowd(rig: Rig, shared: list[int] = SHARED, count: int = CROWD, max_tokens: int = 1) -> list[Request]:
    """Requests that arrive together, each with a few tokens of its own after the shared ones."""
    return [rig.submit([*shared, *[name] * OWN], max_tokens)[0] for name in range(count)]


def roomy(depth: int, budget: int = 512) -> Rig:
    return Rig(capacity(pages=200, size=16, rows=CROWD, budget=budget), depth=depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [48, 128, 4096])
def test_a_shared_prompt_is_computed_once_by_those_who_arrive_together(depth: int, budget: int) -> None:
    rig = roomy(depth, budget)
    requests = crowd(rig)
    peak = 0
    while rig.turn():
        peak = max(peak, rig.scheduler.pool.held)
    rig.check_empty()
    assert rig.computed_tokens == len(SHARED) + CROWD * OWN
    assert sum(request.cached for request in requests) == (CROWD - 1) * len(SHARED) == rig.scheduler.cached_tokens
    assert rig.scheduler.prompt_tokens == CROWD * (len(SHARED) + OWN)
    assert peak <= len(SHARED) // 16 + CROWD


def test_without_the_cache_everybody_computes_everything() -> None:
    rig = Rig(capacity(pages=600, size=16, rows=CROWD, budget=4096), prefix_cache=False)
    crowd(rig)
    rig.run()
    rig.check_empty()
    assert rig.computed_tokens == CROWD * (len(SHARED) + OWN)


def test_the_last_token_of_a_whole_hit_is_computed_for_its_logits() -> None:
    rig = roomy(1)
    for _ in range(2):
        rig.submit(SHARED, 1)
        rig.run()
    rig.check_empty()
    assert rig.requests[1].cached == len(SHARED) - 16
    assert rig.computed_tokens == len(SHARED) + 16


def test_a_completion_is_found_again_by_the_next_turn_of_its_chat() -> None:
    rig = roomy(2)
    (first,) = rig.submit(SHARED[:40], 60)
    rig.run()
    (second,) = rig.submit([*first.tokens, 1, 2, 3], 4)
    rig.run()
    rig.check_empty()
    assert second.cached == (len(first.tokens) - 1) // 16 * 16, "the last token was never written"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_when_the_leader_is_cancelled_in_mid_prefill_another_goes_on_where_it_was(depth: int) -> None:
    rig = roomy(depth, budget=80)
    requests = crowd(rig)
    rig.turn()
    rig.turn()
    assert 0 < requests[0].planned < len(SHARED) and all(request.row < 0 for request in requests[1:])
    rig.finish(requests[0])
    rig.run()
    rig.check_empty()
    assert rig.computed_tokens == len(SHARED) + (CROWD - 1) * OWN


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_when_the_leader_is_paused_in_mid_prefill_the_others_do_not_wait_for_it(depth: int) -> None:
    rig = roomy(depth, budget=80)
    requests = crowd(rig)
    rig.turn()
    rig.turn()
    done = requests[0].planned
    assert 0 < done < len(SHARED)
    rig.pause(requests[0])
    rig.run()
    assert all(request.state is State.FINISHED for request in requests[1:])
    assert rig.computed_tokens == len(SHARED) + (CROWD - 1) * OWN
    rig.resume(requests[0])
    rig.run()
    rig.check_empty()
    assert rig.computed_tokens <= 2 * len(SHARED) - done + CROWD * OWN, "only the paused one computes its rest again"


def test_a_leader_that_comes_back_and_leaves_does_not_take_what_another_promised() -> None:
    rig = roomy(1, budget=80)
    first, second, third = crowd(rig, count=3)
    rig.turn()
    rig.pause(first)
    rig.turn()
    assert second.row >= 0
    rig.resume(first)
    rig.turn()
    rig.finish(first)
    rig.run()
    rig.check_empty()
    assert third.cached == len(SHARED)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_when_the_leader_is_preempted_in_mid_prefill_its_pages_are_found_again(depth: int) -> None:
    shared = SHARED[:128]
    rig = Rig(capacity(pages=37, size=4, rows=6, budget=6), depth=depth)
    (elder,) = rig.submit([88, 87], 40)  # its growth takes the leader's pages
    rig.turn()
    requests = crowd(rig, shared, count=3)
    done = 0
    while not requests[0].preemptions:
        done = requests[0].planned
        assert rig.turn()
    assert len(shared) // 2 < done < len(shared)
    rig.run()
    rig.check_empty()
    ideal = elder.prompt_len + 39 + len(shared) + 3 * OWN
    assert ideal <= rig.computed_tokens <= ideal + len(shared) // 2, "most of the prefix was computed again"
    assert rig.scheduler.roster.preemptions <= 2


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("length", "copies"), [(23, 7), (24, 7), (21, 0), (2, 7), (1, 0)])
def test_choices_compute_their_prompt_once_and_copy_its_last_page_when_they_write(
    prefix_cache: bool, depth: int, length: int, copies: int
) -> None:
    rig = Rig(capacity(pages=64, size=4, rows=8, budget=64), depth=depth, prefix_cache=prefix_cache)
    choices = rig.submit(SHARED[:length], 9, n=8)
    while any(choice.row < 0 for choice in choices):
        rig.turn()
    full = (length - 1) // 4
    assert all(choice.place.pages[:full] == choices[0].place.pages[:full] for choice in choices)
    own = [page for choice in choices for page in choice.place.pages[full:]]
    assert len(set(own)) == len(own), "choices share a page they write to"
    rig.run()
    rig.check_empty()
    assert rig.copies == copies
    assert rig.computed_tokens == length + 7 + 8 * 8, "a fork computes no more of the prompt than its last token"


def test_a_choice_whose_leader_ended_early_still_gives_its_own_tokens() -> None:
    for turns in range(8):
        rig = Rig(capacity(pages=30, size=4, rows=2, budget=6), depth=2)
        choices = rig.submit(SHARED[:18], 6, n=4)
        for _ in range(turns):
            rig.turn()
        rig.finish(choices[0])
        rig.run()
        rig.check_empty()
        assert [rig.ends[choice.id] for choice in choices[1:]] == ["length"] * 3


def test_a_choice_looks_again_where_its_paused_leader_must_give_its_pages_up() -> None:
    rig = Rig(capacity(pages=7, size=8, rows=3), depth=1)
    for name in range(2):
        rig.submit([name], 6)  # they keep the second choice from a row
    leader, other = rig.submit(SHARED[:12], 9, n=2)
    for _ in range(6):
        rig.turn()
    assert len(leader.place.pages) == 3 and rig.scheduler.pool.held == 3 and other.row < 0
    rig.pause(leader)
    rig.submit(SHARED[50:74], 1, priority=-1)  # leaves too little to copy the leader's last page to
    rig.turn()
    assert leader.row < 0 and other.row >= 0 and other.cached == 8
    rig.resume(leader)
    rig.run()
    rig.check_empty()
    assert set(rig.ends.values()) == {"length"}


def test_tenants_never_share_a_page() -> None:
    rig = Rig(capacity(pages=300, size=16, rows=8, budget=600), depth=2)
    groups = [[rig.submit(SHARED, 20, root=root)[0] for _ in range(3)] for root in (b"a", b"b")]
    while rig.turn():
        held = [{page for request in group for page in request.place.pages} for group in groups]
        assert held[0].isdisjoint(held[1])
    rig.check_empty()
    for group in groups:
        assert [request.cached for request in group] == [0, len(SHARED) - 16, len(SHARED) - 16]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 20), st.lists(st.integers(0, 1), max_size=3), st.sampled_from([b"", b"a", b"b"])),
        min_size=1,
        max_size=8,
    ),
    together=st.booleans(),
    size=st.integers(1, 4),
)
def test_what_is_found_is_exactly_the_longest_full_page_prefix_of_the_same_root(
    prompts: list[tuple[int, list[int], bytes]], together: bool, size: int
) -> None:
    rig = Rig(capacity(pages=400, size=size, rows=8, budget=400))
    known: set[tuple[bytes, tuple[int, ...]]] = set()
    for shared, own, root in prompts:
        tokens = [*range(shared), *own] or [5]
        (request,) = rig.submit(tokens, 1, root=root)
        want = 0
        while want + size < len(tokens) and (root, tuple(tokens[: want + size])) in known:
            want += size
        known.update((root, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size))
        if not together:
            rig.run()
            assert request.cached == want
    rig.run()
    rig.check_empty()
