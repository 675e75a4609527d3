"""The one attention function that transformers' modules call here; knows no cache, no device and no model.

transformers lets a module's attention be replaced by name (`AttentionInterface`), and the masks that belong to it
(`AttentionMaskInterface`). What is registered here finds, on the module that calls it, the `Site` that `attach` left
there. Next to read: tracing.py, which records the calls, and network.py, which answers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["ATTENTION", "TRACED_ATTENTION", "Call", "Mask", "Site", "attach"]

ATTENTION: Final = "headrace"
"""Name of the attention for modules that run: these make no masks."""
TRACED_ATTENTION: Final = "headrace-traced"
"""Name of the attention for modules that are traced: their masks are `Mask`."""
_SITE: Final = "_headrace_site"


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


class Site(Protocol):
    """Protocol of what answers the calls of one module."""

    def __call__(self, call: Call) -> Tensor:
        """Return the attention's result, [1, N, H, D of the values]."""
        ...


def attach(modules: Iterable[nn.Module], site: Site) -> None:
    """Let `site` answer the calls that come from any of `modules`."""
    for module in modules:
        setattr(module, _SITE, site)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, *_: object, **options: Any
) -> tuple[Tensor, None]:
    site: Site = getattr(module, _SITE)
    return site(Call(module, query, key, value, attention_mask, options)), None


def _traced_mask(*_: object, mask_function: Callable[..., Tensor], **__: object) -> Mask:
    return Mask(mask_function)


AttentionInterface.register(ATTENTION, _attend)
AttentionInterface.register(TRACED_ATTENTION, _attend)
AttentionMaskInterface.register(TRACED_ATTENTION, _traced_mask)
