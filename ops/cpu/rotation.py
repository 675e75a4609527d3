"""`rotate`: turns heads by tables of cosines and sines on the CPU, apart from the step that also stores keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotate"]


def rotate(heads_NBD: Tensor, tables: tuple[Tensor, Tensor], positions_N: Tensor) -> None:
    """Rotate heads in place, computed in float32.

    Args:
        heads_NBD: Query and key heads of each token.
        tables: Cosines and sines, float32 [positions, D / 2] each.
        positions_N: Position of each token, int64.
    """
    cos_N1C, sin_N1C = (table_PC.index_select(0, positions_N).unsqueeze(1) for table_PC in tables)
    first_NBC, second_NBC = heads_NBD.float().chunk(2, -1)
    turned = first_NBC * cos_N1C - second_NBC * sin_N1C, second_NBC * cos_N1C + first_NBC * sin_N1C
    heads_NBD.copy_(torch.cat(turned, -1))
