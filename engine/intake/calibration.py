"""Texts to calibrate a quantised model with: reads them from a file, and makes sequences of one length of their ids.

`first_token` is where a model begins that writes them itself, by many/own_texts.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from headrace.engine.errors import InvalidParams
from headrace.engine.tokens.interface import TokenizerLike

__all__ = ["calibration_ids", "first_token"]

_PIECE: Final = 1 << 16
"""Characters of plain text, about, that are tokenised at once."""
_FIELDS: Final = ("text", "messages", "prompt")


def calibration_ids(path: Path, tokenizer: TokenizerLike, *, sequences: int, tokens: int) -> list[list[int]]:
    """Return sequences of `tokens` ids each, cut from the start of a file's texts, which are laid end to end.

    There are fewer than `sequences` where the file ends before. A file with less than one sequence gives a shorter one.

    Args:
        path: Plain text in UTF-8; or, where the name ends in .jsonl, an object on each line with `text`, `messages`
            or `prompt`. A list is a chat, which the model's template renders.
        tokenizer: The model's tokenizer.
        sequences: Most sequences.
        tokens: Ids of a sequence.

    Raises:
        InvalidParams: The file cannot be read, is empty, is not UTF-8, or a line is not such an object.
    """
    ids: list[int] = []
    wanted = sequences * tokens
    try:
        for piece in _lines(path, tokenizer) if path.suffix == ".jsonl" else _pieces(path, tokenizer):
            ids += piece
            if len(ids) >= wanted:
                break
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror})", "a file of texts")
    except UnicodeDecodeError as error:
        _refuse(path, f"is not UTF-8 ({error.reason})", "a file of texts in UTF-8")
    if not ids:
        _refuse(path, "holds no text", "a file of texts")
    tokens = min(tokens, len(ids))
    count = min(len(ids) // tokens, sequences)
    return [ids[first : first + tokens] for first in range(0, count * tokens, tokens)]


def first_token(tokenizer: TokenizerLike, bos: object) -> int:
    """Return the id with which a text begins, for a model that is to write one.

    It is the first of those that the tokenizer puts around every text; without any, the model's own; without one, an id
    that ends a sequence, since such ids stand between texts.

    Args:
        tokenizer: The model's tokenizer.
        bos: `bos_token_id` of the model's config.json; None where there is none.

    Raises:
        InvalidParams: The model has none of them.
    """
    fitting = [*tokenizer.encode(""), *([bos] if isinstance(bos, int) else []), *tokenizer.eos_ids]
    if not fitting:
        told = "is not possible for this model, which has no token that begins or ends a text"
        raise InvalidParams(f"self_data: {told}", field="self_data", value=True, limit="a model with such a token")
    return fitting[0]


def _pieces(path: Path, tokenizer: TokenizerLike) -> Iterator[list[int]]:
    """Yield the ids of a plain text, piece by piece; pieces end with lines."""
    with path.open(encoding="utf-8") as file:
        while lines := file.readlines(_PIECE):
            yield tokenizer.encode("".join(lines))


def _lines(path: Path, tokenizer: TokenizerLike) -> Iterator[list[int]]:
    """Yield the ids of the text or chat on each line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                value = _found(path, number, line)
                try:
                    is_text = isinstance(value, str)
                    yield tokenizer.encode(value) if is_text else tokenizer.encode_chat(value, end="closed")
                except InvalidParams as error:
                    _refuse(path, f"has on line {number} what cannot be used ({error})", "texts or chats")


def _found(path: Path, number: int, line: str) -> Any:
    """Return the text or the messages of an object."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    held = [record[name] for name in _FIELDS if record.get(name)] if isinstance(record, dict) else []
    if not held or not isinstance(held[0], (str, list)):
        _refuse(path, f"has on line {number} none of {', '.join(_FIELDS)}", "a JSON object with one of them a line")
    return held[0]


def _refuse(path: Path, told: str, limit: str) -> NoReturn:
    raise InvalidParams(f"data: {path} {told}; wanted: {limit}", field="data", value=str(path), limit=limit)
