"""`NativeExperts`: a layer's experts on the CPU in C, all that are hit in one loop over their weights.

Every row is computed alike, whichever rows share its experts.
"""

from __future__ import annotations

from ctypes import addressof, c_void_p
from typing import TYPE_CHECKING

import torch

from headrace.ops.cpu.experts import activate_expert, grouped, pack_each, pack_router
from headrace.ops.cpu.native.linear import NativeLinear, as_floats
from headrace.ops.experts import route

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from headrace.ops.cpu.experts import Groups
    from headrace.ops.cpu.linear import CpuLinear
    from headrace.ops.cpu.native.library import Context
    from headrace.ops.cpu.products import CpuKernel
    from headrace.ops.experts import Experts
    from headrace.ops.formats import Stored

__all__ = ["NativeExperts"]


class NativeExperts:
    """A layer's router and experts, packed for the kernels in C."""

    def __init__(
        self,
        experts: Experts,
        context: Context,
        pack: Callable[[Stored, Tensor | None], CpuLinear],
        products: Sequence[CpuKernel],
    ) -> None:
        """Pack all weights, those of the router for the kernels `products` in float32."""
        self._routing, self._activation = experts.routing, experts.activation
        self._correction_X, self._scales_X, self._context = experts.correction_X, experts.scales_X, context
        (self._router,) = _native([pack_router(experts, products)])
        self._gate_up = _Stack(_native(pack_each(pack, experts.gate_up, experts.gate_up_bias_XF)))
        self._down = _Stack(_native(pack_each(pack, experts.down, experts.down_bias_XE)))

    def __call__(self, x_NE: Tensor, routed_NE: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the results of each token's experts, float32.

        Raises:
            MemoryError: There is no memory for the activations.
        """
        x_NE, context = as_floats(x_NE), self._context
        logits_NX = torch.empty(len(x_NE), self._routing.experts)
        self._router.run(context, x_NE if routed_NE is None else as_floats(routed_NE), logits_NX)
        choice = route(logits_NX, self._routing, self._correction_X, self._scales_X)
        groups = grouped(choice.ids_NK, self._routing.experts)
        gate_up_P2F = self._gate_up.multiply(context, x_NE, groups, groups.tokens_P.ctypes.data)
        if self._activation == "silu":
            x_PF = torch.empty(len(gate_up_P2F), gate_up_P2F.shape[1] // 2)
            context.kernels.headrace_silu_mul(context.handle, gate_up_P2F.data_ptr(), *x_PF.shape, x_PF.data_ptr())
        else:
            x_PF = activate_expert(gate_up_P2F, self._activation)
        y_PE = self._down.multiply(context, x_PF, groups, None)
        return self._summed(y_PE, groups, choice.weights_NK.contiguous())

    def _summed(self, y_PE: Tensor, groups: Groups, weights_NK: Tensor) -> Tensor:
        context, (rows, count) = self._context, weights_NK.shape
        sum_NE = torch.empty(rows, y_PE.shape[1])
        pointers = y_PE.data_ptr(), groups.places_NK.ctypes.data, weights_NK.data_ptr()
        context.kernels.headrace_weighted_sums(context.handle, *pointers, rows, count, y_PE.shape[1], sum_NE.data_ptr())
        return sum_NE


class _Stack:
    """One weight of each expert, all of one shape."""

    def __init__(self, linears: Sequence[NativeLinear]) -> None:
        self._linears = linears
        self._pointers = (c_void_p * len(linears))(*(addressof(linear.struct) for linear in linears))

    def multiply(self, context: Context, x: Tensor, groups: Groups, gather: int | None) -> Tensor:
        """Return the product of each pair's row with its expert's weight, float32.

        Args:
            context: Threads and memory of the kernels.
            x: Rows, float32.
            groups: The pairs.
            gather: Address of each pair's row of `x`, int64; None if these are in order.
        """
        y_PO = torch.empty(len(groups.tokens_P), self._linears[0].outs)
        starts = groups.starts_X1.ctypes.data
        sizes = self._pointers, len(self._linears), starts, gather
        if context.kernels.headrace_grouped(context.handle, *sizes, x.data_ptr(), y_PO.data_ptr()):
            raise MemoryError(f"no memory for the activations of {len(y_PO)} rows of experts")
        return y_PO


def _native(packed: Sequence[CpuLinear]) -> list[NativeLinear]:
    found = [each for each in packed if isinstance(each, NativeLinear)]
    assert len(found) == len(packed)
    return found
