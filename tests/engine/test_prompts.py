"""What is taken for a prompt, what is refused and with which field, and what is short enough for the event loop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import InvalidParams, PromptTooLong
from headrace.engine.intake.by_turns import tokenizing_cost
from headrace.engine.intake.prompts import check_text_size, check_token_ids, is_short, to_token_ids
from headrace.engine.testing import ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_text_becomes_the_tokenizers_ids(text: str) -> None:
    assert to_token_ids(text, TOKENIZER) == list(text.encode())


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), range(1, 4)])
def test_ids_stay_as_they_are_in_a_list_of_their_own(prompt: Any) -> None:
    ids = to_token_ids(prompt, TOKENIZER)
    assert ids == [1, 2, 3]
    assert ids is not prompt


def test_messages_go_through_the_template() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert to_token_ids(chat, TOKENIZER) == TOKENIZER.encode_chat(chat)
    assert to_token_ids(tuple(chat), TOKENIZER) == TOKENIZER.encode_chat(chat)


@pytest.mark.parametrize("prompt", ["", [], (), range(0)])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidParams, match="empty") as caught:
        to_token_ids(prompt, TOKENIZER)
    assert (caught.value.field, caught.value.limit) == ("prompt", 1)


def test_no_text_is_an_empty_prompt_although_the_tokenizer_adds_a_token() -> None:
    class Adding(ByteTokenizer):
        def encode(self, text: str, *, framed: bool = True) -> list[int]:
            return [256, *super().encode(text)] if framed else super().encode(text)

    assert to_token_ids("a", Adding()) == [256, 97]
    assert to_token_ids("a", Adding(), framed=False) == [97]
    with pytest.raises(InvalidParams, match="empty") as caught:
        to_token_ids("", Adding())
    assert (caught.value.field, caught.value.limit) == ("prompt", 1)


@pytest.mark.parametrize(
    "prompt", [None, 3, 1.5, b"bytes", bytearray(b"x"), {1, 2}, {"role": "user"}, iter([1]), object()]
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidParams) as caught:
        to_token_ids(prompt, TOKENIZER)
    assert caught.value.field == "prompt"
    assert type(prompt).__name__ in str(caught.value)


@pytest.mark.parametrize(
    "value", [-1, 257, 2**31, 2**63, -(2**63), True, False, 1.0, float("nan"), "1", None, [1], {"role": "user"}]
)
@pytest.mark.parametrize("place", [0, 2])
def test_what_is_no_id_is_refused_with_its_place(value: Any, place: int) -> None:
    ids: list[Any] = [0, 256, 128]
    ids[place] = value
    with pytest.raises(InvalidParams) as caught:
        check_token_ids(ids, 257)
    assert (caught.value.field, caught.value.limit) == (f"prompt[{place}]", 256)
    assert "256" in str(caught.value)


def test_every_id_below_the_bound_is_accepted() -> None:
    check_token_ids(range(257), 257)
    check_token_ids([], 257)


@pytest.mark.parametrize(
    ("prompt", "short"),
    [
        ("x" * 2048, True),
        ("x" * 2049, False),
        ([1] * 100_000, True),
        ([], True),
        (None, True),
        ([{"role": "user", "content": ""}], False),
    ],
)
def test_what_is_tokenised_on_the_event_loop(prompt: Any, short: bool) -> None:
    assert is_short(prompt, TOKENIZER.table) is short


def test_no_text_is_tokenised_on_the_event_loop_where_a_short_one_may_take_long() -> None:
    table = ByteTokenizer().table
    table.is_quick = False
    assert not is_short("x", table) and is_short("", table) and is_short([1, 2], table)


def chat_of(*contents: str) -> list[dict[str, str]]:
    return [{"role": "", "content": content} for content in contents]


@pytest.mark.parametrize("make", [lambda size: "x" * size, lambda size: chat_of("x" * (size - 3), "xxx")])
def test_a_text_that_no_tokens_of_the_context_can_hold_is_refused(make: Any) -> None:
    check_text_size(make(50), TOKENIZER.table, max_context=10)
    with pytest.raises(PromptTooLong, match="51 characters") as caught:
        check_text_size(make(51), TOKENIZER.table, max_context=10)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("prompt", 51, 50)


def test_ids_pass_the_check_of_texts() -> None:
    check_text_size([1] * 100, TOKENIZER.table, max_context=10)


def test_the_cost_of_tokenising_counts_texts_calls_and_tools_but_stops_early() -> None:
    assert tokenizing_cost("x" * 5000) == 5000
    plain = tokenizing_cost(chat_of("hello"))
    assert tokenizing_cost(chat_of("hello"), [{"description": "x" * 1000}]) > plain + 1000
    called = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"a": "x" * 999}}}]}]
    assert tokenizing_cost(called) > 999
    assert tokenizing_cost(chat_of(*["x" * 10] * 100_000), most=1000) < 100_000
