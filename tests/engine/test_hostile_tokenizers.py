"""A tokenizer that a stranger wrote opens in seconds or is refused by name, and no text makes it raise untyped."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import BASE, LETTERS, byte_metadata, folder, piece_metadata, sequence

from headrace.engine.errors import ModelRejected, PromptTooLong, TokenizerFailed
from headrace.engine.tokens.tokenizer import Tokenizer


def added(count: int, first: int = 94, special: bool = True, content: str = "<|c{}|>") -> list[dict[str, Any]]:
    rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return [{"id": first + index, "content": content.format(index)} | rules for index in range(count)]


def template(*pieces: str) -> dict[str, Any]:
    """A post-processor: `$A` and `$B` stand for texts, anything else for a special token that it does not declare."""
    made = [
        {"Sequence": {"id": piece[1:], "type_id": 0}}
        if piece[0] == "$"
        else {"SpecialToken": {"id": piece, "type_id": 0}}
        for piece in pieces
    ]
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {"type": "TemplateProcessing", "single": made, "pair": pair, "special_tokens": {}}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def charsmap(text: bytes, trie: bytes = b"\xff" * 16) -> dict[str, Any]:
    """A precompiled normaliser whose trie is junk, unless it is given."""
    data = struct.pack("<I", len(trie)) + trie + text
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


WORD_PIECE = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": LETTERS}
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

HOSTILE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a chunk of no letters": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, {}, "chunk size"),
    "a charsmap of junk": ({"normalizer": charsmap(b"abc")}, {}, "could not be read"),
    "a charsmap of nothing": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {},
        "precompiled_charsmap",
    ),
    "an unknown token around texts": ({"post_processor": template("<zz>", "$A")}, {}, "could not be read"),
    "a text a hundred times": ({"post_processor": template(*["$A"] * 100)}, {}, "repeats a text (single) is 100"),
    "a thousand tokens around texts": (
        {
            "post_processor": template("x", "$A")
            | {"special_tokens": {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}}}
        },
        {},
        "put around a text is 1000",
    ),
    "a token of 200,000 letters": ({"model": BASE["model"] | {"vocab": LETTERS | {"a" * 200_000: 94}}}, {}, "4096"),
    "an added token of 200,000 letters": ({"added_tokens": added(1, content="a" * 200_000)}, {}, "4096"),
    "100,000 control tokens": ({"added_tokens": added(100_000)}, {}, "control tokens is 100000; at most 4096"),
    "100,000 added tokens": ({"added_tokens": added(100_000, special=False)}, {}, "added tokens is 100000"),
    "100,000 tokens in the settings": (
        {},
        {"tokenizer_config.json": {"added_tokens_decoder": {str(94 + token): {} for token in range(100_000)}}},
        "added tokens is 100000",
    ),
    "100,000 special names": (
        {},
        {"tokenizer_config.json": {f"a{index}_token": f"<|{index}|>" for index in range(100_000)}},
        "control tokens is 100000",
    ),
    "100,000 extra names": (
        {},
        {"special_tokens_map.json": {"additional_special_tokens": [f"<|{index}|>" for index in range(100_000)]}},
        "control tokens is 100000",
    ),
    "100,000 tokens more": (
        {},
        {"added_tokens.json": {f"<|{index}|>": 94 + index for index in range(100_000)}},
        "added tokens is 100000",
    ),
    "the highest id": (
        {"model": BASE["model"] | {"vocab": LETTERS | {"zz": 2**32 - 1}}},
        {},
        "highest id is 4294967295",
    ),
    "words of any length": (
        {"model": WORD_PIECE | {"max_input_chars_per_word": 10**9}},
        {},
        "max_input_chars_per_word",
    ),
    "text that multiplies": (
        {"normalizer": sequence("normalizers", *[replace("a", "a" * 100)] * 6)},
        {},
        "1000000000000; at most 4096",
    ),
    "text that multiplies in parts": (
        {"pre_tokenizer": sequence("pretokenizers", *[BASE["decoder"]] * 20)},
        {},
        "at most 4096",
    ),
    "a thousand steps": (
        {"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 1000)},
        {},
        "steps of its normalizer",
    ),
    "a decoder that multiplies": (
        {"decoder": sequence("decoders", *[replace("a", "a" * 100)] * 6, {"type": "Fuse"})},
        {},
        "4096",
    ),
    "nesting": ({}, {"tokenizer_config.json": {"chat_template": DEEP}}, "nested deeper"),
    "files elsewhere": ({}, {"tokenizer_config.json": {"gguf_file": "/dev/zero"}}, "gguf_file"),
    "a template of megabytes": ({}, {"chat_template.jinja": "a" * (1 << 21)}, "chat_template.jinja"),
}


@pytest.mark.parametrize(("changes", "files", "word"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_folders_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], files: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelRejected) as caught:
        Tokenizer.from_folder(folder(tmp_path, files, **changes), is_exact="WordPiece" not in str(changes))
    assert word in str(caught.value) and caught.value.field


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "generation_config.json",
        "tokenizer.json",
    ],
)
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelRejected, match=r"no regular file|holds none"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "added_tokens.json", "tokenizer.json", "chat_template.jinja"]
)
def test_a_file_of_gigabytes_is_not_read(tmp_path: Path, name: str) -> None:
    folder(tmp_path)
    with (tmp_path / name).open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(ModelRejected, match=f"{name}: longer than") as caught:
        Tokenizer.from_folder(tmp_path)
    assert caught.value.value == 2 << 30


def test_long_tokens_without_a_tokenizer_json_are_refused(tmp_path: Path) -> None:
    vocabulary = LETTERS | {chr(0x4E00 + index) * 1300: 94 + index for index in range(200)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ModelRejected, match="squares"):
        Tokenizer.from_folder(tmp_path)


# --- GGUF


def many(count: int, kind: int) -> dict[str, Any]:
    """Metadata with so many more tokens of a type."""
    tokens = byte_metadata()["tokenizer.ggml.tokens"]
    return byte_metadata(
        tokens=[*tokens, *(f"<|{index}|>" for index in range(count))],
        token_type=[1] * (len(tokens) - 1) + [3] + [kind] * count,
    )


def with_pieces(*pieces: str) -> dict[str, Any]:
    """SentencePiece metadata with more pieces."""
    metadata = piece_metadata()
    return piece_metadata(
        tokens=metadata["tokenizer.ggml.tokens"] + list(pieces),
        scores=metadata["tokenizer.ggml.scores"] + [-50.0] * len(pieces),
        token_type=metadata["tokenizer.ggml.token_type"] + [1] * len(pieces),
    )


GGUF: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "100,000 control tokens": (lambda: many(100_000, 3), "at most 4096"),
    "100,000 tokens of the user": (lambda: many(100_000, 4), "at most 32768"),
    "a piece of 200,000 letters": (lambda: with_pieces("a" * 200_000), "4096"),
    "many long pieces": (lambda: with_pieces(*(chr(0x4E00 + at) * 1300 for at in range(200))), "squares"),
}


@pytest.mark.parametrize(("metadata", "word"), GGUF.values(), ids=GGUF)
def test_hostile_metadata_is_refused_by_name(metadata: Callable[[], dict[str, Any]], word: str) -> None:
    with pytest.raises(ModelRejected) as caught:
        Tokenizer.from_gguf(metadata())
    assert word in str(caught.value) and str(caught.value.field).startswith("tokenizer.ggml.")


@pytest.mark.parametrize("name", ["$B", "$A", "a:1", "$", "<s>:x"])
def test_what_a_token_is_called_changes_nothing(name: str) -> None:
    tokens = piece_metadata()["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer.from_gguf(piece_metadata(tokens=[tokens[0], name, *tokens[2:]]))
    assert tokenizer.encode("hello")[0] == 1


# --- texts that a tokenizer which opened cannot handle


def test_a_text_that_makes_the_library_panic_is_a_typed_error(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(z+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, pre_tokenizer=split))
    assert tokenizer.encode("abc") == [64, 65, 66]
    for text in ("z" * 40 + "!", "z" * 3000 + "!"):
        with pytest.raises(TokenizerFailed, match="retry-limit"):
            tokenizer.encode(text)
    assert tokenizer.encode("abc") == [64, 65, 66]


def test_a_text_that_the_vocabulary_cannot_spell_is_a_typed_error(tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": LETTERS, "unk_token": "none"}
    split = {"type": "Split", "pattern": {"Regex": "[ -~]"}, "behavior": "Isolated", "invert": False}
    spaces = words | {"vocab": LETTERS | {" ": 94, "\n": 95, "\t": 96, "\r": 97}}
    norm = sequence("normalizers", {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": False,
                                    "strip_accents": False, "lowercase": False})  # fmt: skip
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model=spaces, pre_tokenizer=split, normalizer=norm))
    with pytest.raises(TokenizerFailed, match="UNK"):
        tokenizer.encode("é")


def test_a_text_that_would_grow_too_large_is_refused(tmp_path: Path) -> None:
    growing = sequence("normalizers", replace("a", "a" * 60), replace("b", "b" * 60))
    tokenizer = Tokenizer.from_folder(folder(tmp_path, normalizer=growing))
    assert len(tokenizer.encode("ab")) == 120
    with pytest.raises(PromptTooLong, match="3600 bytes of one"):
        tokenizer.encode("a" * 20_000)


def test_the_index_of_a_precompiled_normaliser_is_no_text_that_it_writes(tmp_path: Path) -> None:
    """A real one, of SentencePiece's nmt_nfkc, has 195 bytes without a zero in its index and texts of up to 33."""
    finds_nothing = bytes(4) + b"\xff" * 4 * 255
    normalizer = sequence("normalizers", charsmap(b"abc\0", finds_nothing), replace("a", "a" * 30))
    tokenizer = Tokenizer.from_folder(folder(tmp_path, normalizer=normalizer))
    assert len(tokenizer.encode("ab" * 20_000)) == 31 * 20_000


def test_quoted_special_tokens_have_the_size_of_their_text(tmp_path: Path) -> None:
    """What stands for them while the template is rendered is longer, and no part of the prompt."""
    settings = {"tokenizer_config.json": {"chat_template": "{{ messages[0].content }}"}}
    with closing(Tokenizer.from_folder(folder(tmp_path, settings, added_tokens=added(1)))) as tokenizer:
        chat = [{"role": "user", "content": "<|c0|>" * 20}]
        tokenizer.start(120)
        assert len(tokenizer.encode_chat(chat)) == 120
        tokenizer.start(10)
        with pytest.raises(PromptTooLong):
            tokenizer.encode_chat(chat)


def test_a_folder_with_a_template_for_tools_alone_renders_all_chats(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "{{ messages[0].content }}{{ tools | length if tools else '' }}"}]
    tokenizer = Tokenizer.from_folder(folder(tmp_path, {"tokenizer_config.json": {"chat_template": templates}}))
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.encode_chat(chat) == [LETTERS["a"]]
    assert tokenizer.encode_chat(chat, [{"type": "function"}]) == [LETTERS["a"], LETTERS["1"]]
