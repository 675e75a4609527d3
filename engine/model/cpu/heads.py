"""`CpuHead`: a trained draft head on a CPU: it takes up what the target computes, and drafts for rows when asked.

Owns the head's pages, which have the numbers of the target's pages: what a row of the block table names holds the keys
and values of the target's layers there, and those of the head here. Never verifies a draft. Next to read:
../drafting/heads/recurrent.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.engine.model.cpu.rows import CpuRows, StepBatch
from headrace.engine.model.cpu.runner import cpu_ops
from headrace.engine.model.drafting.heads.loading import MedusaWeights, load_head
from headrace.engine.model.drafting.heads.medusa import MedusaHeads
from headrace.engine.model.drafting.heads.reading import HeadFiles
from headrace.engine.model.drafting.heads.recurrent import RecurrentHead
from headrace.engine.model.drafting.heads.spec import MedusaSpec, RecurrentSpec
from headrace.engine.model.network.decoder import Decoder, HiddenStates
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.plan import Work
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.linear import CpuLinear
from headrace.ops.cpu.native.library import Context
from headrace.ops.cpu.step import CpuStep

__all__ = ["CpuHead", "DraftAsk"]

_LAYERS: Final = 1
"""Number of layers of a recurrent head."""
_Target: TypeAlias = Decoder[CpuLinear, CpuStep, CpuKv]


class DraftAsk(NamedTuple):
    """A wish for drafts behind the tokens of one row."""

    work: Work
    """A work of the row, whatever its place."""
    length: int
    """Number of tokens of the row, the one just chosen included."""
    most: int
    """Largest number of drafts; there are pages for all of them."""


class CpuHead:
    """A draft head with its pages, and what it knows of each row."""

    def __init__(
        self,
        found: HeadFiles,
        target: _Target,
        ops: CpuOps,
        *,
        pages: int,
        max_positions: int,
        dtype: torch.dtype,
        keep_packed: bool = False,
        context: Context | None = None,
    ) -> None:
        """Load a head.

        Args:
            found: The open checkpoint of the head.
            target: The model that it drafts for.
            ops: Operations of the target.
            pages: Number of pages of the cache.
            max_positions: Number of positions for which rotations are made.
            dtype: Dtype of activations, keys and values.
            keep_packed: Whether weights of products stay in the formats in which the checkpoint stores them.
            context: Threads and memory of the operations in C; None for those of torch.

        Raises:
            ModelRejected: A tensor is not finite, a file has changed, or nothing computes the head's layer.
        """
        cpu = torch.device("cpu")
        weights = load_head(found, target.spec, dtype=dtype, device=cpu, keep_packed=keep_packed)
        self.spec = found.spec
        self._states: dict[int, Tensor] = {}
        """State, [E], of the last position of each row whose following token is known."""
        self._ops: Mapping[MixerSpec, CpuOps] = {}
        self.kv: CpuKv | None = None
        """The head's pages; None if the head keeps nothing of a row's tokens."""
        self._medusa: MedusaHeads[CpuLinear, CpuStep, CpuKv] | None = None
        self._recurrent: RecurrentHead[CpuLinear, CpuStep, CpuKv] | None = None
        if isinstance(weights, MedusaWeights):
            assert isinstance(self.spec, MedusaSpec)
            self._medusa = MedusaHeads(self.spec, weights, ops)
            return
        assert isinstance(self.spec, RecurrentSpec)
        self._ops = cpu_ops(
            self.spec.block, page_size=ops.page_size, max_positions=max_positions, dtype=dtype, context=context
        )
        self._recurrent = RecurrentHead(self.spec, weights, self._ops, target)
        self.kv = next(iter(self._ops.values())).allocate_kv(_LAYERS, pages)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the head reads."""
        return self.spec.taps

    def page_bytes(self) -> int:
        """Return the memory that one page of the cache takes for the head, in bytes."""
        first = next(iter(self._ops.values()), None)
        return 0 if first is None else first.page_bytes(_LAYERS)

    def resize(self, pages: int) -> None:
        """Make room for another number of pages."""
        if self.kv is not None:
            self.kv = self.kv.resized(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination)."""
        if self.kv is not None:
            self.kv.copy_pages(pairs)

    def forget(self, row: int) -> None:
        """Drop what is known of a row, which begins anew."""
        self._states.pop(row, None)

    def take_up(self, batch: StepBatch, rows: CpuRows, hidden: HiddenStates, last: Mapping[int, int]) -> None:
        """Compute the head's states of a step's positions, once the tokens behind them are known.

        Args:
            batch: The step. Its last positions may be drafts that were refused: what is written for them is not read.
            rows: The row table, with the tokens that were chosen.
            hidden: What the target has computed, with the inputs of the layers that `inputs` names.
            last: For each row that goes on, the index among the step's tokens of its last position whose following
                token was chosen.
        """
        if self._recurrent is not None:
            assert self.kv is not None
            count = len(batch.tokens_N)  # the target may have computed padding behind them
            hidden = HiddenStates(hidden.final_NE[:count], tuple(each_NE[:count] for each_NE in hidden.inputs))
            following_N = rows.following(batch.rows_N, batch.paged.positions_N)
            steps = {mixer: ops.prepare(batch.paged) for mixer, ops in self._ops.items()}
            states_NE = self._recurrent.advance(following_N, self._recurrent.fused(hidden), steps, self.kv)
        else:
            states_NE = hidden.final_NE
        states_RE = states_NE[torch.tensor(list(last.values()), dtype=torch.int64)]
        self._states.update(zip(last, states_RE.unbind(), strict=True))

    def drafts(self, asked: Sequence[DraftAsk], rows: CpuRows) -> list[list[int]]:
        """Return drafts for each of some rows, in order; none for a row of which no state is known."""
        found: list[list[int]] = [[] for _ in asked]
        going = [at for at, ask in enumerate(asked) if ask.work.row in self._states and ask.most > 0]
        going.sort(key=lambda at: asked[at].length)  # the order of the decodes of a step
        if not going:
            return found
        states_RE = torch.stack([self._states[asked[at].work.row] for at in going])
        if self._medusa is not None:
            most = min(max(asked[at].most for at in going), self.spec.most_drafts)
            for at, drafts in zip(going, self._medusa.drafts(states_RE, most).tolist(), strict=True):
                found[at] = drafts[: asked[at].most]
            return found
        assert self._recurrent is not None
        ids_R = self._recurrent.best(states_RE)
        for count in range(1, self.spec.most_drafts + 1):
            for at, token in zip(going, ids_R.tolist(), strict=True):
                found[at].append(token)
            kept = [place for place, at in enumerate(going) if asked[at].most > count]
            if not kept or count == self.spec.most_drafts:
                break
            going = [going[place] for place in kept]
            states_RE = self._further([asked[at] for at in going], count, ids_R[kept], states_RE[kept], rows)
            ids_R = self._recurrent.best(states_RE)
        return found

    def _further(
        self, asked: Sequence[DraftAsk], count: int, tokens_R: Tensor, states_RE: Tensor, rows: CpuRows
    ) -> Tensor:
        """Return the states of positions that the target has not computed, from drafts."""
        assert self._recurrent is not None and self.kv is not None
        works = [ask.work._replace(start=ask.length - 2 + count, num_tokens=1, samples=False) for ask in asked]
        paged = rows.batch(works).paged
        steps = {mixer: ops.prepare(paged) for mixer, ops in self._ops.items()}
        return self._recurrent.advance(tokens_R, states_RE, steps, self.kv)
