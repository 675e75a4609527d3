"""Timing of captured work on random data, and the two model shapes that the kernel benchmarks use."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.fused import DecodeInputs

__all__ = ["PAGE", "SHAPES", "Bench", "Shape", "copies", "decode_inputs", "random"]

PAGE = 16
COLD_BYTES = 400 << 20


class Shape(NamedTuple):
    """The shape of one model."""

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
    """A stopwatch for captured work that collects the rows of a table."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.rows: list[dict[str, Any]] = []
        self.device = torch.device("cuda")
        self.arch = Arch.of(self.device)

    def time(self, work: Callable[[], object], calls: int = 1) -> tuple[float, float, float]:
        """Return microseconds a call (p10, p50, p90) of graph replays of `work`, which makes `calls` calls."""
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
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.repeats)
        ]
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


def random(*shape: int) -> Tensor:
    """Return normally distributed bf16 numbers on the GPU."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def copies(size: int) -> int:
    """Return the number of buffers of `size` bytes to rotate among so that L2 holds none when its turn comes."""
    return max(2, min(64, -(-COLD_BYTES // size)))


def decode_inputs(rows: int, context: int, pages: int, columns: int) -> DecodeInputs:
    """Return rows of one context length, with pages scattered among `pages` and padded with the page `pages`."""
    table = torch.full((rows, columns), pages, dtype=torch.int32, device="cuda")
    used = -(-context // PAGE)
    table[:, :used] = torch.randperm(pages, device="cuda")[: rows * used].view(rows, used).int()
    lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    empty = torch.zeros(rows, dtype=torch.int32, device="cuda")
    return DecodeInputs(empty, lengths - 1, empty.long(), lengths, table, lengths - (columns - 1) * PAGE)
