"""`CpuDraftHead`: a trained draft head on a CPU: it drafts for rows when asked, and reads before what it missed.

It reads prompts at once, and all else when drafts are asked for, when `KEPT` positions of a row are unread, and before
pages are copied, shared or given to another row: while there are no drafts, it costs little, and its pages are whole.
Owns the head's pages, which have the numbers of the target's pages: what a row of the block table names holds the keys
and values of the target's layers there, and those of the head here. Never verifies a draft. Next to read:
../drafting/heads/recurrent.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.engine.model.cpu.rows import CpuRows, StepBatch
from headrace.engine.model.cpu.untaken import Untaken
from headrace.engine.model.drafting.heads.loading import MedusaWeights, load_head
from headrace.engine.model.drafting.heads.medusa import MedusaHeads
from headrace.engine.model.drafting.heads.reading import HeadFiles
from headrace.engine.model.drafting.heads.recurrent import RecurrentHead
from headrace.engine.model.drafting.heads.spec import MedusaSpec, RecurrentSpec
from headrace.engine.model.network.decoder import Decoder, HiddenStates
from headrace.engine.model.network.foreign import Network
from headrace.engine.model.shared.host_pool import HostPool
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.plan import StepPlan, Work
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.linear import CpuLinear
from headrace.ops.cpu.sample import sample_drafts
from headrace.ops.cpu.step import CpuStep
from headrace.ops.quantise import Method

__all__ = ["KEPT", "CpuDraftHead", "DraftAsk", "LoadHead", "known_lengths"]

KEPT: Final = 64
"""Number of unread positions from which a row is read: one pass over so many costs little for each."""
_AT_ONCE: Final = 18
"""Number of a row's tokens in a step from which they are read at once: more than a token and its drafts."""
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


class _Known(NamedTuple):
    length: int
    """Number of tokens of a row when its state was computed."""
    state_E: Tensor
    """State of the row's last position whose following token is known."""


