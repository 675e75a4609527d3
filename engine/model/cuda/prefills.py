"""`Prefills`: the eager part of a step on CUDA: rows that compute several tokens, or one token without sampling.

Owns the attention plans and the pinned memory that tell the device which tokens those are; never decides which rows
run, and never decodes (graphs.py does). Next to read: ops/cuda/block.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.errors import DeviceUnavailable
from headrace.engine.model.cuda.adapters import NO_USE, Adapted, AdapterUse, CudaBank
from headrace.engine.model.cuda.compiling import compiles
from headrace.engine.model.cuda.drafting.drafter import Prefilled
from headrace.engine.model.cuda.drafting.drafts import CudaDrafts
from headrace.engine.model.cuda.operations import CudaDecoder
from headrace.engine.model.cuda.reports import MOST_POSITIONS, Lines
from headrace.engine.model.cuda.rows import DeviceRows
from headrace.engine.model.cuda.sampling import RowSampler
from headrace.engine.model.network.decoder import Decoder, HiddenStates
from headrace.engine.model.shared.pools import Pools, PoolSpan
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.plan import Capacity, Work
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.registry import PrefillKernel, resolve_prefill
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.attention.steps import CudaKv, PrefillAttention, PrefillStep
from headrace.ops.cuda.block import CudaOps

__all__ = ["Prefills"]

_RING = 4


class _Batch(NamedTuple):
    """One step's prefills on the device; indices are into the step's N tokens."""

    tokens_N: Tensor
    rows_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    last_W: Tensor
    """Indices of the last token of each work."""
    last_S: Tensor
    """Indices of the last tokens of works that sample; row and position of each follow."""
    rows_S: Tensor
    last_positions_S: Tensor
    prompt_P: Tensor
    """Indices of the tokens after which prompt log-probabilities are wanted; row and next token of each follow."""
    prompt_rows_P: Tensor
    next_tokens_P: Tensor
    pooled_P: Tensor
    """Indices of the tokens whose hidden states are wanted."""
    adapter_words: Tensor
    """Words of `CudaBank.prefill_words`; empty where no row uses an adapter."""


class _UsedAdapters(NamedTuple):
    """The adapters that the rows of one step's prefills use."""

    bank: CudaBank
    slots_W: NDArray[np.int32]
    use: AdapterUse

    @classmethod
    def of(cls, bank: CudaBank, slots_W: NDArray[np.int32]) -> _UsedAdapters | None:
        """Return the adapters in `slots_W`; None if there are none."""
        use = bank.use_of(slots_W)
        return None if use == NO_USE else cls(bank, slots_W, use)

    def ops(self, batch: _Batch, works: Sequence[Work]) -> Adapted:
        """Return the operations of all tokens."""
        return self.bank.prefill(batch.adapter_words, len(batch.positions_N), self.use, works, self.slots_W)

    def singles(self, slots_R: Tensor, rows_S: Tensor) -> Adapted | None:
        """Return the output head for some tokens of these rows; None where no adapter updates it."""
        return self.bank.single(slots_R[rows_S.long()], self.use) if self.use.ends else None


def _attention(
    shape: HeadShape, device: torch.device, arch: Arch, kernels: Sequence[PrefillKernel], *, pdl: bool
) -> PrefillAttention:
    """Return the first of `kernels` that this GPU can run and that could be compiled."""
    able, refused = resolve_prefill(kernels, shape, arch)
    for kernel in able:
        if compiles(kernel.builds(shape), f"prefills attend without the kernel {kernel.name!r}, which is slower"):
            return kernel.open(shape, device, pdl=pdl)
    raise DeviceUnavailable(f"device: no kernel attends for prefills of this model: {refused}")


