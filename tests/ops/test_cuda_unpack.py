"""Stored matrices arrive in their places on a GPU, whatever pieces they were cut into."""

from __future__ import annotations

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from headrace.ops.cuda.memory.unpack import Unpacker
from headrace.ops.host_memory import PiecePool

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PIECE = 1 << 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_scaled_and_rounded_once_in_their_places(dtype: torch.dtype) -> None:
    """Matrices of all dtypes, some transposed, over more pieces than are staged at a time."""
    torch.manual_seed(0)
    end, start, memory, lines, scales = 0, 0, bytearray(), [], []
    expected = torch.full((1 << 20,), 7.0, dtype=dtype)
    for number in range(40):
        kind, rows, columns = number % 3, 3 + 7 * number % 50, 8 * (1 + number % 5)
        stored = torch.randn(rows, columns).to(DTYPES[kind])
        scale = np.float32(1.0 if number % 4 else 0.3)
        memory += bytes(-len(memory) % 16)
        at, size = len(memory), stored.itemsize
        memory += stored.view(torch.uint8).numpy().tobytes()
        down, along = (columns, 1) if number % 2 else (1, rows)
        while at < len(memory):
            stop = min(len(memory), (at // PIECE + 1) * PIECE)
            first = (at - (len(memory) - stored.nbytes)) // size
            lines.append((at, first, (stop - at) // size, columns, start, down, along, kind))
            scales.append(scale)
            at = stop
        placed = (stored.float() * float(scale)).to(dtype)
        expected[100 + start :][: stored.numel()] = (placed if number % 2 else placed.T).flatten()
        start += stored.numel()
        end = 100 + start
    pool = PiecePool(0, PIECE)
    pieces = pool.take(len(memory))
    assert len(pieces) > 16
    for number, piece in enumerate(pieces):
        part = memory[number * PIECE :][:PIECE]
        piece[: len(part)] = torch.frombuffer(part, dtype=torch.uint8)
    target = torch.full((1 << 20,), 7.0, dtype=dtype, device="cuda")
    Unpacker(target, DTYPES, PIECE)(pieces, np.array(lines, np.int64), np.array(scales, np.float32), 100)
    assert end < len(target) and torch.equal(target.cpu(), expected)
