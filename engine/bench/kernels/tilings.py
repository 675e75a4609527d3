"""Small-batch products against cuBLAS with every weight read cold, and sweeps of their tilings."""

# ruff: noqa: B023 - every lambda here is called before its loop goes on
from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.engine.bench.kernels.timing import Bench, copies, random
from headrace.ops.cuda import fused
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.products.linear import LinearScratch, Tiling, linear, linear_silu_mul, tiling
from headrace.ops.cuda.products.vector import vector_linear

__all__ = ["gated_sweep", "linear_sweep", "products", "vector_sweep"]

SWEEP = [
    Tiling(out, inner, splits, warps, stages)
    for out, inner, warps, stages in (
        (16, 256, 4, 4),
        (32, 128, 4, 4),
        (32, 256, 4, 3),
        (64, 64, 4, 4),
        (64, 64, 4, 6),
        (64, 128, 4, 3),
        (64, 128, 4, 5),
        (64, 256, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
    )
    for splits in (1, 2, 4)
]


GATED_SWEEP = [
    Tiling(*how)
    for how in (
        (16, 128, 1, 4, 4),
        (16, 256, 1, 4, 3),
        (32, 64, 1, 4, 5),
        (32, 128, 1, 4, 3),
        (32, 128, 1, 4, 4),
        (32, 256, 1, 4, 2),
        (64, 64, 1, 4, 4),
        (64, 128, 1, 4, 3),
        (64, 128, 1, 8, 3),
    )
]


def products(bench: Bench, best_of: Sequence[Tiling] | None = None) -> None:
    """Time small-batch products against cuBLAS, every weight read cold."""
    for name, out_size, in_size in (
        ("8b qkv", 6144, 4096),
        ("8b o", 4096, 4096),
        ("8b gate-up", 28672, 4096),
        ("8b down", 4096, 14336),
        ("0.6b qkv", 4096, 1024),
        ("0.6b o", 1024, 2048),
        ("0.6b gate-up", 6144, 1024),
        ("0.6b down", 1024, 3072),
    ):
        size = out_size * in_size * 2
        weights = [random(out_size, in_size) / in_size**0.5 for _ in range(copies(size))]
        scratch = LinearScratch("cuda", Arch.of("cuda"))
        for rows in (16, 64):
            x, out = random(rows, in_size), random(rows, out_size)
            bench.add(
                f"cublas {name} M={rows}",
                bench.time(lambda: [torch.mm(x, w.t(), out=out) for w in weights], len(weights)),
                size,
            )
            results = []
            for how in best_of if best_of else (tiling(rows, out_size, in_size, scratch.arch),):
                if how.splits * -(-out_size // how.block_out) * how.block_out * max(16, rows) > scratch.planes.numel():
                    continue
                try:
                    timed = bench.time(
                        lambda: [linear(x, w, out, scratch, how=how, pdl=True) for w in weights], len(weights)
                    )
                except Exception as error:  # a tiling that asks for too much shared memory
                    print("  ", how, type(error).__name__)
                    torch.cuda.synchronize()
                    continue
                results.append((timed, how))
            results.sort(key=lambda item: item[0][1])
            for timed, how in results[:3]:
                bench.add(f"  triton {name} M={rows}", timed, size, str(tuple(how)))


def linear_sweep(bench: Bench) -> None:
    """Time `products` at every tiling, and print the best three."""
    products(bench, SWEEP)


def gated_sweep(bench: Bench) -> None:
    """Time gate, up and activation in one product at several tilings, against product and activation apart."""
    for name, ffn, in_size in (("8b", 14336, 4096), ("0.6b", 3072, 1024)):
        weights = [random(2 * ffn, in_size) / in_size**0.5 for _ in range(copies(2 * ffn * in_size * 2))]
        scratch = LinearScratch("cuda", Arch.of("cuda"))
        for rows in (16, 64):
            x, both, out = random(rows, in_size), random(rows, 2 * ffn), random(rows, ffn)

            def two() -> None:
                for w in weights:
                    linear(x, w, both, scratch, pdl=True)
                    fused.activate_mul(both, out, pdl=True)

            bench.add(f"gate-up, silu apart {name} M={rows}", bench.time(two, len(weights)), 4 * ffn * in_size)
            results = []
            for how in GATED_SWEEP:
                timed = bench.time(
                    lambda: [linear_silu_mul(x, w, out, pdl=True, how=how) for w in weights], len(weights)
                )
                results.append((timed, how))
            results.sort(key=lambda item: item[0][1])
            for timed, how in results[:2]:
                bench.add(f"  gated {name} M={rows}", timed, 4 * ffn * in_size, str(tuple(how)))


def vector_sweep(bench: Bench) -> None:
    """Time products of 1, 4 and 8 rows at several program sizes."""
    for name, out_size, in_size, gated in (
        ("8b qkv", 6144, 4096, False),
        ("8b o", 4096, 4096, False),
        ("8b gate-up", 28672, 4096, True),
        ("8b down", 4096, 14336, False),
        ("0.6b qkv", 4096, 1024, False),
        ("0.6b o", 1024, 2048, False),
        ("0.6b gate-up", 6144, 1024, True),
        ("0.6b down", 1024, 3072, False),
    ):
        weights = [random(out_size, in_size) / in_size**0.5 for _ in range(copies(out_size * in_size * 2))]
        for rows in (1, 4, 8):
            x, out = random(rows, in_size), random(rows, out_size // 2 if gated else out_size)
            results = []
            for block_out in (1, 2, 4, 8):
                for warps in (4, 8):
                    if block_out * min(4096, in_size) * (2 if gated else 1) > 4096 * 2 * warps:
                        continue
                    timed = bench.time(
                        lambda: (
                            [
                                vector_linear(x, w, out, gated=gated, pdl=True, block_out=block_out, warps=warps)
                                for w in weights
                            ]
                        ),
                        len(weights),
                    )
                    results.append((timed, (block_out, warps)))
            results.sort(key=lambda item: item[0][1])
            for timed, how in results[:2]:
                bench.add(f"vector {name} M={rows}", timed, out_size * in_size * 2, str(how))
