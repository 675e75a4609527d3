"""Answers as blocks: the blocks are what the parser finds in the whole text, however it arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import Token
from headrace.engine.tools import ReasoningMode, make_parser, parse
from headrace.server.protocol.answers import Piece
from headrace.server.protocol.blocks import BlockReader

WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', "so", " ", "\n")


def piece(tokens: list[str], position: int, *, last: bool) -> Piece:
    reason = "stop" if last else None
    made = [Token(id=1, text=text, position=position + place) for place, text in enumerate(tokens)]
    return Piece(0, "".join(tokens), reason, made)


@given(
    words=st.lists(st.sampled_from(WORDS) | st.text("<tc>{}", max_size=3), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    reasoning=st.sampled_from(["none", "tagged", "opened"]),
)
def test_blocks_are_what_the_text_holds(words: list[str], cuts: list[int], reasoning: ReasoningMode) -> None:
    reader = BlockReader(make_parser("hermes", reasoning))
    places = [0, *sorted(min(cut, len(words)) for cut in cuts), len(words)]
    steps = []
    for begin, end in zip(places, places[1:], strict=False):
        steps += reader.feed(piece(words[begin:end], begin, last=False))
    steps += reader.feed(piece([], len(words), last=True))
    parsed = parse("".join(words), "hermes", reasoning)

    def joined(kind: str) -> list[str]:
        return [block.text for block in reader.blocks if block.kind == kind]

    assert "".join(joined("text")) == parsed.content
    assert "".join(joined("reasoning")) == parsed.reasoning
    assert joined("call") == [call.arguments for call in parsed.tool_calls]
    assert [block.name for block in reader.blocks if block.kind == "call"] == [call.name for call in parsed.tool_calls]
    assert [block.index for block in reader.blocks] == list(range(len(reader.blocks)))
    order = [(step.what, step.block.index) for step in steps if step.what != "added"]
    assert order == [(what, block.index) for block in reader.blocks for what in ("opened", "closed")]
    opened = -1
    for step in steps:  # what is added belongs to the block that is open
        opened += step.what == "opened"
        assert step.block.index == opened and (step.text != "") == (step.what == "added")
    assert (reader.reasoning_tokens > 0) == bool(parsed.reasoning)
    assert reader.reasoning_tokens <= len(words)


def test_tokens_of_the_reasoning_are_counted() -> None:
    reader = BlockReader(make_parser(None, "opened"))
    thoughts = ["Hm", ", ", "so", "."]
    for position, text in enumerate([*thoughts, "</think>", "\n", "Yes", ", ", "it", " is"]):
        reader.feed(piece([text], position, last=False))
    reader.feed(piece([], 10, last=True))
    assert [(block.kind, block.text) for block in reader.blocks] == [("reasoning", "Hm, so."), ("text", "Yes, it is")]
    assert reader.reasoning_tokens == len(thoughts)


def test_what_a_limit_cuts_is_incomplete() -> None:
    reader = BlockReader(None)
    reader.feed(Piece(0, "some", None, []))
    reader.feed(Piece(0, " text", "length", [Token(id=1, text=" text", position=1)]))
    assert [(block.text, block.complete) for block in reader.blocks] == [("some text", False)]
    assert reader.finish_reason == "length" and reader.stop_string is None
