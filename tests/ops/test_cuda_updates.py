"""Products of few rows with the update of one adapter inside, against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_tensors import error, poison, random

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.adapters.rows import ALIKE, UNIT, LoraBatch, UpdateSite, group_rows, pick
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.products.even_heads import EvenHeads
from headrace.ops.cuda.products.even_linear import EvenLinear
from headrace.ops.cuda.products.fusion import HeadTargets, Squares
from headrace.ops.cuda.products.linear import LinearScratch

GPU = torch.device("cuda")
EPS = 1e-5
HEAD, PAGE, POSITIONS = 128, 16, 200
if not Arch.of(GPU).has("wgmma"):
    pytest.skip("needs Hopper", allow_module_level=True)

SCRATCH = LinearScratch(GPU, Arch.of(GPU))
ROWS = [2, 16, 17, 33, 64]
PRODUCTS = [
    (4096, 4096, 16),
    (4096, 14336, 8),
    (14336, 1024, 16),
    (1024, 3072, 16),
    (576, 576, 16),
    (64, 64, 8),
    (512, 512, 0),
]
FEEDS = [
    (14336, 4096, [16, 16]),
    (1536, 2048, [16, 8]),
    (8480, 576, [8, 16]),
    (1568, 576, [16, 0]),
    (1568, 576, [0, 8]),
    (32, 64, [16, 8]),
]
HEADS = [
    (4096, 32, 8, [16, 16, 16]),
    (1024, 16, 8, [16, 0, 8]),
    (448, 3, 2, [8, 16, 8]),
    (64, 1, 1, [16, 8, 16]),
    (256, 100, 20, [16, 8, 16]),
]
"""In each case few and many tiles, an odd number of lines, and one; and more heads than clusters at once."""


class Adapter:
    """The update of one site, in an arena among others', which hold no numbers."""

    def __init__(self, size_in: int, sizes: list[int], ranks: list[int]) -> None:
        self.a = [random(rank, size_in) / size_in**0.5 for rank in ranks]
        self.b = [random(rank, size) for rank, size in zip(ranks, sizes, strict=True)]
        lines, parts, end = torch.zeros(2, len(ranks), 4, dtype=torch.int32), [poison(7, UNIT).flatten()], 7 * UNIT
        for column, matrices in enumerate((self.a, self.b)):
            for place, matrix in enumerate(matrices):
                lines[1, place, column] = end // UNIT
                parts.append(matrix.flatten())
                end += matrix.numel()
        for place, rank in enumerate(ranks):
            lines[1, place, 2:] = torch.tensor([rank, sum(ranks[:place])])
        self.arena, self.table = torch.cat([*parts, poison(1, 64).flatten()]), lines.to(GPU)

    def worn(self, wears: list[bool]) -> UpdateSite:
        rows = len(wears)
        slots = torch.tensor([1 if worn else -1 for worn in wears], dtype=torch.int32, device=GPU)
        entries, order = torch.zeros(rows, 4, dtype=torch.int32, device=GPU), torch.zeros_like(slots)
        batch = LoraBatch(
            self.arena, self.table, entries, torch.zeros(2, dtype=torch.int32, device=GPU), order,
            torch.zeros_like(slots), ALIKE, 16, Arch.of(GPU).shared_bytes,
        )  # fmt: skip
        group_rows(slots, torch.arange(rows, dtype=torch.int32, device=GPU), batch)
        own = torch.full_like(self.table[0], -9)
        pick(batch, own)
        return UpdateSite(self.arena, own, batch.slots_N)

    def add(self, y: torch.Tensor, x: torch.Tensor, wears: list[bool]) -> torch.Tensor:
        """y with the updates of those that wear them."""
        mask = torch.tensor(wears, device=GPU)[:, None]
        return y + reference.low_rank(x, list(zip(self.a, self.b, strict=True))) * mask


def some(rows: int) -> list[bool]:
    return [row % 3 != 1 for row in range(rows)]


@pytest.mark.parametrize(("size_out", "size_in", "rank"), PRODUCTS)
@pytest.mark.parametrize("rows", ROWS)
def test_product_and_sum(rows: int, size_out: int, size_in: int, rank: int) -> None:
    x, weight, wears = random(rows, size_in), random(size_out, size_in) / size_in**0.5, some(rows)
    adapter = Adapter(size_in, [size_out], [rank])
    worn = adapter.worn(wears)
    truth = adapter.add(reference.linear(x, weight, None).double(), x, wears)
    residual, norm = random(rows, size_out), random(size_out)
    outs = []
    for pdl in (False, True, True):
        out, kept, scaled = poison(rows, size_out), residual.clone(), poison(rows, size_out)
        even = EvenLinear(SCRATCH, eps=EPS, pdl=pdl)
        even.product(x, weight, out, updates=worn)
        squares = even.add(x, weight, kept, norm, scaled, worn)
        outs.append((out, kept, scaled))
    assert error(outs[0][0], truth) < 5e-3
    assert error(outs[0][1], truth + residual) < 5e-3
    assert error(outs[0][2], (truth + residual) * norm) < 6e-3
    assert error(squares.parts_EN.sum(0), (truth + residual).square().sum(1)) < 5e-3
    for again in outs[1:]:
        assert all(torch.equal(first, second) for first, second in zip(outs[0], again, strict=True))
    assert not SCRATCH.counters.any()


