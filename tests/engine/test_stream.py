"""`TokenStream`: items, ends, text, stop strings, two readers and slow readers, over a fake device and real threads."""

from __future__ import annotations

from typing import Any, NamedTuple

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    Gate,
    capacity,
    check_serving,
    expected_ids,
    expected_text,
    greedy,
    read,
    returned,
    serving,
    until,
)

from headrace.engine import Chunk, SamplingParams, Token, Usage
from headrace.engine.concurrency.threads import Poster
from headrace.engine.delivery.generation import Delivered, TokenMaker
from headrace.engine.testing import ByteTokenizer
from headrace.engine.tokens.token_table import TokenTable

pytestmark = pytest.mark.anyio

EOS = ByteTokenizer.eos_ids[0]


def scripted_bytes(prompt: str, text: bytes) -> dict[int, int]:
    """Make the device give `text` after `prompt`."""
    return dict(enumerate(text, len(prompt.encode())))


def check_items(items: list[Token], n: int = 1) -> None:
    """Every choice counts its positions from 0 and has one end, at its last item."""
    for choice in range(n):
        own = [item for item in items if item.index == choice]
        assert [item.position for item in own] == list(range(len(own)))
        assert [bool(item.finish_reason) for item in own] == [False] * (len(own) - 1) + [True]
    assert {item.index for item in items} == set(range(n))


# -- items and ends ------------------------------------------------------------------------------------------------


async def test_tokens_come_singly_and_in_order_with_one_end() -> None:
    async with serving() as engine:
        stream = engine.stream("a prompt", greedy(20))
        assert stream.finish_reasons == [None]
        items = await read(stream)
        check_items(items)
        assert [item.id for item in items] == expected_ids("a prompt", 20)
        assert "".join(item.text for item in items) == expected_text("a prompt", 20)
        assert [item.logprob for item in items] == [None] * 20
        assert stream.finish_reasons == ["length"]
        assert stream.prompt_token_ids == list(b"a prompt")
        assert stream.usage == Usage(prompt_tokens=8, completion_tokens=20)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_one_token_only() -> None:
    async with serving() as engine:
        (item,) = await read(engine.stream([7], greedy(1)))
        assert (item.id, item.position, item.finish_reason) == (expected_ids([7], 1)[0], 0, "length")


@pytest.mark.parametrize("n", [2, 3, 7])
async def test_choices_come_interleaved_each_with_its_own_end(n: int) -> None:
    """Also more of them than rows. The fake device is deaf to seeds, so all choices say the same."""
    async with serving() as engine:
        stream = engine.stream("shared by all choices", greedy(9, n=n))
        items = await read(stream)
        check_items(items, n)
        for choice in range(n):
            assert [item.id for item in items if item.index == choice] == expected_ids("shared by all choices", 9)
        assert stream.finish_reasons == ["length"] * n
        assert stream.usage.completion_tokens == 9 * n
        assert stream.usage.prompt_tokens == 21
        if n <= 4:
            order = [item.index for item in items]
            assert order != sorted(order), "one choice waited for the other"


async def test_the_end_of_sequence_is_an_item_without_text() -> None:
    async with serving(eos={10: EOS}) as engine:
        items = await read(engine.stream("prompt", greedy(20, ignore_eos=False)))
        check_items(items)
        assert [item.id for item in items] == [*expected_ids("prompt", 4), EOS]
        assert (items[-1].text.strip("\ufffd"), items[-1].finish_reason) == ("", "stop")
        assert "".join(item.text for item in items) == expected_text("prompt", 4)


@pytest.mark.parametrize("stops", [(), ("never",)], ids=["plain", "with-stop-strings"])
async def test_special_tokens_are_text_where_that_is_wanted(stops: tuple[str, ...]) -> None:
    async with serving(eos=scripted_bytes("prompt", b"ab") | {8: EOS, 9: ord("c")}) as engine:
        special = engine._life.opened.tokenizer.table.pieces[EOS].decode() if engine._life.opened is not None else ""
        params = greedy(4, stop=stops, skip_special_tokens=False)
        items = await read(engine.stream("prompt", params))
        assert special and "".join(item.text for item in items) == f"ab{special}c"


