"""The detokenizer and the stop matcher against whole-text oracles, however the text is cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.tokens.spaced import SpacedDetokenizer
from headrace.engine.tokens.stop_matcher import StopMatcher
from headrace.engine.tokens.text import Detokenizer
from headrace.engine.tokens.token_table import TokenTable

# Every byte, some whole characters, parts of characters, and a special token at 260.
BYTE_PIECES = [bytes([byte]) for byte in range(256)] + [
    b"plain",
    "é".encode(),
    "🙂".encode()[:3],
    b"a\xe2\x96",
    b"<end>",
]
BYTE_TABLE = TokenTable(BYTE_PIECES, special_ids={260})

# A SentencePiece vocabulary: byte tokens 0 to 255, pieces, and a special token at 259.
PIECE_TABLE = TokenTable(
    [bytes([byte]) for byte in range(256)] + [b" word", "é".encode(), b"", b"</s>"],
    special_ids={259},
    byte_ids=set(range(256)),
)


def joined(table: TokenTable, ids: list[int], skip: bool = True) -> str:
    """Feed one by one, then flush."""
    detokenizer = Detokenizer(table, skip_special_tokens=skip)
    return "".join([detokenizer.feed(index) for index in ids]) + detokenizer.flush()


@given(st.lists(st.integers(0, 263)), st.booleans())
def test_byte_level_text_is_the_lossy_reading_of_all_bytes(ids: list[int], skip: bool) -> None:
    shown = [index for index in ids if index < len(BYTE_PIECES) and not (skip and index == 260)]
    expected = b"".join(BYTE_PIECES[index] for index in shown).decode("utf-8", "replace")
    assert joined(BYTE_TABLE, ids, skip) == expected


@given(st.text())
def test_characters_come_out_whole_and_as_soon_as_they_are_complete(text: str) -> None:
    detokenizer = Detokenizer(BYTE_TABLE)
    for char in text:
        *first, last = char.encode()
        assert [detokenizer.feed(byte) for byte in first] == [""] * len(first)
        assert detokenizer.feed(last) == char
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, 262)), st.booleans())
def test_a_run_of_byte_tokens_is_text_or_one_mark_per_byte(ids: list[int], skip: bool) -> None:
    expected, run = "", b""
    for index in [*ids, None]:
        if index is not None and (index >= 260 or index == 258 or (skip and index == 259)):
            continue  # not part of the sequence, so it does not end the run
        if index is not None and index < 256:
            run += bytes([index])
            continue
        try:
            expected += run.decode()
        except UnicodeDecodeError:
            expected += "\ufffd" * len(run)
        run = b""
        expected += PIECE_TABLE.pieces[index].decode() if index is not None else ""
    assert joined(PIECE_TABLE, ids, skip) == expected


def test_incomplete_bytes_at_the_end_become_one_mark() -> None:
    assert joined(BYTE_TABLE, [0x41, 0xF0, 0x9F, 0x99]) == "A\ufffd"
    assert joined(PIECE_TABLE, [256, 0xF0, 0x9F, 0x99]) == " word\ufffd\ufffd\ufffd"


def test_special_tokens_do_not_split_a_character() -> None:
    assert joined(BYTE_TABLE, [0xC3, 260, 0xA9]) == "é"
    assert joined(BYTE_TABLE, [0xC3, 260, 0xA9], skip=False) == "\ufffd<end>\ufffd"
    assert joined(PIECE_TABLE, [0xC3, 259, 0xA9]) == "é"


def test_ids_outside_the_table_have_no_text() -> None:
    assert joined(BYTE_TABLE, [-1, 10**9, 256, len(BYTE_PIECES)]) == "plain"


def test_one_table_serves_many_sequences() -> None:
    one, other = Detokenizer(BYTE_TABLE), Detokenizer(BYTE_TABLE)
    assert (one.feed(0xC3), other.feed(0x41), one.feed(0xA9), other.flush()) == ("", "A", "é", "")


def cut_at_first(text: str, stops: tuple[str, ...], include: bool = False) -> tuple[str, bool]:
    """The naive answer: cut before, or after, the stop string that starts first, the shorter of two."""
    places = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if not places:
        return text, False
    start, length = min(places)
    return text[: start + length if include else start], True


def run_matcher(chunks: list[str], stops: tuple[str, ...], include: bool = False) -> tuple[str, bool]:
    """Everything shown, and whether a stop string ended it."""
    matcher = StopMatcher(stops, include)
    shown = "".join([matcher.feed(chunk)[0] for chunk in chunks])
    return shown + matcher.flush(), matcher.matched


# Two letters make overlaps, borders and stops within stops likely.
stop_sets = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4).map(tuple)


@given(st.lists(st.text("abc", max_size=8), max_size=12), stop_sets, st.booleans())
def test_the_cut_depends_on_the_text_and_not_on_its_pieces(
    chunks: list[str], stops: tuple[str, ...], include: bool
) -> None:
    whole = "".join(chunks)
    expected = cut_at_first(whole, stops, include)
    assert run_matcher(chunks, stops, include) == expected
    assert run_matcher([whole], stops, include) == expected
    assert run_matcher(list(whole), stops, include) == expected


@given(st.lists(st.text("abc", max_size=8), max_size=12), stop_sets, st.booleans())
def test_the_stop_string_that_ended_the_text_is_told(chunks: list[str], stops: tuple[str, ...], include: bool) -> None:
    matcher, whole = StopMatcher(stops, include), "".join(chunks)
    for chunk in chunks:
        matcher.feed(chunk)
    matcher.flush()
    first = min(((whole.find(stop), len(stop), stop) for stop in stops if stop in whole), default=None)
    assert matcher.stop == (None if first is None else first[2])


@given(st.text("abc", max_size=30), stop_sets)
def test_exactly_what_may_start_a_stop_string_is_held(text: str, stops: tuple[str, ...]) -> None:
    matcher, shown, matched = StopMatcher(stops), "", False
    for end, char in enumerate(text, start=1):
        safe, matched = matcher.feed(char)
        shown += safe
        read = text[:end]
        cut = len(cut_at_first(read, stops)[0])  # the end of `read` where nothing matches
        open_starts = [start for start in range(end) if any(stop.startswith(read[start:]) for stop in stops)]
        assert shown == read[: min([cut, *open_starts])]
        assert matched == (len(shown) == cut < end)
        if matched:
            break


def test_a_match_may_span_tokens_and_ends_the_text() -> None:
    matcher = StopMatcher(("\nUser:",))
    assert matcher.feed("Fine.\nUs") == ("Fine.", False)
    assert matcher.feed("er") == ("", False)
    assert matcher.feed(": more") == ("", True)
    assert matcher.feed("later") == ("", True)
    assert matcher.flush() == ""


def test_held_text_is_released_when_the_stop_string_does_not_come() -> None:
    matcher = StopMatcher(("###",))
    assert matcher.feed("a##") == ("a", False)
    assert matcher.feed("b") == ("##b", False)
    assert matcher.feed("#") == ("", False)
    assert matcher.flush() == "#"
    assert not matcher.matched


def test_an_inner_stop_waits_for_an_outer_one_that_starts_earlier() -> None:
    outer = StopMatcher(("abcd", "bc"))
    assert outer.feed("abc") == ("", False)
    assert outer.feed("d") == ("", True)
    inner = StopMatcher(("abcd", "bc"))
    assert inner.feed("abc") == ("", False)
    assert inner.feed("x") == ("a", True)
    ended = StopMatcher(("abcd", "bc"))
    assert ended.feed("abc") == ("", False)
    assert (ended.flush(), ended.matched) == ("a", True)


def test_no_stops_pass_everything() -> None:
    assert run_matcher(["a", "", "b"], ()) == ("ab", False)


@pytest.mark.parametrize("text", ["a" * 20_000, ("a" * 1022 + "c") * 20], ids=["always-nearly", "restarts"])
def test_the_worst_stop_strings_cost_linear_time(text: str) -> None:
    stops = tuple("a" * 1023 + chr(ord("d") + index) for index in range(16))
    matcher = StopMatcher(stops)
    began = time.thread_time()  # threads of earlier tests may still compute
    shown = "".join([matcher.feed(text[start : start + 4])[0] for start in range(0, len(text), 4)])
    spent = time.thread_time() - began
    assert shown + matcher.flush() == text
    assert spent < 2.0  # 16 needles over 20,000 characters take about 0.1 s; a quadratic search takes minutes


# -- spaces around special tokens -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 257), max_size=12))
def test_special_tokens_are_set_off_as_by_joining_the_parts(ids: list[int]) -> None:
    """Each special token is a part, and each run of others, where it has text; 256 and 257 are special."""
    table = TokenTable([bytes([value]) for value in range(256)] + [b"<a>", b"<b>"], special_ids={256, 257})
    parts: list[str] = []
    run = bytearray()
    for token in [*ids, None]:
        if token is not None and token < 256:
            run.append(token)
            continue
        parts += [run.decode(errors="replace")] if run else []
        run.clear()
        parts += [] if token is None else [table.pieces[token].decode()]
    spaced = SpacedDetokenizer(table)
    assert "".join([*map(spaced.feed, ids), spaced.flush()]) == " ".join(parts)
