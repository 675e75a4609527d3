"""The lower bound of a text's tokens: never above what the tokenizer makes, and high enough to refuse what floods."""

from __future__ import annotations

import json
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
from headrace.engine.intake.prompts import check_fewest_tokens
from headrace.engine.tokens.bounds import fewest_tokens_rule
from headrace.engine.tokens.gguf import BYTE_OF_CHAR
from headrace.engine.tokens.tokenizer import Tokenizer

ENOUGH = 1 << 30
BYTES = Tokenizer.from_gguf(byte_metadata())
ALPHABETS = [
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("he lo1\n"),
    st.sampled_from(["\u2581", "\u2581\u2581", "a"]),
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


def pieces_of(lost: tuple[str, ...] = (), **changes: Any) -> Core:
    """The small SentencePiece tokenizer with another model, or without some of its tokens."""
    state = json.loads(pieces()._core.to_str())
    state["model"] |= {"fuse_unk": True} | changes
    for token in lost:
        del state["model"]["vocab"][token]
    return Core.from_str(json.dumps(state))


def byte_levels(*splits: Any) -> Core:
    """A tokenizer with a byte-level decoder and other pre-tokenizers."""
    return core_of(pre_tokenizer=pre_tokenizers.Sequence(list(splits)))


CORES: dict[str, Callable[[], Any]] = {
    "smollm2": lambda: smollm2()._core,
    "sentencepiece": lambda: pieces()._core,
    "no fallback": lambda: pieces_of(byte_fallback=False),
    "one byte missing": lambda: pieces_of(lost=("<0xA9>",)),
    "parts of words": lambda: pieces_of(byte_fallback=False, continuing_subword_prefix="##", merges=[]),
    "spaces as they are": lambda: without_normalizer(pieces_of()),
    "bytes": lambda: BYTES._core,
    "decodes bytes alone": lambda: byte_levels(pre_tokenizers.Digits()),
    "encodes bytes twice": lambda: byte_levels(pre_tokenizers.ByteLevel(False), pre_tokenizers.ByteLevel(False)),
    "writes spaces, then bytes": lambda: byte_levels(pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(False)),
    "nfc": lambda: core_of(normalizer=normalizers.NFC()),
    "strips": lambda: stripping(),
    "removes": lambda: core_of(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
}


def without_normalizer(core: Core) -> Core:
    core.normalizer = None
    return core


def stripping() -> Core:
    core = core_of()
    core.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return core


@cache
def rule(name: str) -> tuple[Any, Callable[[str, int], int]]:
    core = CORES[name]()
    return core, fewest_tokens_rule(core, core.get_vocab())


@pytest.mark.parametrize("name", CORES)
@settings(deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    core, bound = rule(name)
    fewest = bound(text, ENOUGH)
    assert 0 <= fewest <= len(core.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("name", "text", "fewest"),
    [
        ("smollm2", "7" * 1000, 1000),
        ("smollm2", "the " * 1000, 100),
        ("bytes", "xq\u4e2d" * 100, 400),
        ("sentencepiece", "5" * 100, 100),
        ("no fallback", "h" * 100, 10),
        ("no fallback", "\u00e9" * 100, 0),
        ("one byte missing", "\u00e9" * 100, 0),
        ("decodes bytes alone", "x" * 100, 100),
        ("encodes bytes twice", "x" * 100, 0),
        ("nfc", "x" * 100, 100),
        ("nfc", "e\u0301" * 100, 0),
        ("strips", "x" * 100, 0),
        ("removes", "x" * 100, 0),
    ],
)
def test_the_bound_is_worth_having_where_bytes_are_kept_and_0_where_they_may_not_be(
    name: str, text: str, fewest: int
) -> None:
    found = rule(name)[1](text, ENOUGH)
    assert found >= fewest and bool(found) == bool(fewest)


def test_a_text_is_refused_untokenised_where_its_bytes_are_too_many_tokens() -> None:
    table = smollm2().table
    check_fewest_tokens("7" * 8192, table, 8192)
    with pytest.raises(PromptTooLong, match="8193 characters are at least 8193 tokens") as caught:
        check_fewest_tokens("7" * 8193, table, 8192)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("prompt", 8193, 8192)
    chat = [{"role": "user", "content": "7" * 8193}]
    check_fewest_tokens(chat, table, 8192)  # its template may leave some of it out


def test_no_more_of_a_text_is_counted_than_it_takes_to_refuse_it() -> None:
    bound = rule("smollm2")[1]
    text = "7" * (1 << 22)
    assert 8192 < bound(text, 8192) < 1 << 17
    assert bound(text, 1 << 30) == 1 << 22
    assert bound("the " * 100_000, 1 << 30) <= len(smollm2().encode("the " * 100_000))
