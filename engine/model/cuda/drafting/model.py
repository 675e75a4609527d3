"""`ModelDrafter`: a smaller model inside the graphs of decode steps, which drafts one token after the other.

Its layers keep their keys and values in pages with the numbers of the target's, behind the target's own. It reads
prompts behind the target, in the same steps, and in steps with drafts the last two known tokens of each row, of which
the first is new to it where all drafts of the step before were right. What steps without drafts compute it reads late
(unread.py). So nothing is kept of a row but what lies in its pages. Next to read: attention.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from headrace.engine.model.cuda.drafting.attention import HeadAttention
from headrace.engine.model.cuda.drafting.choice import DraftChoice
from headrace.engine.model.cuda.drafting.drafter import Decoded, Prefilled, RowTable
from headrace.engine.model.cuda.drafting.inputs import LineInputs
from headrace.engine.model.cuda.drafting.unread import LAG, UnreadLines
from headrace.engine.model.cuda.operations import CudaDecoder, positions_of
from headrace.engine.model.spec import MixerSpec
from headrace.ops.cuda.attention.steps import CudaKv, PrefillStep
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.drafts.lines import prepare_lines
from headrace.ops.cuda.experts.registry import Padding
from headrace.ops.cuda.fused import DecodeInputs, prepare_decode
from headrace.ops.cuda.hazards import Launch
from headrace.ops.cuda.kernels import Kernels

__all__ = ["ModelDrafter", "CudaDraftModel"]

_PREPARATION: Final = Launch(
    "the preparation of drafts", overlaps=False, writes=frozenset(("pages", "lengths", "activations"))
)


@dataclass(frozen=True, slots=True)
class CudaDraftModel:
    """A draft model on a GPU, which may serve several runners one after the other."""

    decoder: CudaDecoder
    ops: Mapping[MixerSpec, CudaOps]
    target: Mapping[MixerSpec, CudaOps]
    """Operations of the model that it drafts for."""
    context: int
    """Number of positions that it can read."""
    reads_all: bool
    """Whether that is the whole context of the engine."""
    tokens: int
    """Number of tokens that it may guess, and that it knows; it reads others as token 0."""
    knows_all: bool
    """Whether these are all tokens of the target."""
    kernels: Kernels


class ModelDrafter:
    """A draft model for the rows of one runner."""

    taps: Final[tuple[int, ...] | None] = ()
    behind: Final = 1

    def __init__(self, model: CudaDraftModel, rows: RowTable) -> None:
        """Draft for `rows`, whose last pages are those of the model's layers."""
        self._model, self._rows = model, rows
        self._kv: CudaKv = rows.kv[-model.decoder.spec.num_layers :]
        self._any = next(iter(model.ops.values()))
        self._chain, self._page_size = self._any.products.room.chain, self._any.shape.page_size
        self._padding_row: Final = len(rows.lengths_R) - 1
        lines = 2 * self._padding_row
        self._inputs = LineInputs(rows.table_RP, lines)
        self._choice = DraftChoice(rows, model.tokens)
        most_lines, target = max(lines, rows.most_lines), model.target if model.reads_all else {}
        kinds = {ops.shape.key: ops for ops in model.ops.values()}
        self._attention = {
            key: HeadAttention(ops, target, rows.pages, most_lines=most_lines, kernels=model.kernels)
            for key, ops in kinds.items()
        }
        device = rows.lengths_R.device
        self._line_rows = torch.zeros(lines, dtype=torch.int32, device=device)
        self._firsts = torch.arange(0, lines, 2, device=device)
        self._one_R = torch.ones_like(rows.lengths_R)
        self._unread = UnreadLines(rows, self._page_size, model.context)

    def draft(self, rows_B: Tensor, depth: int, counts_B: Tensor) -> None:
        """Enqueue the drafts of a step, as `CudaDrafter.draft` says; rows without drafts are read, too."""
        rows, places_B = self._rows, rows_B.long()
        left_B = (self._model.context - rows.lengths_R[places_B]).clamp(0, depth)
        counts_B.copy_(torch.where(rows_B == self._padding_row, 0, left_B))
        self._choice.begin(rows_B)
        self._choose(self._read_last(rows_B), rows_B, counts_B)
        most_B = torch.minimum(counts_B, rows.most_R[places_B])
        inputs = self._inputs.of(len(rows_B))
        for place in range(1, depth):
            # Where nobody will look at the draft, there may be no page either.
            going_B = torch.where(most_B > place, rows_B, self._padding_row).int()
            prepare_decode(
                going_B,
                rows.pool_RC,
                rows.lengths_R + place,
                rows.table_RP,
                inputs,
                page_size=self._page_size,
            )
            self._choose(self._read(inputs, going_B), rows_B, counts_B)

    def take_up(self, decoded: Decoded) -> None:
        """Note what `draft` has read of a step with drafts: of right ones all but perhaps the last."""
        if decoded.depth:
            rows, rows_B = self._rows, decoded.rows_B.long()
            rows.read_R[rows_B] = rows.lengths_R[rows_B] - 1

    def catch_up(self, rows_B: Tensor) -> None:
        """Read tokens that steps without drafts have left."""
        unread = self._unread.of(rows_B)
        self._read(unread.inputs, unread.line_rows_L, self._firsts[:1], LAG)
        self._rows.read_R[unread.rows_B] = unread.ends_B

    def take_up_prompts(self, prefilled: Prefilled) -> None:
        """Read the tokens of prompts, as far as the model's context goes."""
        last_W, positions_N = prefilled.last_W, positions_of(next(iter(prefilled.steps.values())))
        self._rows.read_R[prefilled.rows_N[last_W]] = positions_N[last_W].int() + 1
        if not self._model.reads_all:
            within = _within(prefilled, self._model.context)
            if within is None:
                return
            prefilled = within
        by_shape = {key: attention.prefill(prefilled) for key, attention in self._attention.items()}
        steps = {mixer: by_shape[ops.shape.key] for mixer, ops in self._model.ops.items()}
        self._model.decoder.hidden(self._known(prefilled.tokens_N), steps, self._kv, self._firsts[:1])

    def _read_last(self, rows_B: Tensor) -> Tensor:
        """Read the last two known tokens of rows; return the states of the last ones."""
        rows, inputs = self._rows, self._inputs.of(2 * len(rows_B))
        ends_R = rows.lengths_R
        line_rows_L = self._line_rows[: 2 * len(rows_B)]
        reading_B = torch.where(ends_R[rows_B.long()] < self._model.context, rows_B, self._padding_row).int()
        before_B = ends_R[reading_B.long()].clamp(max=1)
        prepare_lines(
            reading_B, before_B, self._one_R, rows.pool_RC, (ends_R - 1).clamp(min=0), rows.table_RP, line_rows_L,
            inputs, depth=1, page_size=self._page_size,
        )  # fmt: skip
        return self._read(inputs, line_rows_L, self._firsts[: len(rows_B)] + before_B)

    def _read(self, inputs: DecodeInputs, line_rows_L: Tensor, last_B: Tensor | None = None, of_row: int = 1) -> Tensor:
        """Read the tokens of some lines, `of_row` for each row; return the states of the lines `last_B`, or of all."""
        with self._chain.watched(), self._any.experts.padded(Padding(line_rows_L, self._padding_row)):
            self._chain.note(_PREPARATION)
            by_shape = {key: attention.decode(inputs, of_row) for key, attention in self._attention.items()}
            steps = {mixer: by_shape[ops.shape.key] for mixer, ops in self._model.ops.items()}
            return self._model.decoder.hidden(self._known(inputs.tokens_B), steps, self._kv, last_B)

    def _choose(self, hidden_BE: Tensor, rows_B: Tensor, counts_B: Tensor) -> None:
        """Choose the next draft of each row by the state of the token before it."""
        self._choice.choose(self._model.decoder.logits(hidden_BE)[:, : self._model.tokens], rows_B, counts_B)

    def _known(self, tokens_N: Tensor) -> Tensor:
        """Return tokens of the target as the model reads them."""
        return tokens_N if self._model.knows_all else torch.where(tokens_N < self._model.tokens, tokens_N, 0)


def _within(prefilled: Prefilled, context: int) -> Prefilled | None:
    """Return the part of prompts at the first `context` positions; None if that is nothing."""
    works, kept, start = [], [], 0
    for work in prefilled.works:
        count = min(work.num_tokens, context - work.start)
        if count > 0:
            works.append(work._replace(num_tokens=count))
            kept.append(np.arange(start, start + count))
        start += work.num_tokens
    if not works:
        return None
    last = np.cumsum([work.num_tokens for work in works]) - 1
    sent = torch.from_numpy(np.concatenate([*kept, last])).to(prefilled.tokens_N.device)
    some_N, last_W = sent[: -len(last)], sent[-len(last) :]
    step = next(iter(prefilled.steps.values()))
    assert isinstance(step, PrefillStep)
    cut = PrefillStep(step.positions_N[some_N], step.slots_N[some_N], step.attention)
    tokens_N, rows_N = prefilled.tokens_N[some_N], prefilled.rows_N[some_N]
    return Prefilled(works, tokens_N, rows_N, last_W, dict.fromkeys(prefilled.steps, cut), prefilled.states)