async def test_ignore_eos_runs_past_it_and_it_still_has_no_text() -> None:
    async with serving(eos=scripted_bytes("prompt", b"ab") | {8: EOS, 9: ord("c")}) as engine:
        items = await read(engine.stream("prompt", greedy(4)))
        assert [(item.id, item.text) for item in items] == [(97, "a"), (98, "b"), (EOS, ""), (99, "c")]
        assert items[-1].finish_reason == "length"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", [(), ("never",)], ids=["plain", "with-stop-strings"])
async def test_a_stop_token_ends_without_text_unless_it_is_wanted(stops: tuple[str, ...], include: bool) -> None:
    async with serving(eos=scripted_bytes("prompt", b"abcd")) as engine:
        params = greedy(9, stop_token_ids=[ord("c"), 3], stop=stops, include_stop_str_in_output=include)
        stream = engine.stream("prompt", params)
        items = await read(stream)
        end = "c" if include else ""
        assert [(item.id, item.text, item.finish_reason) for item in items][-1] == (ord("c"), end, "stop")
        assert "".join(item.text for item in items) == "ab" + end
        assert stream.usage.completion_tokens == 3
        await returned(engine)


async def test_without_max_tokens_it_runs_to_the_context() -> None:
    async with serving(capacity(max_context=50)) as engine:
        items = await read(engine.stream("x" * 30, greedy(None)))
        assert [item.id for item in items] == expected_ids("x" * 30, 20)
        assert items[-1].finish_reason == "length"


async def test_without_max_tokens_it_runs_to_the_page_pool() -> None:
    async with serving(capacity(num_pages=3)) as engine:  # 48 tokens, and the last one needs no place
        items = await read(engine.stream("x" * 30, greedy(None)))
        assert [item.id for item in items] == expected_ids("x" * 30, 19)
        assert items[-1].finish_reason == "length"


async def test_a_repeated_prompt_counts_its_cached_tokens() -> None:
    async with serving() as engine:
        answers = [await engine.generate("x" * 40, greedy(5)) for _ in range(2)]
        assert [answer.usage.cached_tokens for answer in answers] == [0, 32]
        assert answers[0].choices == answers[1].choices


# -- chunks --------------------------------------------------------------------------------------------------------


async def test_a_chunk_holds_all_tokens_since_the_last_look() -> None:
    async with serving() as engine:
        stream = engine.stream("to be merged", greedy(12, n=2))
        await until(lambda: engine.stats().generated_tokens == 24)
        chunks = [chunk async for chunk in stream.chunks()]
        assert len(chunks) == 1
        check_items(chunks[0].tokens, 2)
        assert chunks[0].text == "".join(token.text for token in chunks[0].tokens)


async def test_tokens_and_chunks_of_one_stream_mix_without_loss() -> None:
    async with serving() as engine:
        stream = engine.stream("mixed", greedy(30))
        await until(lambda: engine.stats().generated_tokens >= 5)
        got = [await anext(stream), await anext(stream)]
        chunk = await stream.next_chunk()
        assert isinstance(chunk, Chunk) and len(chunk.tokens) >= 3
        got += chunk.tokens
        got.append(await anext(stream))
        async for chunk in stream.chunks():
            assert chunk.tokens
            got += chunk.tokens
        check_items(got)
        assert [token.id for token in got] == expected_ids("mixed", 30)
        assert await stream.next_chunk() is None


# -- text ----------------------------------------------------------------------------------------------------------

ALPHABET = "ab \u00e9\u20ac\U0001f600\n"
TEXTS = st.text(ALPHABET, min_size=1, max_size=12)


# Everything is drawn before a test's coroutine starts: what hypothesis raises to give an example up would otherwise be
# the exception of a task that nobody looks at.


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[bytes, int]:
    """Bytes and how many of them are generated."""
    text = draw(st.one_of(TEXTS.map(str.encode), st.binary(min_size=1, max_size=20)))
    return text, draw(st.integers(1, len(text)))


@given(cut=cut_texts())
@settings(max_examples=30, deadline=None)
async def test_joined_text_is_the_full_decode_however_it_is_cut(cut: tuple[bytes, int]) -> None:
    text, count = cut
    async with serving(eos=scripted_bytes("p", text)) as engine:
        items = await read(engine.stream("p", greedy(count)))
        assert bytes(item.id for item in items if item.id is not None) == text[:count]
        assert "".join(item.text for item in items) == text[:count].decode(errors="replace")
        for item in items[:-1]:  # a character that is still incomplete is never shown
            assert "\ufffd" not in item.text or "\ufffd" in text.decode(errors="replace")