class Prefills:
    """Runs prefills of one runner, all on one stream."""

    def __init__(
        self,
        decoder: CudaDecoder,
        ops: Mapping[MixerSpec, CudaOps],
        rows: DeviceRows,
        sampler: RowSampler,
        kv: CudaKv,
        capacity: Capacity,
        bank: CudaBank | None = None,
        drafts: CudaDrafts | None = None,
        *,
        kernels: Sequence[PrefillKernel],
    ) -> None:
        """Allocate memory to describe a step of `capacity.max_batched_tokens` tokens.

        Args:
            decoder: The model.
            ops: The model's operations, by mixer.
            rows: The row table.
            sampler: The sampler of these rows.
            kv: The paged cache.
            capacity: Tokens and rows of a step.
            bank: The adapters that rows may use; None without adapters.
            drafts: The drafts of rows that speculate; None where none does.
            kernels: The kernels of attention to choose among.
        """
        self._decoder, self._rows, self._sampler, self._kv = decoder, rows, sampler, kv
        self._drafter = None if drafts is None else drafts.drafter
        self._bank = bank
        self._device, self._page_size = kv[0].device, capacity.page_size
        self._shapes = {mixer: each.shape.key for mixer, each in ops.items()}
        self._attention: dict[Hashable, PrefillAttention] = {}
        """Attention by shape of heads."""
        for each in ops.values():
            if each.shape.key not in self._attention:
                made = _attention(each.shape, self._device, each.arch, kernels, pdl=each.pdl)
                self._attention[each.shape.key] = made
        self.pools = Pools()
        """Rows whose hidden states are wanted; the runner adds new ones."""
        words = 7 * capacity.max_batched_tokens + 9 * capacity.max_rows
        self._packed = [torch.empty(words, dtype=torch.int64, pin_memory=True) for _ in range(_RING)]
        self._sent = [torch.cuda.Event() for _ in range(_RING)]
        self._sends = 0

    def run(self, works: Sequence[Work], ids: Tensor, first: int) -> tuple[int, list[Lines], dict[int, Tensor]]:
        """Enqueue the forward pass of `works`, and sample for those that want it.

        Args:
            works: Prefills of one step.
            ids: int32 tensor that sampled ids go to, in the order of `works`, from place `first` on.
            first: First place in `ids`, and first of the lines of log-probabilities.

        Returns:
            The number of sampled ids, the lines, and the pooled hidden states of prompts that end here, by row.
        """
        rows, size = self._rows, self._page_size
        spans = self._spans(works)
        row_W = np.array([work.row for work in works])
        used = None if self._bank is None else _UsedAdapters.of(self._bank, rows.slots[row_W])
        batch = self._pack(works, spans, used)
        given = () if used is None else used.bank.given(works, used.slots_W)
        adapters = None if used is None else used.ops(batch, works)
        counts = [work.num_tokens for work in works]
        lengths = [work.start + work.num_tokens for work in works]
        pages = [
            rows.pages[work.row, : -(-length // size)].tolist() for work, length in zip(works, lengths, strict=True)
        ]
        by_shape = {}
        for key, attention in self._attention.items():
            attention.plan(counts, lengths, pages)
            by_shape[key] = PrefillStep(batch.positions_N, batch.slots_N, attention, given)
        steps = {mixer: by_shape[key] for mixer, key in self._shapes.items()}
        sampled, reported = len(batch.last_S), len(batch.prompt_P)
        wanted = torch.cat((batch.last_S, batch.prompt_P, batch.pooled_P)) if reported or spans else batch.last_S
        hidden_WE, states = self._hidden(batch, steps, wanted, adapters)
        lines = [self._report(works, batch, hidden_WE[sampled : sampled + reported], used)] if reported else []
        pooled = self.pools.pool(spans, hidden_WE[sampled + reported :])
        if not sampled:
            self._take_up(works, batch, steps, states)
            return 0, lines, pooled
        samplers = [work for work in works if work.samples]
        for work in samplers:
            rows.sampled(work.row, work.start + work.num_tokens)
        row_S = np.array([work.row for work in samplers])
        singles = None if used is None else used.singles(rows.slots_R, batch.rows_S)
        logits_SV = self._decoder.logits(hidden_WE[:sampled], singles)
        variant = self._sampler.variant(row_S)
        rows_S = self._act_between(logits_SV, samplers, batch.rows_S) if variant.masked else batch.rows_S
        self._sampler.choose(
            logits_SV, rows_S, batch.last_positions_S, ids[first : first + sampled], variant, first=first
        )
        self._take_up(works, batch, steps, states)
        return sampled, lines + self._sampler.lines(row_S, first), pooled

    def _hidden(
        self, batch: _Batch, steps: Mapping[MixerSpec, PrefillStep], wanted: Tensor, adapters: Adapted | None
    ) -> tuple[Tensor, HiddenStates | None]:
        """Return the hidden states of the tokens `wanted`, and those of all tokens that a drafter reads, if any."""
        taps = None if self._drafter is None else self._drafter.taps
        if taps is None:
            return self._decoder.hidden(batch.tokens_N, steps, self._kv, wanted, adapters), None
        if not taps:
            states = HiddenStates(self._decoder.hidden(batch.tokens_N, steps, self._kv, None, adapters))
        else:
            assert isinstance(self._decoder, Decoder)  # no other model has a drafter that reads inputs of layers
            states = self._decoder.hidden_states(batch.tokens_N, steps, self._kv, taps, adapters)
        return states.final_NE[wanted], states

    def _take_up(
        self,
        works: Sequence[Work],
        batch: _Batch,
        steps: Mapping[MixerSpec, PrefillStep],
        states: HiddenStates | None,
    ) -> None:
        """Let the drafter keep what it reads of `works`, once the tokens behind them are known."""
        if self._drafter is not None and states is not None:
            self._drafter.take_up_prompts(Prefilled(works, batch.tokens_N, batch.rows_N, batch.last_W, steps, states))

    def _act_between(self, logits_SV: Tensor, works: Sequence[Work], rows_S: Tensor) -> Tensor:
        """Enqueue what the host does before `works` choose; return their rows, with padding for those left out."""
        row_S = np.array([work.row for work in works])
        late, _ = self._sampler.act_between(logits_SV, row_S)
        self._rows.leave_out(row_S[late], late[:0])
        if not len(late):
            return rows_S
        row_S[late] = self._rows.padding_row
        return self._send(row_S).int()

    def _report(self, works: Sequence[Work], batch: _Batch, hidden_PE: Tensor, used: _UsedAdapters | None) -> Lines:
        """Enqueue log-probabilities of the prompts, some positions at a time, since their logits are wide."""
        lines = self._sampler.reported.prompt_lines(works)
        for start in range(0, len(hidden_PE), MOST_POSITIONS):
            some = slice(start, start + MOST_POSITIONS)
            rows_P = batch.prompt_rows_P[some]
            singles = None if used is None else used.singles(self._rows.slots_R, rows_P)
            self._sampler.reported.write_prompt(
                self._decoder.logits(hidden_PE[some], singles), rows_P, batch.next_tokens_P[some], lines.words_LW[some]
            )
        return lines

    def _spans(self, works: Sequence[Work]) -> list[PoolSpan]:
        """Return the spans of tokens whose hidden states are wanted; `PoolSpan.work` is the row here."""
        spans, start = [], 0
        for work in works:
            span = self.pools.span(work.row, work, start)
            start += work.num_tokens
            if span is not None:
                spans.append(span)
        return spans

    def _pack(self, works: Sequence[Work], spans: Sequence[PoolSpan], used: _UsedAdapters | None) -> _Batch:
        """Send all that a prefill needs to know of its tokens to the device, in one copy."""
        size = self._page_size
        counts = np.array([work.num_tokens for work in works])
        ends = counts.cumsum()
        total = int(ends[-1])
        row_W = np.array([work.row for work in works])
        offset_W = np.array([work.start for work in works]) - (ends - counts)
        rows_N = row_W.repeat(counts)
        positions_N = np.arange(total) + offset_W.repeat(counts)
        slots_N = self._rows.pages[rows_N, positions_N // size].astype(np.int64) * size + positions_N % size
        samples = np.array([work.samples for work in works])
        last_W = ends - 1
        last_S = last_W[samples]
        prompt_P = self._prompt_places(works, ends - counts)
        pooled_P = np.concatenate([np.arange(0), *(np.array(span.places) for span in spans)])
        words_X = np.empty(0, np.int64) if used is None else used.bank.prefill_words(used.slots_W, counts)
        sampled = last_S, row_W[samples], positions_N[last_S]
        parts = (rows_N, positions_N, slots_N, last_W, *sampled, prompt_P, pooled_P, words_X)
        sent = torch.split(self._send(np.concatenate(parts)), [len(part) for part in parts])
        rows, positions, slots, ends_W, last, row, at, prompt, pooled, words = sent
        pool_RC, of_prompt = self._rows.pool_RC, rows[prompt]
        following = pool_RC[of_prompt, positions[prompt] + 1]
        return _Batch(
            pool_RC[rows, positions],
            rows,
            positions,
            slots,
            ends_W,
            last,
            row.int(),
            at,
            prompt,
            of_prompt.int(),
            following,
            pooled,
            words,
        )

    def _prompt_places(self, works: Sequence[Work], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the step's tokens that are followed by a prompt token to report on."""
        counts = [self._sampler.reported.prompt_count(work) for work in works]
        spans = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True) if count]
        return np.concatenate(spans) if spans else np.empty(0, np.int64)

    def _send(self, words: NDArray[np.int64]) -> Tensor:
        slot = self._sends % _RING
        self._sends += 1
        self._sent[slot].synchronize()
        pinned = self._packed[slot][: len(words)]
        pinned.numpy()[:] = words
        on_device = pinned.to(self._device, non_blocking=True)
        self._sent[slot].record()
        return on_device
