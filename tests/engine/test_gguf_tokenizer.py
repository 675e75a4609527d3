"""What GGUF metadata says is what the tokenizer does; damaged or unknown metadata is refused by name."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import (
    as_transformers,
    byte_metadata,
    gemma4_metadata,
    piece_metadata,
    pieces,
    text_of,
    tokens_of,
)

from headrace.engine.errors import ModelRejected
from headrace.engine.tokens.gguf import build_gguf_tokenizer
from headrace.engine.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build the shared tokenizer outside the time limit of any one example."""
    pieces()
    as_transformers(piece_metadata)


# --- SentencePiece vocabularies


def test_pieces_merge_by_score_and_fall_back_to_bytes() -> None:
    assert tokens_of(pieces(), pieces().encode("hello world")) == ["<s>", " hello", " world"]
    ids = pieces().encode("hello\né")
    assert [bytes([index - 3]) for index in ids[2:]] == [b"\n", b"\xc3", b"\xa9"]
    assert pieces().decode(ids) == "hello\né"
    assert pieces().eos_ids == (2,)


@given(st.lists(st.integers(0, 300)))
def test_a_completion_continues_its_prompt(completion: list[int]) -> None:
    prompt = pieces().encode("hello")
    whole = as_transformers(piece_metadata).decode(
        [*prompt, *completion], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert text_of(pieces(), completion) == whole[len("hello") :]


@given(st.text("helo wrd\né🙂"))
def test_piece_text_survives_the_round_trip(text: str) -> None:
    assert pieces().decode(pieces().encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["<s>", " hello"]),
        ({"add_bos_token": False}, [" hello"]),
        ({"add_eos_token": True}, ["<s>", " hello", "</s>"]),
        ({"add_space_prefix": False}, ["<s>", "hello"]),
    ],
)
def test_the_file_says_what_is_added(changes: dict[str, Any], expected: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(piece_metadata(**changes))
    assert tokens_of(tokenizer, tokenizer.encode("hello")) == expected


def test_a_space_at_the_start_is_kept_without_a_space_prefix() -> None:
    tokenizer = Tokenizer.from_gguf(piece_metadata(add_space_prefix=False))
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


# --- Gemma 4's vocabulary


@pytest.mark.parametrize("text", ["hello world", "  hello\n\n\nwor", "é🙂 or", " ", "hell<turn|>owl"])
def test_gemma_4_has_the_ids_of_its_class_in_transformers(text: str) -> None:
    from transformers import GemmaTokenizer

    metadata = gemma4_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    special: Any = {"additional_special_tokens": ["<turn|>", "<|tool_response>"]}
    theirs = GemmaTokenizer({token: index for index, token in enumerate(tokens)}, merges, **special)
    ours = Tokenizer.from_gguf(metadata)
    assert ours.encode(text) == [2, *theirs.encode(text, add_special_tokens=False)]
    assert ours.decode(ours.encode(text, framed=False)) == text.replace("<turn|>", "")


def test_every_end_of_gemma_4_ends_a_completion() -> None:
    """Converted files name one, `<eos>` or `<turn|>`."""
    assert set(Tokenizer.from_gguf(gemma4_metadata()).eos_ids) == {1, 4, 5}
    assert set(Tokenizer.from_gguf(gemma4_metadata(eos_token_id=4)).eos_ids) == {1, 4, 5}


# --- GGUF fields


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234 hell", ["1", "2", "3", "4", " ", "hell"]),
        ("default", "HE'S", ["H", "E", "'", "S"]),
        ("llama-bpe", "hell", ["<｜end▁it｜>", "hell"]),
        ("qwen2", "e\u0301", ["\u00c3", "\u00a9"]),
        ("tekken", "1234", ["<｜end▁it｜>", "1", "2", "3", "4"]),
    ],
)
def test_known_pre_tokenizers(pre: str, text: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_metadata(pre=pre))
    tokens = as_transformers(lambda: byte_metadata(pre=pre)).convert_ids_to_tokens(tokenizer.encode(text))
    assert [token.replace("Ġ", " ") for token in tokens] == expected


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("smollm", "in 2024's", ["in", " ", "2", "0", "2", "4", "'s"]),
        ("gpt-2", "in 2024's", ["in", " 2024", "'s"]),
        ("llama-bpe", "in 20245's IT'S", ["in", " ", "202", "45", "'s", " IT", "'S"]),
        ("qwen2", "in 20!!\n\n (x", ["in", " ", "2", "0", "!!\n\n", " (", "x"]),
        ("tekken", "fooBar BAZ 12/", ["foo", "Bar", " BAZ", " ", "1", "2", "/"]),
        ("refact", "in 2024's", ["in", " ", "2", "0", "2", "4", "'s"]),
        ("exaone4", "in 2024's", ["in", " 2024", "'s"]),
        ("dbrx", "in 20245's IT'S", ["in", " ", "202", "45", "'s", " IT", "'S"]),
        ("glm4", "x=20245!\n\n y", ["x", "=", "202", "45", "!\n\n", " y"]),
        ("smaug-bpe", "don't", ["don", "'t"]),
        ("gpt-4o", "fooBar's IT'S 1234/\n", ["foo", "Bar's", " IT'S", " ", "123", "4", "/\n"]),
        ("seed-coder", "in 20!!\n\n (x's", ["in", " ", "2", "0", "!!", "\n\n", " (", "x", "'s"]),
        ("hunyuan-dense", "in 20245 .map !!\n  y", ["in", " ", "202", "45", " .", "map", " !!\n", " ", " y"]),
    ],
)
def test_text_is_split_as_the_pre_tokenizer_says(pre: str, text: str, parts: list[str]) -> None:
    core = Tokenizer.from_gguf(byte_metadata(pre=pre))._core
    found = [part.replace("Ġ", " ").replace("Ċ", "\n") for part, _ in core.pre_tokenizer.pre_tokenize_str(text)]
    assert found == parts


