"""Triton's kernels of attention, run by its interpreter on a CPU, against float64."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commit import chosen, head
from interpreting import interpret

pytest.importorskip("triton")

SCRIPT = """
import math
import sys

import torch
from interpreted_bfloat16 import teach

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention import tiles
from headrace.ops.cuda.attention.decode import FusedDecode
from headrace.ops.cuda.attention.grouped import GroupedAttention, GroupedTiling, grouped_tiling
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.attention.split import SplitDecode, SplitTiling
from headrace.ops.cuda.fused import DecodeInputs
from headrace.ops.cuda.heads import norm_rope_write
from headrace.ops.paged import KvScales


class Ring:
    # The plan's words as they are: without pinned memory.
    def __init__(self, device):
        pass

    def send(self, words):
        return torch.from_numpy(words).int()


teach()
torch.manual_seed(0)
CPU, PAGE, COLUMNS = torch.device("cpu"), 16, 24
ARCH = Arch.named("sm_86")
SHAPES = {
    "gpt-oss": {"heads": 16, "kv_heads": 2, "head_dim": 64, "window": 37, "has_sinks": True},
    "gpt-oss, full": {"heads": 16, "kv_heads": 2, "head_dim": 64, "has_sinks": True},
    "gemma 2": {"heads": 4, "kv_heads": 2, "head_dim": 256, "cap": 5.0, "scale": 0.4, "window": 37},
    "phi-2": {"heads": 3, "kv_heads": 3, "head_dim": 80},
    "pythia": {"heads": 6, "kv_heads": 2, "head_dim": 96, "cap": 3.0, "has_sinks": True},
    "gemma 4": {"heads": 6, "kv_heads": 2, "head_dim": 512, "scale": 0.05},
    "falcon": {"heads": 20, "kv_heads": 1, "head_dim": 64, "window": 100},
}


def sinks_of(shape):
    return torch.randn(shape.heads) * 3 if shape.has_sinks else None


