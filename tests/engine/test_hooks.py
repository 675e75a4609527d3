"""Hooks: `stop_when` ends a choice exactly where it says so, and what goes wrong in it ends its own stream alone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import check_serving, expected_ids, expected_text, greedy, read, returned, serving, until

from headrace.engine import HookFailed, InvalidParams, SamplingParams, Token
from headrace.engine.testing import ByteTokenizer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("launch_ahead", [1, 2, 3])
async def test_stop_when_ends_a_choice_there_and_its_pages_return(launch_ahead: int) -> None:
    async with serving(launch_ahead=launch_ahead) as engine:
        seen: list[Token] = []

        def sixth(token: Token) -> bool:
            seen.append(token)
            return token.position == 5

        stream = engine.stream("Hello", greedy(50), stop_when=sixth)
        tokens = await read(stream)
        assert [token.id for token in tokens] == expected_ids("Hello", 6)
        assert "".join(token.text for token in tokens) == expected_text("Hello", 6)
        assert [token.finish_reason for token in tokens] == [None] * 5 + ["stop"]
        assert all(own is shown for own, shown in zip(seen, tokens, strict=True))
        assert stream.usage.completion_tokens == 6 and stream.finish_reasons == ["stop"]
        await returned(engine, steps=launch_ahead)


@given(
    prompt=st.binary(min_size=1, max_size=12).map(list),
    ends=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    stop=st.none() | st.text("ab\ufffd0", min_size=1, max_size=2),
    limit=st.integers(1, 14),
    eos=st.booleans(),
)
def test_any_choice_is_the_same_up_to_where_it_is_ended(
    prompt: list[int], ends: list[int], stop: str | None, limit: int, eos: bool
) -> None:
    """Against the same request without the hook: its tokens up to the end, the same items, joined the decoded text."""

    async def run() -> None:
        params = greedy(limit, n=len(ends), stop=stop or (), ignore_eos=not eos)
        async with serving() as engine:
            whole = await read(engine.stream(prompt, params))
            asked: list[tuple[int, int]] = []

            def ended(token: Token) -> bool:
                asked.append((token.index, token.position))
                return token.position >= ends[token.index]

            cut = await read(engine.stream(prompt, params, stop_when=ended))
            for choice, end in enumerate(ends):
                mine = [token for token in whole if token.index == choice]
                got = [token for token in cut if token.index == choice]
                assert [token.id for token in got] == [token.id for token in mine[: end + 1]]
                expected = [(choice, at) for at in range(min(end + 1, len(mine) - 1))]
                assert [each for each in asked if each[0] == choice] == expected
                if len(mine) <= end + 1:
                    assert got == mine
                elif stop is None:
                    ids = [token.id for token in got if token.id is not None]
                    assert "".join(token.text for token in got) == ByteTokenizer().decode(ids)
                    assert got[-1].finish_reason == "stop"

    anyio.run(run)


async def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    ids = expected_ids("Hello", 9)
    held = ByteTokenizer().decode(ids[8:9])
    assert held.isprintable()
    async with serving() as engine:
        stream = engine.stream("Hello", greedy(30, stop=held + "never"), stop_when=lambda token: token.position == 8)
        tokens = await read(stream)
        assert "".join(token.text for token in tokens) == expected_text("Hello", 9)
        assert tokens[-1].finish_reason == "stop" and tokens[-1].stop_string is None


def too_slow(token: Token) -> bool:
    time.sleep(0.15)
    return False


def raising(token: Token) -> bool:
    raise KeyError("x")


HOSTILE: list[tuple[Any, str]] = [
    (raising, "stop_when raised KeyError at token 0"),
    (too_slow, "where a hook has 0.1"),
    (lambda token: None, "must return a bool, got NoneType at token 0"),
    (lambda token: np.bool_(True), "must return a bool, got numpy.bool"),
    (lambda: True, "stop_when raised TypeError"),
]


@pytest.mark.parametrize(("hook", "message"), HOSTILE)
async def test_a_hook_that_fails_ends_its_own_stream_alone(hook: Any, message: str) -> None:
    async with serving(hook_seconds=0.1) as engine:
        other = engine.stream("other", greedy(20))
        stream = engine.stream("Hello", greedy(20, n=2), stop_when=hook)
        with pytest.raises(HookFailed, match=message) as failed:
            await read(stream)
        assert isinstance(failed.value.__cause__, KeyError) is (hook is raising)
        assert [token.id for token in await read(other)] == expected_ids("other", 20)
        await check_serving(engine)
        await returned(engine)


async def test_a_coroutine_is_no_answer() -> None:
    async def hook(token: Token) -> bool:
        return False

    made: list[Any] = []

    def forgetful(token: Token) -> Any:
        made.append(hook(token))
        return made[-1]

    async with serving() as engine:
        with pytest.raises(HookFailed, match="got coroutine"):
            await engine.generate("Hello", greedy(5), stop_when=forgetful)
    made[0].close()


async def test_what_is_no_hook_is_refused_before_the_first_token() -> None:
    async with serving() as engine:
        for hook, params in ((True, greedy()), (lambda token: True, SamplingParams(beam_width=2))):
            with pytest.raises(InvalidParams, match="^stop_when|^beam_width") as refused:
                await engine.generate("Hello", params, stop_when=hook)  # type: ignore[arg-type]
            assert refused.value.field in ("stop_when", "beam_width")
        assert engine.stats().steps == 0


async def test_it_is_asked_whether_or_not_anybody_reads_and_may_cancel() -> None:
    async with serving() as engine:
        count = 0

        def third(token: Token) -> bool:
            nonlocal count
            count += 1
            if token.position == 2:
                stream.cancel()
            return False

        stream = engine.stream("Hello", greedy(50), stop_when=third)
        await until(lambda: stream.usage.completion_tokens >= 3)
        await returned(engine)
        tokens = await read(stream)
        assert [token.finish_reason for token in tokens][-1] == "cancelled"
        assert count == 3


async def test_a_cancellation_that_a_hook_raises_ends_its_own_stream_alone() -> None:
    """As `result()` of a cancelled task does; no `Exception`, and none of the engine's business."""
    async with serving() as engine:

        def looks_at_a_cancelled_task(token: Token) -> bool:
            raise asyncio.CancelledError

        stream = engine.stream("Hello", greedy(5), stop_when=looks_at_a_cancelled_task)
        with pytest.raises(HookFailed, match="raised CancelledError at token 0"):
            await read(stream)
        await check_serving(engine)