class Stopping(NamedTuple):
    text: str
    stops: list[str]
    count: int
    n: int
    include: bool


@st.composite
def stoppings(draw: st.DrawFn) -> Stopping:
    """Stops are cut from the text itself, so they span tokens, which are bytes, and each other."""
    text = draw(TEXTS)
    some = st.one_of(
        st.tuples(st.integers(0, len(text) - 1), st.integers(1, 4)).map(lambda cut: text[cut[0] : cut[0] + cut[1]]),
        st.text(ALPHABET, min_size=1, max_size=3),
    )
    stops = draw(st.lists(some, min_size=1, max_size=3))
    count = draw(st.integers(1, len(text.encode())))
    return Stopping(text, stops, count, draw(st.integers(1, 2)), draw(st.booleans()))


@given(case=stoppings())
@settings(max_examples=60, deadline=None)
async def test_stop_strings_cut_exactly(case: Stopping) -> None:
    text, stops, count, n, include = case
    whole = text.encode()[:count].decode(errors="replace")
    found = [(whole.find(stop), len(stop)) for stop in stops if stop in whole]
    start, length = min(found, default=(len(whole), 0))
    async with serving(eos=scripted_bytes("p", text.encode())) as engine:
        stream = engine.stream("p", greedy(count, stop=stops, n=n, include_stop_str_in_output=include))
        items = await read(stream)
        check_items(items, n)
        for choice in range(n):
            shown = "".join(item.text for item in items if item.index == choice)
            assert shown == whole[: start + length * include]
        assert stream.finish_reasons == ["stop" if found else "length"] * n
        ends = [item.stop_string for item in items if item.finish_reason is not None]
        assert ends == [whole[start : start + length] or None] * n
        assert not any(item.stop_string for item in items if item.finish_reason is None)
        assert stream.usage.completion_tokens <= count * n
        await returned(engine)


async def test_a_stop_string_ends_the_request_before_its_reader_looks() -> None:
    async with serving(eos=scripted_bytes("p", b"0123456789" * 20)) as engine:
        stream = engine.stream("p", greedy(200, stop="345"))
        await until(lambda: engine.stats().generated_tokens >= 6)
        await returned(engine)
        assert engine.stats().generated_tokens <= 6 + 2, "it ran on after its stop string"
        items = await read(stream)
        assert "".join(item.text for item in items) == "012"
        assert stream.usage.completion_tokens == 6


async def test_one_choice_stops_and_the_other_goes_on() -> None:
    """The fake device gives all choices the same, so one of them is cancelled by hand."""
    async with serving() as engine:
        stream = engine.stream("p", greedy(30, n=2))
        await anext(stream)
        first, second = stream._generation.requests
        stream._generation._control.finish(first, "cancelled")
        stream._generation._end_cancelled(0)
        items = await read(stream)
        assert [item.id for item in items if item.index == 1][-1] == expected_ids("p", 30)[-1]
        assert stream.finish_reasons == ["cancelled", "length"]
        assert second.finish_reason == "length"


async def test_what_a_stop_string_held_back_is_shown_when_the_stream_is_cancelled() -> None:
    gate = Gate()
    async with serving(eos=scripted_bytes("p", b"abXY"), gate=gate) as engine:
        post = Poster()
        stream = engine.stream("p", greedy(900, stop="XY!"))
        gate.arm(4, lambda: (gate.hold(), post(stream.cancel)))
        await until(lambda: stream._generation.finished)
        gate.release()
        assert [(item.text, item.finish_reason) for item in await read(stream)] == [
            ("a", None),
            ("b", None),
            ("", None),
            ("", None),
            ("XY", "cancelled"),
        ]


# -- readers -------------------------------------------------------------------------------------------------------


