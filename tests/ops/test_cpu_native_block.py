"""A step's operations in C: near the truth, and the same bits however the tokens of a row come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from stored_weights import random_groups
from torch import Tensor
from torch.nn import functional

from headrace.ops.cpu.lora import CpuAdapterOps
from headrace.ops.cpu.native.block import NativeOps
from headrace.ops.cpu.native.library import Context, library
from headrace.ops.cpu.native.linear import as_floats
from headrace.ops.formats import Stored
from headrace.ops.paged import DecodeGroup, GivenKv, PagedBatch, PrefillRow
from headrace.ops.stream import HeadNorms, Stream

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2")

HEADS, KV_HEADS, HEAD_DIM, LENGTH, PAGES = 6, 2, 48, 83, 1000


@pytest.fixture(autouse=True)
def without_autograd() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_ops(
    page_size: int = 16,
    window: int | None = None,
    threads: int = 1,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
) -> NativeOps:
    frequencies = 100.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    angles = torch.arange(400)[:, None] * frequencies
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": head_dim, "page_size": page_size}
    tables = {"cos": angles.cos(), "sin": angles.sin()}
    return NativeOps(Context(threads), **sizes, **tables, eps=1e-5, window=window, dtype=dtype)


def table_of(row: int, page_size: int) -> Tensor:
    """Pages of a row, scattered and unlike those of other rows."""
    count = -(-LENGTH // page_size)
    return (torch.arange(count) * 2 + 1 + row * 2 * count) % PAGES


def batch_of(works: Sequence[tuple[int, int, int]], page_size: int, dropped: int = 0) -> PagedBatch:
    """A step of works (row, start, count): single tokens first; without the first `dropped` pages of each row."""
    works = sorted(works, key=lambda work: work[2] > 1)
    singles = [(row, start) for row, start, count in works if count == 1]
    positions = [at for _, start, count in works for at in range(start, start + count)]
    tables = [table_of(row, page_size) for row, _, count in works for _ in range(count)]
    slots = [
        int(table[at // page_size]) * page_size + at % page_size for table, at in zip(tables, positions, strict=True)
    ]
    first = dropped * page_size
    decodes = []
    if singles:
        pages = torch.stack([table_of(row, page_size)[dropped:] for row, _ in singles])
        lengths = torch.tensor([start + 1 - first for _, start in singles])
        decodes = [DecodeGroup(0, pages, lengths)]
    prefills, at = [], len(singles)
    for row, start, count in works[len(singles) :]:
        prefills.append(PrefillRow(at, count, table_of(row, page_size)[dropped:], start + count - first))
        at += count
    return PagedBatch(torch.tensor(positions), torch.tensor(slots), tuple(decodes), tuple(prefills))


def qkv_of(row: int, head_dim: int = HEAD_DIM) -> Tensor:
    generator = torch.Generator().manual_seed(row)
    return torch.randn(LENGTH, (HEADS + 2 * KV_HEADS) * head_dim, generator=generator)


def run(ops: NativeOps, steps: Sequence[Sequence[tuple[int, int, int]]], *, dropped: int = 0) -> dict[int, Tensor]:
    """Results of each row's tokens over steps of works (row, start, count)."""
    kv = ops.allocate_kv(1, PAGES)
    found: dict[int, list[Tensor]] = {}
    for works in steps:
        ordered = sorted(works, key=lambda work: work[2] > 1)
        qkv = torch.cat([qkv_of(row, ops.head_dim)[start : start + count] for row, start, count in ordered])
        begins = min(start for _, start, _ in works) // ops.page_size
        batch = batch_of(works, ops.page_size, min(dropped, begins))
        o = ops.attend_with(qkv, None, ops.prepare(batch), kv, 0)
        for (row, _, _), part in zip(ordered, o.split([count for *_, count in ordered]), strict=True):
            found.setdefault(row, []).append(part)
    ops.close()
    return {row: torch.cat(parts) for row, parts in found.items()}


