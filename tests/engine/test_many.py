"""`Engine.generate_many`: order, bounds, errors, cancellation and its bar; over a fake device, once on a real model."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Gate, capacity, check_serving, expected_ids, expected_text, greedy, returned, serving, until

from headrace.engine import (
    Completion,
    Engine,
    EngineCrashed,
    EngineStopped,
    HeadraceError,
    InvalidParams,
    PromptTooLong,
    RequestFailed,
    SamplingParams,
    UnknownAdapter,
)
from headrace.engine.testing import ScriptedEngine

pytestmark = pytest.mark.anyio

ROWS = 4
AHEAD = 2 * ROWS


class Taken:
    """Prompts made when they are asked for; counts them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0

    def __iter__(self) -> Iterator[str]:
        for number in range(self.count):
            self.taken += 1
            yield f"prompt {number}"


class OddError(Exception):
    """Nothing that headrace knows."""


# -- answers -------------------------------------------------------------------------------------------------------


async def test_answers_come_in_the_order_of_the_prompts() -> None:
    """Later prompts end long before earlier ones."""
    prompts = [f"prompt {number}" for number in range(40)]
    params = [greedy(40 - number) for number in range(40)]
    async with serving() as engine:
        answers = await engine.generate_many(prompts, params)
        assert len(answers) == 40
        for prompt, each, answer in zip(prompts, params, answers, strict=True):
            assert each.max_tokens is not None
            assert answer.choices[0].token_ids == expected_ids(prompt, each.max_tokens)
            assert answer.choices[0].text == expected_text(prompt, each.max_tokens)
        await returned(engine)


async def test_mixed_prompts_and_params() -> None:
    prompts: list[Any] = ["text", [1, 2, 3], [{"role": "user", "content": "Hi"}], (7, 8)]
    params = [greedy(3), greedy(5, n=3), greedy(2, stop="zzz"), greedy(1)]
    async with serving() as engine:
        answers = await engine.generate_many(prompts, params)
        for prompt, each, answer in zip(prompts, params, answers, strict=True):
            assert answer == await engine.generate(prompt, each)


async def test_the_real_model_answers_as_it_does_one_by_one(smollm2: Path) -> None:
    prompts = ["The sea is", "One, two, three,", "Rain"]
    params = SamplingParams(temperature=0, max_tokens=4)
    async with Engine(smollm2, kv_memory="32MiB", dtype="float32") as engine:
        answers = await engine.generate_many(iter(prompts), params)
        assert [answer.choices[0].text for answer in answers] == [
            (await engine.generate(prompt, params)).choices[0].text for prompt in prompts
        ]


@pytest.mark.parametrize("prompts", [[], (), iter(())])
async def test_no_prompts_no_answers(prompts: Any) -> None:
    async with serving() as engine:
        assert await engine.generate_many(prompts) == []
        assert await engine.generate_many([], []) == []


# -- bounds --------------------------------------------------------------------------------------------------------


async def test_prompts_are_taken_as_room_comes() -> None:
    prompts = Taken(200)
    gate = Gate()
    async with serving(gate=gate) as engine:
        gate.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate_many, prompts, greedy(2))
            await until(lambda: prompts.taken == AHEAD and gate.holds)
            for _ in range(20):
                await anyio.sleep(0.001)
            assert prompts.taken == AHEAD
            assert engine.stats().running + engine.stats().waiting == AHEAD
            gate.release()
        assert prompts.taken == 200


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=30), lengths=st.integers(1, 6))
def test_choices_in_flight_are_bounded(
    anyio_backend: tuple[str, dict[str, Any]], counts: list[int], lengths: int
) -> None:
    """Choices count, not prompts: in flight are no more than two a row, or those of one prompt alone."""

    async def run() -> None:
        most = 0
        limit = max(AHEAD, *counts)

        def look() -> None:
            nonlocal most
            stats = engine.stats()
            most = max(most, stats.running + stats.waiting + stats.paused)

        def prompts() -> Iterator[str]:
            for number in range(len(counts)):
                look()
                yield f"{number}"
            look()

        async with serving(capacity(max_rows=ROWS)) as engine:
            answers = await engine.generate_many(prompts(), [greedy(lengths, n=n) for n in counts])
            assert [len(answer.choices) for answer in answers] == counts
        assert most <= limit

    anyio.run(run, backend=anyio_backend[0], backend_options=anyio_backend[1])


