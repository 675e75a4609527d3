"""Adapters in decode steps: all layers in one CUDA graph with and without, against the time to read the adapters."""

# ruff: noqa: B023 - every lambda here is called before its loop goes on
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.adapters.layout import MODULES, BlockLayout, ModelShape
from headrace.engine.bench.kernels.timing import PAGE, SHAPES, Bench, Shape, decode_inputs, random
from headrace.engine.model.cuda.adapters import sites_of, table_lines
from headrace.ops.cuda.adapters.expand import expand, expand_add_norm, expand_silu_mul
from headrace.ops.cuda.adapters.inside import CudaInsideOps
from headrace.ops.cuda.adapters.products import CudaAdapterOps
from headrace.ops.cuda.adapters.rows import ALIKE, GROUP, LoraBatch, LoraSite, UpdateTiling, group_rows, pick
from headrace.ops.cuda.adapters.shrink import shrink
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.kernels import EvenDecodes, FusedDecodes
from headrace.ops.cuda.attention.registry import DecodeRoom
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.attention.steps import DecodeStep
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.hazards import Chain
from headrace.ops.cuda.products.linear import MAX_ROWS, LinearScratch
from headrace.ops.cuda.products.packed import Products
from headrace.ops.cuda.products.registry import ProductRoom
from headrace.ops.formats import Stored
from headrace.ops.stream import Stream

__all__ = ["lora", "lora_sweep"]

_CONTEXT = 1000
_EPS = 1e-6
_KINDS = {"r8 q k v o": (8, MODULES[:4]), "r16 all": (16, MODULES)}


_Ops: TypeAlias = CudaOps | CudaAdapterOps | CudaInsideOps


class _Layer(NamedTuple):
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


def _model_shape(s: Shape) -> ModelShape:
    return ModelShape(s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.ffn, s.vocabulary)


class _Adapters:
    """Adapters of one kind, each in a block of its own."""

    def __init__(self, s: Shape, kind: str, count: int) -> None:
        rank, modules = _KINDS[kind]
        shape = _model_shape(s)
        layout = BlockLayout.of(shape, {(layer, module): rank for layer in range(s.layers) for module in modules})
        self.bytes, self.rank, self.feeds = 2 * layout.elements, rank, "down" in modules
        self.arena = torch.empty(count * layout.elements, dtype=torch.bfloat16, device="cuda").uniform_(-0.02, 0.02)
        lines = [torch.from_numpy(table_lines(layout, place * layout.elements)) for place in range(count)]
        self.table = torch.stack(lines).cuda()
        self.own = torch.empty_like(self.table[0])
        self.sites = sites_of(shape)

    def batch(self, rows: int, group: int) -> LoraBatch:
        """Return an empty batch with entries of up to `group` rows."""
        entries = torch.zeros(rows, 4, dtype=torch.int32, device="cuda")
        order, slots = (torch.zeros(rows, dtype=torch.int32, device="cuda") for _ in range(2))
        counts = torch.zeros(2, dtype=torch.int32, device="cuda")
        shared_bytes = Arch.of("cuda").shared_bytes
        return LoraBatch(self.arena, self.table, entries, counts, order, slots, group, self.rank, shared_bytes)


