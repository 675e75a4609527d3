"""`python -m headrace.engine.bench.kernels`: CUDA kernels against the memory bandwidth measured in the same run.

It times graph replays of each operation alone, and of whole decoder layers in a chain, on random data with weights and
caches that do not fit in L2; it loads no model and keeps no engine.
"""

# ruff: noqa: B023 - every lambda here is called before its loop goes on
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.bench.kernels.layers import chain
from headrace.engine.bench.kernels.lora import lora, lora_sweep
from headrace.engine.bench.kernels.tilings import gated_sweep, linear_sweep, products, vector_sweep
from headrace.engine.bench.kernels.timing import PAGE, SHAPES, Bench, copies, decode_inputs, random
from headrace.ops.cuda import fused, heads
from headrace.ops.cuda.attention.decode import FusedDecode
from headrace.ops.cuda.attention.even import EvenDecode
from headrace.ops.cuda.attention.paged import FlashAttention, PlannedDecode, XqaDecode
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.attention.tile import TileAttention
from headrace.ops.cuda.products.linear import LinearScratch, linear
from headrace.ops.cuda.sampling.sample import SampleScratch, sample

__all__ = ["main"]


def floor(bench: Bench) -> None:
    """Time a large device-to-device copy, and a chain of nearly empty kernels."""
    source = torch.randn(512 << 20, device="cuda")
    target = torch.empty_like(source)
    bench.add("copy 2 GiB (kernel)", bench.time(lambda: [torch.add(source, 1.0, out=target)]), 8 * source.numel())
    bench.add("read 2 GiB (sum)", bench.time(lambda: [torch.sum(source)]), 4 * source.numel())
    x, out, weight = random(1, 1024), random(1, 1024), random(1024)
    for pdl in (False, True):
        bench.add(
            f"chained rms_norm 1x1024 pdl={pdl}",
            bench.time(lambda pdl=pdl: [fused.rms_norm(x, weight, 1e-6, out, pdl=pdl) for _ in range(100)], 100),
        )


def elementwise(bench: Bench) -> None:
    """Time norms and activation, each alone in a chain of 50, against FlashInfer's."""
    from flashinfer import fused_add_rmsnorm, silu_and_mul

    for rows in (1, 64, 256, 8192):
        for hidden, ffn in ((1024, 3072), (4096, 14336)):
            x, residual, weight, out = (
                random(rows, hidden),
                random(rows, hidden),
                random(hidden),
                random(rows, hidden),
            )
            moved = 4 * x.numel() * 2
            bench.add(
                f"add_rms_norm {rows}x{hidden}",
                bench.time(
                    lambda: [fused.add_rms_norm(x, residual, weight, 1e-6, out, pdl=True) for _ in range(50)],
                    50,
                ),
                moved,
            )
            bench.add(
                "  flashinfer fused_add_rmsnorm",
                bench.time(
                    lambda: [fused_add_rmsnorm(x, residual, weight, 1e-6, enable_pdl=True) for _ in range(50)],
                    50,
                ),
                moved,
            )
            gate_up, act = random(rows, 2 * ffn), random(rows, ffn)
            moved = 3 * act.numel() * 2
            bench.add(
                f"silu_mul {rows}x{ffn}",
                bench.time(lambda: [fused.activate_mul(gate_up, act, pdl=True) for _ in range(50)], 50),
                moved,
            )
            bench.add(
                "  flashinfer silu_and_mul",
                bench.time(lambda: [silu_and_mul(gate_up, out=act, enable_pdl=True) for _ in range(50)], 50),
                moved,
            )