async def test_other_requests_have_their_turn_meanwhile() -> None:
    """Taking prompts, which a list allows without a pause, holds up nobody."""
    turns = 0
    looks: list[int] = []

    async def count() -> None:
        nonlocal turns
        while True:
            await checkpoint()
            turns += 1

    def prompts() -> Iterator[str]:
        for _ in range(100):
            looks.append(turns)
            yield "x"

    async with serving(capacity(max_rows=64)) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await engine.generate_many(prompts(), greedy(1))
        tasks.cancel_scope.cancel()
    assert len(set(looks)) > 50  # trio may give two tasks their turns in either order


async def test_prompts_may_come_later() -> None:
    """An async iterable that waits holds up neither what runs nor the end of what failed."""
    arrived = anyio.Event()

    async def prompts() -> AsyncIterator[str]:
        yield "early"
        await arrived.wait()
        yield "late"

    async with serving() as engine:
        async with anyio.create_task_group() as tasks:
            answers: list[Completion] = []

            async def ask() -> None:
                answers.extend(await engine.generate_many(prompts(), greedy(3)))

            tasks.start_soon(ask)
            await until(lambda: engine.stats().generated_tokens == 3)
            arrived.set()
        assert [answer.prompt_token_ids for answer in answers] == [list(b"early"), list(b"late")]


async def test_a_failure_ends_the_wait_for_a_prompt() -> None:
    async def prompts() -> AsyncIterator[str]:
        yield "a"
        await anyio.sleep_forever()

    async with serving(faults={0: OddError()}) as engine:
        with pytest.raises(RequestFailed, match=r"^prompts\[0\]: "), anyio.fail_after(10):
            await engine.generate_many(prompts())


# -- errors --------------------------------------------------------------------------------------------------------


async def test_the_first_error_names_its_prompt_and_cancels_the_rest() -> None:
    prompts: list[Any] = ["a", "b", [10**6], *["endless"] * 100]
    async with serving() as engine:
        with pytest.raises(InvalidParams) as caught:
            await engine.generate_many(prompts, greedy(None))
        assert str(caught.value).startswith("prompts[2]: prompt[0]: must be a token id")
        assert (caught.value.field, caught.value.value, caught.value.limit) == ("prompt[0]", 10**6, 256)
        await returned(engine)
        await check_serving(engine)


async def test_a_failed_step_is_told_with_its_cause() -> None:
    fault = RuntimeError("broken")
    async with serving(capacity(max_rows=1), faults={2: fault}) as engine:
        with pytest.raises(RequestFailed, match=r"^prompts\[2\]: the step failed") as caught:
            await engine.generate_many(["a", "b", "c", "d"], greedy(1))
        assert caught.value.__cause__ is fault


async def test_errors_in_the_places_of_answers() -> None:
    prompts: list[Any] = ["a", "", "b" * 2000, "c", 7]
    async with serving(faults={}) as engine:
        answers = await engine.generate_many(prompts, greedy(2), return_errors=True)
        kinds = [type(answer) for answer in answers]
        assert kinds == [Completion, InvalidParams, PromptTooLong, Completion, InvalidParams]
        for answer in answers:
            if isinstance(answer, HeadraceError):
                assert answer.__traceback__ is None
                assert not str(answer).startswith("prompts")
        unknown = await engine.generate_many(["a"], adapter="none", return_errors=True)
        assert isinstance(unknown[0], UnknownAdapter)
        await returned(engine)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("text", greedy(), "prompts: must be an iterable of prompts, got str"),
        (b"text", greedy(), "prompts: must be an iterable of prompts, got bytes"),
        (7, greedy(), "prompts: must be an iterable of prompts, got int"),
        (["a"], None, "params: must be SamplingParams or a sequence of them, got NoneType"),
        (["a"], "hot", "params: must be SamplingParams or a sequence of them, got str"),
        (["a", "b"], [greedy(), {}], r"params\[1\]: must be SamplingParams, got dict"),
        (["a", "b"], [greedy()], "params: .* got 1 for 2"),
        (["a"], [greedy()] * 2, "params: .* got 2 for 1"),
        ("ab".__iter__, [greedy()], "params: .* got 1 for more"),
        ("a".__iter__, [greedy()] * 2, "params: .* got 2 for 1"),
    ],
)
async def test_arguments_are_checked(prompts: Any, params: Any, message: str) -> None:
    async with serving() as engine:
        with pytest.raises(InvalidParams, match=f"^{message}"):
            await engine.generate_many(prompts() if callable(prompts) else prompts, params)
        await returned(engine)


