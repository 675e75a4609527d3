"""What decides the bytes of a quantised copy, compared with that of an earlier run; and how a folder is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headrace.engine.errors import InvalidParams

__all__ = ["difference", "refusal"]


def difference(before: object, now: Mapping[str, object]) -> str:
    """Return how the arguments of an earlier run, from its JSON, differ from those of this run; empty if not at all."""
    now = json.loads(json.dumps(now))
    if not isinstance(before, Mapping):
        return "by another program"
    if before == now:
        return ""
    names = [name for name in now if before.get(name) != now[name]]
    told = [f"{name} {before.get(name)!r} and not {now[name]!r}" for name in names if _is_short(before.get(name))]
    others = [name for name in names if not _is_short(before.get(name))]
    return "with " + ", ".join([*told, *(f"another {name}" for name in others)] or ["more arguments"])


def _is_short(value: object) -> bool:
    return isinstance(value, (str, int, type(None))) and len(str(value)) < 20


def refusal(out: Path, told: str) -> InvalidParams:
    """Return the error for a folder to write that cannot be written, with what is wrong with it."""
    return InvalidParams(f"out: {told}", field="out", value=str(out), limit="a new or empty folder")
