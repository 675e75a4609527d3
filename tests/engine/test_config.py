"""`EngineConfig` and sizes in words: what is accepted, and that what is not names its field and the limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import Engine, EngineConfig, InvalidParams
from headrace.engine.config import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("123", 123),
        ("7B", 7),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        (" 1.5GiB ", 3 * 2**29),
        ("512 MB", 512 * 10**6),
        ("1KB", 1000),
        ("1kIb", 1024),
        ("0.1KB", 100),
        (4096, 4096),
        (None, None),
    ],
)
def test_sizes(text: object, expected: object) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "two", "-1", "1e9", "1 2", "1TiB", "1GiBs", "0x10", "nan", "inf", "1.", ".5"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="KiB"):
        parse_bytes(text)
    with pytest.raises(InvalidParams) as caught:
        EngineConfig(model="m", kv_memory=text)
    assert caught.value.field == "kv_memory"


@given(st.integers(min_value=1, max_value=2**70))
def test_a_size_in_words_is_exact(count: int) -> None:
    assert parse_bytes(str(count)) == count
    assert parse_bytes(f"{count}KiB") == count * 1024


def test_an_absurd_size_is_still_a_number_or_a_typed_refusal() -> None:
    try:
        assert EngineConfig(model="m", kv_memory="9" * 400 + "GiB").kv_memory == int("9" * 400) * 2**30
    except InvalidParams as error:
        assert error.field == "kv_memory"


ACCEPTED: list[dict[str, Any]] = [
    {"model": Path("folder") / "model"},
    {"device": "cpu"},
    {"dtype": "float32"},
    {"load_format": "random"},
    {"kv_memory": 1},
    {"page_size": 1},
    {"page_size": 1024},
    {"max_rows": 65536},
    {"max_rows": 8, "max_batched_tokens": 8},
    {"max_context": 2},
    {"max_unread_tokens": 1},
    {"launch_ahead": 1},
    {"launch_ahead": 8},
    {"cpu_threads": 1},
    {"seed": -5},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"prefix_cache": False},
]

REFUSED: list[tuple[dict[str, Any], str, object]] = [
    ({"model": None}, "model", None),
    ({"model": 3}, "model", None),
    ({"model": ""}, "model", {"min_length": 1}),
    ({"device": "tpu"}, "device", None),
    ({"dtype": "int3"}, "dtype", {"expected": "'auto', 'float32' or 'bfloat16'"}),
    ({"load_format": "magic"}, "load_format", {"expected": "'auto' or 'random'"}),
    ({"kv_memory": 0}, "kv_memory", {"gt": 0}),
    ({"kv_memory": -1}, "kv_memory", {"gt": 0}),
    ({"kv_memory": "0GiB"}, "kv_memory", {"gt": 0}),
    ({"kv_memory": math.nan}, "kv_memory", {"gt": 0, "lt": 2**63}),
    ({"kv_memory": math.inf}, "kv_memory", {"gt": 0, "lt": 2**63}),
    ({"kv_memory": 1.5}, "kv_memory", None),
    ({"page_size": 0}, "page_size", {"ge": 1}),
    ({"page_size": 1025}, "page_size", {"le": 1024}),
    ({"page_size": None}, "page_size", None),
    ({"max_batched_tokens": 0}, "max_batched_tokens", {"ge": 1}),
    ({"max_rows": 0}, "max_rows", {"ge": 1}),
    ({"max_rows": 65537}, "max_rows", {"le": 65536}),
    ({"max_rows": 8, "max_batched_tokens": 7}, "max_batched_tokens", {"ge": 8}),
    ({"max_context": 1}, "max_context", {"ge": 2}),
    ({"max_unread_tokens": 0}, "max_unread_tokens", {"ge": 1}),
    ({"launch_ahead": 0}, "launch_ahead", {"ge": 1}),
    ({"launch_ahead": 9}, "launch_ahead", {"le": 8}),
    ({"cpu_threads": 0}, "cpu_threads", {"ge": 1}),
    ({"seed": None}, "seed", None),
    ({"seed": 0.5}, "seed", None),
    ({"seed": 2**63}, "seed", {"lt": 2**63}),
    ({"seed": -(2**63) - 1}, "seed", {"ge": -(2**63)}),
    ({"prefix_cache": "perhaps"}, "prefix_cache", None),
    ({"kv_memry": 1}, "kv_memry", None),
]


@pytest.mark.parametrize("values", ACCEPTED, ids=repr)
def test_accepted(values: dict[str, Any]) -> None:
    config = EngineConfig(**({"model": "m"} | values))
    for name, value in values.items():
        assert getattr(config, name) == (str(value) if isinstance(value, Path) else value)


@pytest.mark.parametrize(("values", "field", "limit"), REFUSED, ids=lambda value: repr(value)[:40])
def test_refused_by_the_config_and_by_the_engine(values: dict[str, Any], field: str, limit: object) -> None:
    options = {"model": "m"} | values
    for make in (EngineConfig, Engine):
        with pytest.raises(InvalidParams) as caught:
            make(**options)
        error = caught.value
        assert error.field == field
        assert error.limit == limit
        assert str(error).startswith(f"{field}: ")


def test_the_model_is_needed_and_the_config_is_frozen() -> None:
    with pytest.raises(InvalidParams) as caught:
        EngineConfig()
    assert caught.value.field == "model"
    with pytest.raises(InvalidParams, match=r"^\w+: EngineConfig cannot change; make a copy with model_copy\("):
        EngineConfig(model="m").seed = 3
