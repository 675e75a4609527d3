"""Shaped logits on CUDA are those of the CPU to the last bit, step after step, whatever stands in other rows."""

from __future__ import annotations

import random

import pytest
import torch
from gpu.shaping import SideBySide

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("triton")


@pytest.mark.parametrize("vocabulary", [6, 500, 4096, 50_001, 128_256])
@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_rows_are_shaped_as_on_the_cpu(vocabulary: int, seed: int) -> None:
    """Rows are given away again and again, with other options or none."""
    generator = random.Random(1000 * vocabulary + seed)
    both = SideBySide(generator, "cuda", vocabulary, 9)
    for _ in range(12):
        for row in generator.sample(range(9), 4):
            both.give(row)
        for _ in range(4):
            both.step()
