"""Decode attention over equal shares of pages, against a float32 truth over gathered keys and values."""

from __future__ import annotations

import random

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.even import EvenDecode
from headrace.ops.cuda.attention.kernels import EvenDecodes
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.fused import DecodeInputs
from headrace.ops.cuda.heads import norm_rope_write
from headrace.ops.paged import UNSCALED, KvScales

GPU = torch.device("cuda")
PAGE = 16
FP8 = torch.float8_e4m3fn
if not Arch.of(GPU).has("bulk_copy"):
    pytest.skip("needs Hopper or newer", allow_module_level=True)

SHAPES = {
    "8 kv heads of 4": HeadShape(heads=32, kv_heads=8, head_dim=128),
    "8 kv heads of 2": HeadShape(heads=16, kv_heads=8, head_dim=128),
    "8 kv heads of 1": HeadShape(heads=8, kv_heads=8, head_dim=128),
    "4 kv heads of 16": HeadShape(heads=64, kv_heads=4, head_dim=128),
    "4 kv heads of 7": HeadShape(heads=28, kv_heads=4, head_dim=128),
    "1 kv head of 8": HeadShape(heads=8, kv_heads=1, head_dim=128),
    "3 kv heads of 3, narrow": HeadShape(heads=9, kv_heads=3, head_dim=64),
    "2 kv heads of 7, narrow": HeadShape(heads=14, kv_heads=2, head_dim=64),
    "8 kv heads of 4, narrow": HeadShape(heads=32, kv_heads=8, head_dim=64),
    "a window": HeadShape(heads=32, kv_heads=8, head_dim=128, window=100),
    "a window and turns": HeadShape(heads=9, kv_heads=3, head_dim=64, window=37),
    "a scale": HeadShape(heads=32, kv_heads=8, head_dim=128, scale=0.2),
    "8 bits": HeadShape(heads=32, kv_heads=8, head_dim=128, kv_dtype=FP8),
    "8 bits, 4 kv heads of 16": HeadShape(heads=64, kv_heads=4, head_dim=128, kv_dtype=FP8),
    "8 bits and a window": HeadShape(heads=16, kv_heads=8, head_dim=128, kv_dtype=FP8, window=100),
}
SCALES = {"8 bits": KvScales(0.5, 0.25), "8 bits, 4 kv heads of 16": KvScales(0.02, 0.01)}
BATCHES = {
    "one token": [1],
    "one row": [1000],
    "fewer pages than blocks": [1, 16, 17, 33],
    "page ends": [1, 15, 16, 17, 31, 32, 33, 99, 100, 101, 500, 1900],
    "a long row among short ones": [*[3] * 40, 20_000, *[40] * 23],
    "many short rows": [1, 7, 17, 20] * 75,
    "alike": [1000] * 64,
}


