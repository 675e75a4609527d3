"""Products whose weights are dealt out evenly, against float64: alone, and with residual, norm and activation."""

from __future__ import annotations

import pytest
import torch
from gpu_tensors import error, poison, random

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.products.even_linear import EvenLinear
from headrace.ops.cuda.products.fusion import Squares
from headrace.ops.cuda.products.linear import LinearScratch

GPU = torch.device("cuda")
EPS = 1e-5
if not Arch.of(GPU).has("wgmma"):
    pytest.skip("needs Hopper", allow_module_level=True)

SCRATCH = LinearScratch(GPU, Arch.of(GPU))
ROWS = [2, 16, 17, 33, 64]
SIZES = [(6144, 4096), (14336, 4096), (1024, 3072), (4096, 14336), (576, 576), (64, 64)]
"""The last two: fewer tiles and chunks than multiprocessors, and an odd number of lines."""


@pytest.mark.parametrize(("size_out", "size_in"), SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_product_is_right_and_repeats_itself(rows: int, size_out: int, size_in: int) -> None:
    x, weight = random(rows, size_in), random(size_out, size_in) / size_in**0.5
    outs = []
    for pdl in (False, True, True):
        out = poison(rows, size_out)
        EvenLinear(SCRATCH, eps=EPS, pdl=pdl).product(x, weight, out)
        outs.append(out)
    assert error(outs[0], reference.linear(x, weight, None)) < 4e-3
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])
    assert not SCRATCH.counters.any()


@pytest.mark.parametrize(("size_out", "size_in"), [(3072, 1024), (14336, 4096), (8480, 576), (1568, 576), (32, 64)])
@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(rows: int, size_out: int, size_in: int) -> None:
    x, weight = random(rows, size_in), random(2 * size_out, size_in) / size_in**0.5
    out = poison(rows, size_out)
    EvenLinear(SCRATCH, eps=EPS, pdl=True).silu_mul(x, weight, out)
    assert error(out, reference.silu_mul(reference.linear(x, weight, None))) < 5e-3


@pytest.mark.parametrize(("hidden", "size_in"), [(4096, 14336), (1024, 3072), (576, 1536), (64, 64)])
@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_between_two_products_costs_no_precision(rows: int, hidden: int, size_in: int) -> None:
    x, residual, norm = random(rows, size_in), random(rows, hidden), random(hidden)
    first, second = random(hidden, size_in) / size_in**0.5, random(656, hidden) / hidden**0.5
    even = EvenLinear(SCRATCH, eps=EPS, pdl=True)
    kept, scaled, out, fed = residual.clone(), poison(rows, hidden), poison(rows, 656), poison(rows, 328)
    squares = even.add(x, first, kept, norm, scaled)
    even.product(scaled, second, out, squares)
    even.silu_mul(scaled, second, fed, squares)
    total = reference.linear(x, first, None) + residual.float()
    assert error(kept, total) < 4e-3
    assert error(squares.parts_EN.sum(0), total.square().sum(1)) < 1e-3
    truth = reference.linear(reference.rms_norm(total, norm, EPS), second, None)
    assert error(out, truth) < 5e-3
    assert error(fed, reference.silu_mul(truth)) < 8e-3


@pytest.mark.parametrize(("hidden", "size_in"), [(4096, 14336), (1024, 3072), (576, 1536)])
def test_a_row_gets_the_same_bits_however_many_rows_there_are(hidden: int, size_in: int) -> None:
    """The end of a prompt behind a cached prefix is then computed as it was with the whole prompt."""
    x, residual, norm = random(64, size_in), random(64, hidden), random(hidden)
    first, second = random(hidden, size_in) / size_in**0.5, random(6144, hidden) / hidden**0.5
    even = EvenLinear(SCRATCH, eps=EPS, pdl=True)

    def chain(rows: int) -> tuple[torch.Tensor, ...]:
        kept, scaled, out, fed = residual[:rows].clone(), poison(rows, hidden), poison(rows, 6144), poison(rows, 3072)
        squares = even.add(x[:rows], first, kept, norm, scaled)
        even.product(scaled, second, out, squares)
        even.silu_mul(scaled, second, fed, squares)
        return kept, scaled, out, fed

    whole = chain(64)
    for rows in (2, 10, 16, 17, 32, 33, 63):
        for one, all_of_it in zip(chain(rows), whole, strict=True):
            assert torch.equal(one, all_of_it[:rows])


@pytest.mark.parametrize("rows", [16, 64])
def test_a_chain_in_a_graph_is_the_same_every_time(rows: int) -> None:
    """Each kernel begins while those before it still run."""
    even, x, residual, norm = (
        EvenLinear(SCRATCH, eps=EPS, pdl=True),
        random(rows, 1024),
        random(rows, 1024),
        random(1024),
    )
    up, down = [random(6144, 1024) / 32 for _ in range(6)], [random(1024, 3072) / 55 for _ in range(6)]

    def layers() -> torch.Tensor:
        kept.copy_(residual)
        now, squares = x, Squares(parts)
        for wide, narrow in zip(up, down, strict=True):
            inner, given = torch.empty(rows, 3072, dtype=x.dtype, device=GPU), torch.empty_like(x)
            even.silu_mul(now, wide, inner, squares)
            squares = even.add(inner, narrow, kept, norm, given)
            now = given
        return now

    kept, parts = torch.empty_like(residual), residual.float().square().view(rows, 16, 64).sum(2).T.contiguous()
    truth = layers().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, truth)


def test_other_shapes_are_refused_before_a_launch() -> None:
    even, x, out = EvenLinear(SCRATCH, eps=EPS), random(8, 128), poison(8, 64)
    with pytest.raises(ValueError, match="another number of inputs"):
        even.product(x, random(64, 192), out)
    with pytest.raises(ValueError, match="another number of outputs"):
        even.silu_mul(x, random(64, 128), out)
    with pytest.raises(ValueError, match="squares of another shape"):
        even.product(x, random(64, 128), out, Squares(torch.ones(1, 8, device=GPU)))
    with pytest.raises(ValueError, match="too many rows"):
        even.product(random(65, 128), random(64, 128), poison(65, 64))
