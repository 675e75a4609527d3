"""`CpuDraftModel`: a smaller model on a CPU that drafts for another one, token after token.

Owns the draft model and its pages, which have the numbers of the target's pages: a row of the block table names the
keys and values of both models. It reads what the target reads a little later, several tokens at once, and at the latest
before it drafts. Never verifies a draft. Next to read: drafts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from headrace.engine.model.cpu.heads import DraftAsk
from headrace.engine.model.cpu.rows import CpuRows
from headrace.engine.model.drafting.filled import FilledPages
from headrace.engine.model.network.foreign import Network
from headrace.engine.model.shared.host_pool import HostPool
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.memory.window import Window
from headrace.engine.scheduling.plan import Capacity, StepPlan, Work
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.linear import CpuLinear
from headrace.ops.cpu.sample import sample_drafts
from headrace.ops.cpu.step import CpuStep

__all__ = ["CpuDraftModel"]

_LAG: Final = 32
"""Tokens by which the draft model may be behind the target without a draft: it reads them at once later."""


class CpuDraftModel:
    """A draft model with its pages."""

    def __init__(
        self,
        load: Callable[[], Network[CpuLinear, CpuStep, CpuKv]],
        ops: Mapping[MixerSpec, CpuOps],
        rows: CpuRows,
        capacity: Capacity,
        *,
        context: int,
        tokens: int,
    ) -> None:
        """Load the model and allocate its pages.

        Args:
            load: Reads the model, now and after a sleep without weights.
            ops: The operations that the model is made with, by mixer.
            rows: The row table of the target.
            capacity: Pages, rows and tokens of the engine.
            context: Number of positions that the draft model can read.
            tokens: Number of tokens that it may guess, and that it knows; it reads others as token 0.
        """
        self._load = load
        self._decoder: Network[CpuLinear, CpuStep, CpuKv] | None = load()
        self._ops, self._rows = ops, rows
        self._any = next(iter(ops.values()))
        self._kv = CpuKv.allocate(kv_layout(self._decoder.spec, ops), capacity.num_pages, self._any.dtype)
        self._filled = FilledPages(capacity.num_pages, capacity.page_size)
        self._window = Window(capacity.window, capacity.page_size)
        self._context, self._tokens = context, tokens
        self._budget = capacity.max_batched_tokens
        self._hosts: tuple[HostPool, ...] = ()

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """Memory of one page over all layers of the draft model, in bytes."""
        return self._kv.page_bytes

    def resize(self, pages: int) -> None:
        """Make room for another number of pages."""
        self._kv = self._kv.resized(pages)
        self._filled.resize(pages)

    def release_weights(self) -> None:
        """Drop the weights until the next `restore_weights`."""
        self._decoder = None

    def restore_weights(self) -> None:
        """Read the weights if they were dropped."""
        if self._decoder is None:
            self._decoder = self._load()

    def open_host_pool(self, places: int, *, promised: int) -> None:
        """Make room for `places` pages in host memory, of which others will use `promised` bytes."""
        hosts = list[HostPool]()
        for pool in self._kv.pools:
            taken = promised + sum(each.nbytes for each in hosts)
            hosts.append(HostPool(pool, places, pinned=False, promised=taken))
        self._hosts = tuple(hosts)
        self._filled.open_host(places)

    def spill(self, plan: StepPlan) -> None:
        """Copy pages to host memory, before the plan's step writes to others."""
        if plan.spills:
            for host, pool in zip(self._hosts, self._kv.pools, strict=True):
                host.spill(pool, plan.spills)
            self._filled.spill(plan.spills)

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's copies of pages."""
        if plan.copies:
            self._kv.copy_pages(plan.copies)
            self._filled.copy(plan.copies)
        if plan.fetches:
            for host, pool in zip(self._hosts, self._kv.pools, strict=True):
                host.fetch(pool, plan.fetches)
            self._filled.fetch(plan.fetches)

    def close(self) -> None:
        """Drop the model and its operations."""
        for ops in self._ops.values():
            ops.close()
        self._decoder = None
        self._hosts = ()

    # -- drafts -----------------------------------------------------------------------------------------------------

    def begin(self, works: Sequence[Work]) -> None:
        """Take note of the positions that the target computes next, so that what lies there now is of no use.

        Args:
            works: Works of the next step where they truly are, with as many tokens as they may have with drafts.
        """
        for work in works:
            self._filled.overwrite(self._rows.pages(work.row, work.start + work.num_tokens), work.start)

    def drafts(self, asked: Sequence[DraftAsk]) -> list[list[int]]:
        """Return drafts for each of some rows, in order, and read what the rows have that was not read yet.

        A row that is asked for no drafts is read only where it is behind by `_LAG` tokens. No more tokens are read at
        once than a step may have; a row that is still behind has no drafts.
        """
        found: list[list[int]] = [[] for _ in asked]
        most = [min(ask.most, self._context - ask.length + 1) for ask in asked]
        reading, going = self._to_read(asked, most)
        if not reading:
            return found
        works = [
            asked[at].work._replace(start=start, num_tokens=end - start, samples=at in going)
            for at, (start, end) in reading.items()
        ]
        ids = self._compute(works)
        tokens_RN = self._rows.tokens_RN
        count = 0
        while going:
            for at, token in zip(going, ids, strict=True):
                found[at].append(token)
            count += 1
            going = [at for at in going if most[at] > count]
            for at in going:
                tokens_RN[asked[at].work.row, asked[at].length - 1 + count] = found[at][-1]
            works = [
                asked[at].work._replace(start=asked[at].length - 1 + count, num_tokens=1, samples=True) for at in going
            ]
            ids = self._compute(works) if works else []
        self._any.rest()
        return found

    def replace(self, work: Work, guesses: Sequence[int], drafts: Sequence[int]) -> None:
        """Take note that `drafts` stand in place of `guesses`, its own, behind the one token of `work`."""
        same = next((at for at, pair in enumerate(zip(guesses, drafts, strict=False)) if pair[0] != pair[1]), None)
        if same is not None:
            start = work.start + 1 + same
            self._filled.overwrite(self._rows.pages(work.row, work.start + 1 + len(drafts)), start)

    def _to_read(self, asked: Sequence[DraftAsk], most: Sequence[int]) -> tuple[dict[int, tuple[int, int]], list[int]]:
        """Return the positions (start, end) to read, by index of `asked`, and the indices of rows that then draft."""
        reading: dict[int, tuple[int, int]] = {}
        going: list[int] = []
        left = self._budget
        for at in sorted(range(len(asked)), key=lambda at: most[at] < 1):  # rows with drafts first
            ask = asked[at]
            start, end = self._read(ask), min(ask.length, self._context)
            if self._rows.all_stopped((ask.work,)) or end - start < (1 if most[at] > 0 else _LAG):
                continue
            reached = min(end, start + left)
            if reached > start:
                reading[at] = start, reached
                left -= reached - start
            if most[at] > 0 and reached == end:
                going.append(at)
        return reading, going

    def _read(self, ask: DraftAsk) -> int:
        """Return the first position of a row that the draft model has not read and that matters."""
        first = self._window.first_page(ask.length - 1)
        read = self._filled.first_open(self._rows.pages(ask.work.row, ask.length)[first:])
        return min(first * self._any.page_size + read, ask.length - 1)

    def _compute(self, works: Sequence[Work]) -> list[int]:
        """Read the tokens of `works`; return a draft behind each that samples, in order."""
        assert self._decoder is not None
        batch = self._rows.batch(works)
        paged = replace(batch.paged, given=())  # adapters are of the target alone
        tokens_N = torch.where(batch.tokens_N < self._tokens, batch.tokens_N, 0)
        steps = {mixer: ops.prepare(paged) for mixer, ops in self._ops.items()}
        hidden_SE = self._decoder.hidden(tokens_N, steps, self._kv, batch.last_S)
        for work in works:
            end = work.start + work.num_tokens
            self._filled.fill(self._rows.pages(work.row, end), work.start, end)
        if not batch.samplers:
            return []
        drafts = sample_drafts(self._decoder.logits(hidden_SE)[:, : self._tokens], batch.choosing)
        by_work: dict[int, int] = dict(zip(batch.samplers, drafts, strict=True))
        return [by_work[index] for index in sorted(by_work)]