def rotary(bench: Bench) -> None:
    """Time norm, rotary and KV write, in a chain of 50."""
    for rows in (1, 64, 256, 8192):
        for name in ("0.6b", "8b"):
            s = SHAPES[name]
            qkv = random(rows, (s.heads + 2 * s.kv_heads) * s.head_dim)
            q = random(rows, s.heads * s.head_dim)
            norm = random(s.head_dim) if s.qk_norm else None
            table = torch.rand(40960, s.head_dim, device="cuda")
            kv = random(rows // PAGE + 1, 2, PAGE, s.kv_heads, s.head_dim)
            at = torch.arange(rows, device="cuda")
            bench.add(
                f"norm_rope_write {name} {rows}",
                bench.time(
                    lambda: (
                        [
                            heads.norm_rope_write(
                                qkv,
                                norm,
                                norm,
                                table,
                                at,
                                at,
                                kv,
                                heads=s.heads,
                                kv_heads=s.kv_heads,
                                eps=1e-6,
                                q_out=q,
                                pdl=True,
                            )
                            for _ in range(50)
                        ]
                    ),
                    50,
                ),
                4 * qkv.numel(),
            )


def sampling(bench: Bench) -> None:
    """Time the sampler over a large vocabulary, with logits cold in L2 where they do not fit."""
    vocabulary = 151936
    for rows in (1, 64, 256):
        many = copies(rows * vocabulary * 2)
        logits = [random(rows, vocabulary) * 3 for _ in range(min(many, 8))]
        scratch = SampleScratch(rows, vocabulary, "cuda")
        numbers = torch.arange(rows, dtype=torch.int32, device="cuda")
        positions = torch.randint(5, 900, (rows,), device="cuda")
        pool = torch.zeros(rows + 1, 1024, dtype=torch.int32, device="cuda")
        lengths = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
        seeds = torch.randint(0, 2**60, (rows + 1,), device="cuda")
        out = torch.empty(rows, dtype=torch.int32, device="cuda")
        cases = {
            "greedy": (0.0, 0, 1.0, 0.0, False),
            "temperature": (0.6, 0, 1.0, 0.0, False),
            "greedy, filters possible": (0.0, 0, 1.0, 0.0, True),
            "top-k 20, top-p .95": (0.6, 20, 0.95, 0.0, True),
            "top-p .9": (1.0, 0, 0.9, 0.0, True),
            "min-p .05": (1.0, 0, 1.0, 0.05, True),
        }
        for name, (heat, top_k, top_p, min_p, filtered) in cases.items():

            def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
                return torch.full((rows + 1,), value, dtype=dtype, device="cuda")

            state = (full(heat), full(top_k, torch.int32), full(top_p), full(min_p), seeds)

            def work() -> None:
                for line in logits:
                    sample(line, numbers, *state, positions, pool, lengths, out, scratch, filtered=filtered, pdl=True)

            bench.add(f"sample B={rows} {name}", bench.time(work, len(logits)), rows * vocabulary * 2)


def decoding(bench: Bench) -> None:
    """Time decode attention with XQA, equal shares and FA2, over contexts of equal length."""
    for name in ("8b", "0.6b"):
        s = SHAPES[name]
        shape = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
        for rows, context in (
            (1, 1024),
            (1, 8192),
            (4, 1024),
            (16, 1024),
            (16, 4096),
            (64, 1024),
            (64, 4096),
            (256, 1024),
        ):
            used = rows * -(-context // PAGE)
            size = used * 2 * PAGE * s.kv_heads * s.head_dim * 2
            layers = [random(used + 1, 2, PAGE, s.kv_heads, s.head_dim) for _ in range(min(16, copies(size)))]
            inputs = decode_inputs(rows, context, used, max(128, context // PAGE))
            q, out = random(rows, s.heads, s.head_dim), random(rows, s.heads, s.head_dim)
            decode = XqaDecode(shape, bench.device, max_rows=rows, arch=bench.arch)
            bench.add(
                f"xqa {name} {rows}x{context}",
                bench.time(lambda: [decode.run(q, kv, inputs, out) for kv in layers], len(layers)),
                size,
            )
            half = [kv.to(torch.float8_e4m3fn) for kv in layers]
            low = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, kv_dtype=torch.float8_e4m3fn)
            decode = XqaDecode(low, bench.device, max_rows=rows, arch=bench.arch)
            bench.add(
                f"xqa fp8 {name} {rows}x{context}",
                bench.time(lambda: [decode.run(q, kv, inputs, out) for kv in half], len(half)),
                size // 2,
            )
            even = EvenDecode(shape, bench.device, max_rows=rows, arch=bench.arch, pdl=True)
            even.deal(inputs)
            bench.add(
                f"even {name} {rows}x{context}",
                bench.time(lambda: [even.run(q, kv, inputs, out) for kv in layers], len(layers)),
                size,
            )
            size = PlannedDecode.workspace_bytes(shape, rows, bench.arch)
            workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
            planned = PlannedDecode(shape, inputs, workspace)
            planned.plan([context] * rows)
            bench.add(
                f"fa2 {name} {rows}x{context}",
                bench.time(lambda: [planned.run(q, kv, inputs, out) for kv in layers], len(layers)),
                size,
            )


def fused_decoding(bench: Bench) -> None:
    """Time norm, rotary, KV write and attention in one kernel, against `norm_rope_write` and XQA."""
    for name, s in SHAPES.items():
        shape = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
        table, norm = torch.rand(131072, s.head_dim, device="cuda"), random(s.head_dim) if s.qk_norm else None
        for rows, context in ((1, 1024), (1, 8192), (1, 32768), (4, 1024), (8, 1024), (16, 1024), (16, 4096)):
            used = rows * -(-context // PAGE)
            size = used * 2 * PAGE * s.kv_heads * s.head_dim * 2
            layers = [random(used + 1, 2, PAGE, s.kv_heads, s.head_dim) for _ in range(min(16, copies(size)))]
            inputs = decode_inputs(rows, context, used, max(128, context // PAGE))
            slots = used * PAGE + torch.arange(rows, device="cuda") % PAGE
            qkv = random(rows, (s.heads + 2 * s.kv_heads) * s.head_dim)
            q, out = random(rows, s.heads, s.head_dim), random(rows, s.heads, s.head_dim)
            decode = XqaDecode(shape, bench.device, max_rows=rows, arch=bench.arch)

            def two() -> None:
                for kv in layers:
                    heads.norm_rope_write(
                        qkv,
                        norm,
                        norm,
                        table,
                        inputs.positions_B,
                        slots,
                        kv,
                        heads=s.heads,
                        kv_heads=s.kv_heads,
                        eps=1e-6,
                        q_out=q,
                        pdl=True,
                    )
                    decode.run(q, kv, inputs, out)

            bench.add(f"rope + xqa {name} {rows}x{context}", bench.time(two, len(layers)), size)
            results = []
            for splits in (4, 8, 16, 32):
                for tile in (32, 64):
                    small = FusedDecode(shape, bench.device, max_rows=rows, splits=splits, tile=tile)
                    timed = bench.time(
                        lambda: (
                            [
                                small.run(qkv, norm, norm, table, kv, inputs, out.view(rows, -1), eps=1e-6, pdl=True)
                                for kv in layers
                            ]
                        ),
                        len(layers),
                    )
                    results.append((timed, (splits, tile)))
            results.sort(key=lambda item: item[0][1])
            for timed, how in results[:2]:
                bench.add(f"  fused {name} {rows}x{context}", timed, size, str(how))


def host(bench: Bench) -> None:
    """Time calls on the host outside a graph, in microseconds, without waiting for the device."""
    x, residual, weight, out = random(64, 1024), random(64, 1024), random(1024), random(64, 1024)
    product, scratch = random(1024, 1024), LinearScratch("cuda", bench.arch)
    shape = HeadShape(heads=32, kv_heads=8, head_dim=128)
    calls: dict[str, Callable[[], object]] = {
        "add_rms_norm": lambda: fused.add_rms_norm(x, residual, weight, 1e-6, out),
        "linear": lambda: linear(x, product, out, scratch),
        "torch.mm": lambda: torch.mm(x, product.t(), out=out),
    }
    for rows in (16, 64, 256):
        inputs = decode_inputs(rows, 1000, rows * 63, 128)
        size = PlannedDecode.workspace_bytes(shape, rows, bench.arch)
        planned = PlannedDecode(shape, inputs, torch.zeros(size, dtype=torch.uint8, device="cuda"))
        lengths = [1000] * rows
        calls[f"PlannedDecode.plan {rows} rows"] = lambda planned=planned, lengths=lengths: planned.plan(lengths)
    for backend in ("fa2", "fa3"):
        prefill = FlashAttention(shape, bench.device, backend=backend)
        pages = [list(range(128))] * 4
        calls[f"PrefillAttention.plan {backend} 4x2048"] = lambda prefill=prefill, pages=pages: prefill.plan(
            [2048] * 4, [2048] * 4, pages
        )
    for name, call in calls.items():
        took = []
        for _ in range(120):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            took.append(1e6 * (time.perf_counter() - start))
        took = sorted(took[20:])
        bench.add(f"host {name}", (took[10], took[50], took[90]))


def uneven(bench: Bench) -> None:
    """Time decode attention where one row is long, which shows the cost of an even split per row."""
    s = SHAPES["8b"]
    shape = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
    rows, columns = 32, 2048
    lengths = [32000] + [500] * (rows - 1)
    used = sum(-(-length // PAGE) for length in lengths)
    layers = [random(used + 1, 2, PAGE, s.kv_heads, s.head_dim) for _ in range(4)]
    table = torch.full((rows, columns), used, dtype=torch.int32, device="cuda")
    order, at = torch.randperm(used, device="cuda").int(), 0
    for row, length in enumerate(lengths):
        many = -(-length // PAGE)
        table[row, :many] = order[at : at + many]
        at += many
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    inputs = fused.DecodeInputs(lens, lens, lens.long(), lens, table, lens - (columns - 1) * PAGE)
    q, out = random(rows, s.heads, s.head_dim), random(rows, s.heads, s.head_dim)
    size = used * 2 * PAGE * s.kv_heads * s.head_dim * 2
    for spread in (1, 4, 16):
        decode = XqaDecode(shape, bench.device, max_rows=rows, arch=bench.arch, spread=spread)
        bench.add(
            f"xqa spread {spread} 1x32000+31x500",
            bench.time(lambda: [decode.run(q, kv, inputs, out) for kv in layers], 4),
            size,
        )
    size = PlannedDecode.workspace_bytes(shape, rows, bench.arch)
    planned = PlannedDecode(shape, inputs, torch.zeros(size, dtype=torch.uint8, device="cuda"))
    planned.plan(lengths)
    even = EvenDecode(shape, bench.device, max_rows=rows, arch=bench.arch, pdl=True)
    even.deal(inputs)
    bench.add("even 1x32000+31x500", bench.time(lambda: [even.run(q, kv, inputs, out) for kv in layers], 4), size)
    bench.add("fa2 1x32000+31x500", bench.time(lambda: [planned.run(q, kv, inputs, out) for kv in layers], 4), size)


def prefilling(bench: Bench) -> None:
    """Time prefill attention of chunks over prefixes with FA2, FA3 and our own, in TFLOP/s of the causal half."""
    for name in ("0.6b", "8b"):
        s = SHAPES[name]
        shape = HeadShape(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
        for rows, count, prefix in ((1, 512, 0), (1, 2048, 0), (4, 2048, 0), (1, 8192, 0), (1, 2048, 8192)):
            length = count + prefix
            used = -(-length // PAGE)
            kv = random(rows * used, 2, PAGE, s.kv_heads, s.head_dim)
            order = torch.randperm(rows * used).view(rows, used).tolist()
            q, out = random(rows * count, s.heads, s.head_dim), random(rows * count, s.heads, s.head_dim)
            work = 4 * rows * s.heads * s.head_dim * (count * prefix + count * (count + 1) // 2)
            own = TileAttention(shape, bench.device, pdl=True)
            ways = {way: FlashAttention(shape, bench.device, backend=way) for way in ("fa2", "fa3")} | {"own": own}
            for backend, attention in ways.items():
                attention.plan([count] * rows, [length] * rows, order)
                timed = bench.time(lambda: attention.run(q, kv, out))
                bench.add(
                    f"{backend} {name} {rows}x{count} after {prefix}", timed, 0, f"{work / timed[1] / 1e6:.0f} TFLOP/s"
                )


PARTS: dict[str, Callable[[Bench], None]] = {
    "floor": floor,
    "host": host,
    "fused": fused_decoding,
    "elementwise": elementwise,
    "rotary": rotary,
    "sample": sampling,
    "decode": decoding,
    "uneven": uneven,
    "prefill": prefilling,
    "linear": products,
    "chain": chain,
    "lora": lora,
}
SWEEPS: dict[str, Callable[[Bench], None]] = {
    "linear-sweep": linear_sweep,
    "gated-sweep": gated_sweep,
    "vector-sweep": vector_sweep,
    "lora-sweep": lora_sweep,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named parts (all by default) and print one line a figure; `--json` keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[], help=f"any of {', '.join(PARTS | SWEEPS)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args(arguments)
    bench = Bench(options.repeats)
    with torch.inference_mode():
        for name in options.parts or PARTS:
            (PARTS | SWEEPS)[name](bench)
    if options.json is not None:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"conditions": machine, "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
