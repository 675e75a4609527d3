"""What a module keeps beside its weights, to find out whether a call changes it; never runs a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor, nn

__all__ = ["State", "changed", "state_of"]

State: TypeAlias = Mapping[str, tuple[object, object]]
"""By name, each value that a module and those in it hold, and what tells whether the value itself was changed."""

_OWN = frozenset(("_parameters", "_modules", "_buffers"))


def state_of(module: nn.Module) -> State:
    """Return what `module` holds now: buffers, and all attributes but weights and modules."""
    found: dict[str, tuple[object, object]] = {}
    for prefix, each in module.named_modules():
        own = {name: value for name, value in vars(each).items() if name not in _OWN}
        for name, value in {**own, **each._buffers}.items():
            found[f"{prefix}.{name}"] = value, _mark(value)
    return found


def changed(before: State, module: nn.Module) -> str | None:
    """Return the name of what is not as it was when `state_of` returned `before`; None if all is."""
    now = state_of(module)
    for name in (*before, *now):
        if name not in before or name not in now:
            return name
        (old, old_mark), (new, new_mark) = before[name], now[name]
        is_plain = isinstance(old, int | float | str | None)
        if (old != new if is_plain else old is not new) or old_mark != new_mark:
            return name
    return None


def _mark(value: object) -> object:
    """Return what changes when a value does that stays the same object."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), float(value.double().sum())) if value.numel() else tuple(value.shape)
    return len(value) if isinstance(value, list | dict | set) else None
