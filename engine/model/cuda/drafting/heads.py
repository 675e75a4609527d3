"""`RecurrentDrafter` and `MedusaDrafter`: trained draft heads inside the graphs of decode steps.

They own what a head keeps of each row between steps: the state of the row's last position whose following token is
known. A recurrent head's keys and values lie in the pages of the target, as those of one more layer, at the places of
the positions that they belong to. It reads steps without drafts late (unread.py). Next to read:
../../drafting/heads/recurrent.py, then attention.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from headrace.engine.model.cuda.drafting.attention import HeadAttention
from headrace.engine.model.cuda.drafting.choice import DraftChoice
from headrace.engine.model.cuda.drafting.drafter import Decoded, Prefilled, RowTable
from headrace.engine.model.cuda.drafting.inputs import LineInputs
from headrace.engine.model.cuda.drafting.unread import LAG, KeptStates, UnreadLines
from headrace.engine.model.cuda.operations import positions_of
from headrace.engine.model.drafting.heads.medusa import MedusaHeads
from headrace.engine.model.drafting.heads.recurrent import RecurrentHead
from headrace.engine.model.spec import MixerSpec
from headrace.ops.cuda.attention.steps import CudaKv, CudaStep
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.experts.registry import Padding
from headrace.ops.cuda.fused import prepare_decode
from headrace.ops.cuda.products.packed import CudaProduct

__all__ = ["MedusaDrafter", "RecurrentDrafter"]

_UNKNOWN: Final = -1


class _States:
    """The state of the last position that was read of each row; rows get drafts if none behind it is unread."""

    def __init__(self, rows: RowTable, size: int, dtype: torch.dtype) -> None:
        """Know nothing of any row."""
        self.rows = rows
        self.padding_row: Final = len(rows.lengths_R) - 1
        device = rows.lengths_R.device
        self._states_RE = torch.zeros(len(rows.lengths_R), size, dtype=dtype, device=device)
        self._known_R = torch.full_like(rows.lengths_R, _UNKNOWN)
        """Position behind that of each row's state."""

    def keep(self, rows_B: Tensor, ends_B: Tensor, states_BE: Tensor) -> None:
        """Keep the state of rows (int64) that are read up to the positions before these; of padding it is no matter."""
        self._states_RE[rows_B] = states_BE
        self._known_R[rows_B] = self.rows.read_R[rows_B] = ends_B.int()

    def keep_decoded(self, decoded: Decoded, states_BE: Tensor) -> None:
        """Keep the states of each row's last line whose token was right, `_last_lines`."""
        rows_B = decoded.rows_B.long()
        self.keep(rows_B, self.rows.lengths_R[rows_B], states_BE)

    def keep_prefilled(self, prefilled: Prefilled, states_WE: Tensor) -> None:
        """Keep the states of the last tokens of prompts, or of parts of prompts."""
        positions_N, last_W = positions_of(next(iter(prefilled.steps.values()))), prefilled.last_W
        self.keep(prefilled.rows_N[last_W], positions_N[last_W] + 1, states_WE)

    def of(self, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of rows (int64), and which of these are known and up to date, bool."""
        is_known_B = (self._known_R[rows_B] == self.rows.lengths_R[rows_B]) & (rows_B != self.padding_row)
        return self._states_RE[rows_B], is_known_B

    def following(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Return the token behind each position of rows (int64), which the row table has."""
        last = self.rows.pool_RC.shape[1] - 1
        return self.rows.pool_RC[rows_N, (positions_N.long() + 1).clamp(max=last)]


class MedusaDrafter:
    """Medusa's heads, which read the final hidden state of the token before the last one."""

    taps: Final[tuple[int, ...] | None] = ()

    def __init__(self, heads: MedusaHeads[CudaProduct, CudaStep, CudaKv], rows: RowTable, dtype: torch.dtype) -> None:
        """Draft for `rows` by hidden states in `dtype`."""
        self._heads = heads
        self._states = _States(rows, heads.spec.hidden_size, dtype)
        self._choice = DraftChoice(rows, heads.spec.vocab_size)

    def draft(self, rows_B: Tensor, depth: int, counts_B: Tensor) -> None:
        """Enqueue the drafts of a step, as `CudaDrafter.draft` says."""
        states_BE, is_known_B = self._states.of(rows_B.long())
        counts_B.copy_(is_known_B * depth)
        self._choice.begin(rows_B)
        for head in range(depth):
            self._choice.choose(self._heads.logits(head, states_BE), rows_B, counts_B)

    def take_up(self, decoded: Decoded) -> None:
        """Keep the final state of each row's last right token."""
        self._states.keep_decoded(decoded, decoded.states.final_NE[_last_lines(decoded)])

    def take_up_prompts(self, prefilled: Prefilled) -> None:
        """Keep the final state of each row's last token."""
        self._states.keep_prefilled(prefilled, prefilled.states.final_NE[prefilled.last_W])


class RecurrentDrafter:
    """A head of EAGLE, EAGLE-2 or EAGLE-3, or a module for multi-token prediction."""

    behind: Final = 0

    def __init__(
        self,
        head: RecurrentHead[CudaProduct, CudaStep, CudaKv],
        ops: Mapping[MixerSpec, CudaOps],
        attention: HeadAttention,
        rows: RowTable,
        kv: Tensor,
    ) -> None:
        """Draft for `rows`.

        Args:
            head: The head.
            ops: The operations that it was made with.
            attention: The attention of its layer.
            rows: The row table.
            kv: The pages of the head's layer, [pages, 2, T, K, D].
        """
        (self._mixer,) = ops
        self._head, self._ops, self._attention, self._kv = head, ops[self._mixer], attention, (kv,)
        self._chain = self._ops.products.room.chain
        spec, dtype = head.spec, self._ops.shape.dtype
        self._states = _States(rows, spec.block.hidden_size, dtype)
        self._choice = DraftChoice(rows, spec.draft_vocab_size, head.ids_D)
        self._page_size = self._ops.shape.page_size
        self._unread = UnreadLines(rows, self._page_size)
        self._kept = KeptStates(rows, len(spec.taps), spec.target_size, dtype)
        self._inputs = LineInputs(rows.table_RP, len(rows.lengths_R) - 1)

    @property
    def taps(self) -> tuple[int, ...] | None:
        """Layers of the target whose inputs the head reads."""
        return self._head.spec.taps

    def draft(self, rows_B: Tensor, depth: int, counts_B: Tensor) -> None:
        """Enqueue the drafts of a step, as `CudaDrafter.draft` says; each but the first computes one position more."""
        states, rows = self._states, self._states.rows
        places_B = rows_B.long()
        states_BE, is_known_B = states.of(places_B)
        counts_B.copy_(is_known_B * depth)
        most_B = torch.where(is_known_B, rows.most_R[places_B], 0)
        self._choice.begin(rows_B)
        ids_B = self._choice.choose(self._head.logits(states_BE), rows_B, counts_B)
        for place in range(1, depth):
            # Where nobody will look at the draft, there may be no page either.
            going_B = torch.where(most_B > place, rows_B, states.padding_row).int()
            states_BE = self._further(going_B, place, ids_B, states_BE)
            ids_B = self._choice.choose(self._head.logits(states_BE), rows_B, counts_B)

    def take_up(self, decoded: Decoded) -> None:
        """Read a step's lines, or keep the target's states if the step has no drafts.

        Entries behind refused drafts are overwritten before use. Lines without a draft leave theirs in the scratch
        page, as in the target.
        """
        if not decoded.depth:
            self._kept.keep(decoded)
            return
        inputs = decoded.inputs
        following_L = self._states.following(decoded.line_rows_L.long(), inputs.positions_B)
        entries_LE = self._head.fused(decoded.states)
        step = self._attention.decode(inputs)
        states_BE = self._advance(following_L, entries_LE, step, decoded.line_rows_L, _last_lines(decoded))
        self._states.keep_decoded(decoded, states_BE)

    def catch_up(self, rows_B: Tensor) -> None:
        """Read positions that steps without drafts have left."""
        unread = self._unread.of(rows_B)
        following_L = self._states.following(unread.line_rows_L.long(), unread.inputs.positions_B)
        entries_LE = self._head.fused(self._kept.of(unread))
        step = self._attention.decode(unread.inputs, LAG)
        states_BE = self._advance(following_L, entries_LE, step, unread.line_rows_L, unread.last_B)
        self._states.keep(unread.rows_B, unread.ends_B, states_BE)

    def take_up_prompts(self, prefilled: Prefilled) -> None:
        """Read all tokens; behind a prompt that goes on, the following token is known, too."""
        step = self._attention.prefill(prefilled)
        following_N = self._states.following(prefilled.rows_N, step.positions_N)
        entries_NE = self._head.fused(prefilled.states)
        states_WE = self._head.advance(following_N, entries_NE, {self._mixer: step}, self._kv, prefilled.last_W)
        self._states.keep_prefilled(prefilled, states_WE)

    def _further(self, rows_B: Tensor, place: int, ids_B: Tensor, states_BE: Tensor) -> Tensor:
        """Return the states of the positions `place` behind the last one whose state was kept."""
        rows, inputs = self._states.rows, self._inputs.of(len(rows_B))
        positions_R = rows.lengths_R + (place - 1)
        prepare_decode(rows_B, rows.pool_RC, positions_R, rows.table_RP, inputs, page_size=self._page_size)
        return self._advance(ids_B, states_BE, self._attention.decode(inputs), rows_B)

    def _advance(
        self, tokens_L: Tensor, states_LE: Tensor, step: CudaStep, rows_L: Tensor, last_B: Tensor | None = None
    ) -> Tensor:
        """Return the states of the lines `last_B`, or of all; the keys and values of all are written."""
        fed_S = rows_L if last_B is None else rows_L[last_B]
        with self._chain.watched(), self._ops.experts.padded(Padding(fed_S, self._states.padding_row)):
            return self._head.advance(tokens_L, states_LE, {self._mixer: step}, self._kv, last_B)


def _last_lines(decoded: Decoded) -> Tensor:
    """Return the index of each row's last line whose token was right, int64."""
    lines, counts_B = decoded.depth + 1, decoded.counts_B
    firsts_B = torch.arange(0, len(counts_B) * lines, lines, device=counts_B.device)
    return firsts_B + (counts_B - 1).clamp(min=0)