async def test_a_second_reader_is_refused_and_the_first_goes_on() -> None:
    gate = Gate()
    async with serving(gate=gate) as engine:
        gate.hold()
        stream = engine.stream("one reader only", greedy(10))
        got: list[Token] = []

        async def first() -> None:
            got.extend(await read(stream))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await until(lambda: stream._generation.mailbox.awaited)
            for second in (stream.__anext__, stream.next_chunk, stream.chunks().__anext__):
                with pytest.raises(RuntimeError, match="two tasks"):
                    await second()
            gate.release()
        assert [token.id for token in got] == expected_ids("one reader only", 10)
        await check_serving(engine)


async def test_readers_may_take_turns() -> None:
    async with serving() as engine:
        stream = engine.stream("turns", greedy(4))
        got: list[int | None] = []

        async def one() -> None:
            got.append((await anext(stream)).id)

        for _ in range(4):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
        assert got == expected_ids("turns", 4)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("options", [{}, {"stop": "not in there"}], ids=["plain", "with-stop-strings"])
async def test_a_reader_that_is_behind_pauses_and_goes_on_token_for_token(n: int, options: dict[str, Any]) -> None:
    window, ahead = 8, 2
    async with serving(max_unread_tokens=window, launch_ahead=ahead) as engine:
        slow = engine.stream("slow reader", greedy(100, n=n, **options))
        await until(lambda: engine.stats().paused == n)
        for name in "abc":  # the others do not notice
            answer = await engine.generate(name * 20, greedy(30))
            assert answer.choices[0].token_ids == expected_ids(name * 20, 30)
        stats = engine.stats()
        assert (stats.paused, stats.running, stats.waiting) == (n, 0, 0)
        assert window <= len(slow._generation.mailbox) <= window + n * (ahead + 1)
        most = 0
        got: list[Token] = []
        async for chunk in slow.chunks():
            got += chunk.tokens
            most = max(most, len(chunk.tokens))
            await until(lambda: not engine.stats().running and not engine.stats().waiting)
        check_items(got, n)
        for choice in range(n):
            assert [token.id for token in got if token.index == choice] == expected_ids("slow reader", 100)
        assert most <= window + n * (ahead + 1), "unread tokens are not bounded"
        await returned(engine)


async def test_tokens_that_a_stream_has_taken_and_nobody_has_read_count_as_unread() -> None:
    window, ahead = 8, 2
    async with serving(max_unread_tokens=window, launch_ahead=ahead) as engine:
        stream = engine.stream("token by token", greedy(60))
        for read_so_far in range(1, 60):
            await anext(stream)
            await until(lambda: not engine.stats().running and not engine.stats().waiting)
            assert engine.stats().generated_tokens <= read_so_far + window + ahead + 1
        assert (await anext(stream)).finish_reason == "length"


async def test_a_paused_request_gives_way_and_comes_back_token_for_token() -> None:
    """The pool holds one long request: the paused one loses its pages to another and computes them again."""
    async with serving(capacity(num_pages=8), max_unread_tokens=4) as engine:
        slow = engine.stream("s" * 60, greedy(40))
        await until(lambda: engine.stats().paused == 1)
        answer = await engine.generate("o" * 70, greedy(20))
        assert answer.choices[0].token_ids == expected_ids("o" * 70, 20)
        assert engine.stats().preemptions >= 1
        assert [token.id for token in await read(slow)] == expected_ids("s" * 60, 40)


async def test_many_readers_that_never_read_leave_the_rows_to_others() -> None:
    async with serving(max_unread_tokens=4) as engine:
        idle = [engine.stream(f"never read {number}", greedy(900)) for number in range(9)]
        await until(lambda: engine.stats().paused == 9)
        await check_serving(engine)
        for stream in idle:
            stream.cancel()
        await returned(engine)


async def test_a_paused_request_ends_when_the_engine_closes_it() -> None:
    async with serving(max_unread_tokens=4) as engine:
        stream = engine.stream("paused", greedy(900))
        await until(lambda: engine.stats().paused == 1)
        await engine.aclose()
    items = await read(stream)
    check_items(items)
    assert (items[-1].id, items[-1].finish_reason) == (None, "cancelled")
    assert [item.id for item in items[:-1]] == expected_ids("paused", len(items) - 1)


def test_tokens_are_made_as_their_own_constructor_would() -> None:
    made = TokenMaker(TokenTable([b"a"], set()), SamplingParams(), set()).make(Delivered(0, 0, None, "length"))
    assert made == Token(id=0, text="a", index=0, position=0, finish_reason="length")
    assert repr(made)
