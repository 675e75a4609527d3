"""Ways of guessing the next tokens of a request, which steps verify several at a time: values of `speculation`.

What is generated does not depend on them; docs/speculation.md says when they help. They hold options and guess nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NoReturn, TypeAlias, get_args

from headrace.engine.errors import InvalidParams

__all__ = ["DraftModel", "Eagle", "Medusa", "Mtp", "Ngram", "Speculation", "speculation_of"]

_MOST_DRAFTS: Final = 16
_LONGEST: Final = 32
_FEWEST_COMPARED: Final = 2
_Quantize: TypeAlias = Literal["fp8", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class Ngram:
    """Guess that a request goes on as it did the last time that it held its latest tokens; needs no second model.

    Raises:
        InvalidParams: A number is out of its range.
    """

    k: int = 4
    """Most drafts for a request in one step, from 1 to 16; steps take fewer, or none, where that is faster."""
    longest: int = 4
    """Most of the latest tokens that are compared, from 2 to 32; at least two must be equal."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check("k", self.k, 1, _MOST_DRAFTS)
        _check("longest", self.longest, _FEWEST_COMPARED, _LONGEST)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Guess by a smaller model with the same tokenizer, which reads all that the model reads.

    Raises:
        InvalidParams: `path` is no path, `file` no text, `quantize` no format, or `k` is out of its range.
    """

    path: str | os.PathLike[str]
    """The model that guesses: a folder, a GGUF file or a hub id, as `Engine` takes them."""
    k: int = 3
    """Most drafts for a request in one step, from 1 to 16; steps take fewer, or none, where that is faster."""
    file: str | None = None
    """Which GGUF file of a folder or of a hub repository, by a pattern such as `*Q4_K_M*`."""
    quantize: _Quantize | None = None
    """Format to which its matrices are quantised while they are loaded; None leaves them as they are stored."""

    def __post_init__(self) -> None:
        """Check the values."""
        _check_path(self.path, "the path of a model")
        _check("k", self.k, 1, _MOST_DRAFTS)
        if self.file is not None and (not isinstance(self.file, str) or not self.file):
            _refuse("file", self.file, "a pattern of a file's name, or None")
        _check_quantize(self.quantize)


@dataclass(frozen=True, slots=True)
class Eagle:
    """Guess by a head of EAGLE, EAGLE-2 or EAGLE-3 that was trained for the model; of EAGLE-3 also as speculators.

    Raises:
        InvalidParams: `path` is no path, `quantize` no format, or `k` is out of its range.
    """

    path: str | os.PathLike[str]
    """The head: a folder with a config.json and weights in safetensors, or a hub id, as `Engine` takes them."""
    k: int = 3
    """Most drafts for a request in one step, from 1 to 16; steps take fewer, or none, where that is faster."""
    quantize: _Quantize | None = None
    """Format to which the head's matrices are quantised while they are loaded, with its output head if it has one of
    its own; None leaves them as they are stored."""

    def __post_init__(self) -> None:
        """Check the values."""
        _check_path(self.path, "the path of the head's folder, or a hub id")
        _check("k", self.k, 1, _MOST_DRAFTS)
        _check_quantize(self.quantize)


@dataclass(frozen=True, slots=True)
class Medusa:
    """Guess by Medusa's heads that were trained for the model, each for a token at another distance.

    Raises:
        InvalidParams: `path` is no path, `quantize` no format, or `k` is out of its range.
    """

    path: str | os.PathLike[str]
    """The heads: a folder with a config.json and weights in safetensors, or a hub id, as `Engine` takes them."""
    k: int = 3
    """Most drafts for a request in one step, from 1 to the number of heads; steps take fewer, or none, where that is
    faster."""
    quantize: _Quantize | None = None
    """Format to which the heads' matrices are quantised while they are loaded, output heads included; None leaves them
    as they are stored."""

    def __post_init__(self) -> None:
        """Check the values."""
        _check_path(self.path, "the path of the head's folder, or a hub id")
        _check("k", self.k, 1, _MOST_DRAFTS)
        _check_quantize(self.quantize)


@dataclass(frozen=True, slots=True)
class Mtp:
    """Guess by the module for multi-token prediction that comes with the model, as with DeepSeek-V3 and GLM-4.5.

    Raises:
        InvalidParams: `quantize` is no format, or `k` is out of its range.
    """

    k: int = 2
    """Most drafts for a request in one step, from 1 to 16; steps take fewer, or none, where that is faster."""
    quantize: _Quantize | None = None
    """Format to which the module's matrices are quantised while they are loaded, whatever the model's are; None leaves
    them as they are stored. Embeddings and output head are those of the model."""

    def __post_init__(self) -> None:
        """Check the values."""
        _check("k", self.k, 1, _MOST_DRAFTS)
        _check_quantize(self.quantize)


Speculation: TypeAlias = Ngram | DraftModel | Eagle | Medusa | Mtp
"""Any way of guessing tokens."""

_METHODS: Final[Mapping[str, type[Speculation]]] = {
    "ngram": Ngram,
    "draft": DraftModel,
    "eagle": Eagle,
    "medusa": Medusa,
    "mtp": Mtp,
}
_TEXTS: Final = ("path", "file", "quantize")
"""Options that are text; the others are numbers."""


def speculation_of(wanted: object) -> Speculation | None:
    """Return what `wanted` is or names, such as `Ngram(k=4)`, "ngram", "ngram:k=4,longest=3", "draft:FOLDER" or None.

    Raises:
        InvalidParams: The way of guessing has no such option, or an option's value is out of range.
        ValueError: `wanted` is of another type, or there is no such way of guessing.
    """
    if wanted is None or isinstance(wanted, Speculation):
        return wanted
    if not isinstance(wanted, str):
        raise ValueError('must be None, a value such as Ngram(k=4), or text such as "ngram:k=4"')
    name, _, rest = wanted.partition(":")
    if name not in _METHODS:
        raise ValueError(f"must begin with one of {', '.join(_METHODS)}")
    return _METHODS[name](**_options(_METHODS[name], rest))


def _options(method: type[Speculation], text: str) -> dict[str, Any]:
    """Return the options of a way of guessing that text such as "k=4,longest=3" holds; a path may stand first alone."""
    known = [field.name for field in fields(method)]
    options: dict[str, Any] = {}
    for place, part in enumerate(filter(None, text.split(","))):
        name, _, value = part.partition("=")
        if place == 0 and "path" in known and "=" not in part:
            name, value = "path", part
        if name not in known:
            field = f"speculation.{name}"
            raise InvalidParams(f"{field}: there is no such option, only {', '.join(known)}", field=field, value=value)
        if name in options:
            raise InvalidParams(f"speculation.{name}: is given twice", field=f"speculation.{name}", value=value)
        options[name] = int(value) if name not in _TEXTS and value.isascii() and value.isdecimal() else value
    if "path" in known:
        options.setdefault("path", "")
    return options


def _check_path(path: object, limit: str) -> None:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        _refuse("path", path, limit)


def _check_quantize(value: object) -> None:
    if value is not None and value not in get_args(_Quantize):
        _refuse("quantize", value, f"{', '.join(get_args(_Quantize))} or None")


def _check(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        _refuse(name, value, f"an int from {least} to {most}", {"ge": least, "le": most})


def _refuse(name: str, value: object, what: str, limit: object = None) -> NoReturn:
    field = f"speculation.{name}"
    raise InvalidParams(f"{field}: must be {what}, got {value!r}", field=field, value=value, limit=limit or what)