class CpuDraftHead:
    """A draft head with its pages, and what it knows of each row."""

    def __init__(
        self,
        found: HeadFiles,
        target: _Target,
        ops: Mapping[MixerSpec, CpuOps],
        rows: CpuRows,
        *,
        pages: int,
        dtype: torch.dtype,
        keep_packed: bool = False,
        quantize: Method | None = None,
    ) -> None:
        """Load a head.

        Args:
            found: The open checkpoint of the head.
            target: The model that it drafts for.
            ops: Operations of the head's layer; of a head without one, those of the target.
            rows: The row table.
            pages: Number of pages of the cache.
            dtype: Dtype of activations, keys and values.
            keep_packed: Whether weights of products stay in the formats in which the checkpoint stores them.
            quantize: Way to quantise the head's matrices, as `load_head` takes it.

        Raises:
            ModelRejected: A tensor is not finite, a file has changed, or nothing computes the head's layer.
        """
        cpu = torch.device("cpu")
        weights = load_head(found, target.spec, dtype=dtype, device=cpu, keep_packed=keep_packed, quantize=quantize)
        self.spec = found.spec
        self._rows, self._ops = rows, ops
        self._known: dict[int, _Known] = {}
        self._works: dict[int, Work] = {}
        """The latest work of each row."""
        self._untaken = Untaken()
        self._speculating: set[int] = set()
        """Rows that may ask for drafts; of others, long parts of prompts alone are read."""
        self.host: HostPool | None = None
        """Pages of rows that are swapped out; a head that is read again after a sleep takes it over."""
        self.kv: CpuKv | None = None
        """The head's pages; None if the head keeps nothing of a row's tokens."""
        self._medusa: MedusaHeads[CpuLinear, CpuStep, CpuKv] | None = None
        self._recurrent: RecurrentHead[CpuLinear, CpuStep, CpuKv] | None = None
        if isinstance(weights, MedusaWeights):
            assert isinstance(self.spec, MedusaSpec)
            self._medusa = MedusaHeads(self.spec, weights, next(iter(ops.values())))
            return
        assert isinstance(self.spec, RecurrentSpec)
        self._recurrent = RecurrentHead(self.spec, weights, self._ops, target)
        self.kv = next(iter(self._ops.values())).allocate_kv(_LAYERS, pages)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the head reads."""
        return self.spec.taps

    @property
    def _pages(self) -> Tensor:
        """The head's pages, all in one pool, since its layers are of one kind."""
        assert self.kv is not None
        (pool,) = self.kv.pools
        return pool

    def resize(self, pages: int) -> None:
        """Make room for another number of pages; whoever keeps the present ones calls `read_all` before."""
        if self.kv is not None:
            self._untaken.forget(self._untaken.rows)
            self.kv = self.kv.resized(pages)

    @torch.inference_mode()
    def read_all(self) -> None:
        """Read all that is unread."""
        if self.kv is not None:
            self._catch_up(self._untaken.rows)

    def open_host_pool(self, places: int, *, promised: int) -> None:
        """Make room for `places` pages in host memory, of which others will use `promised` bytes."""
        if self.kv is not None:
            self.host = HostPool(self._pages, places, pinned=False, promised=promised)

    def spill(self, plan: StepPlan) -> None:
        """Copy pages to host memory, before the plan's step writes to others."""
        if self.kv is not None and self.host is not None and plan.spills:
            self._complete({page for page, _ in plan.spills})
            self.host.spill(self._pages, plan.spills)

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's new rows, of which nothing is known, and its copies of pages.

        Before, what is unread of the rows' former requests is read, and so is what is unread in pages that are copied,
        are overwritten by copies or become another row's: the prefix cache, forks and turns find whole pages.
        """
        new = {row.row for row in plan.new_rows}
        if self.kv is not None and (new or plan.copies or plan.entries):
            shared = {page for pair in plan.copies for page in pair} | {entry.page for entry in plan.entries}
            self._complete(shared, new)
        for row in new:
            self._known.pop(row, None)
        self._untaken.forget(new)
        self._speculating.difference_update(new)
        self._speculating.update(row.row for row in plan.new_rows if row.speculates)
        if self.kv is None:
            return
        self.kv.copy_pages(plan.copies)
        if plan.fetches and self.host is not None:
            self.host.fetch(self._pages, plan.fetches)

    def take_up(
        self, works: Sequence[Work], batch: StepBatch, hidden: HiddenStates, lengths: Mapping[int, int]
    ) -> None:
        """Keep what the target has computed of a step's positions, and read long parts of prompts at once.

        Args:
            works: The works of the step.
            batch: The step. Its last positions may be drafts that were refused, which are dropped.
            hidden: What the target has computed, with the inputs of the layers that `inputs` names.
            lengths: Number of tokens of each row that samples, those that it has just chosen included.
        """
        rows = batch.rows_N.tolist()
        long = {work.row for work in works if self.kv is not None and work.num_tokens >= _AT_ONCE}
        wanted = (self._speculating | long).intersection(rows)
        taken = {work.row: work for work in works if work.row in wanted}
        self._works.update(taken)
        if self.kv is None:
            self._untaken.forget(taken)  # the last state alone matters
        spans = {row: self._span(work, lengths) for row, work in taken.items()}
        self._untaken.add(spans, rows, batch.paged.positions_N.tolist(), hidden)
        for row in taken:
            if row in self._rows.options.late:
                self._untaken.leave_open(row)
        behind = [row for row in self._untaken.rows if row not in long and self._missed(row) >= KEPT]
        behind.sort(key=self._missed, reverse=True)
        share = -(-len(self._untaken.rows) // KEPT)  # so rows that began together do not hold up one step together
        self._catch_up([*long, *behind[:share]])

    def _span(self, work: Work, lengths: Mapping[int, int]) -> tuple[int, int]:
        """Return the positions of a work whose states are kept: the first, and the one behind the last.

        They are those behind which a token is known, and of a late row also the one behind which none was chosen:
        either the target computes it again, or the token turns out to be forced.
        """
        end = work.start + work.num_tokens
        if work.row in lengths:
            end = min(end, lengths[work.row] - (work.row not in self._rows.options.late))
        return (end - 1 if self.kv is None else work.start), end

    def _missed(self, row: int) -> int:
        """Return how many positions of a row are unread."""
        start, end = self._untaken.span(row)
        return end - start

    def _complete(self, pages: Set[int], rows: Set[int] = frozenset()) -> None:
        """Read what is unread in some pages and of some rows, before others write there or read it."""
        self._catch_up([row for row in self._untaken.rows if row in rows or not pages.isdisjoint(self._pages_of(row))])

    def _pages_of(self, row: int) -> list[int]:
        """Return the pages of the positions that are unread."""
        start, end = self._untaken.span(row)
        size = next(iter(self._ops.values())).page_size
        pages: list[int] = self._rows.pages(row, end)[start // size :].tolist()
        return pages

    def _catch_up(self, rows: Iterable[int]) -> None:
        """Read what the target has computed for some rows, in one pass, also of those that have stopped.

        If that fails, what was to be read is forgotten: it costs these rows drafts, and no later step fails by it.
        """
        works: list[Work] = []
        for row in rows:
            start, end = self._untaken.span(row)
            if end > start:
                works.append(self._works[row]._replace(start=start, num_tokens=end - start, samples=False))
        if not works:
            return
        try:
            self._read(works)
        finally:
            self._untaken.forget_known(work.row for work in works)

    def _read(self, works: Sequence[Work]) -> None:
        """Read the positions of `works`, all of which are unread."""
        batch = self._rows.batch(works, computed=True)
        taken, positions = batch.rows_N.tolist(), batch.paged.positions_N.tolist()
        hidden = self._untaken.gather(taken, positions)
        ends = {row: place for place, row in enumerate(taken)}
        last_S = torch.tensor(list(ends.values()), dtype=torch.int64)
        if self._recurrent is not None:
            assert self.kv is not None
            following_N = self._rows.following(batch.rows_N, batch.paged.positions_N)
            steps = {mixer: ops.prepare(batch.paged) for mixer, ops in self._ops.items()}
            states_SE = self._recurrent.advance(following_N, self._recurrent.fused(hidden), steps, self.kv, last_S)
        else:
            states_SE = hidden.final_NE[last_S]
        for index, (row, place) in enumerate(ends.items()):
            self._known[row] = _Known(positions[place] + 2, states_SE[index])

    def drafts(self, asked: Sequence[DraftAsk]) -> list[list[int]]:
        """Return drafts for each of some rows, in order; none for a row of which no state is known."""
        found: list[list[int]] = [[] for _ in asked]
        self._catch_up([ask.work.row for ask in asked if ask.most > 0])
        going = [at for at, ask in enumerate(asked) if ask.most > 0 and self._knows(ask)]
        going.sort(key=lambda at: asked[at].length)  # the order of the decodes of a step
        if not going:
            return found
        states_RE = torch.stack([self._known[asked[at].work.row].state_E for at in going])
        if self._medusa is not None:
            most = min(max(asked[at].most for at in going), self.spec.most_drafts)
            for head in range(most):
                ids = self._choose(self._medusa.logits(head, states_RE), [asked[at] for at in going], head)
                for at, token in zip(going, ids, strict=True):
                    if head < asked[at].most:
                        found[at].append(token)
            return found
        assert self._recurrent is not None
        ids = self._choose(self._recurrent.logits(states_RE), [asked[at] for at in going], 0)
        for count in range(1, self.spec.most_drafts + 1):
            for at, token in zip(going, ids, strict=True):
                found[at].append(token)
            kept = [place for place, at in enumerate(going) if asked[at].most > count]
            if not kept or count == self.spec.most_drafts:
                break
            going, tokens_R = [going[place] for place in kept], torch.tensor([ids[place] for place in kept])
            states_RE = self._further([asked[at] for at in going], count, tokens_R, states_RE[kept])
            ids = self._choose(self._recurrent.logits(states_RE), [asked[at] for at in going], count)
        return found

    def _choose(self, logits_RD: Tensor, asked: Sequence[DraftAsk], place: int) -> list[int]:
        """Return the draft of each row at one place behind its tokens, from 0 on."""
        works = [ask.work._replace(start=ask.length - 1 + place, num_tokens=1) for ask in asked]
        ids_D = None if self._recurrent is None else self._recurrent.ids_D
        return sample_drafts(logits_RD, list(map(self._rows.choosing, works)), ids_D)

    def _knows(self, ask: DraftAsk) -> bool:
        known = self._known.get(ask.work.row)
        return known is not None and known.length == ask.length

    def _further(self, asked: Sequence[DraftAsk], count: int, tokens_R: Tensor, states_RE: Tensor) -> Tensor:
        """Return the states of positions that the target has not computed, from drafts."""
        assert self._recurrent is not None and self.kv is not None
        works = [ask.work._replace(start=ask.length - 2 + count, num_tokens=1, samples=False) for ask in asked]
        paged = self._rows.batch(works).paged
        steps = {mixer: ops.prepare(paged) for mixer, ops in self._ops.items()}
        return self._recurrent.advance(tokens_R, states_RE, steps, self.kv)


LoadHead: TypeAlias = Callable[[Network[CpuLinear, CpuStep, CpuKv], CpuRows, int], CpuDraftHead]
"""Function that reads a draft head, from its target, the row table and the number of pages."""


def known_lengths(works: Sequence[Work], drafted: Sequence[int], runs: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return the number of tokens of each row that has just sampled, for `CpuDraftHead.take_up`.

    Args:
        works: The works of the plan.
        drafted: Number of drafts of each work.
        runs: The tokens that each sampling work chose, by its index; the last may be a code in place of an id.
    """
    lengths = {}
    for index, run in runs.items():
        row, start, count = works[index].row, works[index].start, works[index].num_tokens - drafted[index]
        lengths[row] = start + count + sum(token >= 0 for token in run)
    return lengths
