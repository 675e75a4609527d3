"""The kernels of products on the emulated GPU: their own declarations, with slow, obvious torch behind `run`; no tests.

What a kernel refuses, and the rows for which it pays, are the real ones, so the choice is the engine's own. A launch
that its kernel refuses, or that no GPU would survive, is a `Misuse`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from emulated_kernels import Misuse, demand, gated, normed, rotate_and_store
from torch import Tensor

__all__ = ["EmulatedProduct"]


class EmulatedProduct:
    """A kernel's declaration that is opened on an emulated GPU."""

    def __init__(self, gpu: Any, kernel: Any) -> None:
        self._gpu, self._kernel = gpu, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def open(self, room: Any) -> EmulatedRun:
        """As the kernel does, without its compiler."""
        major = self._gpu.capability[0]
        demand(not room.pdl or major >= 9, f"{self._kernel.name}: launched dependently on a GPU that cannot")
        demand(not hasattr(self._kernel, "source") or major == 9, f"{self._kernel.name}: opened on another GPU")
        return EmulatedRun(self._gpu, self._kernel, room)


class EmulatedRun:
    """One kernel on one stream."""

    def __init__(self, gpu: Any, kernel: Any, room: Any) -> None:
        self._gpu, self._kernel, self._room = gpu, kernel, room
        self._fusions = importlib.import_module("headrace.ops.cuda.products.fusion")
        self._shape = importlib.import_module("headrace.ops.cuda.products.registry").WeightShape

    def run(
        self, x: Tensor, weight: Tensor, out: Tensor, before: Any = None, after: Any = None, updates: Any = None
    ) -> None:
        """As `ProductRun.run`."""
        name = f"product: {self._kernel.name}" + (", updated" if updates else "")
        fusion = "heads" if isinstance(after, self._fusions.HeadTargets) else "plain"
        launch = self._kernel.launch(fusion, updates=updates is not None)
        self._room.chain.note(replace(launch, overlaps=launch.overlaps and self._room.pdl))
        self._gpu.launch(name, self._work(x, weight, out, before, after, updates))

    def _work(
        self, x: Tensor, weight: Tensor, out: Tensor, before: Any, after: Any, updates: Any
    ) -> Callable[[], None]:
        fusions, arch = self._fusions, self._room.scratch.arch
        is_norm, is_scaled = isinstance(before, fusions.AddNorm), isinstance(before, fusions.Squares)
        is_heads, is_sum = isinstance(after, fusions.HeadTargets), isinstance(after, fusions.Residual)
        fusion = "heads" if is_heads else "residual" if is_sum else "gated" if after is not None else "plain"
        if out.dtype != x.dtype:
            fusion = "logits"
        if not is_heads:
            fusion = "norm " * is_norm + "factors " * is_scaled + fusion
        dense = weight if isinstance(weight, Tensor) else dense_of(weight)
        shape = self._shape(*weight.shape, 128, kind=getattr(weight, "kind", None))

        def work() -> None:
            why = self._kernel.refuses(arch, shape, fusion)
            demand(why is None, f"{fusion} that the kernel refuses: {why}")
            demand(len(x) in self._kernel.rows(arch, shape, fusion), f"{fusion} of {len(x)} rows")
            demand(updates is None or self._kernel.has_updates, "updates that the kernel does not add")
            demand(out.data_ptr() != x.data_ptr(), "a product over its own input")
            y = self._input(x, before if is_norm else None).float() @ dense.float().T
            if updates is not None:
                y += update_of(x, self._sizes(out, after), *updates)
            if is_scaled:
                y = y * torch.rsqrt(before.parts_EN.sum(0) / x.shape[1] + self._room.eps)[:, None]
            if is_heads:
                rotate_and_store(y, out, after, self._room.eps)
            elif is_sum:
                demand(after.total_NE.is_contiguous(), "a sum that the kernel cannot write")
                y = y + after.total_NE.float()
                after.total_NE.copy_(y)
                after.squares.parts_EN.copy_((y * y).view(len(y), -1, 64).sum(2).T)
                out.copy_(y * after.norm_E.float())
            else:
                out.copy_(y if after is None else gated(y))

        return work

    @staticmethod
    def _input(x: Tensor, norm: Any) -> Tensor:
        if norm is None:
            return x
        value = x.float()
        if norm.residual is not None:
            kept = norm.residual_out
            demand(kept.data_ptr() != norm.residual.data_ptr(), "a sum over the residual that others read")
            value = value + norm.residual.float()
            kept.copy_(value)
        return normed(value, norm.weight, norm.eps).to(x.dtype)

    def _sizes(self, out: Tensor, after: Any) -> list[int]:
        """Output features of each module of a site."""
        if isinstance(after, self._fusions.HeadTargets):
            return [out.shape[1], *[after.kv_layer.shape[3] * 128] * 2]
        return [out.shape[1]] * (1 + isinstance(after, self._fusions.Gated))


def dense_of(weight: Any) -> Tensor:
    """The numbers that codes stand for, rounded as a plain model's are, so that both give the same tokens."""
    layout = importlib.import_module("headrace.ops.cuda.codes.layout").CodeLayout(weight.kind, weight.scales.dtype)
    fields = {"codes": "codes_OB", "order": "order_I"}
    parts = {name: getattr(weight, fields.get(name, name)) for name in layout.parts(weight.shape)}
    dense: Tensor = layout.dense(parts, weight.shape, torch.bfloat16)
    return dense


def update_of(x: Tensor, sizes: Sequence[int], arena: Tensor, modules: Tensor, slots: Tensor) -> Tensor:
    """(x A^T) B of the one adapter that rows use, all modules side by side."""
    parts = []
    for size, (a, b, rank, before) in zip(sizes, modules.tolist(), strict=True):
        if rank > 16 or rank % 8 or 8 * (a - modules[0, 0]) != before * x.shape[1]:
            raise Misuse("an update that the kernel cannot add")
        a_RI = arena[8 * a : 8 * a + rank * x.shape[1]].view(rank, x.shape[1])
        parts.append((x.float() @ a_RI.float().T) @ arena[8 * b : 8 * b + rank * size].view(rank, size).float())
    return torch.cat(parts, 1) * (slots >= 0)[:, None]
