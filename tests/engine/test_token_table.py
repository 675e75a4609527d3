"""Tables of ids: which token the library says that an id stands for, asked for as seldom as that allows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tokenizer_files import byte_metadata, smollm2
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from headrace.engine.tokens.gguf import GgufBackend, build_gguf_tokenizer
from headrace.engine.tokens.tokenizer import Tokenizer


class Counted:
    """A tokenizer that counts which of its methods are called."""

    def __init__(self, core: Any) -> None:
        self.core, self.calls = core, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.core, name)


def test_opening_copies_the_vocabulary_once_and_asks_for_no_token_by_itself() -> None:
    built = build_gguf_tokenizer(byte_metadata())
    counted = Counted(built.backend_tokenizer)
    Tokenizer(GgufBackend(counted, None, built.special_tokens_map), name="counted")
    assert (counted.calls["get_vocab"], counted.calls["id_to_token"]) == (1, 0)


@pytest.mark.parametrize(
    ("vocabulary", "added"),
    [
        ({"a": 0, "b": 1, "c": 2}, []),
        ({"a": 0, "b": 1, "c": 7}, ["<s>"]),
        ({"a": 0, "b": 1, "c": 1}, ["<s>", "é"]),
        ({"a": 0, "": 1, "b": 2}, ["b"]),
    ],
    ids=["whole", "with-holes", "shared", "empty-token"],
)
def test_every_id_stands_for_the_token_that_the_library_names(vocabulary: dict[str, int], added: list[str]) -> None:
    core = Library(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token) for token in added])
    table = Tokenizer(GgufBackend(core, None, {}), name="small").table
    # Both "é" and its byte are spelled so; the byte is meant where the character has one.
    named = [core.id_to_token(index) or "" for index in range(len(table.pieces))]
    assert table.pieces == [b"\xe9" if token == "é" else token.encode() for token in named]
    assert len(table.pieces) == max(core.get_vocab(with_added_tokens=True).values()) + 1


def test_every_id_of_a_real_vocabulary_has_its_token() -> None:
    tokenizer = smollm2()
    core = tokenizer._core
    texts = [core.decode([index], skip_special_tokens=False) for index in range(tokenizer.vocab_size)]
    assert texts == [piece.decode(errors="replace") for piece in tokenizer.table.pieces]
