"""Reads JSON and fields that a stranger may have written, with typed refusals; never decides what is needed."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

from headrace.adapters.errors import ModelRejected

__all__ = [
    "Fields",
    "check_depth",
    "in_turns",
    "open_file",
    "parse_json",
    "parse_members",
    "parse_object",
    "plain",
    "read_bytes",
    "read_object",
    "refuse",
]

_MOST_SHOWN = 200  # characters
_MOST_NESTED = 64  # levels of lists and objects: deeper values may overflow the stack of code that reads or prints them
_TURN = 8
_PAUSE = 20e-6
_SPACES = frozenset(" \t\n\r")

Item = TypeVar("Item")


def parse_object(data: bytes, origin: str) -> dict[str, object]:
    """Return the JSON object that `data` holds; the arguments are those of `parse_json`.

    Raises:
        ModelRejected: The text is not a JSON object, or an ambiguous one.
    """
    found = parse_json(data, origin)
    if not isinstance(found, dict):
        raise ModelRejected(f"{origin}: holds a {type(found).__name__}, not a JSON object", field=origin)
    return found


def parse_json(data: bytes, origin: str) -> object:
    """Return the JSON value that `data` holds.

    Duplicate keys, NaN, infinities and nesting deeper than 64 levels are refused.

    Args:
        data: UTF-8 text.
        origin: Name of the text for messages, such as `config.json`.

    Raises:
        ModelRejected: The text is not JSON, or is ambiguous.
    """

    with _as_rejected(origin):
        found: object = _decoder(origin).decode(data.decode())
    check_depth(found, origin)
    return found


def check_depth(value: object, origin: str) -> None:
    """Refuse a JSON value in which lists and objects are nested deeper than 64 levels.

    Raises:
        ModelRejected: The value is nested deeper.
    """
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list))]:
        depth += 1
        if depth > _MOST_NESTED:
            message = f"{origin}: nested deeper than the {_MOST_NESTED} levels allowed"
            raise ModelRejected(message, field=origin, limit=_MOST_NESTED)
        level = [child for part in level for child in (part.values() if isinstance(part, dict) else part)]


def parse_members(data: bytes, origin: str) -> dict[str, object]:
    """Parse a large JSON object member by member, so that other threads run meanwhile; otherwise do as
    `parse_object`."""
    found: dict[str, object] = {}
    with _as_rejected(origin):
        for key, value in in_turns(_members(data.decode(), _decoder(origin))):
            if key in found:
                _refuse_twice(origin, key)
            found[key] = value
    return found


def _members(text: str, decoder: json.JSONDecoder) -> Iterator[tuple[str, object]]:
    at = _after_space(text, 0)
    mark, at = text[at : at + 1], _after_space(text, at + 1)
    if mark != "{":
        raise ValueError("not an object")
    if text[at : at + 1] == "}":
        mark, at = "}", _after_space(text, at + 1)
    while mark != "}":
        key, at = decoder.raw_decode(text, at)
        at = _after_space(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError(f"no key at character {at}")
        value, at = decoder.raw_decode(text, _after_space(text, at + 1))
        yield key, value
        at = _after_space(text, at)
        mark, at = text[at : at + 1], _after_space(text, at + 1)
        if mark not in (",", "}"):
            raise ValueError(f"neither a comma nor an end before character {at}")
    if at < len(text):
        raise ValueError(f"more than an object at character {at}")


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1] in _SPACES:
        at += 1
    return at


@contextmanager
def _as_rejected(origin: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ModelRejected(f"{origin}: not valid JSON ({str(error)[:200]})", field=origin) from error


def _decoder(origin: str) -> json.JSONDecoder:
    """Return a decoder that refuses what JSON leaves to its readers: duplicate keys, NaN and infinities."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            _refuse_twice(origin, Counter(key for key, _ in pairs).most_common(1)[0][0])
        return found

    def constant(name: str) -> NoReturn:
        raise ModelRejected(f"{origin}: {name} is not a JSON number", field=origin, value=name)

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            constant(text[:50])
        return value

    return json.JSONDecoder(object_pairs_hook=unique, parse_constant=constant, parse_float=number)