class Cache:
    """Random keys and values of rows whose pages are scattered, and what a step reads of them."""

    def __init__(self, shape: HeadShape, lengths: list[int], by: KvScales = UNSCALED) -> None:
        self.shape, self.lengths, self.scales = shape, lengths, by
        used = [-(-length // PAGE) for length in lengths]
        size = (sum(used) + 3, 2, PAGE, shape.kv_heads, shape.head_dim)
        scales = torch.tensor(by, device=GPU).view(2, 1, 1, 1)
        self.kv = (torch.randn(size, device=GPU) / scales).clamp(-448, 448).to(shape.kv_dtype)
        order = iter(torch.randperm(sum(used) + 3).tolist())
        self.pages = torch.full((len(lengths), max(used) + 2), -1, dtype=torch.int32)  # -1: no one may look there
        for row, many in enumerate(used):
            self.pages[row, :many] = torch.tensor([next(order) for _ in range(many)])
        lens = torch.tensor(lengths, dtype=torch.int32, device=GPU)
        pages = self.pages.to(GPU)
        slots = pages.gather(1, ((lens - 1) // PAGE).long()[:, None])[:, 0].long() * PAGE + (lens - 1) % PAGE
        self.inputs = DecodeInputs(lens, (lens - 1).long(), slots, lens, pages, lens)

    def truth(self, q_BHD: torch.Tensor) -> torch.Tensor:
        shape, rows = self.shape, []
        for row, length in enumerate(self.lengths):
            first = 0 if shape.window is None else max(0, length - shape.window)
            place = torch.arange(first, length, device=GPU)
            page = self.inputs.pages_BP[row][place // PAGE].long()
            keys, values = (self.kv[page, part, place % PAGE].float() for part in (0, 1))
            group = shape.heads // shape.kv_heads
            keys, values = (x.repeat_interleave(group, 1) for x in (keys * self.scales.k, values * self.scales.v))
            scores = torch.einsum("hd,shd->hs", q_BHD[row].float(), keys) * shape.scale
            rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), values))
        return torch.stack(rows)

    def queries(self) -> torch.Tensor:
        return torch.randn(len(self.lengths), self.shape.heads, self.shape.head_dim, dtype=torch.bfloat16, device=GPU)


def farthest(out_BHD: torch.Tensor, want_BHD: torch.Tensor) -> float:
    """The largest relative distance of a row and head; infinite where one is no number."""
    distance = (out_BHD.float() - want_BHD).norm(dim=-1) / want_BHD.norm(dim=-1)
    return float(torch.nan_to_num(distance, nan=float("inf")).max())


@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("name", list(SHAPES))
def test_every_row_is_right_whoever_shares_its_blocks(name: str, batch: str) -> None:
    cache = Cache(SHAPES[name], BATCHES[batch], SCALES.get(name, UNSCALED))
    even = EvenDecode(cache.shape, GPU, arch=Arch.of(GPU), max_rows=len(cache.lengths) + 5)
    even.deal(cache.inputs)
    for _ in range(3):  # what one launch leaves behind must not reach the next
        q = cache.queries()
        out = torch.full_like(q, float("nan"))
        even.run(q, cache.kv, cache.inputs, out, cache.scales)
        assert farthest(out, cache.truth(q)) < 1e-2


@pytest.mark.parametrize("name", ["8 kv heads of 2", "3 kv heads of 3, narrow", "a window"])
def test_a_chain_of_dependent_launches_reads_no_key_before_it_is_written(name: str) -> None:
    """Replayed over growing rows: a key that is fetched too early is not a number, and so is what comes of it."""
    shape, generator = SHAPES[name], random.Random(5)
    layers = 6
    cache = Cache(shape, [generator.choice((3, 16, 250, 900)) for _ in range(40)])
    caches = [cache.kv.clone() for _ in range(layers)]
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = [torch.randn(40, width, dtype=torch.bfloat16, device=GPU) for _ in range(layers)]
    outs = [torch.empty_like(cache.queries()) for _ in range(layers)]
    queries = [torch.empty_like(out) for out in outs]
    angles = torch.rand(1024, shape.head_dim // 2, device=GPU) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    even = EvenDecode(shape, GPU, arch=Arch.of(GPU), max_rows=40, pdl=True)
    inputs = cache.inputs

    def step() -> None:
        even.deal(inputs)
        qkv[0].add_(0.0)  # a launch that is not dependent
        for layer in range(layers):
            norm_rope_write(
                qkv[layer], None, None, cos_sin, inputs.positions_B, inputs.slots_B, caches[layer],
                heads=shape.heads, kv_heads=shape.kv_heads, eps=1e-6, q_out=queries[layer], pdl=True,
            )  # fmt: skip
            even.run(queries[layer], caches[layer], inputs, outs[layer])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for _ in range(10):
        for kv, out in zip(caches, outs, strict=True):
            kv[inputs.slots_B // PAGE, :, inputs.slots_B % PAGE] = float("nan")
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for layer in range(layers):
            cache.kv = caches[layer]
            assert farthest(outs[layer], cache.truth(queries[layer])) < 1e-2, layer
        grows = [length % PAGE != 0 for length in cache.lengths]
        cache.lengths = [length + grow for length, grow in zip(cache.lengths, grows, strict=True)]
        more = torch.tensor(grows, device=GPU)
        for each in (inputs.seq_lens_B, inputs.positions_B, inputs.slots_B):
            each.add_(more)


def test_a_row_of_no_numbers_stays_alone() -> None:
    cache = Cache(SHAPES["8 kv heads of 2"], [700] * 20)
    even = EvenDecode(cache.shape, GPU, arch=Arch.of(GPU), max_rows=20)
    q = cache.queries()
    q[7] = float("nan")
    out = torch.zeros_like(q)
    even.deal(cache.inputs)
    even.run(q, cache.kv, cache.inputs, out)
    assert bool(out[7].isnan().all())
    others = [row for row in range(20) if row != 7]
    assert farthest(out[others], cache.truth(q)[others]) < 1e-2


@pytest.mark.parametrize(
    "shape",
    [
        HeadShape(heads=32, kv_heads=8, head_dim=64, kv_dtype=FP8),
        HeadShape(heads=16, kv_heads=16, head_dim=128),
        HeadShape(heads=8, kv_heads=4, head_dim=256),
        HeadShape(heads=40, kv_heads=2, head_dim=128),
        HeadShape(heads=8, kv_heads=8, head_dim=128, page_size=8),
    ],
    ids=["narrow in 8 bits", "too many kv heads", "wide", "too large a group", "small pages"],
)
def test_shapes_without_a_kernel_are_known(shape: HeadShape) -> None:
    assert EvenDecodes().refuses(shape, Arch.of(GPU)) is not None
    assert all(EvenDecodes().refuses(known, Arch.of(GPU)) is None for known in SHAPES.values())