class _Layers:
    """One model's layers at one batch size, computed as the engine does."""

    def __init__(self, bench: Bench, s: Shape, rows: int) -> None:
        self.shape, self.rows = s, rows
        width = (s.heads + 2 * s.kv_heads) * s.head_dim
        self.layers = [
            _Layer(
                random(width, s.hidden) / 32,
                random(s.hidden, s.heads * s.head_dim) / 32,
                random(2 * s.ffn, s.hidden) / 32,
                random(s.hidden, s.ffn) / 32,
            )
            for _ in range(s.layers)
        ]
        head = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
        table = torch.rand(2048, s.head_dim, device="cuda")
        arch = Arch.of("cuda")
        products = Products(arch, ProductRoom(LinearScratch("cuda", arch), _EPS, pdl=True, chain=Chain()))
        self.ops = CudaOps(head, cos_sin_PD=table, products=products)
        used = rows * -(-_CONTEXT // PAGE)
        self.kv = torch.zeros(s.layers, used + 1, 2, PAGE, s.kv_heads, s.head_dim, dtype=torch.bfloat16, device="cuda")
        kernel = FusedDecodes() if rows <= 8 else EvenDecodes()
        room = DecodeRoom(arch, bench.device, most_rows=rows, pdl=True)
        self.step = kernel.open(head, decode_inputs(rows, _CONTEXT, used, 128), room)
        self.embedding, self.norm = random(1024, s.hidden), random(s.hidden)
        self.tokens = torch.arange(rows, device="cuda")
        self.batch_B = torch.arange(rows, dtype=torch.int32, device="cuda")

    def adapter_ops(self, adapters: _Adapters, batch: LoraBatch) -> _Ops:
        """Return the operations that compute a step's products with adapters."""
        if batch.rows == ALIKE:
            return CudaInsideOps(self.ops, batch, adapters.own, adapters.sites, feeds=adapters.feeds)
        return CudaAdapterOps(self.ops, batch, adapters.sites, feeds=adapters.feeds, side=torch.cuda.Stream())

    def run(self, ops: _Ops, prepare: Callable[[], None]) -> Tensor:
        """Enqueue a step's layers."""
        prepare()
        if isinstance(self.step, DecodeStep):
            self.step.attention.deal(self.step.inputs)
        norm, stream = self.norm, Stream(self.embedding[self.tokens])
        for number, layer in enumerate(self.layers):
            qkv, o, gate_up, down = (self.ops.pack(Stored.from_dense(weight), None) for weight in layer)
            after = norm if number + 1 < len(self.layers) else None
            x, total = ops.attend(stream, norm, qkv, None, self.step, tuple(self.kv), number)
            stream = ops.add(x, o, total, norm, number, "o")
            x, total = ops.feed(stream, norm, gate_up, number)
            stream = ops.add(x, down, total, after, number, "down")
        return ops.normed(stream, norm)[0]


def _read_speed(bench: Bench) -> float:
    """Return the bytes a second of a large read."""
    source = torch.randn(512 << 20, device="cuda")
    return 4 * source.numel() / bench.time(lambda: torch.sum(source))[1] * 1e6


def lora(bench: Bench) -> None:
    """Time decode layers of 1,000-token contexts with adapters, without embedding, head and sampler."""
    speed = _read_speed(bench)
    for rows in (1, 64, 256):
        layers = _Layers(bench, SHAPES["8b"], rows)
        base = bench.time(lambda: layers.run(layers.ops, lambda: None))
        bench.add(f"lora 8b B={rows} none", base)
        for kind, count in itertools.product(_KINDS, (1, 8, 64, 256)):
            if count <= rows:
                _worn(bench, layers, _Adapters(SHAPES["8b"], kind, count), f"{count} x {kind}", (base[1], speed))


def _worn(bench: Bench, layers: _Layers, adapters: _Adapters, what: str, known: tuple[float, float]) -> None:
    """Time a step whose rows use `adapters` in turn, in entries of one row and of several, against one without."""
    (base, speed), rows, count = known, layers.rows, len(adapters.table)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda") % count
    for group in _groups(rows, count):
        batch = adapters.batch(rows, group)
        ops = layers.adapter_ops(adapters, batch)

        def prepare() -> None:
            group_rows(slots, layers.batch_B, batch)
            if group == ALIKE:
                pick(batch, adapters.own)

        timed = bench.time(lambda: layers.run(ops, prepare))
        floor = count * adapters.bytes / speed * 1e6
        over, least = timed[1] / base - 1, floor / base
        note = f"+{over:.1%}, floor +{least:.1%}, over it {over - least:.1%}"
        bench.add(f"lora 8b B={rows} {what}, {group} a group", timed, 0, note)


def _groups(rows: int, count: int) -> list[int]:
    """Return the sizes of entries in which rows may share adapters."""
    if rows == 1:
        return [1]
    return [1, GROUP] if count > 1 or rows > MAX_ROWS else [1, ALIKE]


_SWEPT: dict[str, list[tuple[int, ...]]] = {
    "shrink": [(16, 256, 4), (16, 256, 4, 2), (16, 256, 4, 4), (16, 128, 2, 4), (16, 512, 4, 2)],
    "expand": [(8, 256, 1), (8, 512, 2), (8, 512, 2, 2), (8, 512, 2, 4), (8, 256, 1, 4), (8, 1024, 4, 2)],
}
"""Tilings for rows with different adapters; `_SWEPT_GROUPS` has those for rows with the same one."""
_SWEPT_GROUPS: dict[str, list[tuple[int, ...]]] = {
    "shrink": [(16, 128, 4, 2), (16, 256, 4), (16, 256, 4, 2), (16, 256, 4, 4), (16, 256, 8, 2)],
    "expand": [(16, 64, 4), (16, 128, 4), (16, 128, 8), (16, 256, 8)],
}


def lora_sweep(bench: Bench) -> None:
    """Time tilings of each kernel, every adapter cold, in a chain over all layers."""
    speed, s = _read_speed(bench), SHAPES["8b"]
    for kind, (rows, count, group) in itertools.product(
        _KINDS, ((1, 1, 1), (64, 64, 1), (64, 1, GROUP), (256, 256, 1))
    ):
        adapters = _Adapters(s, kind, count)
        batch = adapters.batch(rows, group)
        batch_B = torch.arange(rows, dtype=torch.int32, device="cuda")
        group_rows(batch_B % count, batch_B, batch)
        for site in ("qkv", "o", "gate_up", "down"):
            if kind != "r16 all" and site in ("gate_up", "down"):
                continue
            places = [adapters.sites[layer, site] for layer in range(s.layers)]
            where = f"{kind} {site} B={rows} x{count}"
            rank = adapters.rank * len(places[0].sizes_out)
            _sweep_shrink(bench, batch, places, where, (2 * count * rank * places[0].size_in, speed))
            moved = 2 * count * adapters.rank * sum(places[0].sizes_out)
            _sweep_expand(bench, batch, places, where, (moved, speed), site)


def _sweep_shrink(bench: Bench, batch: LoraBatch, places: list[LoraSite], where: str, floor: tuple[int, float]) -> None:
    x = random(len(batch.order_N), places[0].size_in)
    for choice in (_SWEPT if batch.rows == 1 else _SWEPT_GROUPS)["shrink"]:
        how = UpdateTiling(*choice)
        timed = bench.time(lambda: [shrink(x, batch, place, how=how, pdl=True) for place in places], len(places))
        note = f"{tuple(how)}, over its bytes {timed[1] - floor[0] / floor[1] * 1e6:.2f} us"
        bench.add(f"shrink {where}", timed, floor[0], note)


def _sweep_expand(
    bench: Bench, batch: LoraBatch, places: list[LoraSite], where: str, floor: tuple[int, float], site: str
) -> None:
    place = places[0]
    low = shrink(random(len(batch.order_N), place.size_in), batch, place)
    y = random(len(batch.order_N), sum(place.sizes_out))
    out, residual, weight = random(len(y), place.sizes_out[0]), random(*y.shape), random(y.shape[1])

    def one(each: LoraSite, how: UpdateTiling | None) -> None:
        if site == "gate_up":
            expand_silu_mul(low, y, out, batch, each, how=how, pdl=True)
        elif how is None:
            expand_add_norm(low, y, residual, weight, _EPS, batch, each, pdl=True)
        else:
            expand(low, y, batch, each, how=how, pdl=True)

    def all_of(how: UpdateTiling | None) -> None:
        for each in places:
            one(each, how)

    choices = [UpdateTiling(*choice) for choice in (_SWEPT if batch.rows == 1 else _SWEPT_GROUPS)["expand"]]
    for how in [*choices, *([None] if len(place.sizes_out) == 1 else [])]:
        timed = bench.time(lambda: all_of(how), len(places))
        note = f"{how and tuple(how)}, over its bytes {timed[1] - floor[0] / floor[1] * 1e6:.2f} us"
        bench.add(f"expand {where}", timed, floor[0], note)
