"""Drives a decoder or a runner without an engine, as several tests do: any cut of a sequence into steps; no tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cpu.rows import CpuRows
from headrace.engine.model.cpu.runner import CpuDecoder
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.engine.scheduling.asked import Asked, Sampling
from headrace.engine.scheduling.plan import Capacity, NewRow, PageEntry, StepPlan, Work
from headrace.engine.scheduling.request import Request
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.lora import CpuAdapterOps
from headrace.ops.cpu.native.block import NativeOps
from headrace.ops.cpu.native.library import Context, library
from headrace.ops.cpu.products import PRODUCTS, CpuKernel

__all__ = ["ENGINE_OPS", "OPERATIONS", "ModelUnderTest", "capacity", "request"]


def capacity(vocab_size: int, **changes: int) -> Capacity:
    """A small device: 64 pages of 4 tokens, 8 rows, 128 tokens a step and in a context."""
    sizes = {"num_pages": 64, "page_size": 4, "max_rows": 8, "max_batched_tokens": 128, "max_context": 128}
    return Capacity(vocab_size=vocab_size, **(sizes | changes))


def request(ids: Sequence[int], count: int, sampling: Sampling | None = None) -> Request:
    """A request for `count` tokens after `ids`."""
    return Request(Asked(limit=len(ids) + count, sampling=sampling or Sampling()), list(ids))


OPERATIONS = [
    pytest.param(False, id="torch"),
    pytest.param(True, id="native", marks=pytest.mark.skipif(library() is None, reason="no compiled kernels")),
]
"""Values of `native`, for parameters of tests."""

ENGINE_OPS: type[CpuOps] = CpuOps if library() is None else NativeOps
"""The operations by which an engine computes on this machine's processor."""


class ModelUnderTest:
    """A decoder with a cache and a row table of its own, fed with tokens that are known beforehand."""

    def __init__(self, decoder: CpuDecoder, ops: Mapping[MixerSpec, CpuOps], kv: CpuKv, size: Capacity) -> None:
        """Use `kv`, whose pages it takes in an order that no address could be guessed from."""
        self.bank: CpuBank | None = None
        """What sequences may wear."""
        self._decoder, self._ops, self._kv, self._capacity = decoder, ops, kv, size

    @classmethod
    def load(
        cls, folder: Path, dtype: torch.dtype = torch.float32, *, native: bool = False, **sizes: int
    ) -> tuple[DecoderSpec, ModelUnderTest]:
        """Open a folder by the package's own loader."""
        spec = from_hf(read_hf_config(folder))
        weights = load_weights(folder, spec, dtype=dtype, device="cpu")
        return spec, cls.make(spec, weights, dtype, capacity(spec.vocab_size, **sizes), native=native)

    @classmethod
    def open_gguf(cls, path: Path, dtype: torch.dtype, *, keep_packed: bool, native: bool = False) -> ModelUnderTest:
        """Open a GGUF file, with pages of the default size."""
        with GgufFile(path) as file:
            spec = file.spec()
            weights = load_weights(file, spec, dtype=dtype, device="cpu", keep_packed=keep_packed)
        size = capacity(spec.vocab_size, page_size=16, max_context=512)
        return cls.make(spec, weights, dtype, size, native=native)

    @classmethod
    def make(
        cls,
        spec: DecoderSpec,
        weights: DecoderWeights,
        dtype: torch.dtype,
        size: Capacity,
        products: Sequence[CpuKernel] = PRODUCTS,
        *,
        native: bool = False,
    ) -> ModelUnderTest:
        """Compute with loaded weights by the operations in C, or by torch's and the kernels of `products`."""
        context = Context(1) if native else None
        sizes = {"page_size": size.page_size, "max_positions": size.max_context}
        ops = cpu_ops(spec, **sizes, dtype=dtype, products=products, context=context)
        kv = CpuKv.allocate(kv_layout(spec, ops), size.num_pages, dtype)
        return cls(Decoder(spec, weights, ops), ops, kv, size)

    def logits(
        self,
        sequences: Sequence[Sequence[int]],
        chunk: int,
        prompt: int | None = None,
        slots: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Compute all sequences side by side, one row each.

        Args:
            sequences: Token ids.
            chunk: Tokens of a row in one step, while it is in its prompt.
            prompt: Tokens that are computed in chunks; those after it come one a step. None: all of them.
            slots: The slot of `bank` that each sequence wears, -1 for none; None: nobody wears any.

        Returns:
            For each sequence float [tokens, V].
        """
        size = self._capacity
        rows = CpuRows(size, self.bank)
        pages = itertools.cycle(torch.randperm(size.num_pages, generator=torch.Generator().manual_seed(1)).tolist())
        plan = StepPlan(0)
        for row, ids in enumerate(sequences):
            slot = -1 if slots is None else slots[row]
            plan.new_rows.append(NewRow(row, 0, list(ids), Sampling(), slot))
            plan.entries.extend(PageEntry(row, place, next(pages)) for place in range(-(-len(ids) // size.page_size)))
        assert len(plan.entries) <= size.num_pages
        rows.update(plan)
        found: list[list[Tensor]] = [[] for _ in sequences]
        at = [0] * len(sequences)
        while any(start < len(ids) for start, ids in zip(at, sequences, strict=True)):
            works = []
            for row, ids in enumerate(sequences):
                end = len(ids) if prompt is None else min(prompt, len(ids))
                count = min(chunk, end - at[row]) if at[row] < end else 1
                if at[row] < len(ids):
                    works.append(Work(request(ids, 1), row, at[row], count, True))
                    at[row] += count
            self._step(rows, works, found)
        return [torch.cat(parts) for parts in found]

    def _step(self, rows: CpuRows, works: list[Work], found: list[list[Tensor]]) -> None:
        batch = rows.batch(works)
        with torch.inference_mode():
            steps = {mixer: ops.prepare(batch.paged) for mixer, ops in self._ops.items()}
            users, adapted = batch.users, None
            if users:
                adapted = {mixer: CpuAdapterOps(ops, users) for mixer, ops in self._ops.items()}
            hidden_NE = self._decoder.hidden(batch.tokens_N, steps, self._kv, None, adapted)
            logits_NV = self._decoder.logits(hidden_NE, adapted).float()
        for index, last in zip(batch.samplers, batch.last_S.tolist(), strict=True):
            work = works[index]
            found[work.row].append(logits_NV[last + 1 - work.num_tokens : last + 1])