def truth(row: int, ops: NativeOps) -> Tensor:
    size = ops.head_dim
    q, k, v = (
        part.double().unflatten(-1, (-1, size)).transpose(0, 1)
        for part in qkv_of(row, size).split([HEADS * size, KV_HEADS * size, KV_HEADS * size], -1)
    )
    cos, sin = (table[:LENGTH].double() for table in ops._tables)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    k, v = (x.to(ops.dtype).double().repeat_interleave(HEADS // KV_HEADS, 0) for x in (rotated(k), v))
    at = torch.arange(LENGTH)
    seen = at <= at[:, None]
    if ops.window is not None:
        seen &= at > at[:, None] - ops.window
    return functional.scaled_dot_product_attention(rotated(q), k, v, seen).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("page_size", [1, 5, 8, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("head_dim", [48, 64, 18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_is_near_the_truth(page_size: int, window: int | None, head_dim: int, dtype: torch.dtype) -> None:
    ops = make_ops(page_size, window, head_dim=head_dim, dtype=dtype)
    expected = truth(3, ops)
    found = run(ops, [[(3, 0, 50), (1, 0, 7)], [(3, 50, 32)], [(3, 82, 1), (1, 7, 1)]])[3]
    # Keys at the edge between two bfloat16 numbers may round to the other one.
    most, mean = (2e-3, 2e-5) if dtype is torch.bfloat16 else (2e-6, 2e-7)
    assert (found - expected).abs().amax() < most * expected.abs().amax()
    assert (found - expected).abs().mean() < mean * expected.abs().amax()


@pytest.mark.parametrize("page_size", [5, 8, 16])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_has_the_same_bits_however_the_tokens_come(
    page_size: int, window: int | None, dtype: torch.dtype
) -> None:
    whole = run(make_ops(page_size, window, dtype=dtype), [[(0, 0, LENGTH)]])[0]
    one_by_one = [[(0, at, 1)] for at in range(LENGTH)]
    chunks = [[(0, 0, 11)], [(0, 11, 1)], [(0, 12, 70)], [(0, 82, 1)]]
    among_others = [
        [(0, 0, 30), (1, 0, LENGTH)],
        [(0, 30, 1), (2, 0, 9)],
        [(0, 31, 51), (2, 9, 1)],
        [(2, 10, 1), (0, 82, 1)],
    ]
    for steps in (one_by_one, chunks, among_others):
        for threads in (1, 3):
            assert torch.equal(run(make_ops(page_size, window, threads, dtype=dtype), steps)[0], whole)
    if window is not None:  # pages before the window may be left out
        found = run(make_ops(page_size, window, dtype=dtype), [[(0, 0, 70)], [(0, 70, 13)]], dropped=50 // page_size)[0]
        assert torch.equal(found, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_given_keys_and_values_take_the_place_of_computed_ones(dtype: torch.dtype) -> None:
    ops = make_ops(dtype=dtype)
    kv, given = ops.allocate_kv(2, PAGES), torch.randn(2, 3, 2 * KV_HEADS, HEAD_DIM)
    batch = batch_of([(0, 0, LENGTH)], 16)
    batch = PagedBatch(
        batch.positions_N, batch.slots_N, (), batch.prefills, (GivenKv(torch.tensor([0, 2, 40]), given),)
    )
    ops.attend_with(qkv_of(0), None, ops.prepare(batch), kv, 1)
    page, place = table_of(0, 16)[40 // 16], 40 % 16
    keys = kv.pools[0][1, page, 0].view(KV_HEADS, HEAD_DIM, 16)[:, :, place]
    assert torch.equal(keys, given[1, 2, :KV_HEADS].to(dtype))
    assert torch.equal(kv.pools[0][1, page, 1, :, place], given[1, 2, KV_HEADS:].to(dtype))
    ops.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_request_gone_wrong_leaves_nothing_that_is_not_finite(dtype: torch.dtype) -> None:
    ops = make_ops(dtype=dtype)
    kv, qkv = ops.allocate_kv(1, PAGES), qkv_of(0)
    qkv[5], qkv[6] = float("nan"), float("inf")
    ops.attend_with(qkv, None, ops.prepare(batch_of([(0, 0, LENGTH)], 16)), kv, 0)
    assert kv.pools[0].isfinite().all()
    ops.close()


def dense(outs: int, ins: int) -> Stored:
    return Stored.from_dense(torch.randn(outs, ins) / ins**0.5)


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize(
    ("weight", "dtype"),
    [(random_groups, torch.bfloat16), (dense, torch.bfloat16), (dense, torch.float32)],
    ids=["groups", "bfloat16", "float32"],
)
def test_a_layer_in_one_call_is_the_operations_one_after_the_other(
    tokens: int, weight: Callable[[int, int], Stored], dtype: torch.dtype
) -> None:
    """Rows with adapters go the second way, so the bits of others must not depend on which."""
    torch.manual_seed(0)
    ops, size = make_ops(dtype=dtype), 64
    width = HEADS * HEAD_DIM
    qkv = ops.pack(weight(width + 2 * KV_HEADS * HEAD_DIM, size), torch.randn(width + 2 * KV_HEADS * HEAD_DIM))
    gate_up, down = ops.pack(weight(2 * 96, size), None), ops.pack(weight(size, 96), None)
    norm, norms = torch.rand(size).bfloat16(), HeadNorms(torch.rand(HEAD_DIM), torch.rand(HEAD_DIM))
    x, added = torch.randn(tokens, size), torch.randn(tokens, size)
    step = ops.prepare(batch_of([(0, 0, tokens)], 16))
    o, total = ops.attend(Stream(x.clone(), added.clone()), norm, qkv, norms, step, ops.allocate_kv(1, PAGES), 0)
    beside = CpuAdapterOps(ops, ())
    stream = Stream(x.clone(), added.clone())
    apart, total_apart = beside.attend(stream, norm, qkv, norms, step, ops.allocate_kv(1, PAGES), 0)
    assert torch.equal(o, apart) and torch.equal(total, total_apart) and torch.equal(total, x + added)
    y, total = ops.feed(Stream(total), norm, gate_up, 0)
    y_apart, total_apart = beside.feed(Stream(total_apart), norm, gate_up, 0)
    assert torch.equal(y, y_apart)
    after = ops.add(y, down, total, None, 0, "down")
    after_apart = beside.add(y_apart, down, total_apart, None, 0, "down")
    normed, normed_apart = ops.normed(after, norm)[0], beside.normed(after_apart, norm)[0]
    assert torch.equal(normed, normed_apart)
    head = ops.pack_head(weight(100, size))
    assert torch.equal(ops.logits(normed, head), beside.logits(normed, head))
    normed, _ = ops.normed(Stream(x.clone(), added.clone()), norm)
    expected = functional.rms_norm((x + added).double(), (size,), norm.double(), 1e-5)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-6)
    gates = torch.randn(3, 2 * 37) * 20
    torch.testing.assert_close(ops.activate(gates, "silu"), functional.silu(gates[:, :37]) * gates[:, 37:])
    assert as_floats(x) is x
    ops.close()
