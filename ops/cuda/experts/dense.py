"""`dense_products`: products with experts' dense weights on Hopper, whose tiles are filled through all of their pieces.

csrc/expert_dense.cu multiplies. It gathers the rows of tokens as it goes, or copies the rows of a tile in one piece
where those of each expert lie one behind another (gather.py). N tokens, P places, I inputs and O outputs of a product.
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

__all__ = ["dense_products"]


def dense_products(
    x: Tensor,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    lists: Lists,
    out_PO: Tensor,
    *,
    activation: ExpertActivation | None = None,
    gathers: bool = False,
    early: bool = False,
    pdl: bool = False,
) -> None:
    """Multiply by the weights of the chosen experts: by gates and ups with an `activation`, else by downs.

    Args:
        x: Input, bf16, last dimension contiguous, I a multiple of 64: of places [P, I], or with `gathers` of tokens
            [N, I].
        weight: Weights of all experts, dense; each has O gates, then O ups, or O downs, O a multiple of 8.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        lists: Lists of the choices, in tiles of 16 rows or of a multiple of 32 up to 256.
        out_PO: Output, contiguous: activation(gate) * up at places, or for downs results times their weights at pairs,
            bf16, or float32 with tiles of at most 64 rows.
        activation: Activation of gates, or None.
        gathers: Whether `x` has a row for each token: of gates and ups, in tiles of at most 64 rows.
        early: Whether weights are read before the kernel before has ended. That kernel has to be such a product, which
            lets no other begin before all is there that it waits for itself: the lists are.
        pdl: Whether to use programmatic dependent launch.
    """
    first, pitch = weight.first, weight.pitch
    assert isinstance(first, torch.Tensor)
    assert isinstance(pitch, int)
    compiled("expert_dense").run(
        x, first, pitch, weight.experts, x[:0] if bias_XL is None else bias_XL, lists.tiles_T3, lists.ends_2,
        lists.pairs_P, chosen.weights_NK, out_PO, lists.rows, chosen.ids_NK.shape[1] if gathers else 0,
        number_of(activation), early, pdl,
    )  # fmt: skip
