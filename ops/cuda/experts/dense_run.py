"""`DenseExpertsRun`: the launches of dense experts whose rows are brought together in tiles, with csrc/expert_dense.cu.

Imports the compiler; kernels.py declares what runs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.ops.cuda.experts.dense import dense_products
from headrace.ops.cuda.experts.gather import gathered_rows
from headrace.ops.cuda.experts.running import ListedRun
from headrace.ops.cuda.experts.tiles import tile_rows
from headrace.ops.cuda.hazards import Launch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.choose import Choices, Lists
    from headrace.ops.cuda.experts.registry import ExpertWeights
    from headrace.ops.cuda.experts.running import Multiply
    from headrace.ops.cuda.products.registry import ProductRoom

__all__ = ["DenseExpertsRun"]

_GATHERED_ROWS: Final = 64
"""Most rows of a tile that gathers them itself: blocks that share larger ones each fetch half."""


class DenseExpertsRun(ListedRun):
    """Dense experts, of which those of many rows get these gathered before they are multiplied."""

    def __init__(self, room: ProductRoom) -> None:
        """Declare the launch that reads weights before it waits."""
        super().__init__(room)
        self._downs = Launch("downs of experts", room.pdl, frozenset(("weights",)), frozenset(("activations",)))

    def _way(self, weights: ExpertWeights, pairs: int) -> tuple[Multiply, int]:
        tuning = self._room.scratch.arch.tuning
        return self._multiply, tile_rows(pairs, weights.routing.experts, tuning.expert_dense_tiles)

    def _multiply(
        self, x_NE: Tensor, weights: ExpertWeights, chosen: Choices, lists: Lists, act_PF: Tensor, results_PE: Tensor
    ) -> None:
        pdl, activation = self._pdl, weights.activation
        gathers = lists.rows <= _GATHERED_ROWS
        x = x_NE if gathers else gathered_rows(x_NE, chosen, lists, pdl=pdl)
        up, down = (weights.gate_up, weights.gate_up_bias_XL), (weights.down, weights.down_bias_XE)
        dense_products(x, *up, chosen, lists, act_PF, activation=activation, gathers=gathers, pdl=pdl)
        self._room.chain.note(self._downs)
        dense_products(act_PF, *down, chosen, lists, results_PE, early=True, pdl=pdl)
