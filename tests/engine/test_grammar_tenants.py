"""Formats of several tenants: turns, trials one at a time, what waiting and failing cost, and whom a format serves."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from scripted import CAPACITY, until

from headrace.engine import GrammarRejected, Overloaded, ResponseFormat
from headrace.engine.concurrency.threads import Poster
from headrace.engine.grammar import compiler as grammars
from headrace.engine.grammar import trials as grammar_trials
from headrace.engine.grammar.compiled import CompiledGrammar
from headrace.engine.grammar.compiler import Grammars
from headrace.engine.grammar.jobs import GrammarJobs, Waiter
from headrace.engine.life.opened import Opened
from headrace.engine.stats import EngineInfo
from headrace.engine.testing import ByteTokenizer

RUNNER: Any = None
INFO = EngineInfo(**dict.fromkeys([field.name for field in dataclasses.fields(EngineInfo)], 0) | {"vocab_size": 257})
OPENED = Opened(RUNNER, ByteTokenizer(), CAPACITY, INFO)


def endless(number: int) -> ResponseFormat:
    """A format that compiles for ever."""
    return ResponseFormat.json_schema({"type": "integer", "multipleOf": 99_999_989 + 2 * number})


def object_of(name: str) -> ResponseFormat:
    """A harmless format."""
    return ResponseFormat.json_schema({"type": "object", "properties": {name: {"type": "integer"}}})


def tried(letter: str) -> ResponseFormat:
    """A format that is compiled in some milliseconds, but only after a trial."""
    return ResponseFormat.regex(f"({'a?' * 501}|{letter})")


class Requests:
    """Requests for formats, and what they were told in the order in which they were."""

    def __init__(self) -> None:
        self.grammars = Grammars(Poster())
        self.told: list[tuple[str, object]] = []
        self.charged: list[tuple[str, int]] = []
        self.wanted = True

    def ask(self, tenant: str, wanted: ResponseFormat) -> None:
        def done(grammar: CompiledGrammar | None, error: BaseException | None) -> None:
            self.told.append((tenant, error or grammar))

        def charge(tokens: int) -> None:
            self.charged.append((tenant, tokens))

        self.grammars.compile(wanted, OPENED, lambda: self.wanted, done, tenant=tenant, charge=charge)

    def answers(self, tenant: str) -> list[Any]:
        return [answer for name, answer in self.told if name == tenant]


@asynccontextmanager
async def requests() -> AsyncIterator[Requests]:
    asked = Requests()
    try:
        yield asked
    finally:
        asked.wanted = False
        await anyio.to_thread.run_sync(asked.grammars.close)


@pytest.mark.anyio
async def test_harmless_formats_never_wait_for_the_trials_of_others() -> None:
    async with requests() as asked:
        for number in range(24):
            asked.ask("bad", endless(number))
        for number in range(5):
            asked.ask("good", object_of(f"a{number}"))
        await until(lambda: len(asked.answers("good")) == 5)
        assert all(isinstance(answer, CompiledGrammar) for answer in asked.answers("good"))
        assert asked.answers("bad") == [], "a trial takes two seconds of a processor"


@pytest.mark.anyio
async def test_a_tenant_has_one_trial_at_a_time_and_another_its_turn_beside_it() -> None:
    async with requests() as asked:
        for number in range(6):
            asked.ask("bad", endless(number))
        for letter in "bc":
            asked.ask("good", tried(letter))
        await until(lambda: len(asked.answers("good")) == 2)
        assert all(isinstance(answer, CompiledGrammar) for answer in asked.answers("good"))
        assert len(asked.answers("bad")) <= 3
        assert asked.grammars._trying is not None
        assert {account.running for account in asked.grammars._trying._turns._accounts.values()} <= {0, 1}


@pytest.mark.anyio
async def test_waiting_too_long_is_no_fault_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "_SECONDS", 0.2)
    monkeypatch.setattr(grammars, "_PATIENCE", 0.1)
    async with requests() as asked:
        asked.ask("a", endless(0))
        await until(lambda: asked.grammars._jobs._jobs[endless(0)].begun)  # threads may queue trials in another order
        for letter in "bc":
            asked.ask("a", tried(letter))
        await until(lambda: len(asked.told) == 3)
        slow, *late = asked.answers("a")
        assert type(slow) is GrammarRejected and slow.limit == 0.2
        for error in late:
            assert type(error) is Overloaded and error.field == "response_format" and error.limit == 0.1
            assert "waited 0.1 s for others" in str(error)


@pytest.mark.anyio
async def test_a_trial_counts_the_work_of_its_format_and_not_the_wait_for_a_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_trials, "_SECONDS", 0.5)
    async with requests() as asked:
        asked.ask("a", tried("b"))
        await until(lambda: len(asked.told) == 1)
        (child,) = asked.grammars._trials._children._idle
        os.kill(child._process.pid, signal.SIGSTOP)  # as if others had all processors
        asked.ask("a", tried("c"))
        await anyio.sleep(0.8)
        assert len(asked.told) == 1
        os.kill(child._process.pid, signal.SIGCONT)
        await until(lambda: len(asked.told) == 2)
        assert all(isinstance(answer, CompiledGrammar) for answer in asked.answers("a"))
        monkeypatch.setattr(grammar_trials, "_PATIENCE", 0.1)
        os.kill(child._process.pid, signal.SIGSTOP)
        asked.ask("a", tried("d"))
        await until(lambda: len(asked.told) == 3)
        error = asked.answers("a")[-1]
        assert type(error) is Overloaded and "too busy" in str(error)


@pytest.mark.anyio
async def test_a_failed_trial_is_charged_once_to_the_tenant_whose_turn_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "_SECONDS", 0.3)
    async with requests() as asked:
        for tenant in ("a", "b", "a"):
            asked.ask(tenant, endless(0))
        await until(lambda: len(asked.told) == 3)
        assert asked.charged == [("a", 300)]
        assert len({id(error) for _, error in asked.told}) == 3
        asked.ask("b", ResponseFormat.regex("a?" * 501 + "("))
        await until(lambda: len(asked.told) == 4)
        error = asked.answers("b")[-1]
        assert type(error) is GrammarRejected and error.limit is None
        tenant, tokens = asked.charged.pop()
        assert tenant == "b" and 1 <= tokens <= 300
        asked.ask("b", ResponseFormat.regex("("))
        await until(lambda: len(asked.told) == 5)
        assert asked.charged == [("a", 300)], "no trial was needed"
        asked.ask("b", tried("b"))
        await until(lambda: len(asked.told) == 6)
        assert isinstance(asked.answers("b")[-1], CompiledGrammar)
        assert [tenant for tenant, _ in asked.charged] == ["a", "b"], "a trial that finds no fault costs its time, too"


@pytest.mark.anyio
async def test_too_many_that_wait_shut_out_their_own_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_WAITING", 3)
    async with requests() as asked:
        for number in range(4):
            asked.ask("bad", endless(number))
        assert [type(error) for error in asked.answers("bad")] == [Overloaded]
        asked.ask("good", object_of("a"))
        await until(lambda: len(asked.answers("good")) == 1)
        assert isinstance(asked.answers("good")[0], CompiledGrammar)


def waiter(tenant: str, since: float = 0.0, wanted: bool = True) -> Waiter:
    return Waiter(tenant, since, lambda: wanted, lambda grammar, error: None)


def test_a_format_that_two_tenants_want_is_begun_by_whose_turn_comes_first() -> None:
    jobs, wanted = GrammarJobs(5.0), object_of("a")
    job = jobs.join(wanted, OPENED, waiter("a"))
    assert job is not None
    assert jobs.join(wanted, OPENED, waiter("a")) is None, "one turn does for both"
    assert jobs.join(wanted, OPENED, waiter("b")) is job, "no tenant waits for the turn of another"
    assert jobs.claim(job, "b", 1.0).begins
    assert not jobs.claim(job, "a", 1.0).begins
    assert jobs.join(wanted, OPENED, waiter("c")) is None
    assert [each.tenant for each in jobs.end(job)] == ["a", "a", "b", "c"]
    assert jobs.join(wanted, OPENED, waiter("a")) is not job


def test_a_turn_begins_nothing_for_those_that_left_or_waited_too_long() -> None:
    jobs, wanted = GrammarJobs(5.0), object_of("a")
    gone, late, fresh = waiter("a", wanted=False), waiter("a", 0.0), waiter("b", 4.0)
    job = jobs.join(wanted, OPENED, gone)
    assert job is not None
    for each in (late, fresh):
        jobs.join(wanted, OPENED, each)
    claim = jobs.claim(job, "a", 6.0)
    assert (claim.begins, claim.gone, claim.late) == (False, [gone], [late])
    again = waiter("a", 6.0)
    assert jobs.join(wanted, OPENED, again) is job
    assert jobs.claim(job, "b", 7.0).begins
    assert jobs.still_wanted(job) and jobs.end(job) == [fresh, again]
    left = jobs.join(wanted, OPENED, gone)
    assert left is not None and jobs.claim(left, "a", 0.0).gone == [gone]
    assert jobs.join(wanted, OPENED, waiter("b")) is not left
