"""CPU operations agree with the slow reference for any page table, mixture of rows, head geometry and window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from product_shapes import ProductShapes
from stored_weights import random_groups
from torch import Tensor

from headrace.ops import reference
from headrace.ops.cpu import pieces
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.products import pack_product
from headrace.ops.formats import Stored
from headrace.ops.paged import DecodeGroup, KvLayout, PagedBatch, PrefillRow
from headrace.ops.stream import Stream

POSITIONS = 700
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def without_autograd() -> Iterator[None]:
    with torch.inference_mode():
        yield


def tables(head_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    angles = torch.arange(POSITIONS)[:, None] * frequencies
    return angles.cos(), angles.sin()


def make_ops(
    *, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, page_size: int = 4, window: int | None = None,
    dtype: torch.dtype = torch.float32, scale: float | None = None,
) -> CpuOps:  # fmt: skip
    cos, sin = tables(head_dim)
    return CpuOps(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, eps=1e-5, cos=cos, sin=sin,
        window=window, dtype=dtype, scale=scale,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """`length` tokens of context of which the last `count` are computed now; alone in its group or with others."""

    length: int
    count: int
    group: int


def lay_out(rows: list[Row], page_size: int, seed: int) -> tuple[PagedBatch, list[Tensor], int]:
    """A step over scattered pages: decodes first, grouped, then the rest. Also each row's pages, and how many exist."""
    generator = torch.Generator().manual_seed(seed)
    ordered = sorted(rows, key=lambda row: (row.count > 1, row.group))
    needed = [-(-row.length // page_size) for row in ordered]
    total = sum(needed) + 3
    free = torch.randperm(total, generator=generator)
    pages = list(free[: sum(needed)].split(needed))
    places = [
        (position, int(table[position // page_size]) * page_size + position % page_size)
        for row, table in zip(ordered, pages, strict=True)
        for position in range(row.length - row.count, row.length)
    ]
    decodes, prefills, start = [], [], 0
    for group in sorted({row.group for row in ordered if row.count == 1}):
        members = [index for index, row in enumerate(ordered) if row.count == 1 and row.group == group]
        table = torch.zeros(len(members), max(needed[index] for index in members), dtype=torch.int64)
        for place, index in enumerate(members):
            table[place, : needed[index]] = pages[index]
        lengths = torch.tensor([ordered[index].length for index in members])
        decodes.append(DecodeGroup(start, table, lengths))
        start += len(members)
    for row, table in zip(ordered, pages, strict=True):
        if row.count > 1:
            prefills.append(PrefillRow(start, row.count, table, row.length))
            start += row.count
    positions, slots = torch.tensor(places).unbind(1)
    return PagedBatch(positions, slots, tuple(decodes), tuple(prefills)), pages, total


def run_both(ops: CpuOps, rows: list[Row], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of one step over pages of noise: (ours, reference), and the pages afterwards (ours, reference)."""
    torch.manual_seed(seed)
    batch, _, total = lay_out(rows, ops.page_size, seed)
    kv = ops.allocate_kv(2, total)
    kv.pools[0].normal_()
    before = kv.pools[0][1].float().transpose(2, 3)
    truth = reference.ReferenceKv(before[:, 0].clone(), before[:, 1].clone())
    width = (ops.heads + 2 * ops.kv_heads) * ops.head_dim
    qkv = torch.randn(batch.positions_N.shape[0], width).to(ops.dtype)

    step = ops.prepare(batch)
    ours = ops.attention(ops.rope_and_write(qkv, step, kv, 1), step, kv, 1)

    q, k, v = reference.split_qkv(qkv, ops.heads, ops.kv_heads, ops.head_dim)
    cos, sin = tables(ops.head_dim)
    q, k = (reference.rope(x, batch.positions_N, cos, sin) for x in (q, k))
    reference.write_kv(truth, batch.slots_N, k, v)
    expected = reference.attention(q, batch, truth, window=ops.window, scale=ops.scale)
    after = kv.pools[0][1].float().transpose(2, 3)
    return ours, expected, after, torch.stack((truth.keys, truth.values), dim=1)


@st.composite
def any_rows(draw: st.DrawFn) -> list[Row]:
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 40))
        count = draw(st.one_of(st.just(1), st.integers(1, length)))
        rows.append(Row(length, count, draw(st.integers(0, 1))))
    return rows


@given(
    rows=any_rows(),
    page_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 5, 17]),
    blocks=st.sampled_from([3, 128]),
    gather=st.sampled_from([1, 4096, 1 << 24]),
    fused=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_attention_sees_exactly_its_own_context(
    rows: list[Row], page_size: int, heads: tuple[int, int], window: int | None, blocks: int, gather: int, fused: bool,
    seed: int,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_QUERY_BLOCK", blocks)
        patch.setattr(pieces, "_GATHER_BYTES", gather)
        patch.setattr(pieces, "_FUSED_TOKENS", 1000 if fused else 0)
        ops = make_ops(heads=heads[0], kv_heads=heads[1], page_size=page_size, window=window)
        with torch.inference_mode():
            ours, expected, pages, expected_pages = run_both(ops, rows, seed)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pages, expected_pages, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_bfloat16_stays_near_the_truth_with_real_head_sizes(window: int | None) -> None:
    ops = make_ops(heads=9, kv_heads=3, head_dim=64, page_size=16, window=window, dtype=torch.bfloat16)
    rows = [Row(200, 1, 0), Row(130, 1, 0), Row(500, 1, 1), Row(300, 300, 0), Row(600, 40, 0)]
    ours, expected, pages, expected_pages = run_both(ops, rows, 0)
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours.float(), expected, rtol=0.02, atol=0.03)
    torch.testing.assert_close(pages, expected_pages, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("window", [None, 40])
def test_steps_of_all_sizes_multiply_in_few_shapes(window: int | None) -> None:
    ops = make_ops(page_size=16, window=window, dtype=torch.bfloat16)
    kv = ops.allocate_kv(1, 1)
    layer = pack_product(Stored.from_dense(torch.randn(64, 32)), None, dtype=torch.bfloat16)
    with ProductShapes() as shapes:
        for length in range(2, 600, 6):
            pages_P = torch.zeros(-(-length // 16), dtype=torch.int64)
            rows = 1 + length % 24
            group = DecodeGroup(0, pages_P.repeat(rows, 1), torch.full((rows,), length))
            prefill = PrefillRow(rows, 2 + length * 7 % (length - 1), pages_P, length)
            tokens_N = torch.zeros(prefill.start + prefill.count, dtype=torch.int64)
            step = ops.prepare(PagedBatch(tokens_N, tokens_N, (group,), (prefill,)))
            ops.attention(torch.zeros(len(tokens_N), 4, 16, dtype=torch.bfloat16), step, kv, 0)
            layer(torch.zeros(length, 32, dtype=torch.bfloat16))
    assert 20 < len(shapes.seen) < 130  # 378 where each size has its own


def test_a_given_scale_replaces_the_default() -> None:
    ours, expected, *_ = run_both(make_ops(scale=0.9), [Row(9, 1, 0), Row(7, 3, 0)], 1)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_request_gone_wrong_leaves_nothing_that_reaches_another(dtype: torch.dtype) -> None:
    ops = make_ops(dtype=dtype)
    kv = ops.allocate_kv(1, 4)
    width = (ops.heads + 2 * ops.kv_heads) * ops.head_dim
    broken = torch.full((8, width), float("nan"), dtype=dtype)
    broken[4:] = float("inf")
    everywhere = PagedBatch(torch.arange(8), torch.arange(8), (), (PrefillRow(0, 8, torch.tensor([0, 1]), 8),))
    step = ops.prepare(everywhere)
    assert not ops.rope_and_write(broken, step, kv, 0).isfinite().any()
    # Page 0 pads the first row and page 1 is the tail of the second.
    group = DecodeGroup(0, torch.tensor([[2, 0], [3, 1]]), torch.tensor([2, 5]))
    batch = PagedBatch(torch.tensor([1, 4]), torch.tensor([9, 4]), (group,), ())
    step = ops.prepare(batch)
    healthy = torch.randn(2, width).to(dtype)
    assert ops.attention(ops.rope_and_write(healthy, step, kv, 0), step, kv, 0).isfinite().all()


def test_query_and_key_norms_come_before_the_rotation() -> None:
    ops = make_ops()
    kv = ops.allocate_kv(1, 2)
    batch = PagedBatch(torch.tensor([3, 5]), torch.tensor([3, 5]), (),
                       (PrefillRow(0, 2, torch.tensor([0, 1]), 6),))  # fmt: skip
    qkv = torch.randn(2, 8 * 16) * 3
    q_norm, k_norm = torch.randn(16), torch.randn(16)
    got = ops.rope_and_write(qkv, ops.prepare(batch), kv, 0, q_norm, k_norm)
    q, k, v = reference.split_qkv(qkv, 4, 2, 16)
    cos, sin = tables(16)
    q = reference.rope(reference.rms_norm(q, q_norm, 1e-5), batch.positions_N, cos, sin)
    k = reference.rope(reference.rms_norm(k, k_norm, 1e-5), batch.positions_N, cos, sin)
    torch.testing.assert_close(got, q, rtol=1e-5, atol=1e-5)
    pages = kv.pools[0][0]
    torch.testing.assert_close(pages[[0, 1], 0, :, [3, 1]], k, rtol=1e-5, atol=1e-5)
    assert torch.equal(pages[[0, 1], 1, :, [3, 1]], v)


@pytest.mark.parametrize(
    ("tokens", "decode_at", "prefill_at"), [(2, 0, None), (1, 1, None), (2, 0, 0)], ids=["uncovered", "gap", "overlap"]
)
def test_rows_must_cover_the_tokens_once(tokens: int, decode_at: int, prefill_at: int | None) -> None:
    page = torch.tensor([0])
    decodes = (DecodeGroup(decode_at, page[None], torch.tensor([1])),)
    prefills = () if prefill_at is None else (PrefillRow(prefill_at, 2, page, 2),)
    with pytest.raises(ValueError, match="token"):
        make_ops().prepare(PagedBatch(torch.arange(tokens), torch.arange(tokens), decodes, prefills))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_pages_hold_what_their_sources_held_before_any_copy(dtype: torch.dtype) -> None:
    ops = make_ops(dtype=dtype)
    kv = ops.allocate_kv(3, 5)
    assert kv.pools[0].nbytes == 5 * kv.page_bytes
    before = kv.pools[0].normal_().clone()
    kv.copy_pages([(0, 1), (1, 4)])
    kv.copy_pages([])
    assert torch.equal(kv.pools[0], before[:, [0, 0, 2, 3, 1]])


def test_layers_with_pages_of_other_shapes_lie_in_pools_of_their_own() -> None:
    """Pages are copied, kept and dropped in all of them alike, and a layer may see the pages of an earlier one."""
    narrow, wide = (2, 2, 4, 8), (2, 1, 4, 24)
    layout = KvLayout.of([narrow, wide, narrow, 0, wide])
    assert layout.pools == ((2, narrow), (2, wide)) and layout.page_bytes(torch.float32) == 4 * 2 * (128 + 192)
    kv = CpuKv.allocate(layout, 5, torch.float32)
    assert [rows.shape for rows in kv.rows] == [(20, 32), (10, 96), (20, 32), (20, 32), (10, 96)]
    for layer in (0, 1, 2, 4):
        kv.slots[layer][:] = layer + torch.arange(len(kv.slots[layer]))[:, None] / 100
    assert torch.equal(kv.rows[3], kv.rows[0])
    before = [pool.clone() for pool in kv.pools]
    kv.copy_pages([(0, 1), (1, 4)])
    smaller = kv.resized(2)
    larger = smaller.resized(3)
    for pool, was, cut, grown in zip(kv.pools, before, smaller.pools, larger.pools, strict=True):
        assert torch.equal(pool, was[:, [0, 0, 2, 3, 1]]) and torch.equal(cut, was[:, [0, 0]])
        assert torch.equal(grown[:, :2], cut) and not grown[:, 2].any()
    assert larger.num_pages == 3 and torch.equal(larger.rows[3], larger.rows[0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_norms_and_gates_match(dtype: torch.dtype, tolerance: float, tokens: int) -> None:
    ops = make_ops(dtype=dtype)
    x, residual, weight = (torch.randn(size).to(dtype) for size in ((tokens, 96), (tokens, 96), (96,)))
    tiny = x * 1e-3  # small enough for epsilon to matter
    for values in (x, tiny):
        expected = reference.rms_norm(values, weight, 1e-5)
        torch.testing.assert_close(ops.rms_norm(values, weight).float(), expected, rtol=tolerance, atol=tolerance)
    expected_total = x.float() + residual.float()
    normed, total = ops.normed(Stream(x, residual.float()), weight)
    assert total.dtype is torch.float32 and torch.equal(total, expected_total)
    expected = reference.rms_norm(expected_total, weight, 1e-5)
    torch.testing.assert_close(normed.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ops.activate(x, "silu").float(), reference.silu_mul(x), rtol=tolerance, atol=tolerance)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 33])
@pytest.mark.parametrize(("outs", "ins"), [(16, 32), (48, 96), (80, 64), (192, 576), (17, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_four_bit_products_match_the_weight_they_stand_for(tokens: int, outs: int, ins: int, biased: bool) -> None:
    weight = random_groups(outs, ins)
    bias = torch.randn(outs) if biased else None
    x = torch.randn(tokens, ins).bfloat16()
    expected = reference.linear(x, weight.dense(torch.float32), bias)
    assert relative_error(pack_product(weight, bias, dtype=torch.bfloat16)(x), expected) < 0.01
    exact = pack_product(weight, bias, dtype=torch.float32)(x.float())
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 9, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_float_products_match(tokens: int, biased: bool) -> None:
    weight, bias, x = torch.randn(70, 90), torch.randn(70) if biased else None, torch.randn(tokens, 90)
    expected, stored = reference.linear(x, weight, bias), Stored.from_dense(weight)
    exact, rounded = (pack_product(stored, bias, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    torch.testing.assert_close(exact(x), expected, rtol=1e-5, atol=1e-4)
    assert relative_error(rounded(x.bfloat16()), expected) < 0.01


@pytest.mark.parametrize("tokens", [2, 9])
def test_pieces_of_one_weight_multiply_as_it_does(tokens: int) -> None:
    weight, x = random_groups(64, 64), torch.randn(tokens, 64).bfloat16()
    pieces = weight.split([32, 16, 16])
    apart = torch.cat([pack_product(piece, None, dtype=torch.bfloat16)(x) for piece in pieces], dim=1)
    stacked = pack_product(Stored.stack(pieces), None, dtype=torch.bfloat16)(x)
    whole = pack_product(weight, None, dtype=torch.bfloat16)(x)
    torch.testing.assert_close(whole, apart, rtol=0.01, atol=0.01)
    torch.testing.assert_close(whole, stacked, rtol=0.01, atol=0.01)
