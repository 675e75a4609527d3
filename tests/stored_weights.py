"""Weights in 4-bit groups with random numbers, for tests of what multiplies by them; holds no tests."""

from __future__ import annotations

import torch

from headrace.ops.formats import Int4Groups, Stored

__all__ = ["random_groups"]


def random_groups(outs: int, ins: int, group: int = 32) -> Stored:
    """A matrix [outs, ins] whose numbers have a mean near 0, from torch's own generator."""
    scale = torch.rand(outs, ins // group) * 0.02
    parts = {
        "values": torch.randint(0, 16, (outs, ins), dtype=torch.uint8),
        "scale": scale,
        "minimum": -8 * scale + torch.randn_like(scale) * 0.01,
    }
    return Stored(Int4Groups(group), (outs, ins), parts)
