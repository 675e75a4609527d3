"""All layers of a model in one CUDA graph with each choice of kernels, timed where the choice matters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.bench.kernels.timing import PAGE, SHAPES, Bench, Shape, decode_inputs, random
from headrace.ops.cuda import fused, heads
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.decode import FusedDecode
from headrace.ops.cuda.attention.even import EvenDecode
from headrace.ops.cuda.attention.paged import PlannedDecode, XqaDecode
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.attention.steps import DecodeAttention
from headrace.ops.cuda.products.fusion import AddNorm
from headrace.ops.cuda.products.linear import LinearScratch, linear, linear_silu_mul
from headrace.ops.cuda.products.vector import vector_linear

__all__ = ["chain"]

_CONTEXT = 1000
_EPS = 1e-6


class _Layer(NamedTuple):
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    kv: Tensor


class _Chain:
    """One model's layers and buffers at one batch size."""

    def __init__(self, bench: Bench, s: Shape, rows: int) -> None:
        self.shape, self.rows, self.device = s, rows, bench.device
        used = rows * -(-_CONTEXT // PAGE)
        width = (s.heads + 2 * s.kv_heads) * s.head_dim
        self.layers = [
            _Layer(
                random(width, s.hidden) / 32,
                random(s.hidden, s.heads * s.head_dim) / 32,
                random(2 * s.ffn, s.hidden) / 32,
                random(s.hidden, s.ffn) / 32,
                random(used + 1, 2, PAGE, s.kv_heads, s.head_dim),
            )
            for _ in range(s.layers)
        ]
        self.moved = s.layers * (
            sum(w.numel() * 2 for w in self.layers[0][:4]) + used * PAGE * 4 * s.kv_heads * s.head_dim
        )
        self.inputs = decode_inputs(rows, _CONTEXT, used, 128)
        self.slots = used * PAGE + torch.arange(rows, device="cuda") % PAGE
        self.head_shape = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
        self.norm = random(s.head_dim) if s.qk_norm else None
        self.table = torch.rand(2048, s.head_dim, device="cuda")
        self.weight, self.scratch = random(s.hidden), LinearScratch("cuda", Arch.of("cuda"))
        self.x, self.h, self.residual, self.second = (random(rows, s.hidden) for _ in range(4))
        self.qkv, self.gate_up, self.act = random(rows, width), random(rows, 2 * s.ffn), random(rows, s.ffn)
        self.q, self.o = (random(rows, s.heads, s.head_dim) for _ in range(2))
        self.decode: DecodeAttention = XqaDecode(self.head_shape, self.device, max_rows=rows, arch=Arch.of("cuda"))
        self.small = FusedDecode(self.head_shape, self.device, max_rows=rows)

    def use_fa2(self) -> None:
        """Attend through FA2 from now on."""
        size = PlannedDecode.workspace_bytes(self.head_shape, self.rows, Arch.of("cuda"))
        workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.decode = planned = PlannedDecode(self.head_shape, self.inputs, workspace)
        planned.plan([_CONTEXT] * self.rows)

    def use_even(self) -> None:
        """Attend through equal shares from now on."""
        self.decode = EvenDecode(self.head_shape, self.device, max_rows=self.rows, arch=Arch.of("cuda"), pdl=True)

    def _attend(self, kv: Tensor, choice: str) -> None:
        s = self.shape
        if choice.endswith("fused decode"):
            out = self.o.view(self.rows, -1)
            self.small.run(self.qkv, self.norm, self.norm, self.table, kv, self.inputs, out, eps=_EPS, pdl=True)
            return
        heads.norm_rope_write(
            self.qkv, self.norm, self.norm, self.table, self.inputs.positions_B, self.slots, kv,
            heads=s.heads, kv_heads=s.kv_heads, eps=_EPS, q_out=self.q, pdl=True,
        )  # fmt: skip
        self.decode.run(self.q, kv, self.inputs, self.o)

    def _vector(self, layer: _Layer, choice: str) -> None:
        apart = "norm apart" in choice
        for_qkv = None if apart else AddNorm(self.weight, _EPS, self.residual, self.second)
        for_gate = None if apart else AddNorm(self.weight, _EPS, self.second, self.residual)
        given = self.h if apart else self.x
        if apart:
            fused.add_rms_norm(self.x, self.residual, self.weight, _EPS, self.h, pdl=True)
        vector_linear(given, layer.qkv, self.qkv, norm=for_qkv, pdl=True)
        self._attend(layer.kv, choice)
        vector_linear(self.o.view(self.rows, -1), layer.o, self.x, pdl=True)
        if apart:
            fused.add_rms_norm(self.x, self.residual, self.weight, _EPS, self.h, pdl=True)
        vector_linear(given, layer.gate_up, self.act, norm=for_gate, gated=True, pdl=True)
        vector_linear(self.act, layer.down, self.x, pdl=True)

    def _product(self, x: Tensor, weight: Tensor, out: Tensor, choice: str) -> None:
        if choice.startswith("triton"):
            linear(x, weight, out, self.scratch, pdl=True)
        else:
            torch.mm(x, weight.t(), out=out)

    def _block(self, layer: _Layer, choice: str) -> None:
        fused.add_rms_norm(self.x, self.residual, self.weight, _EPS, self.h, pdl=True)
        self._product(self.h, layer.qkv, self.qkv, choice)
        self._attend(layer.kv, choice)
        self._product(self.o.view(self.rows, -1), layer.o, self.x, choice)
        fused.add_rms_norm(self.x, self.residual, self.weight, _EPS, self.h, pdl=True)
        if choice.startswith("triton") and "silu apart" not in choice:
            linear_silu_mul(self.h, layer.gate_up, self.act, pdl=True)
        else:
            self._product(self.h, layer.gate_up, self.gate_up, choice)
            fused.activate_mul(self.gate_up, self.act, pdl=True)
        self._product(self.act, layer.down, self.x, choice)

    def run(self, choice: str) -> None:
        """Enqueue all layers."""
        if isinstance(self.decode, EvenDecode):
            self.decode.deal(self.inputs)
            self.second.copy_(self.residual)  # launched without PDL, like an embedding
        for layer in self.layers:
            if choice.startswith("vector"):
                self._vector(layer, choice)
            else:
                self._block(layer, choice)


def chain(bench: Bench) -> None:
    """Time decode layers of 1,000-token contexts, without embedding, head and sampler."""
    for name, shape in SHAPES.items():
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            layers = _Chain(bench, shape, rows)
            for choice in _choices(rows):
                if choice.endswith("fa2"):
                    layers.use_fa2()
                elif choice.endswith("even"):
                    layers.use_even()
                bench.add(f"chain {name} B={rows} {choice}", bench.time(lambda: layers.run(choice)), layers.moved)  # noqa: B023


def _choices(rows: int) -> list[str]:
    choices = ["cublas", "triton", "triton, silu apart"] if rows <= 64 else ["cublas"]
    if rows <= 8:
        choices += ["triton, fused decode", "triton, silu apart, fused decode"]
    plain = [choice for choice in choices if "fused" not in choice]
    if rows == 1:
        choices += ["vector, fused decode", "vector, norm apart, fused decode"]
    if rows >= 4:  # last, since the attention stays as it was chosen
        choices += [f"{choice}, fa2" for choice in plain]
    return [*choices, *(f"{choice}, even" for choice in plain)]