def _refuse_twice(origin: str, key: str) -> NoReturn:
    twice = plain(key)
    raise ModelRejected(f"{origin}: the key '{twice}' occurs twice", field=twice)


def read_object(path: Path, limit: int) -> dict[str, object]:
    """Return the JSON object in the file at `path`, which may be at most `limit` bytes long.

    Raises:
        ModelRejected: The file is missing, too long, or not an unambiguous JSON object.
    """
    return parse_object(read_bytes(path, limit), path.name)


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the bytes of the file at `path`, which may be at most `limit` bytes long.

    Raises:
        ModelRejected: The file is missing, not a regular one, or too long; no more than the limit is ever read of it.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
    except OSError as error:
        raise ModelRejected(f"{path.name}: cannot be read ({error.strerror})", field=path.name) from error
    if size > limit or len(data) > limit:
        message = f"{path.name}: longer than the {limit} bytes allowed"
        raise ModelRejected(message, field=path.name, value=max(size, len(data)), limit=limit)
    return data


def open_file(path: str | os.PathLike[str], *, folder: int | None = None, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading in binary; another kind, such as a named pipe, is refused without a wait.

    Args:
        path: The file; with `folder` its name in that folder.
        folder: Descriptor of an open folder.
        follow: Whether the last part of the path may be a symbolic link.

    Raises:
        ModelRejected: The file is missing, or is not a regular one.
        OSError: The system refuses to open the file; `ELOOP` for a link that is not followed.
    """
    name = os.path.basename(path)
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), dir_fd=folder)
    except FileNotFoundError:
        raise ModelRejected(f"{name}: no such file", field=name) from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ModelRejected(f"{name}: no regular file", field=name, limit="a regular file")
    return os.fdopen(number, "rb")


def plain(text: str) -> str:
    """Return a stranger's text for a message: cut, and escaped where it cannot be printed or sent."""
    text = text[:_MOST_SHOWN]
    return text if text.isprintable() else repr(text)[1:-1][:_MOST_SHOWN]


def refuse(origin: str, field: str, value: object, limit: object) -> NoReturn:
    """Raise `ModelRejected` that says: in `origin`, `field` is `value`, but `limit` is supported."""
    field, shown = plain(field), repr(value)
    shown = shown if len(shown) <= _MOST_SHOWN else shown[:_MOST_SHOWN] + "..."
    raise ModelRejected(f"{origin}: {field} is {shown}; supported: {limit}", field=field, value=value, limit=limit)


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed reading of a mapping that a stranger wrote."""

    data: Mapping[str, object]
    origin: str
    """The file's base name, for messages."""

    def refuse(self, field: str, limit: object) -> NoReturn:
        """Refuse the value of `field`."""
        refuse(self.origin, field, self.data.get(field), limit)

    def size(self, field: str, limit: int, default: int | None = None, *, option: str | None = None) -> int:
        """Return an integer from 1 to `limit`, which the option `option` sets; null counts as absent."""
        value = self.data.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            self.refuse(field, f"an integer from 1 to {limit}" + (f" ({option})" if option else ""))
        return value

    def real(self, field: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number from `low` to `high`; null counts as absent."""
        value = self.data.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            self.refuse(field, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """Return a bool; null counts as absent."""
        value = self.data.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(field, "true or false")
        return value

    def chosen(self, rule: bool | str) -> bool:
        """Return `rule` itself, or the bool in the field that it names."""
        return self.flag(rule, False) if isinstance(rule, str) else rule


def in_turns(items: Iterable[Item]) -> Iterator[Item]:
    """Yield `items`, with a pause after every few of them in which other threads run."""
    for count, item in enumerate(items, 1):
        yield item
        if not count % _TURN:
            time.sleep(_PAUSE)
