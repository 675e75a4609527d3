"""The cosines and sines by which the heads of every position are rotated, and the factors by which queries grow."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import Attention

__all__ = ["growth_table", "rotation_table"]


def rotation_table(
    rope: Rope, attention: Attention, positions: int, device: torch.device, *, context: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles of each position and each pair of a head's elements.

    Args:
        rope: The rotary embedding.
        attention: Attention with the heads, of which a part may stay as it is.
        positions: Number of positions, from 0 on.
        device: The device of the result.
        context: Most tokens that a request may have; None for `positions`.

    Returns:
        Cosines and sines, float32 [positions, head_dim / 2] each: first those of rotated pairs, times the rope's
        magnitude, then 1 and 0.
    """
    frequencies = torch.from_numpy(rope.inverse_frequencies(attention.rotated_dim, context or positions))
    angles_PC = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies).to(device)
    cos_PC, sin_PC = angles_PC.cos(), angles_PC.sin()
    if (magnitude := rope.magnitude_within(context or positions)) != 1.0:
        cos_PC, sin_PC = cos_PC * magnitude, sin_PC * magnitude
    still = attention.head_dim // 2 - len(frequencies)
    return functional.pad(cos_PC, (0, still), value=1.0), functional.pad(sin_PC, (0, still))


def growth_table(attention: Attention, positions: int, device: torch.device) -> Tensor | None:
    """Return the factor of the queries of each position, float32 [positions]; None if they have none."""
    if attention.growth is None:
        return None
    return torch.from_numpy(attention.growth.factors(positions)).to(device)
