"""The lower bound of a text's tokens: never above what the tokenizer makes, and high enough to refuse what floods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import byte_metadata, pieces, smollm2
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from headrace.engine import PromptTooLong
from headrace.engine.gguf_tokenizer import BYTE_OF_CHAR
from headrace.engine.prompts import check_text_size
from headrace.engine.token_bounds import fewest_tokens_rule
from headrace.engine.tokenizer import Tokenizer

BYTES = Tokenizer.from_gguf(byte_metadata())
ALPHABETS = [
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("he lo1\n"),
    st.sampled_from(["<|im_start|>", "<\uff5cend\u2581it\uff5c>", "</s>", "hell", "  ", "\u0301", "\u00e9", "\u4e2d"]),
]
TEXTS = st.lists(st.one_of(ALPHABETS), max_size=60).map("".join)


def core_of(**changes: Any) -> Core:
    """A byte-level tokenizer with a few merges, changed."""
    vocab = dict(BYTE_OF_CHAR) | {"he": 256, "hell": 257, "ll": 258, "Ġ" * 8: 259, "ĠĠ": 260, "ĠĠĠĠ": 261}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠĠĠ")]
    core = Core(models.BPE(vocab, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(core, name, value)
    return core


CORES: dict[str, Callable[[], tuple[Any, list[bytes]]]] = {
    "smollm2": lambda: (smollm2()._core, smollm2().table.pieces),
    "sentencepiece": lambda: (pieces()._core, pieces().table.pieces),
    "bytes": lambda: (BYTES._core, BYTES.table.pieces),
    "nfc": lambda: made(core_of(normalizer=normalizers.NFC())),
    "strips": lambda: made(stripping()),
    "removes": lambda: made(core_of(pre_tokenizer=pre_tokenizers.Split(" ", "removed"))),
}


def made(core: Core) -> tuple[Any, list[bytes]]:
    tokens = [core.id_to_token(index) or "" for index in range(core.get_vocab_size())]
    return core, [bytes(BYTE_OF_CHAR.get(char, 63) for char in token) for token in tokens]


def stripping() -> Core:
    core = core_of()
    core.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return core


@cache
def rule(name: str) -> tuple[Any, Callable[[str], int]]:
    core, table = CORES[name]()
    return core, fewest_tokens_rule(core, table)


@pytest.mark.parametrize("name", CORES)
@settings(deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    core, bound = rule(name)
    fewest = bound(text)
    assert 0 <= fewest <= len(core.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("name", "text", "fewest"),
    [
        ("smollm2", "7" * 1000, 1000),
        ("smollm2", "the " * 1000, 100),
        ("bytes", "xq\u4e2d" * 100, 400),
        ("sentencepiece", "5" * 100, 100),
        ("nfc", "x" * 100, 100),
        ("nfc", "e\u0301" * 100, 0),
        ("strips", "x" * 100, 0),
        ("removes", "x" * 100, 0),
    ],
)
def test_the_bound_is_worth_having_where_bytes_are_kept_and_0_where_they_may_not_be(
    name: str, text: str, fewest: int
) -> None:
    found = rule(name)[1](text)
    assert found >= fewest and bool(found) == bool(fewest)


def test_a_text_is_refused_untokenised_where_its_bytes_are_too_many_tokens() -> None:
    table = smollm2().table
    check_text_size("7" * 8192, table, 8192)
    with pytest.raises(PromptTooLong, match="8193 characters are at least 8193 tokens") as caught:
        check_text_size("7" * 8193, table, 8192)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("prompt", 8193, 8192)
    assert caught.value.work == 0
    chat = [{"role": "user", "content": "7" * 8193}]
    check_text_size(chat, table, 8192)  # its template may leave some of it out