async def test_an_unknown_keyword_raises_as_it_is() -> None:
    async with serving() as engine:
        with pytest.raises(TypeError, match="colour"):
            await engine.generate_many(["a", "b"], colour="red")  # type: ignore[call-overload]


@pytest.mark.parametrize("place", [0, 3, AHEAD, 3 * AHEAD])
async def test_an_error_of_the_iterable_passes_through(place: int) -> None:
    def prompts() -> Iterator[str]:
        yield from ["endless"] * min(place, AHEAD - 1)
        yield from ["short"] * (place - AHEAD + 1)
        raise OddError

    params = [greedy(None)] * (AHEAD - 1) + [greedy(1)] * 40
    async with serving() as engine:
        with pytest.raises(OddError):
            await engine.generate_many(prompts(), params)
        await returned(engine)


async def test_an_engine_that_closes_or_dies() -> None:
    gate = Gate()
    async with serving(gate=gate) as engine:
        gate.hold()
        async with anyio.create_task_group() as tasks:
            stopped: list[EngineStopped] = []

            async def ask() -> None:
                try:
                    await engine.generate_many(["x"] * 100, greedy(2))
                except EngineStopped as error:
                    stopped.append(error)

            tasks.start_soon(ask)
            await until(lambda: gate.holds)
            tasks.start_soon(engine.aclose)
            await until(lambda: engine._serving.closing)
            gate.release()
        assert re.match(r"prompts\[\d+\]: ", str(stopped[0]))
        with pytest.raises(EngineStopped):
            await engine.generate_many(["x"])

    with pytest.raises(EngineCrashed):
        async with ScriptedEngine(capacity()) as dying:
            assert dying._life.loop is not None
            dying._life.loop.scheduler.plan = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
            errors = await dying.generate_many(["x"] * 20, return_errors=True)
            assert {type(error) for error in errors} == {EngineCrashed}
            assert isinstance(errors[0], EngineCrashed) and not str(errors[0]).startswith("prompts")
            with pytest.raises(EngineCrashed):
                await dying.generate_many(["x"])


# -- cancellation --------------------------------------------------------------------------------------------------


async def test_cancelling_the_caller_cancels_every_request() -> None:
    async with serving() as engine:
        prompts = Taken(1000)
        with anyio.move_on_after(10) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.generate_many, prompts, greedy(None))
                await until(lambda: engine.stats().running == ROWS)
                scope.cancel()
        assert scope.cancelled_caught
        assert prompts.taken <= AHEAD
        await returned(engine)
        await check_serving(engine)


# -- the bar -------------------------------------------------------------------------------------------------------


def shown(printed: str) -> list[str]:
    """The states of the bar without its colours."""
    return re.findall(r"(\d+/(?:\d+|\?) +[\d,]+ tok/s)", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", printed))


async def test_the_bar_shows_what_is_done_and_how_fast(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("headrace.engine.many.bars._DRAW_SECONDS", 0.002)
    async with serving() as engine:
        await engine.generate_many(["x"] * 60, greedy(8), progress=True)
        await returned(engine)
    printed = capsys.readouterr()
    states = shown(printed.err)
    assert printed.out == ""
    assert states[0] == "0/60 0 tok/s"
    assert re.fullmatch(r"60/60 [1-9][\d,]* tok/s", states[-1])
    done = [int(state.split("/")[0]) for state in states]
    assert done == sorted(done) and len(set(done)) > 3


@pytest.mark.parametrize("sized", [True, False])
async def test_where_there_is_no_terminal_the_bar_is_one_line(
    sized: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    async with serving() as engine:
        await engine.generate_many(["x"] * 5 if sized else Taken(5), greedy(2), progress=True)
    assert [state.split(" ")[0] for state in shown(capsys.readouterr().err)] == ["5/5" if sized else "5/?"]


async def test_the_bar_ends_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as engine:
        with pytest.raises(InvalidParams):
            await engine.generate_many(["x", ""], greedy(2), progress=True)
        await check_serving(engine)
    assert "tok/s" in capsys.readouterr().err
    async with serving() as engine:
        await engine.generate_many(["x"], greedy(2))
    assert capsys.readouterr().err == ""
