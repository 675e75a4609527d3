"""`CpuRows`: the tokens, block table and sampling of each row on a CPU, and the tensors of a step made of them.

Owns the row table, which only the plans change; never runs the model. Next to read: runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.cpu.options import CpuOptions, PromptSpan
from headrace.engine.model.shared.host_choice import HostChoices
from headrace.engine.model.shared.pools import Pools, PoolSpan
from headrace.engine.scheduling.asked import Sampling
from headrace.engine.scheduling.memory.window import Window
from headrace.engine.scheduling.plan import Capacity, GivenTokens, StepPlan, Work
from headrace.ops.cpu.lora import AdapterUsers
from headrace.ops.cpu.sample import Choosing
from headrace.ops.paged import DecodeGroup, PagedBatch, PrefillRow

__all__ = ["CpuRows", "StepBatch"]

_LONGEST = 2  # rows of one decode group differ at most by this factor in pages, so that little of it is padding


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tensors of one step."""

    tokens_N: Tensor
    """Token ids, int64."""
    rows_N: NDArray[np.int64]
    """Row of each token."""
    paged: PagedBatch
    samplers: list[int]
    """Indices of the plan's works that sample, in order."""
    last_S: Tensor
    """Index of each sampler's last token among the N of the step, int64; with drafts, those of all of its positions
    behind which a token may be chosen."""
    choosing: list[Choosing]
    prompts: list[PromptSpan]
    """Prompt positions for which log-probabilities are wanted."""
    pooled: list[PoolSpan]
    """Tokens whose hidden states are wanted."""
    users: list[AdapterUsers]
    """Tokens among the N that use adapters."""
    adapted_samplers: list[AdapterUsers]
    """Positions among the S sampled ones that use adapters."""


