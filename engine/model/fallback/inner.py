"""`inner_modules`: the modules within a module, by where they are and of which kind; changes nothing.

Modules at the same place of different layers are of one kind, such as `layers.*.self_attn.q_proj`: what a trial finds
out about them in a small model holds for them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from torch import nn

__all__ = ["InnerModule", "inner_modules", "may_be_norm", "may_be_product"]

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


class InnerModule(NamedTuple):
    """Where a module is within another one."""

    owner: nn.Module
    name: str
    """Name of the module in `owner`."""
    kind: str
    """Path of the module, with `*` for the numbers of layers and experts."""
    module: nn.Module

    def put(self, module: nn.Module) -> None:
        """Put another module there."""
        setattr(self.owner, self.name, module)


def inner_modules(*roots: nn.Module) -> Iterator[InnerModule]:
    """Yield all modules within each of `roots`; those that are changed meanwhile as they were."""
    for root in roots:
        for path, owner in list(root.named_modules()):
            for name, module in list(owner.named_children()):
                yield InnerModule(owner, name, _NUMBER.sub("*", f"{path}.{name}" if path else name), module)


def may_be_product(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer."""
    return type(module) is nn.Linear


def may_be_norm(module: nn.Module) -> bool:
    """Return whether all that a module holds is one vector of weights, as RMS norms do."""
    held = [*module.parameters(), *module.buffers()]
    is_vector = len(held) == 1 and isinstance(held[0], nn.Parameter) and held[0].dim() == 1
    return is_vector and not isinstance(module, nn.LayerNorm) and not any(True for _ in module.children())