def truth(query_HD, kv, pages, position, shape, sinks_H, scales):
    # One query, in float64.
    first = 0 if shape.window is None else max(0, position - shape.window + 1)
    at = torch.arange(first, position + 1)
    page = torch.tensor(pages)[at // PAGE].long()
    group = shape.heads // shape.kv_heads
    keys, values = (kv[page, part, at % PAGE].double().repeat_interleave(group, 1) for part in (0, 1))
    scores = torch.einsum("hd,shd->hs", query_HD.double(), keys) * shape.scale * scales.k
    if shape.cap is not None:
        scores = shape.cap * torch.tanh(scores / shape.cap)
    if sinks_H is not None:
        scores = torch.cat((scores, sinks_H.double()[:, None]), 1)
    return torch.einsum("hs,shd->hd", torch.softmax(scores, 1)[:, : len(at)], values) * scales.v


def pages_of(shape, lengths):
    # Pages in any order; what no row may see is so large that it shows.
    used = [-(-length // PAGE) for length in lengths]
    order = (torch.randperm(sum(used)) + 1).tolist()
    rows = [[order.pop() for _ in range(count)] for count in used]
    kv = torch.randn(sum(used) + 1, 2, PAGE, shape.kv_heads, shape.head_dim).bfloat16()
    kv[0] = 100.0
    for row, length in zip(rows, lengths, strict=True):
        if length % PAGE:
            kv[row[-1], :, length % PAGE :] = 100.0
    return kv, rows


def check(out, wanted, where):
    distance = (out.double() - wanted).norm() / wanted.norm()
    assert distance < 6e-3, (where, float(distance))


def inputs_of(rows, lengths):
    count = len(lengths)
    pages = torch.zeros(count, COLUMNS, dtype=torch.int32)
    for place, row in enumerate(rows):
        pages[place, : len(row)] = torch.tensor(row, dtype=torch.int32)
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    last = torch.tensor([row[-1] for row in rows])
    slots = last * PAGE + positions % PAGE
    return DecodeInputs(torch.zeros(count).int(), positions, slots, positions + 1, pages, torch.zeros(count).int())


def decode(name, lengths, splits, how):
    shape, scales = HeadShape(**SHAPES[name]), KvScales(0.5, 2.0)
    kv, rows = pages_of(shape, lengths)
    inputs, sinks = inputs_of(rows, lengths), sinks_of(shape)
    attention = SplitDecode(shape, CPU, max_rows=len(lengths), arch=ARCH, splits=splits, how=how)
    query = torch.randn(len(lengths), shape.heads, shape.head_dim).bfloat16()
    outs = []
    for _ in range(2):  # counters are left as they were
        outs.append(torch.full_like(query, torch.nan))
        attention.run(query, kv, inputs, outs[-1], scales, sinks)
    assert torch.equal(*outs), name
    for place, length in enumerate(lengths):
        wanted = truth(query[place], kv, rows[place], length - 1, shape, sinks, scales)
        check(outs[0][place], wanted, (name, splits, length))
        if length == max(lengths):  # a row has the same bits in any batch of as many splits
            alone = torch.full_like(query[:1], torch.nan)
            few = SplitDecode(shape, CPU, max_rows=1, arch=ARCH, splits=splits, how=how)
            few.run(query[place : place + 1], kv, inputs_of(rows[place : place + 1], [length]), alone, scales, sinks)
            assert torch.equal(alone[0], outs[0][place]), name


def lined(name, lengths, lines, splits, how, together):
    # Rows with several lines: those of the last tokens, and behind them some of length 1 that have a page of their own.
    shape, scales = HeadShape(**SHAPES[name]), KvScales(0.5, 2.0)
    kv, rows = pages_of(shape, lengths)
    real = [min(length, max(1, lines - 2 * number)) for number, length in enumerate(lengths)]
    counted = [(length, count, at) for length, count in zip(lengths, real) for at in range(lines)]
    given = [length - count + 1 + at if at < count else 1 for length, count, at in counted]
    ends = [max(length, given[place - place % lines]) for place, length in enumerate(given)]
    spread = [row for row in rows for _ in range(lines)]
    # Behind its own length a line has no page numbers, as the preparation of a step leaves it.
    tables = [row[: -(-end // PAGE)] if end == length else [0] for row, end, length in zip(spread, ends, given)]
    inputs, sinks = inputs_of(tables, given), sinks_of(shape)
    query = torch.randn(len(ends), shape.heads, shape.head_dim).bfloat16()
    attention = SplitDecode(shape, CPU, max_rows=len(lengths) + 1, arch=ARCH, splits=splits, how=how, lines=lines)
    assert attention._together == together, (name, attention._together)
    out = torch.full_like(query, torch.nan)
    attention.run(query, kv, inputs, out, scales, sinks)
    tile = attention._how.tile
    division = [(max(0, end - (shape.window or end)) // tile, -(-end // tile)) for end in ends]
    alike = []  # lines that are divided as in a row of their own, and then have its bits
    for place, end in enumerate(ends):
        wanted = truth(query[place], kv, spread[place], end - 1, shape, sinks, scales)
        check(out[place], wanted, (name, lines, splits, end))
        first = place - place % lines % together
        last = min(first + together, place - place % lines + lines) - 1
        ours = division[first : last + 1]
        if division[place] == (min(ours)[0], max(end for _, end in ours)):
            alike.append(place)
    assert len(alike) > len(lengths), name  # the last line of a program at least
    alike = [place for place, after in zip(alike, [*alike[1:], None]) if after != place + 1]  # of neighbours the last
    apart = SplitDecode(shape, CPU, max_rows=len(alike), arch=ARCH, splits=splits, how=how)
    own = inputs_of([spread[place][: -(-ends[place] // PAGE)] for place in alike], [ends[place] for place in alike])
    alone = torch.full_like(query[alike], torch.nan)
    apart.run(query[alike], kv, own, alone, scales, sinks)
    assert torch.equal(out[alike], alone), (name, lines)


def fused(name, lengths, splits):
    shape = HeadShape(**SHAPES[name])
    kv, rows = pages_of(shape, lengths)
    inputs, sinks = inputs_of(rows, lengths), sinks_of(shape)
    angles = torch.rand(COLUMNS * PAGE, shape.head_dim // 2) * 6.28
    table = torch.cat([angles.cos(), angles.sin()], 1)
    packed = torch.randn(len(lengths), (shape.heads + 2 * shape.kv_heads) * shape.head_dim).bfloat16()
    out = torch.full((len(lengths), shape.heads * shape.head_dim), torch.nan, dtype=torch.bfloat16)
    apart, query = kv.clone(), torch.empty(len(lengths), shape.heads, shape.head_dim, dtype=torch.bfloat16)
    norm_rope_write(
        packed, None, None, table, inputs.positions_B, inputs.slots_B, apart, heads=shape.heads,
        kv_heads=shape.kv_heads, eps=1e-6, q_out=query,
    )
    attention = FusedDecode(shape, CPU, max_rows=len(lengths), splits=splits)
    attention.run(packed, None, None, table, kv, inputs, out, KvScales(), sinks, eps=1e-6)
    for place, length in enumerate(lengths):
        wanted = truth(query[place], apart, rows[place], length - 1, shape, sinks, KvScales())
        check(out[place].view(shape.heads, -1), wanted, (name, "fused", splits, length))


def prefill(name, counts, lengths, how):
    shape, scales = HeadShape(**SHAPES[name]), KvScales(0.5, 2.0)
    kv, rows = pages_of(shape, lengths)
    sinks = sinks_of(shape)
    width = shape.heads * shape.head_dim
    packed = torch.randn(sum(counts), width + 2 * shape.kv_heads * shape.head_dim).bfloat16()
    query = packed[:, :width].view(-1, shape.heads, shape.head_dim)
    attention = GroupedAttention(shape, CPU, shared_bytes=ARCH.shared_bytes, how=how)
    attention.plan(counts, lengths, [[*row, 0] for row in rows])
    out = torch.full_like(query, torch.nan).contiguous()
    attention.run(query, kv, out, scales, sinks)
    start = 0
    for place, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        wanted = torch.stack([
            truth(query[start + at], kv, rows[place], length - count + at, shape, sinks, scales)
            for at in range(count)
        ])
        check(out[start : start + count], wanted, (name, count, length))
        start += count


def normed(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x, table):
    low, high = x.chunk(2, -1)
    cos, sin = table.double()[:, None].chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def storing(values):
    # Norms, rotation and storage of what a layer makes, where values are normed, or keys, or another layer's.
    heads, kv_heads, dim, tokens = 8, 4, 96, 35
    shown = {"products": 2 * kv_heads, "normed": 2 * kv_heads, "normed keys": kv_heads, "stored": 0}[values]
    packed = torch.randn(tokens, (heads + shown) * dim).bfloat16() * 3
    weights = [torch.randn(dim).bfloat16() for _ in range(2)]
    angles = torch.rand(tokens, dim // 2) * 6.28
    table = torch.cat([angles.cos(), angles.sin()], 1)
    slots = torch.randperm(6 * PAGE)[:tokens]
    slots[3] = -1
    kv, query = torch.zeros(6, 2, PAGE, kv_heads, dim).bfloat16(), torch.empty(tokens, heads, dim, dtype=torch.bfloat16)
    norm_rope_write(
        packed, *weights, table, torch.arange(tokens), slots, kv, heads=heads, kv_heads=kv_heads, eps=1e-6,
        q_out=query, values=values,
    )
    parts = packed.double().view(tokens, -1, dim)
    close(query, turned(normed(parts[:, :heads], weights[0].double()), table), 2**-8)
    found = kv.float().transpose(1, 2).flatten(0, 1)
    if values == "stored":
        assert not found.any()
        return
    keys, made = parts[:, heads : heads + kv_heads], parts[:, -kv_heads:]
    wanted = turned(normed(keys, weights[1].double()), table), made if values == "products" else normed(made, 1.0)
    real = slots >= 0
    for part in range(2):
        close(found[slots[real], part], wanted[part][real], 2**-8)
    unused = torch.ones(len(found), dtype=torch.bool)
    unused[slots[real]] = False
    assert not found[unused].any()


def close(found, wanted, most):
    assert ((found.double() - wanted).abs() <= most * wanted.abs() + 2**-9).all()


tiles_ring, grouped = tiles.PlanRing, sys.modules["headrace.ops.cuda.attention.grouped"]
grouped.PlanRing = Ring
for name in sys.argv[1:] or SHAPES:
    decode(name, [1, 16, 37, 38, 170], 4, SplitTiling(16, 4, 1))
    decode(name, [200, 64], 1, None)
    lengths, together = [7 if name == "gpt-oss" else 38, 1, 242], 4 if name in ("gemma 4", "falcon") else 7
    lined(name, lengths, 7, 4, SplitTiling(16, 4, 1), together)
    if HeadShape(**SHAPES[name]).head_dim in (64, 256) and name != "falcon":
        fused(name, [1, 33, 140], 4)
    prefill(name, [1, 16, 50, 3], [1, 40, 130, 65], GroupedTiling(32, 16, 4, 1))
    prefill(name, [70], [75], None)
    print(name, flush=True)
for values in ("products", "normed", "normed keys", "stored"):
    storing(values)
"""


EVERYTHING = os.environ.get("HEADRACE_MATRIX") == "all"
ALWAYS = ["gpt-oss"]
"""Of windows and sinks."""
OTHERS = ["gpt-oss, full", "gemma 2", "phi-2", "pythia", "gemma 4", "falcon"]
"""Of these the commit chooses one, and `make soak` all: the interpreter takes ten seconds for each."""


def test_kernels_of_attention_take_bounds_sinks_windows_and_heads_of_any_size() -> None:
    """Decodes and prefills of several rows, whose pages are anywhere, and behind whose last token is something else."""
    names = [*ALWAYS, *(OTHERS if EVERYTHING else chosen(OTHERS, 1, head(Path(__file__).parent)))]
    assert interpret(SCRIPT, *names) == names
