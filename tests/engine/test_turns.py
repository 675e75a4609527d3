"""Conversations: what is sent to a stream, and what branches off it, uses the pages that are there and is right."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import capacity, check_serving, expected_ids, expected_text, greedy, read, returned, serving, until

from headrace.engine import Engine, EngineStopped, InvalidParams, PromptTooLong, SamplingParams, TokenStream
from headrace.engine.testing import ByteTokenizer, ScriptedEngine

pytestmark = pytest.mark.anyio

STORY = "Once upon a time there was"


def ids_of(stream: TokenStream) -> list[int]:
    return stream.prompt_token_ids


def pool_of(engine: ScriptedEngine) -> Any:
    assert engine._life.loop is not None
    return engine._life.loop.scheduler.pool


@pytest.mark.parametrize("launch_ahead", [1, 2, 3])
async def test_what_is_sent_follows_all_that_was_and_nothing_is_computed_again(launch_ahead: int) -> None:
    async with serving(launch_ahead=launch_ahead) as engine, engine.stream(STORY, greedy(9)) as stream:
        known = [*STORY.encode(), *[token.id for token in await read(stream)]]
        for added in (" and then", "", [7, 8, 9], [{"role": "user", "content": "why?"}]):
            again = await stream.send(added, greedy(5))
            assert again is stream
            more = list(b"\nuser: why?\n") if isinstance(added, list) and added[-1:] != [9] else list(added)
            more = list(added.encode()) if isinstance(added, str) else more
            assert ids_of(stream) == known + more
            tokens = await read(stream)
            assert [token.position for token in tokens] == list(range(5))
            assert [token.id for token in tokens] == expected_ids(known + more, 5)
            assert stream.finish_reasons == ["length"]
            usage = stream.usage
            assert usage.prompt_tokens == len(known) + len(more) and usage.completion_tokens == 5
            assert usage.prompt_tokens - usage.cached_tokens == len(more) + 1  # the last token had not been computed
            known = [*known, *more, *[token.id or 0 for token in tokens]]
        await until(lambda: not engine.stats().steps_in_flight)
        assert engine.stats().pages_held == 0, "what is kept can be had by anybody"
    assert not pool_of(engine)._reservations


async def test_an_answer_that_ended_itself_is_not_ended_twice() -> None:
    class Closing(ByteTokenizer):
        def encode_reply(self, messages: Any, *options: Any) -> list[int]:
            return [ord(" "), 256, *super().encode_reply(messages, *options)]

    async with serving(eos={len(STORY) + 4: 256}) as engine:
        assert engine._life.opened is not None
        object.__setattr__(engine._life.opened, "tokenizer", Closing())
        async with engine.stream(STORY, SamplingParams(temperature=0, max_tokens=30)) as stream:
            known = [*STORY.encode(), *[token.id for token in await read(stream)]]
            assert known[-1] == 256 and stream.finish_reasons == ["stop"]
            await stream.send([{"role": "user", "content": "x"}], greedy(3))
            assert ids_of(stream) == [*known, *b"\nuser: x\n"]
            assert stream.usage.prompt_tokens == len(ids_of(stream))
            await read(stream)
            assert stream.usage.cached_tokens == len(known) - 1
            await stream.send([{"role": "user", "content": "y"}], greedy(3))
            assert ids_of(stream)[-11:] == [ord(" "), 256, *b"\nuser: y\n"]


async def test_kept_pages_outlive_cached_ones_and_yield_to_what_needs_them() -> None:
    async with serving(capacity(num_pages=16, max_rows=2)) as engine, engine.stream(STORY, greedy(20)) as stream:
        first = [token.id for token in await read(stream)]
        for number in range(6):  # each takes five pages of the twelve that are left
            await engine.generate(f"{number} other text" * 4, greedy(16))
        await stream.send("!", greedy(30))
        second = [token.id for token in await read(stream)]
        assert second == expected_ids([*STORY.encode(), *first, *b"!"], 30)
        assert stream.usage.cached_tokens == len(STORY) + 19
        answer = await engine.generate("x" * 240, greedy(10))  # needs all
        assert answer.choices[0].token_ids == expected_ids("x" * 240, 10)
        await stream.send("?", greedy(3))
        assert [token.id for token in await read(stream)] == expected_ids(ids_of(stream), 3)
        assert stream.usage.cached_tokens < 16


async def test_a_conversation_may_fill_the_whole_pool() -> None:
    """Where the copy of a page that is only partly full finds no room, its tokens are computed again."""
    async with serving(capacity(num_pages=4, page_size=4, max_context=64)) as engine:
        stream = engine.stream([1, 2, 3], greedy(11))
        known = [1, 2, 3, *[token.id for token in await read(stream)]]
        other = stream.fork()
        for each in (stream, other):
            await each.send([7], greedy(None))
            assert [token.id for token in await read(each)] == expected_ids([*known, 7], 2)
            assert each.usage.cached_tokens == 12
            each.cancel()


@dataclass
class Talk:
    """A stream, and what its tokens must be."""

    stream: TokenStream
    before: list[int]
    """All tokens before those that it yields."""


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["read", "some", "send", "send", "fork", "cancel", "other", "close"]),
        st.integers(0, 40),
    ),
    max_size=14,
)


@given(
    actions=ACTIONS,
    sizes=st.sampled_from([(200, 4), (14, 4), (8, 16), (40, 1)]),
    launch_ahead=st.integers(1, 3),
    cache=st.booleans(),
)
@settings(max_examples=40)
def test_any_conversation_is_what_it_would_be_alone(
    actions: list[tuple[int, str, int]], sizes: tuple[int, int], launch_ahead: int, cache: bool
) -> None:
    shape = capacity(num_pages=sizes[0], page_size=sizes[1], max_context=120, max_rows=3)

    async def run() -> None:
        async with serving(shape, launch_ahead=launch_ahead, prefix_cache=cache) as engine:
            talks = [Talk(engine.stream(list(b"start"), greedy(6)), list(b"start"))]
            for which, action, number in actions:
                await act(engine, talks, talks[which % len(talks)], action, number)
            for talk in talks:
                await check_rest(talk)
                talk.stream.cancel()
            await until(lambda: not engine.stats().steps_in_flight)
            assert not pool_of(engine)._reservations and not pool_of(engine)._kept
            await check_serving(engine)

    anyio.run(run)


async def check_rest(talk: Talk) -> None:
    """Read to the end, each token as it must be."""
    tokens = [token.id for token in await read(talk.stream) if token.id is not None]
    assert tokens == expected_ids(talk.before, len(tokens))
    talk.before += tokens


async def act(engine: ScriptedEngine, talks: list[Talk], talk: Talk, action: str, number: int) -> None:
    stream = talk.stream
    if action == "read":
        await check_rest(talk)
    elif action == "some":
        for _ in range(number % 4):
            token = await anext(stream, None)
            if token is not None and token.id is not None:
                assert token.id == expected_ids(talk.before, 1)[0]
                talk.before.append(token.id)
    elif action == "send":
        await check_rest(talk)
        added = [number] * (number % 7)
        try:
            await stream.send(added, greedy(1 + number % 9))
        except PromptTooLong:
            return
        talk.before += added
        assert stream.prompt_token_ids == talk.before
    elif action == "fork" and len(talks) < 5:
        await stream.admitted()
        talks.append(Talk(stream.fork(), list(talk.before)))
    elif action == "other":
        await engine.generate([number] * (5 + number % 30), greedy(4))
    elif action in ("cancel", "close"):
        stream.cancel()


async def test_a_branch_shares_pages_and_lives_on_by_itself() -> None:
    async with serving(capacity(page_size=4)) as engine:
        stream = engine.stream(STORY, greedy(40))
        shown = [await anext(stream) for _ in range(7)]
        computed = engine.stats().prompt_tokens - engine.stats().cached_tokens
        async with stream.fork() as branch:
            stream.cancel()
            assert ids_of(branch) == [*STORY.encode(), *[token.id for token in shown]]
            tokens = await read(branch)
            assert [token.id for token in shown + tokens] == expected_ids(STORY, 40)
            assert [token.position for token in tokens] == list(range(7, 40))
            assert "".join(token.text for token in shown + tokens) == expected_text(STORY, 40)
            assert branch.usage.completion_tokens == 33 and branch.usage.prompt_tokens == len(STORY) + 7
            stats = engine.stats()
            assert stats.prompt_tokens - stats.cached_tokens - computed < 4, "all but part of a page was shared"
            before = ids_of(branch) + [token.id or 0 for token in tokens]
            both = [branch, branch.fork()]
            for number, each in enumerate(both):
                await each.send([number], greedy(3))
                assert [token.id for token in await read(each)] == expected_ids([*before, number], 3)
                assert each.usage.cached_tokens == len(before) - 1
            both[1].cancel()
        await returned(engine)
    assert not pool_of(engine)._reservations


async def test_a_stop_string_may_begin_before_the_branch() -> None:
    ids = expected_ids(STORY, 12)
    at = next(place for place in range(2, 11) if max(ids[place : place + 2]) < 128)
    stop = bytes(ids[at : at + 2]).decode()
    async with serving() as engine:
        stream = engine.stream(STORY, greedy(30, stop=stop))
        whole = await read(engine.stream(STORY, greedy(30, stop=stop)))
        shown = [await anext(stream) for _ in range(at + 1)]
        rest = await read(stream.fork())
        assert [token.text for token in shown + rest] == [token.text for token in whole]
        assert rest[-1].stop_string == stop


async def test_what_cannot_be_is_refused_and_leaves_the_stream_as_it_was() -> None:
    async with serving(capacity(max_context=64)) as engine:
        stream = engine.stream("a", greedy(4))
        await stream.admitted()
        with pytest.raises(RuntimeError, match="still runs"):
            await stream.send("b")
        await read(stream)
        usage = stream.usage
        with pytest.raises(PromptTooLong):
            await stream.send("b" * 70)
        with pytest.raises(InvalidParams, match=r"^prompt\[7\]"):
            await stream.send([1, 2, 300])
        with pytest.raises(InvalidParams, match=r"^messages\[0\]"):
            await stream.send([{"role": "user"}])
        with pytest.raises(InvalidParams, match="^prompt: must be"):
            await stream.send(7)  # type: ignore[arg-type]
        assert stream.usage == usage and stream.finish_reasons == ["length"]
        await stream.send("b", greedy(2))
        assert len(await read(stream)) == 2

        several = engine.stream("a", greedy(2, n=2))
        await read(several)
        ended = engine.stream("a", greedy(2))
        await read(ended)
        await stream.send("c", greedy(9))
        for refused in (several.fork, partial(stream.fork, seed="x"), partial(ended.fork, seed="x")):
            with pytest.raises(InvalidParams, match="^fork|^seed"):
                refused()
        with pytest.raises(InvalidParams, match="^send: a stream of one choice is needed, got one with n=2"):
            await several.send("b")
        refused_stream = engine.stream("", greedy(2))
        with pytest.raises(InvalidParams):
            await refused_stream.admitted()
        with pytest.raises(RuntimeError, match="not been admitted"):
            refused_stream.fork()
    with pytest.raises(EngineStopped):
        ended.fork()


async def test_a_cancelled_send_leaves_nothing_behind() -> None:
    async with serving() as engine, engine.stream("a", greedy(4)) as stream:
        known = [97, *[token.id for token in await read(stream)]]
        with anyio.CancelScope() as scope:
            scope.cancel()
            await stream.send("b" * 5000)
        await returned(engine)
        await stream.send("c", greedy(3))
        assert [token.id for token in await read(stream)] == expected_ids([*known, *b"c"], 3)


async def test_who_cancels_while_another_task_sends_ends_what_is_sent() -> None:
    async with serving() as engine:
        stream = engine.stream("a", greedy(4))
        await read(stream)
        held = threading.Event()
        for _ in range(2):  # as many as it has threads
            engine._life.helper.submit(held.wait, lambda result, error: None)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(stream.send, "b" * 5000)
                await until(lambda: stream._sent is not None)
                stream.cancel()
        finally:
            held.set()
        await returned(engine)
        assert not pool_of(engine)._reservations
        assert [token.finish_reason for token in await read(stream)] == ["cancelled"]


async def test_dropped_streams_keep_nothing() -> None:
    async with serving() as engine:
        stream = engine.stream(STORY, greedy(4))
        await read(stream)
        await until(lambda: pool_of(engine)._kept)
        del stream
        await until(lambda: not pool_of(engine)._reservations)


def test_the_template_writes_the_same_turn_by_turn(smollm2: Path) -> None:
    """On the real model: each turn's tokens are those of the whole chat, and only the new ones are computed."""

    async def run() -> None:
        chat = [{"role": "user", "content": "Name a river."}]
        params = SamplingParams(temperature=0, max_tokens=10)
        async with Engine(smollm2, kv_memory="64MiB") as engine, engine.stream(chat, params) as stream:
            for question in ("And a <|im_end|> mountain?", "Why?"):
                text = "".join([token.text async for token in stream])
                before = stream.usage
                chat += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
                await stream.send([chat[-1]])
                if stream.finish_reasons == ["stop"]:
                    assert stream.prompt_token_ids == await engine.tokenize(chat)
                await anext(stream)
                computed = stream.usage.prompt_tokens - stream.usage.cached_tokens
                known = before.prompt_tokens + before.completion_tokens
                assert stream.usage.prompt_tokens - known <= computed <= stream.usage.prompt_tokens - known + 1

    anyio.run(run)


