"""Drives a target and a draft head without an engine: any cut of sequences into steps, with shared pages; no tests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draft_heads import TargetStates
from model_driver import capacity, request
from torch import Tensor

from headrace.engine.model.checkpoint.weights import load_weights
from headrace.engine.model.cpu.heads import CpuDraftHead, DraftAsk
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cpu.rows import CpuRows
from headrace.engine.model.drafting.heads.reading import open_head, open_mtp
from headrace.engine.model.drafting.heads.spec import MedusaSpec
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.network.decoder import Decoder, HiddenStates
from headrace.engine.scheduling.asked import Sampling
from headrace.engine.scheduling.plan import NewRow, PageEntry, StepPlan, Work
from headrace.ops.cpu.native.library import Context
from headrace.ops.quantise import Method

__all__ = ["PAGE", "Drafting", "Row", "Target", "states_of"]

PAGE = 4


@dataclass
class Row:
    """A sequence whose last token has just been chosen: all but that one are computed by the target."""

    ids: list[int]
    shares: tuple[int, int] = (0, 0)
    """Row whose pages hold the first tokens, and how many tokens that is: whole pages."""
    sampling: Sampling = Sampling()

    @property
    def computed(self) -> int:
        return len(self.ids) - 1


class Target:
    """A target on the CPU with its pages."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, *, native: bool = False) -> None:
        self.spec = from_hf(read_hf_config(folder))
        self._capacity = capacity(self.spec.vocab_size)
        context = Context(1) if native else None
        self._sizes: dict[str, Any] = {"page_size": PAGE, "max_positions": 128, "dtype": dtype, "context": context}
        self._ops = cpu_ops(self.spec, **self._sizes)
        weights = load_weights(folder, self.spec, dtype=dtype, device="cpu")
        self._target = Decoder(self.spec, weights, self._ops)
        self._kv = next(iter(self._ops.values())).allocate_kv(self.spec.num_layers, self._capacity.num_pages)

    def hidden(self, ids: list[int], inputs: Sequence[int]) -> tuple[HiddenStates, Tensor]:
        """Hidden states of a sequence in one piece, and the final ones from a pass that keeps nothing else."""
        table, plan = CpuRows(self._capacity), StepPlan(0)
        plan.new_rows.append(NewRow(0, 0, ids, Sampling(), -1))
        plan.entries.extend(PageEntry(0, place, place) for place in range(-(-len(ids) // PAGE)))
        table.update(plan)
        batch = table.batch([Work(request(ids, 1), 0, 0, len(ids), True)])
        with torch.inference_mode():
            steps = {mixer: ops.prepare(batch.paged) for mixer, ops in self._ops.items()}
            found = self._target.hidden_states(batch.tokens_N, steps, self._kv, inputs)
            return found, self._target.hidden(batch.tokens_N, steps, self._kv)


class Drafting(Target):
    """A target and its head on the CPU, each with pages of its own under one block table."""

    def __init__(
        self,
        target_folder: Path,
        head_folder: Path | None,
        dtype: torch.dtype = torch.float32,
        *,
        native: bool = False,
        quantize: Method | None = None,
    ) -> None:
        """Open a head, quantised if that is asked for; None for the module that comes with the target."""
        super().__init__(target_folder, dtype, native=native)
        opened = open_mtp(target_folder, self.spec) if head_folder is None else open_head(head_folder, self.spec)
        self._table = CpuRows(self._capacity)
        with opened as found:
            ops = self._ops if isinstance(found.spec, MedusaSpec) else cpu_ops(found.spec.block, **self._sizes)
            self._head = CpuDraftHead(
                found, self._target, ops, self._table, pages=self._capacity.num_pages, dtype=dtype, quantize=quantize
            )
        for layer in () if self._head.kv is None else self._head.kv.slots:
            layer.fill_(17.0)  # what was there before may not matter

    def drafts(self, rows: Sequence[Row], chunk: int, prompt: int | None, count: int) -> list[list[int]]:
        """Drafts behind each row, computed side by side in steps of `chunk` tokens, one by one behind `prompt`."""
        table = self._filled(rows)
        at = [row.shares[1] for row in rows]
        found: list[list[int]] = [[] for _ in rows]
        with torch.inference_mode():
            for number, row in enumerate(rows):  # those that share pages find them computed
                if row.shares[1]:
                    continue
                self._compute(table, rows, [number], at, found, (chunk, prompt), count)
            others = [number for number, row in enumerate(rows) if row.shares[1]]
            self._compute(table, rows, others, at, found, (chunk, prompt), count)
        return found

    def side_by_side(self, rows: Sequence[Row], chunk: int, prompt: int | None, count: int) -> list[list[int]]:
        """Drafts behind each row, all rows in the same steps."""
        table = self._filled(rows)
        at, found = [0] * len(rows), [list[int]() for _ in rows]
        with torch.inference_mode():
            self._compute(table, rows, range(len(rows)), at, found, (chunk, prompt), count)
        return found

    def after_guesses(self, rows: Sequence[Row], seed: int, count: int) -> list[list[int]]:
        """Drafts behind each row, whose tokens were verified in runs of random lengths beside guesses that were wrong.

        Drafts are asked for after every step, as an engine does, and replaced by the guesses.
        """
        draw = random.Random(seed)
        table = self._filled(rows)
        known = [2] * len(rows)
        found: list[list[int]] = [[] for _ in rows]
        with torch.inference_mode():
            self._guess(table, rows, dict.fromkeys(range(len(rows)), (0, 1, 0)), found, known, count)
            while going := [row for row, length in enumerate(known) if length < len(rows[row].ids)]:
                works = {}
                for row in going:
                    drafted = draw.randint(0, 3)
                    right = draw.randint(0, min(drafted, len(rows[row].ids) - known[row] - 1))
                    works[row] = (known[row] - 1, 1 + drafted, right)
                    known[row] += right + 1
                self._guess(table, rows, works, found, known, count)
        return found

    def _guess(
        self,
        table: CpuRows,
        rows: Sequence[Row],
        wanted: Mapping[int, tuple[int, int, int]],
        found: list[list[int]],
        known: Sequence[int],
        count: int,
    ) -> None:
        """Compute (start, tokens, right drafts) of some rows, the drafts behind the right ones being wrong."""
        works = [self._work(rows, row, start, tokens) for row, (start, tokens, _) in wanted.items()]
        for work in works:
            start, tokens, right = wanted[work.row]
            for place in range(start + 1, start + tokens):
                truth = rows[work.row].ids[place] if place < len(rows[work.row].ids) else 0
                self._put(table, work, place, truth if place <= start + right else (truth + 1) % self.spec.vocab_size)
        batch = table.batch(works)
        steps = {mixer: ops.prepare(batch.paged) for mixer, ops in self._ops.items()}
        hidden = self._target.hidden_states(batch.tokens_N, steps, self._kv, self._head.inputs)
        lengths = {}
        for index in batch.samplers:
            work = works[index]
            start, _, right = wanted[work.row]
            lengths[work.row] = start + right + 2
            for place in range(start + 1, start + right + 2):
                self._put(table, work, place, rows[work.row].ids[place])
        self._head.take_up(works, batch, hidden, lengths)
        asked = [DraftAsk(work, known[work.row], count) for work in works]
        for ask, drafts in zip(asked, self._head.drafts(asked), strict=True):
            found[ask.work.row] = drafts

    def _put(self, table: CpuRows, work: Work, place: int, token: int) -> None:
        table.append([work._replace(start=place - 1, num_tokens=1)], [token])

    def _filled(self, rows: Sequence[Row]) -> CpuRows:
        """The row table with these rows alone."""
        plan = StepPlan(0)
        free = iter(torch.randperm(self._capacity.num_pages, generator=torch.Generator().manual_seed(1)).tolist())
        pages: list[list[int]] = []
        for number, row in enumerate(rows):
            shared = row.shares[1] // PAGE
            pages.append((pages[row.shares[0]][:shared] if shared else []) + [])
            pages[-1].extend(next(free) for _ in range(-(-(len(row.ids) + 8) // PAGE) - shared))
            plan.new_rows.append(NewRow(number, 0, row.ids, row.sampling, speculates=True))
            plan.entries.extend(PageEntry(number, place, page) for place, page in enumerate(pages[-1]))
        self._head.update(plan)
        self._table.update(plan)
        return self._table

    def _compute(
        self,
        table: CpuRows,
        rows: Sequence[Row],
        chosen: Sequence[int],
        at: list[int],
        found: list[list[int]],
        cut: tuple[int, int | None],
        count: int,
    ) -> None:
        chunk, prompt = cut
        while any(at[row] < rows[row].computed for row in chosen):
            works = []
            for row in chosen:
                end = rows[row].computed if prompt is None else min(prompt, rows[row].computed)
                tokens = min(chunk, end - at[row]) if at[row] < end else 1
                if at[row] < rows[row].computed:
                    works.append(self._work(rows, row, at[row], tokens))
                    at[row] += tokens
            self._step(table, rows, works, found, count)

    def _work(self, rows: Sequence[Row], row: int, start: int, count: int) -> Work:
        return Work(request(rows[row].ids, 8), row, start, count, True)

    def _step(self, table: CpuRows, rows: Sequence[Row], works: list[Work], found: list[list[int]], count: int) -> None:
        batch = table.batch(works)
        steps = {mixer: ops.prepare(batch.paged) for mixer, ops in self._ops.items()}
        hidden = self._target.hidden_states(batch.tokens_N, steps, self._kv, self._head.inputs)
        ended, lengths = [], {}
        for index in batch.samplers:
            work = works[index]
            if work.start + work.num_tokens == rows[work.row].computed:
                ended.append(DraftAsk(work, len(rows[work.row].ids), count))
                lengths[work.row] = len(rows[work.row].ids)
        self._head.take_up(works, batch, hidden, lengths)
        for ask, drafts in zip(ended, self._head.drafts(ended), strict=True):
            found[ask.work.row] = drafts


def states_of(model: Any, ids: Sequence[int], layers: int | None = None) -> TargetStates:
    """Hidden states of all positions but the last by a model of transformers; of its first `layers` alone, if given."""
    with torch.inference_mode():
        kept = model.model.layers
        if layers is not None:
            model.model.layers = kept[:layers]
        try:
            found: list[Tensor] = []
            hooks = [
                layer.register_forward_pre_hook(lambda _, args: found.append(args[0][0].clone()))
                for layer in model.model.layers
            ]
            hooks.append(model.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0][0].clone())))
            final = model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
            for hook in hooks:
                hook.remove()
        finally:
            model.model.layers = kept
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    return TargetStates(final, found, embedding, head)