def test_rows_that_wear_nothing_are_as_without_adapters() -> None:
    x, weight, adapter = random(40, 1024), random(4096, 1024) / 32, Adapter(1024, [4096], [16])
    even, bare = EvenLinear(SCRATCH, eps=EPS, pdl=True), poison(40, 4096)
    even.product(x, weight, bare)
    for wears in ([False] * 40, [True] * 40, some(40)):
        out = poison(40, 4096)
        even.product(x, weight, out, updates=adapter.worn(wears))
        for row, worn in enumerate(wears):
            assert torch.equal(out[row], bare[row]) != worn


def test_a_failed_row_leaves_others_alone() -> None:
    x, weight, worn = random(5, 1024), random(4096, 1024) / 32, Adapter(1024, [4096], [16]).worn([True] * 5)
    even, whole, ill = EvenLinear(SCRATCH, eps=EPS, pdl=True), poison(5, 4096), poison(5, 4096)
    even.product(x, weight, whole, updates=worn)
    x[3] = float("nan")
    even.product(x, weight, ill, updates=worn)
    assert ill[3].isnan().all()
    assert torch.equal(ill[[0, 1, 2, 4]], whole[[0, 1, 2, 4]])


@pytest.mark.parametrize(("size_out", "size_in", "ranks"), FEEDS)
@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul_of_a_norm(rows: int, size_out: int, size_in: int, ranks: list[int]) -> None:
    total, norm = random(rows, size_in), random(size_in)
    weight, wears = random(2 * size_out, size_in) / size_in**0.5, some(rows)
    adapter = Adapter(size_in, [size_out, size_out], ranks)
    normed = reference.rms_norm(total, norm, EPS)
    truth = reference.silu_mul(adapter.add(reference.linear(normed, weight, None).double(), normed, wears))
    parts = total.float().square().view(rows, size_in // 64, 64).sum(2).T.contiguous()
    out = poison(rows, size_out)
    EvenLinear(SCRATCH, eps=EPS, pdl=True).silu_mul(total * norm, weight, out, Squares(parts), adapter.worn(wears))
    assert error(out, truth) < 8e-3


@pytest.mark.parametrize(("size_in", "heads", "kv_heads", "ranks"), HEADS)
@pytest.mark.parametrize("rows", ROWS)
def test_heads(rows: int, size_in: int, heads: int, kv_heads: int, ranks: list[int]) -> None:
    total, norm = random(rows, size_in), random(size_in)
    weight, wears = random((heads + 2 * kv_heads) * HEAD, size_in) / size_in**0.5, some(rows)
    adapter = Adapter(size_in, [heads * HEAD, kv_heads * HEAD, kv_heads * HEAD], ranks)
    to = HeadTargets(
        random(HEAD), random(HEAD), torch.rand(POSITIONS, HEAD, device=GPU),
        torch.randint(0, POSITIONS, (rows,), dtype=torch.int32, device=GPU),
        torch.randperm((rows + 1) * PAGE, device=GPU)[:rows],
        torch.zeros(rows + 1, 2, PAGE, kv_heads, HEAD, dtype=torch.bfloat16, device=GPU),
    )  # fmt: skip
    normed = reference.rms_norm(total, norm, EPS)
    qkv = adapter.add(reference.linear(normed, weight, None).double(), normed, wears).float()
    q, k, v = reference.split_qkv(qkv, heads, kv_heads, HEAD)
    cos, sin = to.cos_sin_PD.chunk(2, 1)
    q = reference.rope(reference.rms_norm(q, to.q_norm_D, EPS), to.positions_N, cos, sin)
    k = reference.rope(reference.rms_norm(k, to.k_norm_D, EPS), to.positions_N, cos, sin)
    parts = total.float().square().view(rows, size_in // 64, 64).sum(2).T.contiguous()
    worn, outs = adapter.worn(wears), []
    for pdl in (False, True, True):
        to.kv_layer.zero_()
        out = EvenHeads(eps=EPS, pdl=pdl).run(total * norm, weight, Squares(parts), to, worn)
        outs.append((out, to.kv_layer.clone()))
    assert error(outs[0][0].view_as(q), q) < 8e-3
    stored = to.kv_layer.float().transpose(1, 2).flatten(0, 1)[to.slots_N]
    assert error(stored, torch.stack((k, v), 1)) < 8e-3
    for again in outs[1:]:
        assert all(torch.equal(first, second) for first, second in zip(outs[0], again, strict=True))
