"""Log-probabilities are listed in step with the text, however it is cut into tokens and pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import Token, TokenLogprobs
from headrace.server.protocol.logprobs import Aligned, chat_logprobs, completion_logprobs

HIDDEN = 7


def token_of(piece: bytes, place: int, hidden: bool = False) -> Token:
    entry = TokenLogprobs(
        id=HIDDEN if hidden else 1,
        token=piece.decode(errors="replace"),
        bytes=piece,
        logprob=-float(place),
        rank=1,
        top_logprobs=[],
    )
    return Token(id=entry.id, text="", position=place, logprob=entry.logprob, logprobs=entry)


@st.composite
def completions(draw: st.DrawFn) -> tuple[str, list[Token]]:
    """A text, and tokens that it may have been cut into, some of them hidden ones in between."""
    text = draw(st.text(alphabet=st.sampled_from("ab é漢🌊"), min_size=1, max_size=12))
    whole = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, len(whole)), max_size=8)) | {len(whole)})
    tokens = []
    start = 0
    for cut in cuts:
        if draw(st.integers(0, 4)) == 0:
            tokens.append(token_of(b"<|x|>", len(tokens), hidden=True))
        tokens.append(token_of(whole[start:cut], len(tokens)))
        start = cut
    return text, tokens


def visible(tokens: list[Token]) -> bytes:
    return b"".join(token.logprobs.bytes for token in tokens if token.logprobs and token.id != HIDDEN)


@given(completions(), st.data())
def test_streams_list_the_tokens_of_what_they_have_shown(drawn: tuple[str, list[Token]], data: st.DataObject) -> None:
    text, tokens = drawn
    aligned = Aligned(lambda token: token == HIDDEN)
    shown, listed, taken = 0, b"", 0
    end = data.draw(st.integers(0, len(text)), label="where a stop string cuts the text")
    while taken < len(tokens):
        step = data.draw(st.integers(1, len(tokens) - taken))
        piece = tokens[taken : taken + step]
        taken += step
        complete = len(visible(tokens[:taken]).decode(errors="ignore"))
        upto = data.draw(st.integers(min(shown, end), max(shown, min(complete, end))))
        upto = end if taken == len(tokens) else max(upto, shown)
        aligned.take(text[shown:upto], piece)
        shown = upto
        for placed in aligned.shown(cut=taken == len(tokens), over=taken == len(tokens)):
            assert placed.entry is not None and placed.start < shown
            listed += b"" if placed.entry.id == HIDDEN else placed.entry.bytes
        assert listed.decode(errors="ignore").startswith(text[:shown])
    starts = [len(visible(tokens[:place]).decode(errors="ignore")) for place in range(len(tokens))]
    expected = [token for token, start in zip(tokens, starts, strict=True) if start < end]
    assert listed == visible(expected)


@given(completions(), completions())
def test_offsets_point_into_the_text(prompt: tuple[str, list[Token]], completion: tuple[str, list[Token]]) -> None:
    aligned = Aligned(lambda token: token == HIDDEN)
    reports = [token.logprobs for token in prompt[1]]
    aligned.echo(
        [token.id or 0 for token in prompt[1]], [None, *reports[1:]], prompt[1][0].logprobs.token, len(prompt[0])
    )  # type: ignore[union-attr]
    aligned.take(*completion)
    text = prompt[0] + completion[0]
    placed = aligned.all()
    assert len(placed) == len(prompt[1]) + len(completion[1])
    starts = [each.start for each in placed]
    assert starts == sorted(starts) and starts[len(prompt[1])] == len(prompt[0])
    for each, token in zip(placed, [*prompt[1], *completion[1]], strict=True):
        if token.id != HIDDEN and "\ufffd" not in each.token:
            assert text[each.start :].startswith(each.token)


def test_the_space_that_a_vocabulary_puts_before_a_prompt() -> None:
    aligned = Aligned(lambda token: False)
    pieces = [token_of(piece, place).logprobs for place, piece in enumerate([b" Hel", b"lo", b" you"])]
    aligned.echo([1, 1, 1], [None, *pieces[1:]], " Hel", len("Hello you"))
    assert [each.start for each in aligned.all()] == [0, 3, 5]


def test_tokens_of_one_text_are_told_apart() -> None:
    first, second = token_of(b"\xf0", 1).logprobs, token_of(b"\xf1", 2).logprobs
    assert first is not None and second is not None
    first.top_logprobs = [first, second]
    aligned = Aligned(lambda token: False)
    aligned.take("", [Token(id=1, text="", position=0, logprobs=first)])
    placed = aligned.all()
    found = completion_logprobs(placed, 2)
    assert found is not None and found["top_logprobs"] == [{"bytes:\\xf0": -1.0, "bytes:\\xf1": -2.0}]
    chat = chat_logprobs(placed)
    assert chat is not None and [top["bytes"] for top in chat["content"][0]["top_logprobs"]] == [[0xF0], [0xF1]]
    assert chat_logprobs([]) is None and completion_logprobs([], 2) is None
