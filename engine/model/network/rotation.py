"""`rotation_table`: the cosines and sines by which the heads of every position are rotated."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.engine.model.rope import Rope

__all__ = ["rotation_table"]


def rotation_table(
    rope: Rope, positions: int, head_dim: int, device: torch.device, *, context: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles of each position and each pair of a head's elements.

    Args:
        rope: The rotary embedding.
        positions: Number of positions, from 0 on.
        head_dim: Elements of a head.
        device: The device of the result.
        context: Most tokens that a request may have; None for `positions`.

    Returns:
        Cosines and sines, float32 [positions, head_dim / 2] each, times the rope's magnitude.
    """
    frequencies = torch.from_numpy(rope.inverse_frequencies(head_dim, context or positions))
    angles_PC = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies).to(device)
    cos_PC, sin_PC = angles_PC.cos(), angles_PC.sin()
    if rope.magnitude != 1.0:
        cos_PC, sin_PC = cos_PC * rope.magnitude, sin_PC * rope.magnitude
    return cos_PC, sin_PC
