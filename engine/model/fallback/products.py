"""`pack_products`: gives the linear layers of a module to the device's own products; leaves all else as it is.

A packed weight is kept in the form in which the device multiplies by it, and the module's own copy is dropped. Whether
a module computes the same with such layers is tried on a small one first (cpu/trial.py): one may read `weight` itself.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from headrace.engine.model.network.foreign import ForeignOps
from headrace.engine.model.network.operations import Kv, Packed, ReadableHead, Step
from headrace.ops.formats import Stored

__all__ = ["pack_products"]

_SITE = "foreign"
_Layer = TypeVar("_Layer", bound=nn.Module)


class _Product(nn.Module, Generic[Packed, Step, Kv]):
    """A linear layer whose weight the device has packed."""

    def __init__(self, ops: ForeignOps[Packed, Step, Kv], linear: nn.Linear) -> None:
        super().__init__()
        self._ops, self.out_features = ops, linear.out_features
        bias_O = None if linear.bias is None else linear.bias.detach()
        self.packed = ops.pack(Stored.from_dense(linear.weight.detach()), bias_O)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for inputs of any shape [..., in], in their dtype."""
        y_NO = self._ops.linear(x.reshape(-1, x.shape[-1]), self.packed, 0, _SITE)
        return y_NO.to(x.dtype).view(*x.shape[:-1], self.out_features)


class _Rows(nn.Module):
    """Embeddings that are the rows of a packed head, or of a table in another dtype than the activations."""

    def __init__(self, rows: nn.Embedding | ReadableHead, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, self._dtype = rows, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids of any shape."""
        if isinstance(self.rows, nn.Embedding):
            found: Tensor = self.rows(ids)
            return found.to(self._dtype)
        rows_NE = self.rows.read_rows(ids.reshape(-1))
        return rows_NE.to(self._dtype).view(*ids.shape, -1)


def pack_products(
    model: nn.Module, base: nn.Module, ops: ForeignOps[Packed, Step, Kv], activations: torch.dtype
) -> None:
    """Pack all plain linear layers of a module, one after the other.

    Args:
        model: The module with its head, whose `base` was taken out.
        base: The module without its head.
        ops: The operations of the device.
        activations: Dtype that the device prefers for activations. A module all of whose matrices are packed or are
            embeddings takes it; any other keeps its own.
    """
    heads: dict[Tensor, ReadableHead] = {}
    for owner, name, linear in (*_plain(base, nn.Linear), *_plain(model, nn.Linear)):
        product = _Product(ops, linear)
        if isinstance(product.packed, ReadableHead):
            heads[linear.weight] = product.packed
        setattr(owner, name, product)
    tables = {table.weight: table for _, _, table in _plain(base, nn.Embedding)}
    parameters = [*base.parameters(), *model.parameters()]
    unpacked = [each for each in parameters if each.dim() > 1 and each not in tables]
    if unpacked:
        activations = unpacked[0].dtype
    for owner, name, table in _plain(base, nn.Embedding):
        setattr(owner, name, _Rows(heads.get(table.weight, table), activations))
    for parameter in parameters:
        if parameter not in tables:
            parameter.data = parameter.data.to(activations)


def _plain(root: nn.Module, kind: type[_Layer]) -> list[tuple[nn.Module, str, _Layer]]:
    """Return the layers within `root` of just this class: the module that holds each, its name there, and itself."""
    return [
        (owner, name, child)
        for owner in root.modules()
        for name, child in owner.named_children()
        if type(child) is kind
    ]
