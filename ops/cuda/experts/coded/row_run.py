"""`RowExpertsRun`: the launches of experts in codes whose rows are brought together in tiles, with csrc/expert_rows.cu.

Imports the compiler; kernels.py declares what runs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.cuda.experts.coded.rows import row_products
from headrace.ops.cuda.experts.gather import gathered_rows
from headrace.ops.cuda.experts.running import ListedRun
from headrace.ops.cuda.experts.tiles import tile_rows

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.choose import Choices, Lists
    from headrace.ops.cuda.experts.registry import ExpertWeights
    from headrace.ops.cuda.experts.running import Multiply

__all__ = ["RowExpertsRun"]


class RowExpertsRun(ListedRun):
    """Experts in codes, the rows of each of which are gathered before they are multiplied."""

    def _way(self, weights: ExpertWeights, pairs: int) -> tuple[Multiply, int]:
        tuning = self._room.scratch.arch.tuning
        return self._multiply, tile_rows(pairs, weights.routing.experts, tuning.expert_row_tiles)

    def _multiply(
        self, x_NE: Tensor, weights: ExpertWeights, chosen: Choices, lists: Lists, act_PF: Tensor, results_PE: Tensor
    ) -> None:
        pdl, activation = self._pdl, weights.activation
        x_PE = gathered_rows(x_NE, chosen, lists, pdl=pdl)
        up, down = (weights.gate_up, weights.gate_up_bias_XL), (weights.down, weights.down_bias_XE)
        row_products(x_PE, *up, chosen, lists, act_PF, activation=activation, pdl=pdl)
        row_products(act_PF, *down, chosen, lists, results_PE, pdl=pdl)
