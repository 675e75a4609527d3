"""Names of the files that a GGUF model may be split into, such as NAME-00001-of-00003.gguf; never opens them."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["first_parts", "model_stem", "parts_of"]

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MOST = 1024
"""Most files of one model: all of them are open while it loads."""


def parts_of(name: str) -> list[str]:
    """Return the names of all files of the model of which `name` is one, in order; `name` alone if it is no part."""
    found = _PART.fullmatch(name)
    count = 0 if found is None else int(found["count"])
    if found is None or not 0 < int(found["number"]) <= count <= _MOST:
        return [name]
    return [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def first_parts(names: Iterable[str]) -> list[str]:
    """Return `names` without those of later parts of a model whose first part is among them."""
    names = list(names)
    known = set(names)
    return [name for name in names if (first := parts_of(name)[0]) == name or first not in known]


def model_stem(name: str) -> str:
    """Return a file's name without its ending, and without the number of a part."""
    found = _PART.fullmatch(name)
    return name.removesuffix(".gguf") if found is None else found["stem"]