def test_a_branch_takes_another_course_and_the_same_with_the_same_seed(smollm2: Path) -> None:
    async def run() -> None:
        params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True, logprobs=1, presence_penalty=0.5)
        async with Engine(smollm2, kv_memory="64MiB", dtype="float32") as engine:
            whole = [token.id for token in await read(engine.stream("A story:", params))]
            stream = engine.stream("A story:", params)
            shown = [(await anext(stream)).id for _ in range(5)]
            same, other = [[token.id for token in await read(stream.fork(seed=seed))] for seed in (3, 4)]
            assert shown + same == whole
            assert other != same and len(other) == 7
            stream.cancel()

    anyio.run(run)


async def test_a_turn_may_have_a_deadline_and_a_priority_of_its_own() -> None:
    async with serving(gate=lambda: threading.Event().wait(0.002)) as engine:
        async with engine.stream(STORY, greedy(3), priority=2) as stream:
            await read(stream)
            await stream.send("x", greedy(900), deadline=0.05)
            assert (await read(stream))[-1].finish_reason == "deadline"
            assert stream._generation.requests[0].asked.priority == 2
            await stream.send("y", greedy(3), deadline=60, priority=-1)
            assert stream._generation.requests[0].asked.priority == -1
            assert len(await read(stream)) == 3
            with pytest.raises(InvalidParams, match="deadline: must be more than 0"):
                await stream.send("z", deadline=0)
            await stream.send("z", greedy(2))
            assert stream._generation.requests[0].asked.priority == -1