class CpuRows:
    """The row table of a CPU engine."""

    def __init__(self, capacity: Capacity, bank: CpuBank | None = None) -> None:
        """Start with empty rows, which use the adapters in `bank`."""
        self._bank = bank
        self._size = capacity.page_size
        self._window = Window(capacity.window, capacity.page_size)
        max_pages = -(-capacity.max_context // capacity.page_size)
        self._tokens: NDArray[np.int64] = np.zeros((capacity.max_rows, capacity.max_context + 1), np.int64)
        self._tables: NDArray[np.int64] = np.zeros((capacity.max_rows, max_pages), np.int64)
        self._sampling = [Sampling()] * capacity.max_rows
        self._stop_ids: list[frozenset[int]] = [frozenset()] * capacity.max_rows
        self._stopped = [False] * capacity.max_rows
        """Whether each row has just sampled one of its stop ids: what is planned for it will be dropped."""
        self.options = CpuOptions(capacity.vocab_size)
        self.pools = Pools()
        self.hosts = HostChoices(capacity)

    def update(self, plan: StepPlan) -> Sequence[GivenTokens]:
        """Apply the plan's new rows, given tokens and page entries; return the given tokens that rows accept."""
        plan = self.hosts.take(plan)
        accepted = self.options.late.take(plan)
        for given in accepted:
            self._tokens[given.row, given.start : given.start + len(given.tokens)] = given.tokens
            self.options.give(given)
            self._stopped[given.row] = False
        for row, start, tokens, sampling, _, stop_ids, _ in plan.new_rows:
            self._tokens[row, start : start + len(tokens)] = tokens
            self._sampling[row] = sampling
            self._stop_ids[row], self._stopped[row] = stop_ids, False
        if self._bank is not None:
            self._bank.update(plan.new_rows)
        for options in plan.options:  # bad words may begin among tokens that the prefix cache holds
            self._tokens[options.row, : len(options.tokens)] = options.tokens
        self.options.update(plan)
        self.pools.update(plan)
        for row, place, page in plan.entries:
            self._tables[row, place] = page
        return accepted

    def all_stopped(self, works: Sequence[Work]) -> bool:
        """Return whether none of `works` is worth computing, since each of their rows has stopped or is late."""
        return all(map(self._is_left_out, works))

    def batch(
        self, works: Sequence[Work], drafted: Sequence[int] | None = None, *, computed: bool = False
    ) -> StepBatch:
        """Gather the tensors for `works`: decodes first, those of similar context length side by side, then prefills.

        Rows that have stopped or are late are left out; at least one is not. The last tokens of a work may be drafts,
        as many as `drafted` says. If the target has `computed` the works before, none is left out, and none uses an
        adapter: those of rows that have ended may be unloaded.
        """
        going = [index for index, work in enumerate(works) if computed or not self._is_left_out(work)]
        decodes = sorted((index for index in going if works[index].num_tokens == 1), key=lambda at: works[at].start)
        order = decodes + [index for index in going if works[index].num_tokens > 1]
        rows = np.repeat([works[index].row for index in order], [works[index].num_tokens for index in order])
        positions = np.concatenate(
            [np.arange(works[index].start, works[index].start + works[index].num_tokens) for index in order]
        )
        slots = self._tables[rows, positions // self._size] * self._size + positions % self._size
        samplers, choosing, prompts, pooled = [], [], [], []
        last: list[int] = []
        end = 0
        for index in order:
            work = works[index]
            span = self.options.prompt_span(index, work, end)
            if span is not None:
                prompts.append(span)
            wanted = self.pools.span(index, work, end)
            if wanted is not None:
                pooled.append(wanted)
            end += work.num_tokens
            if work.samples:
                samplers.append(index)
                last += range(end - 1 - (drafted[index] if drafted else 0), end)
                choosing.append(self.choosing(work))
        paged = PagedBatch(
            positions_N=torch.from_numpy(positions),
            slots_N=torch.from_numpy(slots),
            decodes=self._groups([works[index] for index in decodes]),
            prefills=self._prefills([works[index] for index in order[len(decodes) :]], len(decodes)),
            given=() if computed or self._bank is None else self._bank.given(rows, positions),
        )
        tokens_N = torch.from_numpy(self._tokens[rows, positions])
        last_S = torch.tensor(last, dtype=torch.int64)
        users = [] if computed else self._users(rows, positions)
        adapted_samplers = self._users(rows[last], positions[last]) if users and last else []
        return StepBatch(tokens_N, rows, paged, samplers, last_S, choosing, prompts, pooled, users, adapted_samplers)

    def row_users(self, row: int, count: int) -> list[AdapterUsers]:
        """Return the adapter uses of `count` tokens of one row."""
        return self._users(np.full(count, row), np.zeros(count, np.int64))

    def _users(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> list[AdapterUsers]:
        return [] if self._bank is None else self._bank.users(rows, positions)

    @property
    def tokens_RN(self) -> NDArray[np.int64]:
        """The tokens of all rows, int64 [rows, positions]."""
        return self._tokens

    def pages(self, row: int, length: int) -> NDArray[np.int64]:
        """Return the pages of the first `length` tokens of a row, int64; those before its window may be others."""
        return self._tables[row, : self._pages(length)]

    def goes_on(self, row: int) -> bool:
        """Return whether `row` has not just chosen one of its stop ids, and no mask of its grammar was late."""
        return not self._stopped[row] and row not in self.options.late

    def known(self, work: Work) -> NDArray[np.int64]:
        """Return the tokens of a work's row up to the work's end."""
        return self._tokens[work.row, : work.start + work.num_tokens]

    def following(self, rows_N: NDArray[np.int64], positions_N: Tensor) -> Tensor:
        """Return the token behind each of some positions, int64; 0 if there is none yet."""
        return torch.from_numpy(self._tokens[rows_N, positions_N.numpy() + 1])

    def append(self, works: Sequence[Work], tokens: Sequence[int]) -> None:
        """Store the tokens just sampled behind `works`, for the next step to read."""
        for work, token in zip(works, tokens, strict=True):
            self._tokens[work.row, work.start + work.num_tokens] = max(token, 0)
            self._stopped[work.row] = token in self._stop_ids[work.row]

    def _is_left_out(self, work: Work) -> bool:
        return self._stopped[work.row] or work.row in self.options.late

    def choosing(self, work: Work) -> Choosing:
        """Return the parameters by which the token behind `work` is chosen."""
        sampling = self._sampling[work.row]
        return Choosing(
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
            work.start + work.num_tokens,
        )

    def _pages(self, length: int) -> int:
        return -(-length // self._size)

    def _groups(self, works: Sequence[Work]) -> tuple[DecodeGroup, ...]:
        groups = []
        start = 0
        while start < len(works):
            most = self._pages(works[start].start + 1) * _LONGEST + 2
            end = start
            while end < len(works) and self._pages(works[end].start + 1) <= most:
                end += 1
            group = works[start:end]
            first, width = self._window.first_page(group[0].start), self._pages(group[-1].start + 1)
            pages = self._tables[[work.row for work in group], first:width]
            width -= first
            lengths = torch.tensor([work.start + 1 - first * self._size for work in group], dtype=torch.int64)
            inside = np.arange(width) * self._size < lengths.numpy()[:, None]
            groups.append(DecodeGroup(start, torch.from_numpy(np.where(inside, pages, 0)), lengths))
            start = end
        return tuple(groups)

    def _prefills(self, works: Sequence[Work], start: int) -> tuple[PrefillRow, ...]:
        prefills = []
        for work in works:
            first, length = self._window.first_page(work.start), work.start + work.num_tokens
            pages_P = torch.from_numpy(self._tables[work.row, first : self._pages(length)].copy())
            prefills.append(PrefillRow(start, work.num_tokens, pages_P, length - first * self._size))
            start += work.num_tokens
        return tuple(prefills)
