"""Paged attention on CUDA against a float32 truth over gathered keys and values."""

from __future__ import annotations

import itertools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.decode import FusedDecode
from headrace.ops.cuda.attention.even import EvenDecode
from headrace.ops.cuda.attention.grouped import GroupedAttention
from headrace.ops.cuda.attention.kernels import EvenDecodes, TilePrefills
from headrace.ops.cuda.attention.paged import FlashAttention, PlannedDecode, XqaDecode
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.attention.split import SplitDecode
from headrace.ops.cuda.attention.tile import TileAttention
from headrace.ops.cuda.fused import DecodeInputs, prepare_decode
from headrace.ops.cuda.heads import norm_rope_write
from headrace.ops.paged import UNSCALED, KvScales

GPU = torch.device("cuda")
ARCH = Arch.of(GPU)
PAGE = 16


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    distance = (out.float() - truth).norm() / truth.norm()
    return float("inf") if torch.isnan(distance) else float(distance)


def scales_of(shape: HeadShape) -> KvScales:
    return UNSCALED if shape.kv_dtype == shape.dtype else KvScales(0.5, 0.25)


def sinks_of(shape: HeadShape) -> torch.Tensor | None:
    """The same sinks each time."""
    return torch.linspace(-3.0, 4.0, shape.heads, device=GPU) if shape.has_sinks else None


