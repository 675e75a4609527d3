"""Intake: what needs no wait is done within the call, and whatever fails ends the stream with one typed error."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest
from scripted import CAPACITY, until

from headrace.engine import EngineStopped, HeadraceError, SamplingParams
from headrace.engine.concurrency.called import Called, run_inline
from headrace.engine.concurrency.threads import Done
from headrace.engine.errors import TokenizerFailed
from headrace.engine.life.opened import Opened
from headrace.engine.response_format import ResponseFormat
from headrace.engine.testing import ByteTokenizer, ScriptedEngine, no_pages_held

LONG = "x" * 4000
ONE = SamplingParams(max_tokens=1)


class Waiting:
    """A call that ends when the test says so."""

    def __init__(self) -> None:
        self.done: Done | None = None

    def __call__(self, done: Done) -> None:
        self.done = done


def test_calls_that_end_at_once_are_awaited_without_a_wait() -> None:
    found: list[int] = []

    async def steps() -> None:
        found.append(await Called(lambda done: done(1, None), "failed"))
        found.append(await Called(lambda done: done(2, None), "failed"))

    run_inline(steps())
    assert found == [1, 2]


def test_steps_go_on_where_the_end_of_a_call_is_told() -> None:
    first, second, found = Waiting(), Waiting(), list[str]()

    async def steps() -> None:
        found.append(await Called(first, "failed"))
        try:
            await Called(second, "it failed")
        except HeadraceError as error:
            found.append(str(error))

    run_inline(steps())
    assert not found and second.done is None and first.done is not None
    first.done("one", None)
    assert found == ["one"] and second.done is not None
    second.done(None, KeyError("untyped"))
    assert found == ["one", "it failed"]


def test_a_call_that_never_ends_keeps_nothing_alive() -> None:
    waiting = Waiting()

    class Kept:
        pass

    kept = Kept()
    alive = weakref.ref(kept)

    async def steps(kept: Kept, waiting: Waiting) -> None:
        await Called(waiting, "failed")
        raise AssertionError(kept)

    run_inline(steps(kept, waiting))
    del kept, waiting
    gc.collect()
    assert alive() is None


@pytest.mark.anyio
async def test_short_prompts_are_queued_within_the_call_and_in_its_order() -> None:
    async with ScriptedEngine(replace(CAPACITY, max_rows=1)) as engine:
        tasks = len(anyio.get_running_tasks())
        streams = [engine.stream(f"prompt {number}", ONE) for number in range(8)]
        assert engine.stats().waiting == 8  # nothing has been awaited
        assert len(anyio.get_running_tasks()) == tasks
        for stream in streams:
            async for _ in stream:
                pass
        ups = [stream.taken_up for stream in streams]
        assert None not in ups and ups == sorted(ups, key=lambda up: up or 0.0)


class Failing(ByteTokenizer):
    """A tokenizer that calls the test's own function in place of encoding."""

    def __init__(self, encode: Callable[[], Any]) -> None:
        super().__init__()
        self._call = encode

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        self._call()
        return super().encode(text)


class Replaced(ScriptedEngine):
    def __init__(self, tokenizer: ByteTokenizer, **options: Any) -> None:
        super().__init__(replace(CAPACITY, max_context=8192, num_pages=1024), **options)
        self._tokenizer = tokenizer

    def _open(self) -> Opened:
        return replace(super()._open(), tokenizer=self._tokenizer)


async def error_of(engine: ScriptedEngine, prompt: str, params: SamplingParams = ONE) -> BaseException:
    """The one error that a stream ends with, in every read."""
    stream = engine.stream(prompt, params)
    errors = []
    for read in (stream.admitted, stream.__anext__, stream.next_chunk):
        with pytest.raises(HeadraceError) as caught:
            await read()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 1
    assert stream.finish_reasons == [None]
    return errors[0]


class Panic(BaseException):
    """Raised in a thread, where it must not pass for a cancellation or an exit."""


Panic.__name__ = "PanicException"


@pytest.mark.anyio
@pytest.mark.parametrize("prompt", ["short", LONG])
@pytest.mark.parametrize("kind", [KeyError, Panic])
async def test_a_tokenizer_that_fails_ends_its_stream_with_one_typed_error(
    prompt: str, kind: type[BaseException]
) -> None:
    fails = True

    def encode() -> None:
        if fails:
            raise kind("scripted")

    async with Replaced(Failing(encode)) as engine:
        assert isinstance(await error_of(engine, prompt), TokenizerFailed)
        fails = False
        await engine.generate(prompt, ONE)
        await no_pages_held(engine)


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["submit", "compile", "known_to"])
async def test_an_error_without_a_type_gets_one(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect anywhere on the way reaches the stream, even where a callback is all that runs."""

    def broken(*arguments: Any, **named: Any) -> Any:
        raise ZeroDivisionError("scripted")

    async with ScriptedEngine(adapter_slots=2) as engine:
        parts = engine._serving.parts()
        owner: Any = {"submit": parts.loop, "compile": parts.grammars, "known_to": parts.adapters}[where]
        monkeypatch.setattr(owner, where, broken)
        params = SamplingParams(max_tokens=1, response_format=ResponseFormat.regex("a"))
        stream = engine.stream("short", params, adapter="one" if where == "known_to" else None)
        with pytest.raises(HeadraceError) as caught:
            await stream.admitted()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.anyio
async def test_an_engine_that_closed_while_a_prompt_was_tokenised_takes_nothing_in() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        assert go_on.wait(20)

    engine = Replaced(Failing(encode))
    async with engine:
        stream = engine.stream(LONG, ONE)
        await until(begun.is_set)
        waits = engine.stream(LONG, ONE)
        go_on.set()
    for each in (stream, waits):
        with pytest.raises(EngineStopped):
            await each.admitted()


@pytest.mark.anyio
async def test_a_stream_that_ended_while_its_prompt_waited_is_not_tokenised() -> None:
    begun, go_on, encoded = threading.Event(), threading.Event(), list[int]()

    def encode() -> None:
        encoded.append(1)
        begun.set()
        assert go_on.wait(20)

    async with Replaced(Failing(encode)) as engine:
        runs = engine.stream(LONG, ONE)
        await until(begun.is_set)
        waits = engine.stream(LONG, ONE)
        waits.cancel()
        go_on.set()
        async for _ in runs:
            pass
        await no_pages_held(engine)
        assert [token async for token in waits] and waits.finish_reasons == ["cancelled"]
        assert len(encoded) == 1
