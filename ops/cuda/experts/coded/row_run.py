"""`RowExpertsRun`: the launches of experts in codes whose rows are brought together in tiles, with csrc/expert_rows.cu.

Imports the compiler; kernels.py declares what runs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda.experts.choose import allocate_choices, allocate_lists, choose
from headrace.ops.cuda.experts.coded.gather import gathered_rows
from headrace.ops.cuda.experts.coded.rows import row_products
from headrace.ops.cuda.experts.combine import combine
from headrace.ops.cuda.experts.running import EXACT_ROWS, RoutedRun
from headrace.ops.cuda.experts.tiles import tile_rows

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.registry import ExpertWeights, Padding
    from headrace.ops.cuda.products.registry import ProductRoom

__all__ = ["RowExpertsRun"]


class RowExpertsRun(RoutedRun):
    """Experts in codes of some tokens, whose rows are brought together in tiles."""

    def __init__(self, room: ProductRoom) -> None:
        """Allocate what launches leave for each other."""
        super().__init__(room)
        self._finished = torch.zeros(2, dtype=torch.int32, device=room.scratch.counters.device)

    def run(
        self, x_NE: Tensor, routed_NE: Tensor, weights: ExpertWeights, out_NE: Tensor, padding: Padding | None
    ) -> None:
        """Enqueue logits, choices with their lists, the rows of each expert, gates and ups, downs, and the sums."""
        pdl, routing, device = self._pdl, weights.routing, x_NE.device
        logits_SNX = self._logits(routed_NE, weights)
        chosen = allocate_choices(len(x_NE), routing, device)
        pairs = chosen.ids_NK.numel()
        rows = tile_rows(pairs, routing.experts, self._room.scratch.arch.tuning.expert_row_tiles)
        lists = allocate_lists(len(x_NE), routing, rows, self._finished)
        self._room.chain.note(self._rest)
        choose(
            logits_SNX, routing, weights.correction_X, chosen, lists, scales_X=weights.scales_X, padding=padding,
            pdl=pdl,
        )  # fmt: skip
        x_PE = gathered_rows(x_NE, chosen, lists, pdl=pdl)
        act_PF = torch.empty(pairs, weights.down.shape[1], dtype=x_NE.dtype, device=device)
        dtype = torch.float32 if len(x_NE) <= EXACT_ROWS else x_NE.dtype
        results_PE = torch.empty(pairs, out_NE.shape[1], dtype=dtype, device=device)
        row_products(
            x_PE, weights.gate_up, weights.gate_up_bias_XL, chosen, lists, act_PF, activation=weights.activation,
            pdl=pdl,
        )  # fmt: skip
        row_products(act_PF, weights.down, weights.down_bias_XE, chosen, lists, results_PE, pdl=pdl)
        combine(results_PE, chosen, out_NE, pdl=pdl)