def truth(q_HD, kv, pages_P, position, shape) -> torch.Tensor:
    first = 0 if shape.window is None else max(0, position - shape.window + 1)
    place = torch.arange(first, position + 1, device=GPU)
    page = pages_P[place // PAGE].long()
    keys = kv[page, 0, place % PAGE].float() * scales_of(shape).k
    values = kv[page, 1, place % PAGE].float() * scales_of(shape).v
    group = shape.heads // shape.kv_heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("hd,shd->hs", q_HD.float(), keys) * shape.scale
    if shape.cap is not None:
        scores = shape.cap * torch.tanh(scores / shape.cap)
    if (sinks_H := sinks_of(shape)) is not None:
        scores = torch.cat((scores, sinks_H[:, None]), 1)
    return torch.einsum("hs,shd->hd", scores.softmax(-1)[:, : len(place)], values)


class Paged:
    """Random pages, and rows of given lengths whose pages are scattered among them."""

    def __init__(self, shape: HeadShape, lengths: list[int], columns: int) -> None:
        used = sum(-(-length // PAGE) for length in lengths)
        pages = used + 7
        kv = torch.randn(pages + 1, 2, PAGE, shape.kv_heads, shape.head_dim, device=GPU)
        self.kv = (kv / scales_of(shape).v).clamp(-448, 448).to(shape.kv_dtype)
        order = itertools.chain(torch.randperm(pages).tolist())
        self.table = torch.full((len(lengths) + 1, columns), pages, dtype=torch.int32, device=GPU)
        self.lists = []
        for row, length in enumerate(lengths):
            numbers = list(itertools.islice(order, -(-length // PAGE)))
            self.lists.append(numbers)
            self.table[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        self.lengths = torch.tensor([length - 1 for length in lengths] + [0], dtype=torch.int32, device=GPU)
        self.pool = torch.zeros(len(lengths) + 1, columns * PAGE, dtype=torch.int32, device=GPU)


def inputs_of(rows: int, columns: int, scratch_page: int) -> DecodeInputs:
    def make(dtype):
        return torch.zeros(rows, dtype=dtype, device=GPU)

    pages = torch.full((rows, columns), scratch_page, dtype=torch.int32, device=GPU)
    return DecodeInputs(
        make(torch.int32), make(torch.int64), make(torch.int64), make(torch.int32), pages, make(torch.int32)
    )


SHAPES = {
    "llama": {"heads": 32, "kv_heads": 8, "head_dim": 128},
    "qwen": {"heads": 16, "kv_heads": 8, "head_dim": 128},
    "smol": {"heads": 9, "kv_heads": 3, "head_dim": 64},
    "window": {"heads": 32, "kv_heads": 8, "head_dim": 128, "window": 100},
    "scaled": {"heads": 32, "kv_heads": 8, "head_dim": 128, "scale": 0.2},
    "fp8": {"heads": 32, "kv_heads": 8, "head_dim": 128, "kv_dtype": torch.float8_e4m3fn},
    "sinks": {"heads": 64, "kv_heads": 8, "head_dim": 64, "has_sinks": True},
    "sinks, window": {"heads": 64, "kv_heads": 8, "head_dim": 64, "has_sinks": True, "window": 100},
    "bounded": {"heads": 16, "kv_heads": 8, "head_dim": 256, "cap": 2.0},
}
OTHERS = {
    "heads of 80": {"heads": 6, "kv_heads": 6, "head_dim": 80},
    "heads of 512": {"heads": 8, "kv_heads": 2, "head_dim": 512, "scale": 0.05, "window": 100},
    "71 heads": {"heads": 71, "kv_heads": 1, "head_dim": 64, "cap": 3.0, "has_sinks": True},
}
"""Heads that Triton's own kernels alone take."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, kind) for name in ("llama", "qwen", "window", "scaled") for kind in ("xqa", "xqa-spread", "fa2")],
        ("fp8", "xqa"),
        ("fp8", "xqa-spread"),  # FA2 with an fp8 cache is the same call
        ("bounded", "fa2"),
        ("sinks", "even"),
        ("sinks, window", "even"),
        *[(name, "split") for name in (*SHAPES, *OTHERS)],
    ],
)
def test_decode_in_a_graph_follows_lengths_on_the_device(name: str, kind: str) -> None:
    if kind.startswith("xqa") and not ARCH.has("xqa"):
        pytest.skip("needs a GPU that runs XQA")
    shape = HeadShape(**(SHAPES | OTHERS)[name])
    if kind == "even" and EvenDecodes().refuses(shape, ARCH) is not None:
        pytest.skip("needs Hopper or newer")
    lengths, columns = [1, 16, 17, 99, 100, 101, 500, 1900, 2048 - 8], 128
    paged = Paged(shape, [length + 8 for length in lengths], columns)
    paged.lengths[:-1] -= 8
    rows = len(lengths) + 2
    chosen = torch.tensor([*range(len(lengths)), len(lengths), len(lengths)], dtype=torch.int32, device=GPU)
    inputs = inputs_of(rows, columns, paged.kv.shape[0] - 1)
    workspace = torch.zeros(PlannedDecode.workspace_bytes(shape, rows, ARCH), dtype=torch.uint8, device=GPU)
    prepare_decode(chosen, paged.pool, paged.lengths, paged.table, inputs, page_size=PAGE)
    makers = {
        "fa2": lambda: PlannedDecode(shape, inputs, workspace),
        "xqa": lambda: XqaDecode(shape, GPU, max_rows=rows, arch=ARCH),
        "xqa-spread": lambda: XqaDecode(shape, GPU, max_rows=rows, arch=ARCH, spread=4),
        "even": lambda: EvenDecode(shape, GPU, max_rows=rows, arch=ARCH, pdl=ARCH.has("dependent_launch")),
        "split": lambda: SplitDecode(shape, GPU, max_rows=rows, arch=ARCH, pdl=ARCH.has("dependent_launch")),
    }
    decode = makers[kind]()
    q = torch.randn(rows, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=GPU)
    out = torch.full_like(q, float("nan"))

    def step() -> None:
        prepare_decode(chosen, paged.pool, paged.lengths, paged.table, inputs, page_size=PAGE)
        decode.deal(inputs)
        decode.run(q, paged.kv, inputs, out, scales_of(shape), sinks_of(shape))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    bound = 8e-2 if name == "fp8" else 8e-3  # XQA rounds queries and probabilities to e4m3 too
    for grown in (0, 1, 7):  # the last plan serves several steps: its lengths are upper bounds
        if grown != 7 and isinstance(decode, PlannedDecode):
            decode.plan([length + 8 for length in lengths] + [1, 1])
        now = [length + grown for length in lengths]
        paged.lengths[:-1] = torch.tensor(now, dtype=torch.int32) - 1
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for row, length in enumerate(now):
            want = truth(q[row], paged.kv, paged.table[row], length - 1, shape)
            assert error(out[row], want) < bound, (row, length)
        assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("splits", [None, 1, 8])
@pytest.mark.parametrize("name", list(SHAPES))
def test_fused_decode_is_norm_rope_write_then_attention(name: str, splits: int | None, norm: bool) -> None:
    shape = HeadShape(**SHAPES[name])
    lengths, columns = [1, 16, 17, 64, 65, 99, 100, 101, 500, 1900, 2048], 128
    paged = Paged(shape, lengths, columns)
    rows = len(lengths)
    inputs = inputs_of(rows, columns, paged.kv.shape[0] - 1)
    chosen = torch.arange(rows, dtype=torch.int32, device=GPU)
    prepare_decode(chosen, paged.pool, paged.lengths, paged.table, inputs, page_size=PAGE)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    angles = torch.rand(columns * PAGE, shape.head_dim // 2, device=GPU) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = [torch.randn(shape.head_dim, dtype=torch.bfloat16, device=GPU) if norm else None for _ in range(2)]
    fused = FusedDecode(shape, GPU, max_rows=rows, splits=splits)
    fp8 = shape.kv_dtype != shape.dtype
    for _ in range(2):
        qkv = torch.randn(rows, width, dtype=torch.bfloat16, device=GPU)
        apart, q = paged.kv.clone(), torch.empty(rows, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=GPU)
        norm_rope_write(
            qkv,
            *weights,
            cos_sin,
            inputs.positions_B,
            inputs.slots_B,
            apart,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            eps=1e-6,
            q_out=q,
            k_scale=scales_of(shape).k,
            v_scale=scales_of(shape).v,
        )
        out = torch.full((rows, shape.heads * shape.head_dim), float("nan"), dtype=torch.bfloat16, device=GPU)
        scales, sinks = scales_of(shape), sinks_of(shape)
        fused.run(qkv, *weights, cos_sin, paged.kv, inputs, out, scales, sinks, eps=1e-6, pdl=True)
        assert error(paged.kv.float(), apart.float()) < (1e-3 if fp8 else 1e-4)
        for row, length in enumerate(lengths):
            want = truth(q[row], apart, paged.table[row], length - 1, shape)
            assert error(out[row].view(shape.heads, -1), want) < (2e-2 if fp8 else 8e-3), (row, length)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "fa2"),
        ("qwen", "fa2"),
        ("window", "fa2"),
        ("llama", "fa3"),
        ("qwen", "fa3"),
        ("llama", "own"),
        ("qwen", "own"),
        ("bounded", "fa2"),
        ("bounded", "fa3"),
        *[(name, "grouped") for name in (*SHAPES, *OTHERS)],
    ],
)
def test_prefill_over_cached_prefixes(name: str, backend: str) -> None:
    if backend == "fa3" and not ARCH.has("wgmma"):
        pytest.skip("needs Hopper")
    shape = HeadShape(**(SHAPES | OTHERS)[name])
    counts, lengths = [1, 16, 200, 333, 64], [1, 40, 200, 1000, 65]
    paged = Paged(shape, lengths, 80)
    packed = torch.randn(
        sum(counts), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=torch.bfloat16, device=GPU
    )
    q = packed[:, : shape.heads * shape.head_dim].unflatten(1, (shape.heads, shape.head_dim))
    out = torch.full(q.shape, float("nan"), dtype=torch.bfloat16, device=GPU)
    if backend == "own" and TilePrefills().refuses(shape, ARCH) is not None:
        pytest.skip("needs Hopper")
    makers = {
        "own": lambda: TileAttention(shape, GPU, pdl=True),
        "grouped": lambda: GroupedAttention(shape, GPU, shared_bytes=ARCH.shared_bytes),
    }
    attention = makers[backend]() if backend in makers else FlashAttention(shape, GPU, backend=backend)
    attention.plan(counts, lengths, [[*pages, 0, 0] for pages in paged.lists])
    attention.run(q, paged.kv, out, scales_of(shape), sinks_of(shape))
    start = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        want = torch.stack(
            [truth(q[start + at], paged.kv, paged.table[row], length - count + at, shape) for at in range(count)]
        )
        assert error(out[start : start + count], want) < (1e-2 if name == "fp8" else 8e-3), row
        start += count


def test_blocks_of_a_cluster_wait_for_each_other_at_the_end() -> None:
    """Tiles of one token end at once; each launch begins while the one before ends."""
    shape = HeadShape(**SHAPES["qwen"])
    if TilePrefills().refuses(shape, ARCH) is not None:
        pytest.skip("needs Hopper")
    lengths = [1 + 7 * at % 150 for at in range(100)]
    paged = Paged(shape, lengths, 16)
    q = torch.randn(len(lengths), shape.heads, shape.head_dim, dtype=torch.bfloat16, device=GPU)
    attention = TileAttention(shape, GPU, pdl=True)
    attention.plan([1] * len(lengths), lengths, paged.lists)
    outs = torch.empty(2, *q.shape, dtype=q.dtype, device=GPU)
    attention.run(q, paged.kv, outs[0])
    for _ in range(4000):
        attention.run(q, paged.kv, outs[1])
    torch.cuda.synchronize()
    assert torch.equal(outs[0], outs[1])
