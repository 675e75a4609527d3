"""`SamplingParams`: what is accepted, and that what is not names its field, its value and the limit."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import HeadraceError, InvalidParams, Rejected, SamplingParams

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"n": 1},
    {"n": 128},
    {"temperature": 0},
    {"temperature": 0.0},
    {"temperature": 1e6},
    {"top_k": 0},
    {"top_k": 2**31 - 1},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"min_p": 0},
    {"min_p": 1},
    {"seed": None},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"max_tokens": None},
    {"max_tokens": 1},
    {"stop": ()},
    {"stop": ["a"] * 16},
    {"stop": "x" * 1024},
    {"stop_token_ids": {0, 2**31 - 1}},
    {"stop_token_ids": list(range(16))},
    {"ignore_eos": True},
    {"n": 2, "best_of": 2},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
    {"logit_bias": {}},
    {"logit_bias": {"50256": -100, 3: 1.5}},
    {"logit_bias": dict.fromkeys(range(1024), -100.0)},
    {"allowed_token_ids": {1, 2}, "forbidden_token_ids": {2}},
    {"bad_words": "word"},
    {"bad_words": ["a"] * 64},
    {"min_tokens": 8, "max_tokens": 8},
    {"min_tokens": 8},
    {"beam_width": 4, "n": 4, "length_penalty": -1, "early_stopping": "never", "temperature": 0, "stop_token_ids": [1]},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"spaces_between_special_tokens": True, "skip_special_tokens": False},
]

NO_SEARCH: dict[str, Any] = {
    "best_of": 2,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.5,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 2,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1],
    "forbidden_token_ids": [1],
    "bad_words": "x",
    "seed": 1,
    "min_tokens": 1,
    "stop": "x",
    "logprobs": 0,
    "prompt_logprobs": 0,
    "response_format": {"type": "json_object"},
    "deterministic": True,
}
"""What a search by beams cannot go with."""
OTHER_MASKS = ("allowed_token_ids", "forbidden_token_ids", "bad_words", "min_tokens")
"""What a format cannot go with."""
REFUSED: list[tuple[dict[str, Any], str, object]] = [
    ({"n": 0}, "n", {"ge": 1}),
    ({"n": 129}, "n", {"le": 128}),
    ({"n": 1.5}, "n", None),
    ({"n": True}, "n", None),
    ({"n": "2"}, "n", None),
    ({"temperature": -0.1}, "temperature", {"ge": 0.0}),
    ({"temperature": math.nan}, "temperature", {"ge": 0.0}),
    ({"temperature": math.inf}, "temperature", {"ge": 0.0}),
    ({"temperature": -math.inf}, "temperature", {"ge": 0.0}),
    ({"temperature": "nan"}, "temperature", {"ge": 0.0}),
    ({"temperature": None}, "temperature", None),
    ({"temperature": "hot"}, "temperature", None),
    ({"top_k": -2}, "top_k", {"ge": 0}),
    ({"top_k": 2**31}, "top_k", {"lt": 2**31}),
    ({"top_k": 1.0}, "top_k", None),
    ({"top_p": 0}, "top_p", {"gt": 0.0}),
    ({"top_p": 1.0001}, "top_p", {"le": 1.0}),
    ({"top_p": math.nan}, "top_p", {"gt": 0.0, "le": 1.0}),
    ({"min_p": -1e-9}, "min_p", {"ge": 0.0}),
    ({"min_p": 2}, "min_p", {"le": 1.0}),
    ({"min_p": math.inf}, "min_p", {"ge": 0.0, "le": 1.0}),
    ({"seed": 2**63}, "seed", {"lt": 2**63}),
    ({"seed": -(2**63) - 1}, "seed", {"ge": -(2**63)}),
    ({"seed": 1.0}, "seed", None),
    ({"max_tokens": 0}, "max_tokens", {"ge": 1}),
    ({"max_tokens": -5}, "max_tokens", {"ge": 1}),
    ({"max_tokens": 2**31}, "max_tokens", {"lt": 2**31}),
    ({"max_tokens": 10.5}, "max_tokens", None),
    ({"stop": ""}, "stop.0", {"min_length": 1}),
    ({"stop": ["a", ""]}, "stop.1", {"min_length": 1}),
    ({"stop": ["a"] * 17}, "stop", {"max_length": 16}),
    ({"stop": "x" * 1025}, "stop.0", {"max_length": 1024}),
    ({"stop": 7}, "stop", None),
    ({"stop": [None]}, "stop.0", None),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0", {"ge": 0}),
    ({"stop_token_ids": [2**31]}, "stop_token_ids.0", {"lt": 2**31}),
    ({"stop_token_ids": [True]}, "stop_token_ids.0", None),
    ({"stop_token_ids": [1.0]}, "stop_token_ids.0", None),
    ({"stop_token_ids": range(17)}, "stop_token_ids", {"max_length": 16}),
    ({"stop_token_ids": 5}, "stop_token_ids", None),
    ({"ignore_eos": "perhaps"}, "ignore_eos", None),
    ({"temprature": 1.0}, "temprature", None),
    ({"best_of": 0}, "best_of", {"ge": 1}),
    ({"best_of": 129}, "best_of", {"le": 128}),
    ({"n": 3, "best_of": 2}, "best_of", {"ge": 3}),
    ({"presence_penalty": 2.1}, "presence_penalty", {"le": 2.0}),
    ({"presence_penalty": -2.1}, "presence_penalty", {"ge": -2.0}),
    ({"presence_penalty": math.nan}, "presence_penalty", {"ge": -2.0, "le": 2.0}),
    ({"frequency_penalty": 3}, "frequency_penalty", {"le": 2.0}),
    ({"frequency_penalty": None}, "frequency_penalty", None),
    ({"repetition_penalty": 0}, "repetition_penalty", {"ge": 0.01}),
    ({"repetition_penalty": 101}, "repetition_penalty", {"le": 100.0}),
    ({"logit_bias": {-1: 1.0}}, "logit_bias.0.0", {"ge": 0}),
    ({"logit_bias": {2**31: 1.0}}, "logit_bias.0.0", {"lt": 2**31}),
    ({"logit_bias": {"one": 1.0}}, "logit_bias.0.0", None),
    ({"logit_bias": {1: 101.0}}, "logit_bias.0.1", {"le": 100.0}),
    ({"logit_bias": {1: -101.0}}, "logit_bias.0.1", {"ge": -100.0}),
    ({"logit_bias": {1: math.nan}}, "logit_bias.0.1", None),
    ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias", None),
    ({"logit_bias": {"1": 1.0, 1: 2.0}}, "logit_bias", None),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", {"max_length": 1024}),
    ({"logit_bias": 5}, "logit_bias", None),
    ({"allowed_token_ids": []}, "allowed_token_ids", {"min_length": 1}),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids.0", {"ge": 0}),
    ({"allowed_token_ids": [1, 2], "forbidden_token_ids": [2, 1]}, "allowed_token_ids", None),
    ({"forbidden_token_ids": [2**31]}, "forbidden_token_ids.0", {"lt": 2**31}),
    ({"forbidden_token_ids": range(2**15 + 1)}, "forbidden_token_ids", {"max_length": 2**15}),
    ({"forbidden_token_ids": 5}, "forbidden_token_ids", None),
    ({"bad_words": [""]}, "bad_words.0", {"min_length": 1}),
    ({"bad_words": "x" * 129}, "bad_words.0", {"max_length": 128}),
    ({"bad_words": ["a"] * 65}, "bad_words", {"max_length": 64}),
    ({"bad_words": [3]}, "bad_words.0", None),
    ({"min_tokens": -1}, "min_tokens", {"ge": 0}),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", {"le": 8}),
    ({"logprobs": -1}, "logprobs", {"ge": 0}),
    ({"logprobs": 21}, "logprobs", {"le": 20}),
    ({"logprobs": True}, "logprobs", None),
    ({"prompt_logprobs": 21}, "prompt_logprobs", {"le": 20}),
    ({"prompt_logprobs": 1.0}, "prompt_logprobs", None),
    ({"beam_width": 0}, "beam_width", {"ge": 1}),
    ({"beam_width": 17}, "beam_width", {"le": 16}),
    ({"beam_width": 2, "n": 3}, "n", {"le": 2}),
    ({"beam_width": 2, "length_penalty": 11}, "length_penalty", {"le": 10.0}),
    ({"beam_width": 2, "early_stopping": "often"}, "early_stopping", {"expected": "True, False or 'never'"}),
    ({"length_penalty": 2.0}, "length_penalty", None),
    ({"early_stopping": True}, "early_stopping", None),
    ({"beam_width": 2, "temperature": 0.5}, "temperature", None),
    *(({"beam_width": 2, field: value}, field, None) for field, value in NO_SEARCH.items()),
    *(({"response_format": {"type": "json_object"}, field: NO_SEARCH[field]}, field, None) for field in OTHER_MASKS),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", None),
    ({"response_format": {"type": "poem"}}, "response_format", None),
    ({"response_format": 5}, "response_format", None),
    ({"include_stop_str_in_output": "perhaps"}, "include_stop_str_in_output", None),
    ({"skip_special_tokens": None}, "skip_special_tokens", None),
    ({"deterministic": 2}, "deterministic", None),
    ({"speculate": "never"}, "speculate", None),
    ({"spaces_between_special_tokens": "perhaps"}, "spaces_between_special_tokens", None),
]


@pytest.mark.parametrize("values", ACCEPTED, ids=repr)
def test_accepted(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params


@pytest.mark.parametrize(("values", "field", "limit"), REFUSED, ids=lambda value: repr(value)[:40])
def test_refused(values: dict[str, Any], field: str, limit: object) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**values)
    error = caught.value
    assert error.field == field
    assert error.limit == limit
    assert str(error).startswith(f"{field}: ")
    for bound in limit.values() if isinstance(limit, dict) else ():
        assert str(bound) in str(error) or f"{bound:g}" in str(error)
    assert isinstance(error, ValueError) and isinstance(error, Rejected) and isinstance(error, HeadraceError)


def test_every_field_has_values_that_are_refused() -> None:
    refused = {field.partition(".")[0] for _, field, _ in REFUSED}
    assert refused - SamplingParams.model_fields.keys() == {"temprature"}
    assert refused >= SamplingParams.model_fields.keys()


@given(
    st.sampled_from(sorted(SamplingParams.model_fields)), st.sampled_from([object(), math.nan, "\0", {"a": 1}, [[]]])
)
def test_what_is_of_no_kind_that_a_field_takes_names_the_field(field: str, value: Any) -> None:
    if (field, value) in (("stop", "\0"), ("bad_words", "\0")):
        return
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value.field).partition(".")[0] == field


def test_a_set_with_what_is_no_id_is_refused_as_any_other() -> None:
    with pytest.raises(InvalidParams, match="stop_token_ids"):
        SamplingParams(stop_token_ids={1, "a"})


def test_the_first_of_several_complaints_is_raised_and_a_huge_value_is_not_repeated_in_full() -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(n=0, top_k="x" * 10_000)
    assert caught.value.field == "n"
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(top_k="x" * 10_000)
    assert len(str(caught.value)) < 300


def test_a_single_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_a_bias_from_json_is_that_of_a_mapping() -> None:
    assert SamplingParams(logit_bias={"7": 1, "3": -2.5}) == SamplingParams(logit_bias=((7, 1.0), (3, -2.5)))


def test_a_set_of_ids_is_in_a_fixed_order() -> None:
    ids = {300, 7, 1000, 20}
    assert SamplingParams(stop_token_ids=ids) == SamplingParams(stop_token_ids=frozenset(ids))
    assert set(SamplingParams(stop_token_ids=ids).stop_token_ids) == ids


def test_frozen_hashable_and_picklable() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], seed=3)
    with pytest.raises(InvalidParams, match=r"^n: SamplingParams cannot change; make a copy with replace\(n="):
        params.n = 2
    assert {params: 1}[SamplingParams(stop=["a"], stop_token_ids=[1], seed=3)] == 1
    assert pickle.loads(pickle.dumps(params)) == params
