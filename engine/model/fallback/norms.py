"""`replace_norms`: gives the RMS norms of a module to the device's own; leaves all else as it is.

Norms are not known by the names of their classes: each module that holds one vector is tried on a few random numbers,
with the very weights that were loaded, and replaced where the device's norm gives the same. Next to read: products.py,
which does the same with linear layers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Generic

import torch
from torch import Tensor, nn

from headrace.engine.model.fallback.inner import inner_modules, may_be_norm
from headrace.engine.model.network.foreign import ForeignOps
from headrace.engine.model.network.operations import Kv, Packed, Step

__all__ = ["Norm", "replace_norms"]

_SCALES: Final = (1.0, 1e-3, 30.0)
"""Sizes of the numbers of a trial: among small ones epsilons differ."""
_TOLERANCE: Final = 1e-5
"""Largest difference, in units of the largest number of a token."""


class Norm(nn.Module, Generic[Packed, Step, Kv]):
    """An RMS norm that the device computes."""

    def __init__(self, ops: ForeignOps[Packed, Step, Kv], weight_E: Tensor, epsilon: float) -> None:
        super().__init__()
        self._ops, self._weight_E, self._epsilon = ops, weight_E, epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of inputs of any shape [..., E]."""
        y_NE = self._ops.norm_with(x.reshape(-1, x.shape[-1]), self._weight_E, self._epsilon)
        return y_NE.view(x.shape)


def replace_norms(base: nn.Module, ops: ForeignOps[Packed, Step, Kv], taken: Collection[str]) -> None:
    """Replace each RMS norm of the kinds `taken` whose weights and inputs are float32."""
    for inner in inner_modules(base):
        if inner.kind in taken and may_be_norm(inner.module):
            norm = _same(inner.module, ops)
            if norm is not None:
                inner.put(norm)


def _same(module: nn.Module, ops: ForeignOps[Packed, Step, Kv]) -> nn.Module | None:
    """Return the norm of the device that computes what `module` does; None if there is none."""
    weight_E = next(iter(module.parameters()), None)
    if weight_E is None or weight_E.dtype is not torch.float32:
        return None
    generator = torch.Generator().manual_seed(5)
    x_1NE = torch.stack([torch.randn(len(weight_E), generator=generator) * scale for scale in _SCALES])[None]
    try:
        expected = module(x_1NE)
    except Exception:  # another library's code, which takes something else
        return None
    if not isinstance(expected, Tensor) or expected.shape != x_1NE.shape or expected.dtype is not torch.float32:
        return None
    bound_1N = _TOLERANCE * expected.abs().amax(-1)
    for weight in (weight_E.detach(), 1.0 + weight_E.detach()):  # Gemma and others keep what is added to 1
        for epsilon in {value for value in vars(module).values() if isinstance(value, float)}:
            norm = Norm(ops, weight, epsilon)
            if bool(((norm(x_1NE) - expected).abs().amax(-1) <= bound_1N).all()):
                return norm
    return None
