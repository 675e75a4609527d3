"""Queries, keys and values of batches in one launch, against the slow reference."""

from __future__ import annotations

import pytest
import torch
from gpu_tensors import error, random

from headrace.ops import reference
from headrace.ops.cuda.arch import Arch
from headrace.ops.paged import KvScales

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.products.even_heads import EvenHeads
from headrace.ops.cuda.products.fusion import HeadTargets, Squares

GPU = torch.device("cuda")
EPS = 1e-5
HEAD = 128
PAGE = 16
POSITIONS = 200
if not Arch.of(GPU).has("wgmma"):
    pytest.skip("needs Hopper", allow_module_level=True)

SIZES = [(4096, 32, 8), (1024, 16, 8), (448, 3, 2), (64, 1, 1), (256, 100, 20)]
"""Inputs, heads of queries and of keys; an odd number of lines, one line, and more heads than clusters at once."""


def targets(rows: int, kv_heads: int, *, normed: bool, kv_dtype: torch.dtype = torch.bfloat16) -> HeadTargets:
    slots = torch.randperm((rows + 1) * PAGE, device=GPU)[:rows]
    slots[0] = -1
    fp8 = kv_dtype == torch.float8_e4m3fn
    return HeadTargets(
        random(HEAD) if normed else None,
        random(HEAD) if normed else None,
        torch.rand(POSITIONS, HEAD, device=GPU),
        torch.randint(0, POSITIONS, (rows,), dtype=torch.int32, device=GPU),
        slots,
        torch.zeros(rows + 1, 2, PAGE, kv_heads, HEAD, device=GPU).to(kv_dtype),
        KvScales(0.5, 2.0) if fp8 else KvScales(),
    )


def truth_of(x: torch.Tensor, weight: torch.Tensor, to: HeadTargets) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [N, H, D], and keys and values [N, 2, K, D] of all rows, of inputs that lack no factors."""
    kv_heads = to.kv_layer.shape[3]
    qkv = reference.linear(x, weight, None)
    q, k, v = reference.split_qkv(qkv, len(weight) // HEAD - 2 * kv_heads, kv_heads, HEAD)
    if to.q_norm_D is not None and to.k_norm_D is not None:
        q, k = reference.rms_norm(q, to.q_norm_D, EPS), reference.rms_norm(k, to.k_norm_D, EPS)
    cos, sin = to.cos_sin_PD.chunk(2, 1)
    return reference.rope(q, to.positions_N, cos, sin), torch.stack((reference.rope(k, to.positions_N, cos, sin), v), 1)


def stored(to: HeadTargets) -> torch.Tensor:
    """[slots, 2, K, D]"""
    return to.kv_layer.float().transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("size_in", "heads", "kv_heads"), SIZES)
@pytest.mark.parametrize("rows", [2, 16, 17, 33, 64])
def test_heads_are_right_and_repeat_themselves(
    rows: int, size_in: int, heads: int, kv_heads: int, normed: bool
) -> None:
    x, weight = random(rows, size_in), random((heads + 2 * kv_heads) * HEAD, size_in) / size_in**0.5
    to = targets(rows, kv_heads, normed=normed)
    q, kv = truth_of(x, weight, to)
    results = []
    for pdl in (False, True, True):
        to.kv_layer.zero_()
        results.append((EvenHeads(eps=EPS, pdl=pdl).run(x, weight, None, to), to.kv_layer.clone()))
    for result in results[1:]:
        assert torch.equal(results[0][0], result[0]) and torch.equal(results[0][1], result[1])
    assert error(results[0][0].view_as(q), q) < 5e-3
    assert error(stored(to)[to.slots_N[1:]], kv[1:]) < 5e-3
    assert int(stored(to).flatten(1).any(1).sum()) == rows - 1


@pytest.mark.parametrize("rows", [7, 40])
def test_a_norm_before_costs_no_precision(rows: int) -> None:
    total, norm, weight = random(rows, 1024), random(1024), random(20 * HEAD, 1024) / 32
    to = targets(rows, 4, normed=True)
    q, kv = truth_of(reference.rms_norm(total, norm, EPS), weight, to)
    parts = total.float().square().view(rows, 16, 64).sum(2).T.contiguous()
    out = EvenHeads(eps=EPS, pdl=True).run(total * norm, weight, Squares(parts), to)
    assert error(out.view_as(q), q) < 8e-3 and error(stored(to)[to.slots_N[1:]], kv[1:]) < 8e-3


def test_an_8_bit_cache_and_long_positions() -> None:
    x, weight = random(20, 512), random(8 * HEAD, 512) / 22
    to = targets(20, 2, normed=False, kv_dtype=torch.float8_e4m3fn)
    _, kv = truth_of(x, weight, to)
    EvenHeads(eps=EPS).run(x, weight, None, to._replace(positions_N=to.positions_N.long()))
    scales = torch.tensor(to.scales, device=GPU)[:, None, None]
    assert error(stored(to)[to.slots_N[1:]] * scales, kv[1:]) < 4e-2


def test_a_failed_row_leaves_zeros_in_its_page_and_others_alone() -> None:
    x, weight, to = random(5, 256), random(4 * HEAD, 256) / 16, targets(5, 1, normed=True)
    even = EvenHeads(eps=EPS)
    q, before = even.run(x, weight, None, to), stored(to)
    x[3] = float("nan")
    ill = even.run(x, weight, None, to)
    assert ill[3].isnan().all() and not stored(to)[to.slots_N[3]].any()
    others = torch.tensor([1, 2, 4], device=GPU)
    assert torch.equal(ill[others], q[others])
    assert torch.equal(stored(to)[to.slots_N[others]], before[to.slots_N[others]])


def test_other_shapes_are_refused_before_a_launch() -> None:
    x, to = random(5, 256), targets(5, 1, normed=True)
    with pytest.raises(ValueError, match="a weight of another shape"):
        EvenHeads(eps=EPS).run(x, random(4 * HEAD, 192), None, to)
    with pytest.raises(ValueError, match="too few positions"):
        EvenHeads(eps=EPS).run(x, random(4 * HEAD, 256), None, to._replace(slots_N=to.slots_N[:4]))
