"""`ExpertProducts`: packs the experts of layers for the kernels of one stream, chosen once for each shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda.experts.arena import arena_of
from headrace.ops.cuda.experts.kernels import EXPERTS
from headrace.ops.cuda.experts.registry import ExpertShape, ExpertWeights, resolve_experts, split_router
from headrace.ops.cuda.products.registry import ByRows

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.experts.registry import ExpertKernel, ExpertRun, Padding
    from headrace.ops.cuda.products.registry import ProductRoom
    from headrace.ops.experts import Experts

__all__ = ["CudaExperts", "ExpertProducts"]


class ExpertProducts:
    """The kernels of one stream."""

    def __init__(self, arch: Arch, room: ProductRoom, kernels: Sequence[ExpertKernel] = EXPERTS) -> None:
        """Choose among `kernels`, of which the first are preferred, for the GPU `arch`."""
        self._arch, self._room, self._kernels = arch, room, kernels
        self._open: dict[str, ExpertRun] = {}
        self._runs: dict[ExpertShape, ByRows[ExpertRun]] = {}
        self.padding: Padding | None = None
        """Tokens of the step at hand that are padding; None where there are none."""

    def pack(self, experts: Experts, dtype: torch.dtype) -> CudaExperts:
        """Pack a layer's router and experts, for activations in `dtype`."""
        up, down = arena_of(experts.gate_up, dtype), arena_of(experts.down, dtype)
        shape = ExpertShape(experts.routing, down.shape[0], experts.size, dtype, up.kind, down.kind)
        runs = self._runs.get(shape)
        if runs is None:
            found = resolve_experts(self._kernels, self._arch, shape).kernels
            runs = self._runs[shape] = ByRows([(rows, self._ready(kernel)) for rows, kernel in found.spans])
        weights = ExpertWeights(
            experts.routing, split_router(experts.router_XE), experts.router_bias_X, experts.correction_X, up, down,
            experts.activation, experts.gate_up_bias_XF, experts.down_bias_XE, experts.scales_X,
        )  # fmt: skip
        return CudaExperts(self, weights, runs)

    @contextmanager
    def padded(self, padding: Padding) -> Iterator[None]:
        """Give no experts to the padding of a step, whose layers are enqueued until this ends."""
        self.padding = padding
        try:
            yield
        finally:
            self.padding = None

    def _ready(self, kernel: ExpertKernel) -> ExpertRun:
        """Make a kernel ready, once for all layers."""
        found = self._open.get(kernel.name)
        if found is None:
            found = self._open[kernel.name] = kernel.open(self._room)
        return found


class CudaExperts:
    """A layer's router and experts, with the kernel for each number of tokens."""

    def __init__(self, products: ExpertProducts, weights: ExpertWeights, runs: ByRows[ExpertRun]) -> None:
        """Compute with `weights`."""
        self._products, self.weights, self._runs = products, weights, runs

    def __call__(self, x_NE: Tensor, routed_NE: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the results of each token's experts, and zeros for padding.

        The router reads `routed_NE`, or what the experts read if that is None.
        """
        out_NE, routed_NE = torch.empty_like(x_NE), x_NE if routed_NE is None else routed_NE
        self._runs[len(x_NE)].run(x_NE, routed_NE, self.weights, out_NE, self._products.padding)
        return out_NE
