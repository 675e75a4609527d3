"""`python -m headrace.engine.bench.kernels`: CUDA kernels against the memory bandwidth measured in the same run.

Times graph replays of each operation alone, and of whole decoder layers in a chain, on random data with weights and
caches that do not fit in L2; loads no model and keeps no engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.ops import cuda_fused as fused
from headrace.ops.cuda_attention import HeadShape, PlannedDecode, PrefillAttention, XqaDecode
from headrace.ops.cuda_linear import LinearScratch, Tiling, linear, linear_silu_mul, tiling
from headrace.ops.cuda_sample import SampleScratch, sample

__all__ = ["main"]

PAGE = 16
COLD_BYTES = 400 << 20


class Shape(NamedTuple):
    """One model's layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int
    vocabulary: int
    qk_norm: bool


SHAPES = {
    "0.6b": Shape(1024, 16, 8, 128, 3072, 28, 151936, True),
    "8b": Shape(4096, 32, 8, 128, 14336, 32, 128256, False),
}


class Bench:
    """Times captured work and collects rows."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.rows: list[dict[str, Any]] = []
        self.device = torch.device("cuda")

    def time(self, work: Callable[[], None], calls: int = 1) -> tuple[float, float, float]:
        """Microseconds a call (p10, p50, p90) of graph replays of `work`, which makes `calls` calls."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for _ in range(3):
            graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.repeats)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        took = sorted(1000 * start.elapsed_time(end) / calls for start, end in events)
        return took[len(took) // 10], median(took), took[-len(took) // 10 - 1]

    def add(self, what: str, timed: tuple[float, float, float], moved: int = 0, note: str = "") -> None:
        low, middle, high = timed
        speed = f"{moved / middle / 1e6:5.2f}" if moved else "     "
        print(f"{what:<46} {middle:9.2f} us  [{low:.2f} {high:.2f}]  {speed} TB/s {note}", flush=True)
        self.rows.append({"what": what, "us": middle, "p10": low, "p90": high, "bytes": moved, "note": note})


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _copies(size: int) -> int:
    return max(2, min(64, -(-COLD_BYTES // size)))


def floor(bench: Bench) -> None:
    """A large device-to-device copy, and a chain of nearly empty kernels."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bench.add("copy 2 GiB", bench.time(lambda: target.copy_(source) and None), 2 * source.numel())
    x, out, weight = _random(1, 1024), _random(1, 1024), _random(1024)
    for pdl in (False, True):
        bench.add(f"chained rms_norm 1x1024 pdl={pdl}", bench.time(
            lambda pdl=pdl: [fused.rms_norm(x, weight, 1e-6, out, pdl=pdl) for _ in range(100)] and None, 100))


def elementwise(bench: Bench) -> None:
    """Norms, activation, rotary with KV write, each alone in a chain of 50."""
    from flashinfer import fused_add_rmsnorm, silu_and_mul

    for rows in (1, 64, 256, 8192):
        for hidden, ffn in ((1024, 3072), (4096, 14336)):
            x, residual, weight, out = _random(rows, hidden), _random(rows, hidden), _random(hidden), _random(rows, hidden)
            moved = 4 * x.numel() * 2
            bench.add(f"add_rms_norm {rows}x{hidden}", bench.time(
                lambda: [fused.add_rms_norm(x, residual, weight, 1e-6, out, pdl=True) for _ in range(50)] and None, 50), moved)
            bench.add(f"  flashinfer fused_add_rmsnorm", bench.time(
                lambda: [fused_add_rmsnorm(x, residual, weight, 1e-6, enable_pdl=True) for _ in range(50)] and None, 50), moved)
            gate_up, act = _random(rows, 2 * ffn), _random(rows, ffn)
            moved = 3 * act.numel() * 2
            bench.add(f"silu_mul {rows}x{ffn}", bench.time(
                lambda: [fused.silu_mul(gate_up, act, pdl=True) for _ in range(50)] and None, 50), moved)
            bench.add("  flashinfer silu_and_mul", bench.time(
                lambda: [silu_and_mul(gate_up, out=act, enable_pdl=True) for _ in range(50)] and None, 50), moved)
        for name in ("0.6b", "8b"):
            s = SHAPES[name]
            qkv = _random(rows, (s.heads + 2 * s.kv_heads) * s.head_dim)
            q = _random(rows, s.heads * s.head_dim)
            norm = _random(s.head_dim) if s.qk_norm else None
            table = torch.rand(40960, s.head_dim, device="cuda")
            kv = _random(rows // PAGE + 1, 2, PAGE, s.kv_heads, s.head_dim)
            at = torch.arange(rows, device="cuda")
            bench.add(f"norm_rope_write {name} {rows}", bench.time(lambda: [fused.norm_rope_write(
                qkv, norm, norm, table, at, at, kv, heads=s.heads, kv_heads=s.kv_heads, eps=1e-6, q_out=q, pdl=True)
                for _ in range(50)] and None, 50), 4 * qkv.numel())


def sampling(bench: Bench) -> None:
    """The sampler over a large vocabulary, with logits cold in L2 where they do not fit."""
    vocabulary = 151936
    for rows in (1, 64, 256):
        many = _copies(rows * vocabulary * 2)
        logits = [_random(rows, vocabulary) * 3 for _ in range(min(many, 8))]
        scratch = SampleScratch(rows, vocabulary, "cuda")
        numbers = torch.arange(rows, dtype=torch.int32, device="cuda")
        positions = torch.randint(5, 900, (rows,), device="cuda")
        pool = torch.zeros(rows + 1, 1024, dtype=torch.int32, device="cuda")
        lengths = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
        seeds = torch.randint(0, 2**60, (rows + 1,), device="cuda")
        out = torch.empty(rows, dtype=torch.int32, device="cuda")
        cases = {
            "greedy": (0.0, 0, 1.0, 0.0, False), "temperature": (0.6, 0, 1.0, 0.0, False),
            "greedy, filters possible": (0.0, 0, 1.0, 0.0, True), "top-k 20, top-p .95": (0.6, 20, 0.95, 0.0, True),
            "top-p .9": (1.0, 0, 0.9, 0.0, True), "min-p .05": (1.0, 0, 1.0, 0.05, True),
        }
        for name, (heat, top_k, top_p, min_p, filtered) in cases.items():
            def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
                return torch.full((rows + 1,), value, dtype=dtype, device="cuda")

            state = (full(heat), full(top_k, torch.int32), full(top_p), full(min_p), seeds)

            def work() -> None:
                for line in logits:
                    sample(line, numbers, *state, positions, pool, lengths, out, scratch, filtered=filtered, pdl=True)

            bench.add(f"sample B={rows} {name}", bench.time(work, len(logits)), rows * vocabulary * 2)


def _decode_inputs(rows: int, context: int, pages: int, columns: int) -> fused.DecodeInputs:
    table = torch.full((rows, columns), pages, dtype=torch.int32, device="cuda")
    used = -(-context // PAGE)
    table[:, :used] = torch.randperm(pages, device="cuda")[: rows * used].view(rows, used).int()
    lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    empty = torch.zeros(rows, dtype=torch.int32, device="cuda")
    return fused.DecodeInputs(empty, lengths - 1, empty.long(), lengths, table, lengths - (columns - 1) * PAGE)


def decoding(bench: Bench, spreads: Sequence[int] = (1, 2, 4)) -> None:
    """Decode attention: XQA at several spreads and FA2, over contexts of equal length."""
    for name in ("8b", "0.6b"):
        s = SHAPES[name]
        shape = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
        for rows, context in ((1, 1024), (1, 8192), (4, 1024), (16, 1024), (16, 4096), (64, 1024), (64, 4096), (256, 1024)):
            used = rows * -(-context // PAGE)
            size = used * 2 * PAGE * s.kv_heads * s.head_dim * 2
            layers = [_random(used + 1, 2, PAGE, s.kv_heads, s.head_dim) for _ in range(min(16, _copies(size)))]
            inputs = _decode_inputs(rows, context, used, max(128, context // PAGE))
            q, out = _random(rows, s.heads, s.head_dim), _random(rows, s.heads, s.head_dim)
            for spread in spreads:
                decode = XqaDecode(shape, bench.device, max_rows=rows, spread=spread)
                bench.add(f"xqa spread {spread} {name} {rows}x{context}", bench.time(
                    lambda: [decode.run(q, kv, inputs, out) for kv in layers] and None, len(layers)), size)
            workspace = torch.zeros(PlannedDecode.workspace_bytes(shape, rows, bench.device), dtype=torch.uint8, device="cuda")
            planned = PlannedDecode(shape, inputs, workspace)
            planned.plan([context] * rows)
            bench.add(f"fa2 {name} {rows}x{context}", bench.time(
                lambda: [planned.run(q, kv, inputs, out) for kv in layers] and None, len(layers)), size)


def uneven(bench: Bench) -> None:
    """Decode attention where one row is long: what an even split per row costs."""
    s = SHAPES["8b"]
    shape = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
    rows, columns = 32, 2048
    lengths = [32000] + [500] * (rows - 1)
    used = sum(-(-length // PAGE) for length in lengths)
    layers = [_random(used + 1, 2, PAGE, s.kv_heads, s.head_dim) for _ in range(4)]
    table = torch.full((rows, columns), used, dtype=torch.int32, device="cuda")
    order, at = torch.randperm(used, device="cuda").int(), 0
    for row, length in enumerate(lengths):
        many = -(-length // PAGE)
        table[row, :many] = order[at : at + many]
        at += many
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    inputs = fused.DecodeInputs(lens, lens, lens.long(), lens, table, lens - (columns - 1) * PAGE)
    q, out = _random(rows, s.heads, s.head_dim), _random(rows, s.heads, s.head_dim)
    size = used * 2 * PAGE * s.kv_heads * s.head_dim * 2
    for spread in (1, 4, 16):
        decode = XqaDecode(shape, bench.device, max_rows=rows, spread=spread)
        bench.add(f"xqa spread {spread} 1x32000+31x500", bench.time(
            lambda: [decode.run(q, kv, inputs, out) for kv in layers] and None, 4), size)
    workspace = torch.zeros(PlannedDecode.workspace_bytes(shape, rows, bench.device), dtype=torch.uint8, device="cuda")
    planned = PlannedDecode(shape, inputs, workspace)
    planned.plan(lengths)
    bench.add("fa2 1x32000+31x500", bench.time(lambda: [planned.run(q, kv, inputs, out) for kv in layers] and None, 4), size)


def prefilling(bench: Bench) -> None:
    """Prefill attention: FA2 against FA3 for chunks over prefixes, in TFLOP/s of the causal half."""
    for name in ("0.6b", "8b"):
        s = SHAPES[name]
        shape = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
        for rows, count, prefix in ((1, 512, 0), (1, 2048, 0), (4, 2048, 0), (1, 8192, 0), (1, 2048, 8192)):
            length = count + prefix
            used = -(-length // PAGE)
            kv = _random(rows * used, 2, PAGE, s.kv_heads, s.head_dim)
            order = torch.randperm(rows * used).view(rows, used).tolist()
            q, out = _random(rows * count, s.heads, s.head_dim), _random(rows * count, s.heads, s.head_dim)
            work = 4 * rows * s.heads * s.head_dim * (count * prefix + count * (count + 1) // 2)
            for backend in ("fa2", "fa3"):
                attention = PrefillAttention(shape, bench.device, backend=backend)
                attention.plan([count] * rows, [length] * rows, order)
                timed = bench.time(lambda: attention.run(q, kv, out))
                bench.add(f"{backend} {name} {rows}x{count} after {prefix}", timed, 0, f"{work / timed[1] / 1e6:.0f} TFLOP/s")


def products(bench: Bench, best_of: Sequence[Tiling] | None = None) -> None:
    """Small-batch products against cuBLAS, every weight read cold."""
    for name, out_size, in_size in (
        ("8b qkv", 6144, 4096), ("8b o", 4096, 4096), ("8b gate-up", 28672, 4096), ("8b down", 4096, 14336),
        ("0.6b qkv", 4096, 1024), ("0.6b o", 1024, 2048), ("0.6b gate-up", 6144, 1024), ("0.6b down", 1024, 3072),
    ):
        size = out_size * in_size * 2
        weights = [_random(out_size, in_size) / in_size**0.5 for _ in range(_copies(size))]
        scratch = LinearScratch("cuda")
        for rows in (1, 16, 64):
            x, out = _random(rows, in_size), _random(rows, out_size)
            bench.add(f"cublas {name} M={rows}", bench.time(
                lambda: [torch.mm(x, w.t(), out=out) for w in weights] and None, len(weights)), size)
            results = []
            for how in best_of if best_of else (tiling(rows, out_size, in_size),):
                if how.splits * -(-out_size // how.block_out) * how.block_out * max(16, rows) > scratch.planes.numel():
                    continue
                try:
                    timed = bench.time(
                        lambda: [linear(x, w, out, scratch, how=how, pdl=True) for w in weights] and None, len(weights))
                except Exception as error:  # a tiling that asks for too much shared memory
                    print("  ", how, type(error).__name__)
                    torch.cuda.synchronize()
                    continue
                results.append((timed, how))
            results.sort(key=lambda item: item[0][1])
            for timed, how in results[:3]:
                bench.add(f"  triton {name} M={rows}", timed, size, str(tuple(how)))


def chain(bench: Bench) -> None:
    """All layers of a model in one graph: what each choice costs where it matters."""
    for name, contexts in (("0.6b", (1000,)), ("8b", (1000,))):
        for rows in (1, 16, 64):
            for context in contexts:
                for choice in ("cublas", "cublas+pdl", "triton+pdl", "triton+pdl+ahead"):
                    timed, moved = _chain(bench, SHAPES[name], rows, context, choice)
                    bench.add(f"chain {name} B={rows} {choice}", timed, moved)


class _Layer(NamedTuple):
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    kv: Tensor


def _chain(bench: Bench, s: Shape, rows: int, context: int, choice: str) -> tuple[tuple[float, float, float], int]:
    pdl, own, ahead = choice != "cublas", choice.startswith("triton"), 16 if choice.endswith("ahead") else 0
    used = rows * -(-context // PAGE)
    width = (s.heads + 2 * s.kv_heads) * s.head_dim
    layers = [
        _Layer(_random(width, s.hidden) / 32, _random(s.hidden, s.heads * s.head_dim) / 32,
               _random(2 * s.ffn, s.hidden) / 32, _random(s.hidden, s.ffn) / 32,
               _random(used + 1, 2, PAGE, s.kv_heads, s.head_dim))
        for _ in range(s.layers)
    ]
    inputs = _decode_inputs(rows, context, used, 128)
    shape = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
    decode = XqaDecode(shape, bench.device, max_rows=rows)
    norm = _random(s.head_dim) if s.qk_norm else None
    table = torch.rand(2048, s.head_dim, device="cuda")
    slots = used * PAGE + torch.arange(rows, device="cuda") % PAGE
    x, residual, weight, h = _random(rows, s.hidden), _random(rows, s.hidden), _random(s.hidden), _random(rows, s.hidden)
    qkv, q, o = _random(rows, width), _random(rows, s.heads, s.head_dim), _random(rows, s.heads, s.head_dim)
    gate_up, act = _random(rows, 2 * s.ffn), _random(rows, s.ffn)
    scratch = LinearScratch("cuda")

    def product(a: Tensor, w: Tensor, out: Tensor) -> None:
        if own:
            linear(a, w, out, scratch, pdl=True, ahead=ahead)
        else:
            torch.mm(a, w.t(), out=out)

    def work() -> None:
        for layer in layers:
            fused.add_rms_norm(x, residual, weight, 1e-6, h, pdl=pdl)
            product(h, layer.qkv, qkv)
            fused.norm_rope_write(qkv, norm, norm, table, inputs.positions_B, slots, layer.kv, heads=s.heads,
                                  kv_heads=s.kv_heads, eps=1e-6, q_out=q, pdl=pdl)
            decode.run(q, layer.kv, inputs, o)
            product(o.view(rows, -1), layer.o, x)
            fused.add_rms_norm(x, residual, weight, 1e-6, h, pdl=pdl)
            if own:
                linear_silu_mul(h, layer.gate_up, act, pdl=True, ahead=ahead)
            else:
                product(h, layer.gate_up, gate_up)
                fused.silu_mul(gate_up, act, pdl=pdl)
            product(act, layer.down, x)

    moved = sum(w.numel() * 2 for w in layers[0][:4]) * s.layers + s.layers * used * PAGE * 4 * s.kv_heads * s.head_dim
    return bench.time(work), moved


PARTS: dict[str, Callable[[Bench], None]] = {
    "floor": floor, "elementwise": elementwise, "sample": sampling, "decode": decoding, "uneven": uneven,
    "prefill": prefilling, "linear": products, "chain": chain,
}
SWEEP = [
    Tiling(out, inner, splits, warps, stages)
    for out, inner, warps in ((16, 256, 4), (16, 512, 4), (32, 128, 4), (32, 256, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4))
    for splits in (1, 2, 4, 8)
    for stages in (3, 5)
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named parts (all by default) and print one line a figure; `--json` keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[], help=f"any of {', '.join(PARTS)}, linear-sweep")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args(arguments)
    bench = Bench(options.repeats)
    with torch.inference_mode():
        for name in options.parts or PARTS:
            if name == "linear-sweep":
                products(bench, SWEEP)
            else:
                PARTS[name](bench)
    if options.json is not None:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"conditions": machine, "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
