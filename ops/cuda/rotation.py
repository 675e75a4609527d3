"""`rotate`: turns heads by a table of cosines and sines on CUDA, apart from the step that also stores keys.

These are a few of torch's kernels, for the one family that norms heads behind their rotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotate"]


def rotate(heads_NBD: Tensor, cos_sin_PD: Tensor, positions_N: Tensor) -> None:
    """Rotate heads in place, computed in float32.

    Args:
        heads_NBD: Query and key heads of each token.
        cos_sin_PD: Cosines, then sines of each position, float32.
        positions_N: Position of each token, of an integer dtype.
    """
    cos_N1C, sin_N1C = cos_sin_PD.index_select(0, positions_N).unsqueeze(1).chunk(2, -1)
    first_NBC, second_NBC = heads_NBD.float().chunk(2, -1)
    turned = first_NBC * cos_N1C - second_NBC * sin_N1C, second_NBC * cos_N1C + first_NBC * sin_N1C
    heads_NBD.copy_(torch.cat(turned, -1))