def test_han_characters_are_split_from_what_stands_beside_them() -> None:
    core = Tokenizer.from_gguf(byte_metadata(pre="hunyuan-dense"))._core
    found = [place for _, place in core.pre_tokenizer.pre_tokenize_str("在apple工作13年 カa")]
    assert found == [(0, 1), (1, 6), (6, 8), (8, 10), (10, 11), (11, 12), (12, 13), (13, 14)]


def test_special_tokens_outside_the_byte_alphabet_keep_their_ids() -> None:
    tokenizer = Tokenizer.from_gguf(byte_metadata())
    assert tokenizer.vocab_size == 261
    assert tokenizer.encode("a<｜end▁it｜>") == [97, 260]
    assert text_of(tokenizer, [97, 260], skip=False) == "a<｜end▁it｜>"


def test_every_end_id_of_the_file_ends_a_completion() -> None:
    assert Tokenizer.from_gguf(byte_metadata(eot_token_id=7, eom_token_id=5)).eos_ids == (5, 7, 260)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "bert"}, "model"),
        ({"model": ["gpt2"]}, "model"),
        ({"pre": "mystery"}, "pre"),
        ({"pre": ["gpt-2"]}, "pre"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"token_type": [1]}, "token_type"),
        ({"merges": None}, "merges"),
        ({"merges": ["ab"]}, "merges"),
        ({"merges": ["no token"]}, "tokens"),
        ({"eos_token_id": 261}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"eot_token_id": "2"}, "eot_token_id"),
        ({"add_bos_token": 1}, "add_bos_token"),
    ],
)
def test_damaged_metadata_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelRejected) as caught:
        Tokenizer.from_gguf(byte_metadata(**changes))
    assert caught.value.field == f"tokenizer.ggml.{field}"


@pytest.mark.parametrize(
    "metadata",
    [
        byte_metadata(),
        byte_metadata(bos_token_id=97, padding_token_id=98, unknown_token_id=97),
        piece_metadata(),
        piece_metadata(padding_token_id=40, token_type=None),
        gemma4_metadata(),
    ],
)
def test_special_tokens_are_those_that_transformers_would_know(metadata: dict[str, Any]) -> None:
    """Among them are tokens that have a role and that the file takes for plain ones."""
    backend = build_gguf_tokenizer(metadata)
    other = as_transformers(lambda: metadata)
    assert json.loads(backend.backend_tokenizer.to_str()) == json.loads(other.backend_tokenizer.to_str())
    assert backend.special_tokens_map == other.special_tokens_map
    assert backend.eos_token_id == other.eos_token_id


def test_opening_a_gguf_file_imports_neither_transformers_nor_the_compiler_of_torch(tmp_path: Path) -> None:
    """Their imports take longer than all else that opening does."""
    (tmp_path / "metadata.json").write_text(json.dumps(byte_metadata()))
    program = (
        "import json, pathlib, sys, headrace.engine.life.build\n"
        "from headrace.engine.tokens.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.from_gguf(json.loads(pathlib.Path(sys.argv[1]).read_text()))\n"
        "assert tokenizer.encode('hell')\n"
        "print([name for name in ('transformers', 'torch._dynamo', 'sympy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "metadata.json")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("scores", [None, [0.0], ["a"] * 282])
def test_damaged_scores_are_refused(scores: Any) -> None:
    with pytest.raises(ModelRejected):
        Tokenizer.from_gguf(piece_metadata(scores=scores))


def test_a_large_vocabulary_looks_nothing_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looked_up: list[object] = []  # recorded, since transformers swallows what a failed look-up raises

    def look_up(*place: object, **_: object) -> None:
        looked_up.append(place)
        raise OSError("no network in tests")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket.socket, "connect", look_up)
    small = byte_metadata(pre="qwen2")["tokenizer.ggml.tokens"]
    tokens = small + [f"<{index}>" for index in range(100_001)]
    metadata = byte_metadata(pre="qwen2", tokens=tokens, token_type=[1] * 260 + [3] + [1] * 100_001)
    as_transformers(lambda: metadata).save_pretrained(tmp_path)
    assert Tokenizer.from_folder(tmp_path).vocab_size == len(tokens)
    assert looked_up == []
