"""Low-rank updates on CUDA against float64, adapter by adapter."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_tensors import error, poison, random

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from headrace.ops.cuda.adapters.alike import expand_alike, shrink_alike
from headrace.ops.cuda.adapters.expand import expand, expand_add_norm, expand_silu_mul
from headrace.ops.cuda.adapters.rows import ALIKE, GROUP, SEGMENT, UNIT, LoraBatch, LoraSite, group_rows
from headrace.ops.cuda.adapters.shrink import shrink
from headrace.ops.cuda.adapters.vector_expand import Waiting, norm_shrink, vector_linear_expand
from headrace.ops.cuda.adapters.vector_shrink import vector_linear_shrink
from headrace.ops.cuda.arch import Arch

GPU = torch.device("cuda")
EPS = 1e-5
MAX_RANK = 64
SHARED_BYTES = Arch.of(GPU).shared_bytes
QKV, OUT, GATE_UP, DOWN = SITES = [
    LoraSite(0, 1024, (1024, 256, 256)),
    LoraSite(3, 1024, (1024,)),
    LoraSite(4, 1024, (1500, 1500)),
    LoraSite(6, 1500, (1024,)),
]
WIDE = [
    LoraSite(0, 5120, (256, 64, 64)),
    LoraSite(3, 64, (5120,)),
    LoraSite(4, 5120, (96, 96)),
    LoraSite(6, 96, (5120,)),
]
RANKS = [
    [8] * 7,
    [16] * 7,
    [8, 0, 64, 24, 0, 16, 40],  # patterns, and modules that the adapter leaves alone
    [0] * 7,
    [0, 0, 0, 0, 32, 0, 64],
]
Update = list[tuple[torch.Tensor, torch.Tensor]]


class Adapters:
    """One of each of `RANKS` in one arena, after a gap."""

    def __init__(self, sites: list[LoraSite]) -> None:
        self.sites = sites
        parts, end = [random(UNIT)], UNIT
        self.table = torch.zeros(len(RANKS), 7, 4, dtype=torch.int32)
        self.updates: list[list[Update]] = []
        for slot, ranks in enumerate(RANKS):
            self.updates.append([])
            for site in sites:
                mine = ranks[site.line : site.line + len(site.sizes_out)]
                a = [random(rank, site.size_in) / site.size_in**0.5 for rank in mine]
                b = [random(rank, size) for rank, size in zip(mine, site.sizes_out, strict=True)]
                self.updates[-1].append(list(zip(a, b, strict=True)))
                for column, matrices in enumerate((a, b)):
                    for place, matrix in enumerate(matrices):
                        self.table[slot, site.line + place, column] = end // UNIT
                        parts.append(matrix.flatten())
                        end += matrix.numel()
                for place, rank in enumerate(mine):
                    self.table[slot, site.line + place, 2:] = torch.tensor([rank, sum(mine[:place])])
        self.arena, self.table = torch.cat(parts), self.table.to(GPU)

    def truth(self, x: torch.Tensor, y: torch.Tensor, slots: list[int], site: LoraSite) -> torch.Tensor:
        """y with each token's update, in float64."""
        total = y.double()
        for token, slot in enumerate(slots):
            if slot >= 0:
                update = self.updates[slot][self.sites.index(site)]
                total[token] += reference.low_rank(x[token : token + 1], update)[0]
        return total


@pytest.fixture(scope="module")
def adapters() -> Adapters:
    torch.manual_seed(0)
    return Adapters(SITES)


def decode_batch(adapters: Adapters, slots: list[int], rows: int) -> LoraBatch:
    """As a decode step of rows in another order than the table's."""
    order = torch.randperm(len(slots)).int()
    table = torch.full((len(slots) + 1,), -1, dtype=torch.int32)
    table[order.long()] = torch.tensor(slots, dtype=torch.int32)
    empty = torch.full((len(slots), 6), -9, dtype=torch.int32, device=GPU)
    entries, order_N, slots_N = empty[:, :4].clone(), empty[:, 4].clone(), empty[:, 5].clone()
    counts = torch.full((2,), -9, dtype=torch.int32, device=GPU)
    batch = LoraBatch(adapters.arena, adapters.table, entries, counts, order_N, slots_N, rows, MAX_RANK, SHARED_BYTES)
    group_rows(table.to(GPU), order.to(GPU), batch)
    return batch


