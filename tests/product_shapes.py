"""Notes what products of matrices are asked of torch: oneDNN makes and keeps code for each shape; holds no tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ProductShapes"]

_PRODUCTS = (
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten.mm.default,
    torch.ops.mkldnn._linear_pointwise.default,
)


class ProductShapes(TorchDispatchMode):
    """While it is entered, `seen` gets each product with the shapes and strides of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in _PRODUCTS:
            tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.layout is torch.strided]
            self.seen.add((func, *((each.shape, each.stride()) for each in tensors)))
        return func(*args, **(kwargs or {}))
