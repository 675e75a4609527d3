"""`pack_products`: gives the linear layers of a module to the device's own products; leaves all else as it is.

A packed weight is kept in the form in which the device multiplies by it, and the module's own copy is dropped. Which
kinds of layers a module can do without is tried on a small one first (cpu/trial.py): one may read a `weight` itself.
What was not tried stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Generic

import torch
from torch import Tensor, nn

from headrace.engine.model.fallback.inner import InnerModule, inner_modules, may_be_product
from headrace.engine.model.fallback.interface import uncompiled
from headrace.engine.model.network.foreign import ForeignOps
from headrace.engine.model.network.operations import Kv, Packed, ReadableHead, Step
from headrace.ops.formats import Stored

__all__ = ["pack_products"]

_SITE = "foreign"


class _Product(nn.Module, Generic[Packed, Step, Kv]):
    """A linear layer whose weight the device has packed."""

    def __init__(self, ops: ForeignOps[Packed, Step, Kv], linear: nn.Linear) -> None:
        super().__init__()
        self._ops, self.out_features = ops, linear.out_features
        bias_O = None if linear.bias is None else linear.bias.detach()
        self.packed = ops.pack(Stored.from_dense(linear.weight.detach()), bias_O)

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for inputs of any shape [..., in], in their dtype."""
        y_NO = self._ops.linear(x.reshape(-1, x.shape[-1]), self.packed, 0, _SITE)
        return y_NO.to(x.dtype).view(*x.shape[:-1], self.out_features)


class _Rounding(nn.Module):
    """A head that is the very table of the embeddings, which is not packed: it takes and gives another dtype."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self._dtype = linear, dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        y: Tensor = self.linear(x.to(self.linear.weight.dtype))
        return y.to(self._dtype)


class _Rows(nn.Module):
    """Embeddings that are the rows of a packed head, or of a table in another dtype than the activations."""

    def __init__(self, rows: nn.Embedding | ReadableHead, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, self._dtype = rows, dtype

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return the embeddings of ids of any shape, or of what else a table takes that is more than one."""
        if isinstance(self.rows, nn.Embedding):
            found: Tensor = self.rows(*given, **named)
            return found.to(self._dtype)
        (ids,) = given
        rows_NE = self.rows.read_rows(ids.reshape(-1))
        return rows_NE.to(self._dtype).view(*ids.shape, -1)


def pack_products(
    model: nn.Module,
    base: nn.Module,
    ops: ForeignOps[Packed, Step, Kv],
    activations: torch.dtype,
    taken: Collection[str],
) -> torch.dtype:
    """Pack plain linear layers of a module, one after the other; each drops its own weight then.

    Args:
        model: The module with its head, whose `base` was taken out.
        base: The module without its head.
        ops: The operations of the device.
        activations: Dtype that the device prefers for activations. A module all of whose matrices are packed or are
            embeddings takes it; any other keeps its own. What the module keeps in a wider dtype stays as it is.
        taken: Kinds of layers (inner.py) that are packed; others stay as they are.

    Returns:
        The dtype of activations.
    """
    embeddings = [(inner, inner.module) for inner in inner_modules(base) if isinstance(inner.module, nn.Embedding)]
    tables: dict[Tensor, type[nn.Embedding]] = {table.weight: type(table) for _, table in embeddings}
    dtype = next(iter(tables)).dtype
    heads: dict[Tensor, ReadableHead] = {}
    roundings: list[tuple[InnerModule, nn.Linear]] = []
    for inner in inner_modules(base, model):
        linear = inner.module
        if not isinstance(linear, nn.Linear):
            continue
        if tables.get(linear.weight, nn.Embedding) is not nn.Embedding:
            roundings.append((inner, linear))  # a table that does more than look up is needed as it is
        elif may_be_product(linear) and inner.kind in taken and _fits(linear.weight, activations):
            product = _Product(ops, linear)
            if linear.weight in tables and isinstance(product.packed, ReadableHead):
                heads[linear.weight] = product.packed
            inner.put(product)
    if any(each.dim() > 1 and each not in tables for each in _parameters(model, base)):
        activations = dtype
    for inner, linear in roundings:
        inner.put(_Rounding(linear, activations))
    for inner, table in embeddings:
        inner.put(_Rows(heads.get(table.weight, table), activations))
    for parameter in _parameters(model, base):
        if parameter not in tables and _fits(parameter, activations):
            parameter.data = parameter.data.to(activations)
    return activations


def _fits(parameter: Tensor, activations: torch.dtype) -> bool:
    """Return whether a dtype holds the numbers of a parameter."""
    return torch.promote_types(parameter.dtype, activations) == activations


def _parameters(*roots: nn.Module) -> list[nn.Parameter]:
    return [each for root in roots for each in root.parameters()]
