"""The attention functions that transformers' modules call here; they know no cache, no device and no model.

transformers lets a module's attention be replaced by name (`AttentionInterface`), and the masks that belong to it
(`AttentionMaskInterface`). What is registered here finds, on the module that calls it, what `attach` left there: a
`Recorder` on modules that are traced (tracing.py), a `Site` on those that run (network.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["ATTENTION", "TRACED_ATTENTION", "Call", "Mask", "Recorder", "Site", "attach", "uncompiled"]

ATTENTION: Final = "headrace"
"""Name of the attention for modules that run: these make no masks."""
TRACED_ATTENTION: Final = "headrace-traced"
"""Name of the attention for modules that are traced: their masks are `Mask`."""
_SITE: Final = "_headrace_site"
_Function = TypeVar("_Function", bound=Callable[..., object])
uncompiled: Callable[[_Function], _Function] = torch.compiler.disable  # untyped
"""Decorator of a function in front of which compiled code (fusing.py) ends, to go on behind it."""


class Mask:
    """The mask that a traced module hands to its attention: a rule instead of a tensor."""

    def __init__(self, allows: Callable[..., Tensor]) -> None:
        """Keep the rule: `allows(batch, head, query, key)` says which positions attend to which."""
        self.allows = allows


class Call(NamedTuple):
    """One call of the attention function."""

    module: nn.Module
    """The attention of one layer."""
    q_1HND: Tensor
    """Queries, rotated: [1, H, N, D]."""
    k_1KND: Tensor
    """Keys, rotated: [1, K, N, D]."""
    v_1KND: Tensor
    """Values: [1, K, N, D], or of smaller heads."""
    mask: object
    """What the module gives as mask: None where masks are not made, `Mask` where they are traced."""
    options: Mapping[str, Any]
    """All other arguments by name, such as `scaling`."""


class Recorder(Protocol):
    """Protocol of what answers the calls of modules that are traced."""

    def __call__(self, call: Call) -> Tensor:
        """Return something of the shape of the attention's result, [1, N, H, D of the values]."""
        ...


class Site(Protocol):
    """Protocol of what attends for one module that runs."""

    def __call__(self, qkv_NX: Tensor, width: int, /) -> Tensor:
        """Return the attention's result.

        Args:
            qkv_NX: Rotated queries, rotated keys and values of all heads, side by side: [N, (H + 2 * K) * D].
            width: H * D, the size of a token's result.
        """
        ...


def attach(modules: Iterable[nn.Module], site: Recorder | Site) -> None:
    """Let `site` answer the calls that come from any of `modules`."""
    for module in modules:
        setattr(module, _SITE, site)


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, *_: object, **options: Any
) -> tuple[Tensor, None]:
    recorder: Recorder = getattr(module, _SITE)
    return recorder(Call(module, query, key, value, attention_mask, options)), None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """Put queries, keys and values side by side, which what is compiled (fusing.py) does as it rotates, and attend."""
    heads, tokens, size = query.shape[1:]
    of_value = value.shape[3]
    if of_value < size:
        value = functional.pad(value, (0, size - of_value))  # pages have one size of heads
    parts = [part[0].transpose(0, 1) for part in (query, key, value)]
    o_NX = _attended(module, torch.cat(parts, 1).view(tokens, -1), heads * size)
    return o_NX.view(1, tokens, heads, size)[..., :of_value], None


@uncompiled
def _attended(module: nn.Module, qkv_NX: Tensor, width: int) -> Tensor:
    site: Site = getattr(module, _SITE)
    return site(qkv_NX, width).to(qkv_NX.dtype)


def _traced_mask(*_: object, mask_function: Callable[..., Tensor], **__: object) -> Mask:
    return Mask(mask_function)


AttentionInterface.register(ATTENTION, _attend)
AttentionInterface.register(TRACED_ATTENTION, _record)
AttentionMaskInterface.register(TRACED_ATTENTION, _traced_mask)
