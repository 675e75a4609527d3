"""`row_products`: products with experts' weights in codes on Hopper, whose codes become bfloat16 once for all rows.

csrc/expert_rows.cu multiplies. It copies the rows of a tile in one piece, so that the rows of each expert have to lie
one behind another (gather.py). P places, I inputs and O outputs of a product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda.compiling.source import compiled
from headrace.ops.cuda.experts.activation import number_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.experts.choose import Choices, Lists
    from headrace.ops.routing import ExpertActivation

__all__ = ["row_products"]


def row_products(
    x_PI: Tensor,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    lists: Lists,
    out_PO: Tensor,
    *,
    activation: ExpertActivation | None = None,
    pdl: bool = False,
) -> None:
    """Multiply by the weights of the chosen experts: by gates and ups with an `activation`, else by downs.

    Args:
        x_PI: Input of each place, bf16, contiguous, I a multiple of 64.
        weight: Weights of all experts in codes of a kind that csrc/ takes; each has O gates, then O ups, or O downs.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        lists: Lists of the choices, in tiles of 16, 32 or 64 rows.
        out_PO: Output, contiguous: activation(gate) * up at places, or for downs results times their weights at pairs,
            bf16 or float32.
        activation: Activation of gates, or None.
        pdl: Whether to use programmatic dependent launch.
    """
    first, pitch = weight.first, weight.pitch
    assert not isinstance(first, torch.Tensor)
    assert not isinstance(pitch, int)
    compiled("expert_rows", **first.kind.macros).run(
        x_PI, first.codes_OB, first.scales, first.zeros, pitch.words * 4, pitch.scales, pitch.zeros,
        weight.experts, x_PI[:0] if bias_XL is None else bias_XL, lists.tiles_T3, lists.ends_2, lists.pairs_P,
        chosen.weights_NK, out_PO, lists.rows, number_of(activation), pdl,
    )  # fmt: skip
