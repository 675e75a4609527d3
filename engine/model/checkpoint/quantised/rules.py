"""Which modules a quantization_config names, and `Layout`, how one of them is stored; never reads a tensor.

A config may come from a stranger. Its regular expressions are matched in linear time, so none can hold up an opening.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol, TypeAlias

from pydantic_core import SchemaError, SchemaValidator, core_schema

from headrace.adapters.untrusted import Fields
from headrace.engine.model.checkpoint.found import Found
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder

__all__ = [
    "Layout",
    "Rules",
    "check_names",
    "fields_in",
    "group_size",
    "matched",
    "names_module",
    "objects_in",
    "texts_in",
]

_MOST_TEXTS = 1 << 14
_MOST_EXPRESSIONS = 1 << 10
_LONGEST = 1 << 12
_MOST_IN_GROUP = 1 << 20
_UNREAD: Final = ("visual", "vision", "image", "audio", "speech", "projector", "merger", "mtp", "nextn")
"""What names of parts hold that are never read: those for images and sounds, and layers that predict further tokens."""
_LAYER: Final = re.compile(r"layers\W{0,4}(\d{1,6})")
_FUSED: Final = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
"""Names that other engines have for the products of several modules, by that of one of them."""


class Layout(Protocol):
    """Protocol of one way in which a quantised module is stored."""

    def find(self, files: SafetensorsFolder, module: str) -> Found | None:
        """Return how `files` hold the weight of a module such as `model.layers.0.mlp.up_proj`.

        None where they hold it in plain numbers, or not at all.

        Raises:
            ModelRejected: They hold it in this way, but it is damaged.
        """
        ...


Rules: TypeAlias = Callable[[str], Layout | None]
"""Function that returns the layout of a module; None for one that the config leaves in plain numbers."""


def matched(
    patterns: Iterable[str], modules: frozenset[str], fields: Fields, field: str
) -> Mapping[str, frozenset[str]]:
    """Return the names among `modules` that each regular expression of `field` matches from their start.

    Each expression is compiled once and forgotten, since one may take megabytes.

    Raises:
        ModelRejected: An expression is not valid, is too long or cannot be matched in linear time, or is one too many.
    """
    found: dict[str, frozenset[str]] = {}
    for pattern in dict.fromkeys(patterns):
        if len(pattern) > _LONGEST or len(found) == _MOST_EXPRESSIONS:
            fields.refuse(field, f"at most {_MOST_EXPRESSIONS} regular expressions of {_LONGEST} characters")
        try:
            # The engine of pydantic's patterns matches in linear time.
            matcher = SchemaValidator(core_schema.str_schema(pattern=f"^(?:{pattern})"))
        except SchemaError:
            fields.refuse(field, f"regular expressions without look-around and references, not {pattern[:100]!r}")
        found[pattern] = frozenset(filter(matcher.isinstance_python, modules))
    return found


def check_names(entries: Mapping[str, str], modules: frozenset[str], fields: Fields, field: str, *, rules: str) -> None:
    """Refuse an entry that says how modules are stored and names none of them.

    An entry that may name what is never read is let pass: parts for images or sounds, and layers behind the last. So is
    one that names the products of several modules, as other engines call them.

    Args:
        entries: By each entry, as the config has it, the regular expression that it is.
        modules: The modules that the checkpoint has.
        fields: The config.
        field: The field that holds the entries.
        rules: What the entries are, for the message.

    Raises:
        ModelRejected: An entry names nothing.
    """
    parts = (module.rpartition(".") for module in modules)
    joined = {f"{above}.{_FUSED[name]}" for above, _, name in parts if name in _FUSED}
    found = matched(entries.values(), modules | joined, fields, field)
    last = max((int(number) for module in modules for number in _LAYER.findall(module)), default=-1)
    for entry, expression in entries.items():
        is_unread = any(word in entry.lower() for word in _UNREAD)
        is_unread |= any(int(number) > last for number in _LAYER.findall(entry))
        if not found[expression] and not is_unread:
            fields.refuse(field, f"{rules} that name modules of the checkpoint; {entry[:100]!r} names none")


def names_module(entry: str, module: str) -> bool:
    """Return whether a list's entry names a module: in full, by its last parts, or by a part that contains it."""
    return f".{entry.strip('.')}." in f".{module}."


def texts_in(fields: Fields, *names: str) -> tuple[str, ...]:
    """Return the strings of all lists among the fields `names`; null counts as absent.

    Raises:
        ModelRejected: A field is not a list of strings, or is too long.
    """
    found: list[str] = []
    for name in names:
        value = fields.data.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(each, str) and len(each) <= _LONGEST for each in value):
            fields.refuse(name, "a list of strings")
        found += value
    if len(found) > _MOST_TEXTS:
        fields.refuse(names[0], f"at most {_MOST_TEXTS} strings")
    return tuple(found)


def fields_in(fields: Fields, name: str) -> Fields | None:
    """Return the object in the field `name`; None if there is none.

    Raises:
        ModelRejected: The field is no object.
    """
    value = fields.data.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        fields.refuse(name, "an object")
    return Fields(value, f"{fields.origin}: {name}")


def objects_in(fields: Fields, name: str) -> Iterable[tuple[str, Fields]]:
    """Yield the objects in the object `name`, each with its key.

    Raises:
        ModelRejected: The field is no object of objects.
    """
    outer = fields_in(fields, name)
    if outer is None:
        return
    if len(outer.data) > _MOST_TEXTS:
        fields.refuse(name, f"at most {_MOST_TEXTS} entries")
    for key in outer.data:
        inner = fields_in(outer, key)
        yield key, Fields({}, outer.origin) if inner is None else inner


def group_size(fields: Fields, name: str, default: int | None = None) -> int | None:
    """Return the inputs of a group in the field `name`, where -1 and null mean all of an output: None.

    Raises:
        ModelRejected: The field is no such number.
    """
    value = fields.data.get(name, default)
    return None if value is None or value == -1 else fields.size(name, _MOST_IN_GROUP, default)