def prefill_batch(adapters: Adapters, slots: list[int]) -> LoraBatch:
    entries, start = [], 0
    for token in range(1, len(slots) + 1):
        if token == len(slots) or slots[token] != slots[start] or token - start == SEGMENT:
            entries.append((slots[start], start, token - start, start))
            start = token
    order = torch.arange(len(slots), dtype=torch.int32, device=GPU)
    worn = torch.tensor(slots, dtype=torch.int32, device=GPU)
    lines = torch.tensor(entries, dtype=torch.int32, device=GPU)
    counts = torch.full((2,), len(entries), dtype=torch.int32, device=GPU)
    return LoraBatch(adapters.arena, adapters.table, lines, counts, order, worn, SEGMENT, MAX_RANK, SHARED_BYTES)


def batches(adapters: Adapters) -> list[tuple[str, list[int], LoraBatch]]:
    """Mixes of adapters and rows without one."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows in (1, 5, 33, 256):
        slots = torch.randint(-1, len(RANKS), (rows,), generator=generator).tolist()
        found += [(f"{rows} mixed, {group}", slots, decode_batch(adapters, slots, group)) for group in (1, GROUP)]
    found.append(("64 alike", [2] * 64, decode_batch(adapters, [2] * 64, GROUP)))
    found.append(("none", [-1] * 8, decode_batch(adapters, [-1] * 8, 1)))
    slots = [0] * 130 + [-1] * 70 + [2] * 3 + [4] + [1] * 96
    found.append(("prefill", slots, prefill_batch(adapters, slots)))
    return found


def test_updates_are_right_and_repeat_themselves(adapters: Adapters) -> None:
    for name, slots, batch in batches(adapters):
        for site in SITES:
            x, y = random(len(slots), site.size_in), random(len(slots), sum(site.sizes_out))
            truth = adapters.truth(x, y, slots, site)
            outs = []
            for pdl in (False, True, True):
                out = y.clone()
                expand(shrink(x, batch, site, pdl=pdl), out, batch, site, pdl=pdl)
                outs.append(out)
            assert error(outs[0], truth) < 6e-3, (name, site)
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2]), (name, site)
            bare = [slot < 0 for slot in slots]
            assert torch.equal(outs[0][bare], y[bare]), (name, site)


def test_updates_before_an_activation_or_a_norm(adapters: Adapters) -> None:
    for name, slots, batch in batches(adapters):
        x, y = random(len(slots), GATE_UP.size_in), random(len(slots), sum(GATE_UP.sizes_out))
        out = torch.full((len(slots), GATE_UP.sizes_out[0]), float("nan"), dtype=torch.bfloat16, device=GPU)
        expand_silu_mul(shrink(x, batch, GATE_UP, pdl=True), y, out, batch, GATE_UP, pdl=True)
        assert error(out, reference.silu_mul(adapters.truth(x, y, slots, GATE_UP))) < 6e-3, name
        if batch.rows == SEGMENT:
            continue
        for site in (OUT, DOWN):
            x, y, residual = (random(len(slots), size) for size in (site.size_in, 1024, 1024))
            weight = random(1024)
            total = adapters.truth(x, y, slots, site) + residual.double()
            expand_add_norm(shrink(x, batch, site, pdl=True), y, residual, weight, EPS, batch, site, pdl=True)
            assert error(residual, total) < 6e-3, (name, site)
            assert error(y, reference.rms_norm(total, weight, EPS)) < 6e-3, (name, site)


def test_a_captured_step_serves_any_mix(adapters: Adapters) -> None:
    slots_R = torch.full((9,), -1, dtype=torch.int32, device=GPU)
    rows = torch.arange(8, dtype=torch.int32, device=GPU)
    x, y, out = random(8, QKV.size_in), random(8, sum(QKV.sizes_out)), random(8, sum(QKV.sizes_out))
    for group in (1, GROUP):
        batch = decode_batch(adapters, [-1] * 8, group)

        def work(batch: LoraBatch = batch) -> None:
            group_rows(slots_R, rows, batch)
            out.copy_(y)
            expand(shrink(x, batch, QKV, pdl=True), out, batch, QKV, pdl=True)

        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for slots in ([0, 1, 2, 3, 4, -1, 0, 1], [2] * 8, [-1] * 8, [4, -1, 4, -1, 2, 2, 2, 0]):
            slots_R[:8] = torch.tensor(slots, dtype=torch.int32)
            graph.replay()
            assert error(out, adapters.truth(x, y, slots, QKV)) < 6e-3, (group, slots)


def test_one_row_is_multiplied_and_shrunk_at_once(adapters: Adapters) -> None:
    for slot in (-1, 0, 2, 4):
        batch = decode_batch(adapters, [slot], 1)
        for site in SITES:
            x, weight = random(1, site.size_in), random(sum(site.sizes_out), site.size_in) / site.size_in**0.5
            out = torch.full((1, len(weight)), float("nan"), dtype=torch.bfloat16, device=GPU)
            low = vector_linear_shrink(x, weight, out, batch, site, pdl=True)
            assert error(out, reference.linear(x, weight, None).double()) < 4e-3
            expand(low, out, batch, site, pdl=True)
            truth = adapters.truth(x, reference.linear(x, weight, None), [slot], site)
            assert error(out, truth) < 6e-3, (slot, site)


@pytest.mark.parametrize("sites", [SITES, WIDE], ids=["1024", "5120"])
def test_one_row_is_shrunk_beside_its_norm_and_updated_within_the_product(sites: list[LoraSite]) -> None:
    adapters, size = Adapters(sites), sites[0].size_in
    qkv, out, gate_up, down = sites
    for slot, (site, before) in itertools.product((-1, 0, 2, 4), ((qkv, down), (gate_up, out), (qkv, None))):
        batch = decode_batch(adapters, [slot], 1)
        y, residual, weight = random(1, size), random(1, size), random(size)
        matrix, waiting, total = random(sum(site.sizes_out), size) / size**0.5, None, y.double() + residual.double()
        if before is not None:
            x, square = random(1, before.size_in), random(before.size_in, before.size_in)
            low = vector_linear_shrink(x, square, torch.empty_like(x), batch, before)
            waiting, total = Waiting(low, before), adapters.truth(x, y, [slot], before) + residual.double()
        normed = reference.rms_norm(total, weight, EPS).double()
        truth, gated = adapters.truth(normed, normed @ matrix.double().T, [slot], site), site is gate_up
        outs = []
        for pdl in (False, True, True):
            row = norm_shrink(y, residual, weight, batch, site, waiting, pdl=pdl)
            outs.append(poison(1, site.sizes_out[0] if gated else len(matrix)))
            vector_linear_expand(row, matrix, outs[-1], EPS, batch, site, gated=gated, pdl=pdl)
        assert error(row.total_1E, total) < 6e-3, (slot, site)
        assert error(outs[0], reference.silu_mul(truth) if gated else truth) < 8e-3, (slot, site)
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2]), (slot, site)


def test_rows_of_one_adapter(adapters: Adapters) -> None:
    for slots in ([2, -1], [1, 1, -1, 1, 1], [-1, 4] * 8, [2] * 64, [-1, 0] * 32, [-1] * 5):
        batch = decode_batch(adapters, slots, ALIKE)
        for site in SITES:
            gated = site is GATE_UP
            x, y = random(len(slots), site.size_in), random(len(slots), sum(site.sizes_out))
            truth = adapters.truth(x, y, slots, site)
            outs = []
            for _ in range(2):
                out = random(len(slots), site.sizes_out[0]) if gated else y.clone()
                expand_alike(shrink_alike(x, batch, site), y if gated else out, out, batch, site, gated=gated, pdl=True)
                outs.append(out)
            assert error(outs[0], reference.silu_mul(truth) if gated else truth) < 8e-3, (slots, site)
            assert torch.equal(outs[0], outs[1]), (slots, site)
