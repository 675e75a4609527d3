"""The kernels of experts on the emulated GPU: their own declarations, with slow torch behind `run`; no tests."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from emulated_kernels import demand
from emulated_products import dense_of
from torch import Tensor

__all__ = ["EmulatedExperts", "expert_weights", "mixed"]


class EmulatedExperts:
    """A kernel's declaration that is opened on an emulated GPU."""

    def __init__(self, gpu: Any, kernel: Any) -> None:
        self._gpu, self._kernel = gpu, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def open(self, room: Any) -> EmulatedExpertsRun:
        """As the kernel does, without its compiler."""
        return EmulatedExpertsRun(self._gpu, self._kernel, room)


class EmulatedExpertsRun:
    """One kernel on one stream."""

    def __init__(self, gpu: Any, kernel: Any, room: Any) -> None:
        self._gpu, self._kernel, self._room = gpu, kernel, room
        self._registry = importlib.import_module("headrace.ops.cuda.experts.registry")
        self._route = importlib.import_module("headrace.ops.experts").route

    def run(self, x: Tensor, routed: Tensor, weights: Any, out: Tensor, padding: Any) -> None:
        """As `ExpertRun.run`."""
        for launch in self._registry.launches(pdl=self._room.pdl):
            self._room.chain.note(launch)

        def work() -> None:
            up, down, routing = weights.gate_up, weights.down, weights.routing
            shape = self._registry.ExpertShape(routing, x.shape[1], down.shape[1], x.dtype, up.kind, down.kind)
            arch = self._room.scratch.arch
            why = self._kernel.refuses(arch, shape)
            demand(why is None, f"experts that the kernel refuses: {why}")
            demand(len(x) in self._kernel.rows(arch, shape), f"experts of {len(x)} rows")
            demand(out.data_ptr() != x.data_ptr(), "experts over their own input")
            demand(routed.shape == x.shape, "a router that reads other tokens")
            logits = routed.float() @ weights.router_XE.T
            if weights.router_bias_X is not None:
                logits += weights.router_bias_X
            ids, shares = self._route(logits, routing, weights.correction_X, weights.scales_X)
            if padding is not None:
                demand(len(padding.rows_N) == len(x), "padding of another step")
                shares[padding.rows_N == padding.row] = 0
            out.copy_(mixed(x.float(), ids, shares, weights))

        self._gpu.launch(f"experts: {self._kernel.name}", work)


def in_8_bits(x: Tensor) -> Tensor:
    """Inputs rounded to 8-bit floats, with a scale for each row, in their own dtype."""
    scale = x.abs().amax(1, keepdim=True).float() / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale.to(x.dtype)


def mixed(x: Tensor, ids: Tensor, shares: Tensor, weights: Any, *, coded: bool = False) -> Tensor:
    """The sums of the experts' results, in the dtype of `x`; what a kernel keeps in bfloat16 is rounded to it.

    With `coded`, inputs of both products are rounded to 8-bit floats.
    """
    x = in_8_bits(x) if coded else x
    total = torch.zeros(len(x), weights.down.shape[0], dtype=x.dtype, device=x.device)
    for rank in range(ids.shape[1]):
        for expert in ids[:, rank].unique().tolist():
            rows = (ids[:, rank] == expert) & (shares[:, rank] != 0)
            gate_up = x[rows] @ expert_weights(weights.gate_up, expert).to(x.dtype).T
            if weights.gate_up_bias_XL is not None:
                gate_up += weights.gate_up_bias_XL[expert]
            act = activated(*gate_up.chunk(2, 1), weights.activation).bfloat16().to(x.dtype)
            act = in_8_bits(act) if coded and len(act) else act
            result = act @ expert_weights(weights.down, expert).to(x.dtype).T
            if weights.down_bias_XE is not None:
                result += weights.down_bias_XE[expert]
            total[rows] += shares[rows, rank, None] * result
    return total


def activated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation of gates times their ups."""
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1.0) * gate * torch.sigmoid(1.702 * gate)


def expert_weights(arena: Any, expert: int) -> Tensor:
    """The numbers of one expert's weight."""

    def moved(part: Tensor, pitch: int) -> Tensor:
        return torch.as_strided(part, part.shape, part.stride(), part.storage_offset() + expert * pitch)

    first, pitch = arena.first, arena.pitch
    if isinstance(first, Tensor):
        return moved(first, pitch)
    parts = {
        "codes_OB": moved(first.codes_OB, 4 * pitch.words), "scales": moved(first.scales, pitch.scales),
        "zeros": moved(first.zeros, pitch.zeros), "high": moved(first.high, pitch.high),
        "factors": moved(first.factors, pitch.factors), "table": moved(first.table, pitch.table),
    }  # fmt: skip
    return dense_of(first._replace(**parts))
