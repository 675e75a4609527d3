"""Bounds that are arithmetic: queue and keys, the pace of events, keys in constant time, who may send what head."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import InvalidParams
from headrace.server import KeyLimits, ServerSettings
from headrace.server.auth import Caller, Keyring
from headrace.server.errors import ApiError
from headrace.server.http.pacing import Pacer
from headrace.server.limits import Limits, Permit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


ANN, BOB = Caller("ann"), Caller("bob")


@given(st.lists(st.tuples(st.sampled_from(["admit", "start", "end", "again"]), st.integers(0, 9)), max_size=80))
def test_whatever_happens_counts_return_to_zero(actions: list[tuple[str, int]]) -> None:
    limits = Limits(ServerSettings(max_queue=12, default_limits=KeyLimits(concurrency=9)), Clock())
    permits: list[Permit] = []
    for action, number in actions:
        waiting = sum(permit.weight for permit in permits if permit.waiting)
        live = sum(permit.weight for permit in permits if not permit.ended)
        if action == "admit":
            weight = number + 1
            fits = waiting + weight <= 12 and live + weight <= 9
            try:
                permits.append(limits.admit(ANN, weight))
            except ApiError as refusal:
                assert not fits and refusal.status == (400 if weight > 9 else 429 if live + weight > 9 else 503)
                assert weight > 9 or 1 <= int(refusal.headers["retry-after"]) <= 30
            else:
                assert fits
                permits[-1].add_prompt(10 * weight)
        elif permits:
            permit = permits[number % len(permits)]
            if action == "start" and not permit.ended:
                permit.started()
            else:
                permit.end()
    for permit in permits:
        permit.end()
    assert limits.live == 0 and limits._queue.choices == limits._queue.tokens == 0
    assert limits.admit(ANN, 9).account.live == 9


def test_keys_do_not_use_up_each_others_tokens() -> None:
    clock = Clock()
    limits = Limits(ServerSettings(default_limits=KeyLimits(tokens_per_minute=60)), clock)
    first = limits.admit(ANN, 1)
    first.add_prompt(50)
    first.spend(40)  # a minute's worth and a half
    with pytest.raises(ApiError) as refused:
        limits.admit(ANN, 1)
    assert refused.value.status == 429 and int(refused.value.headers["retry-after"]) >= 27
    limits.admit(BOB, 1)
    clock.now += 31.5  # one token a second
    limits.admit(ANN, 1)
    limits.set_limits("ann", KeyLimits(tokens_per_minute=0))
    clock.now += 600
    with pytest.raises(ApiError):
        limits.admit(ANN, 1)
    limits.set_limits("ann", KeyLimits())
    limits.admit(ANN, 1)


def test_requests_admitted_together_overdraw_by_one_prompt_alone() -> None:
    limits = Limits(ServerSettings(default_limits=KeyLimits(tokens_per_minute=60)), Clock())
    permits = [limits.admit(ANN, 1) for _ in range(100)]
    permits[0].add_prompt(50)
    permits[1].add_prompt(500)
    for permit in permits[2:]:
        with pytest.raises(ApiError) as refused:
            permit.add_prompt(500)
        assert refused.value.status == 429
        permit.end(refund=True)
    assert permits[0].account.tokens == 60 - 550


def test_retry_after_is_the_time_the_queue_takes() -> None:
    clock = Clock()
    limits = Limits(ServerSettings(max_queue=1000), clock)
    permits = [limits.admit(ANN, 1) for _ in range(1000)]
    for permit in permits[:500]:
        clock.now += 0.01
        permit.started()
    pauses = {int(limits.overloaded().headers["retry-after"]) for _ in range(50)}
    assert 4 <= min(pauses) and max(pauses) <= 7  # 500 wait, 100 a second go
    clock.now += 60
    assert int(limits.overloaded().headers["retry-after"]) == 1  # nothing is known any more


def test_bodies_that_are_read_at_once_are_bounded_for_each_key_and_for_all() -> None:
    limits = Limits(ServerSettings(max_upload_bytes=2**20, max_body_bytes=2**18), Clock())
    with contextlib.ExitStack() as uploads:

        def fits(caller: Caller, size: int) -> int:
            try:
                uploads.enter_context(limits.upload(caller, size))
            except ApiError as refusal:
                return refusal.status
            return 200

        assert [fits(ANN, 2**18) for _ in range(3)] == [200, 200, 429]
        assert [fits(BOB, 1) for _ in range(9)] == [200] * 8 + [429]  # a small one counts for 64 KiB
        assert fits(Caller("eve"), 1) == 503
    with contextlib.ExitStack() as uploads:  # all of it is there again
        assert [fits(caller, 2**18) for caller in (ANN, ANN, BOB, BOB)] == [200] * 4


def test_prompt_tokens_that_wait_are_bounded_but_a_single_one_is_not() -> None:
    limits = Limits(ServerSettings(max_queue_tokens=100), Clock())
    limits.admit(ANN, 1).add_prompt(500)
    with pytest.raises(ApiError) as refused:
        limits.admit(ANN, 1).add_prompt(1)
    assert refused.value.code == "server_overloaded"


@given(st.dictionaries(st.text("ab", min_size=1), st.text("xyz", min_size=1), max_size=6), st.binary(max_size=8))
def test_a_secret_opens_for_its_holder_alone(keys: dict[str, str], guess: bytes) -> None:
    if len(set(keys.values())) < len(keys):
        with pytest.raises(ValueError, match="same"):
            Keyring(keys, {})
        return
    ring = Keyring(keys, {})
    assert ring.empty == (not keys)
    for name, secret in keys.items():
        assert ring.caller(secret.encode()) == Caller(name)
    holders = [name for name, secret in keys.items() if secret.encode() == guess]
    assert ring.caller(guess) == (Caller(holders[0]) if holders else None)


@pytest.mark.anyio
@pytest.mark.parametrize(("rate", "together"), [(100, 1), (150, 2), (249, 2), (2000, 20)])
async def test_the_pacer_keeps_to_its_rate_and_lets_everybody_pass(
    monkeypatch: pytest.MonkeyPatch, rate: int, together: int
) -> None:
    clock = Clock()
    sleepers: list[tuple[float, int, anyio.Event]] = []
    order = itertools.count()

    async def sleep(seconds: float) -> None:
        event = anyio.Event()
        heapq.heappush(sleepers, (clock.now + seconds, next(order), event))
        await event.wait()

    async def let_time_pass() -> None:
        while len(passed) < 100:
            for _ in range(20):  # what is awake comes first
                await anyio.lowlevel.checkpoint()
            if sleepers:
                clock.now, _, event = heapq.heappop(sleepers)
                event.set()

    monkeypatch.setattr(anyio, "sleep", sleep)
    pacer = Pacer(rate, clock)
    passed: list[float] = []

    async def one() -> None:
        for _ in range(5):
            await pacer.turn()
            passed.append(clock.now)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_time_pass)
            for _ in range(20):
                tasks.start_soon(one)
    assert len(passed) == 100
    windows = [len(list(window)) for _, window in itertools.groupby(passed)]
    assert max(windows) == together
    assert passed[-1] - passed[0] == pytest.approx((100 - windows[-1]) / rate)  # the last window is only begun


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api_keys", {"a b": "secret-enough"}),
        ("api_keys", {"a": "short"}),
        ("max_queue", 0),
        ("ping_seconds", 0),
        ("x", 1),
    ],
)
def test_settings_name_what_is_wrong(field: str, value: Any) -> None:
    with pytest.raises(InvalidParams) as error:
        ServerSettings(**{field: value})
    assert error.value.field is not None and error.value.field.startswith(field)


@pytest.mark.parametrize("keys", [{"a": "kept sec"}, {"a": "kept-se"}, {"kept sec": "long-enough"}])
@pytest.mark.parametrize("field", ["api_keys", "admin_keys"])
def test_what_is_wrong_with_a_key_is_said_without_it(field: str, keys: dict[str, str]) -> None:
    with pytest.raises(InvalidParams, match=field) as error:
        ServerSettings(**{field: keys})
    assert "kept" not in str(error.value) + repr(error.value.value)


def test_settings_do_not_show_secrets() -> None:
    assert "secret" not in repr(ServerSettings(api_keys={"a": "secret-enough"}, admin_keys={"b": "secret-as-well"}))
