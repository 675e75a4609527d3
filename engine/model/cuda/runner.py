"""`CudaRunner`: carries out plans on one GPU: decodes by replaying a graph, prefills eagerly, both on one stream.

Owns the stream, the model, the paged cache and what crosses between host and device; never decides what runs. Launching
waits for nothing: sampled tokens stay with the rows on the device, and a step's ids come back through pinned memory.
Next to read: rows.py, then graphs.py and prefills.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.model.cuda.adapters import CudaBank
from headrace.engine.model.cuda.decodes import Decodes, Ordering
from headrace.engine.model.cuda.drafting.catching_up import CatchUps
from headrace.engine.model.cuda.drafting.drafts import CudaDrafts, OpenDrafts, most_lines, most_words
from headrace.engine.model.cuda.grammars import DraftsOf
from headrace.engine.model.cuda.graphs import DecodeGraphs, Key
from headrace.engine.model.cuda.moves import PageMoves
from headrace.engine.model.cuda.operations import CudaDecoder
from headrace.engine.model.cuda.prefills import Prefills
from headrace.engine.model.cuda.reports import Lines
from headrace.engine.model.cuda.rows import DeviceRows
from headrace.engine.model.cuda.sampling import PLAIN, VARIANTS, RowSampler, Variant
from headrace.engine.model.cuda.sleep import Weights
from headrace.engine.model.cuda.steps import (
    CudaStep,
    Result,
    RowRuns,
    faults_are_fatal,
    places_of,
    split,
)
from headrace.engine.model.latent import has_latents
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.engine.model.shared.memory import borrow_stream, return_device_memory, return_stream, returned_if_short
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.asked import Asked, Sampling
from headrace.engine.scheduling.plan import Ability, Capacity, NewRow, RowOptions, StepPlan, Work
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.shaping import Reporting, Shaping
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.kernels import KERNELS, Kernels
from headrace.ops.cuda.memory import copies as page_copies
from headrace.ops.cuda.memory.pools import PoolMemory

__all__ = ["CudaRunner"]

_RESULTS = 16  # more than any launch_ahead
_USUAL_CONTEXT = 1024  # tokens
_FEW_TOKENS = 20  # in a prefill small enough for the kernels of few rows
_ALL_OPTIONS = Shaping(bias=((0, 1.0),), frequency_penalty=1.0, bad_words=((0, 0, 0),))
"""Shaping that needs every shaping kernel."""
_NOWHERE: NDArray[np.int64] = np.empty(0, np.int64)
_ALL_REPORTS = Reporting(completion=1, prompt=1)
_LAUNCHED_TOO_FAR = "more steps are launched than results can be kept for"


class CudaRunner:
    """The runner of a decoder on one GPU."""

    abilities: Final[frozenset[Ability]] = frozenset(("hooks", "shaping", "logprobs", "grammar", "pooling"))

    def __init__(
        self,
        decoder: CudaDecoder,
        ops: Mapping[MixerSpec, CudaOps],
        capacity: Capacity,
        *,
        attention: str,
        device: torch.device,
        bank: CudaBank | None = None,
        weights: Weights | None = None,
        speculation: OpenDrafts | None = None,
        kernels: Kernels = KERNELS,
    ) -> None:
        """Allocate rows and the paged cache; `warm_up` captures.

        Args:
            decoder: The model, on `device`.
            ops: The operations that the model was made with, by mixer.
            capacity: Pages, rows and tokens.
            attention: Way of attention in decodes: "auto", "fused", "even", "fa2" or "xqa".
            device: The GPU.
            bank: The adapters that rows may use, closed with this; None without adapters.
            weights: Memory of the model's parameters, closed with this; None where the caller owns it.
            speculation: How drafts are made for rows that speculate; None where none does.
            kernels: The kernels of attention to choose among.
        """
        self._capacity, self._bank, self._weights = capacity, bank, weights
        self._kinds = next(iter(ops.values())).products.kinds
        self._cached = (0, 1) if has_latents(decoder.spec) and capacity.max_context > 1 else (0,)
        """Numbers of cached tokens for which prefills have kernels of their own."""
        self._stream = borrow_stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the stream on which weights were made
        with returned_if_short(self._stream), torch.inference_mode(), self._stream:
            beside, most = ((), 0) if speculation is None else (speculation.pages, speculation.most)
            rows, dtype = capacity.max_rows, next(iter(ops.values())).shape.kv_dtype
            self._memory = PoolMemory(kv_layout(decoder.spec, ops, beside), dtype, capacity.num_pages, device)
            kv = self._memory.layers
            self._rows = DeviceRows(capacity, self._memory.scratch_page, device, most_words(rows, most))
            chosen = most_lines(rows, most) + rows  # in decodes and prefills
            self._sampler = RowSampler(self._rows, capacity, device, chosen, most + 1)
            self._ids = torch.zeros(chosen, dtype=torch.int32, device=device)
            self._results, self._turn = [Result(chosen) for _ in range(_RESULTS)], 0
            self._ordering = Ordering()
            """Order of the decodes that `launch` enqueues itself."""
            self._drafts = speculation and CudaDrafts(speculation, self._rows, self._sampler, capacity, kv)
            shared = decoder, ops, self._rows, self._sampler, kv
            self._graphs = DecodeGraphs(
                *shared, self._ids,
                max_rows=rows, attention=attention, bank=bank, drafts=self._drafts, kernels=kernels.decodes,
            )  # fmt: skip
            self._late = CatchUps(self._drafts, self._rows, self._graphs.captured)
            self._prefills = Prefills(*shared, capacity, bank, self._drafts, kernels=kernels.prefills)
        self._moves = PageMoves(self._memory.pools, self._stream, device)
        self._submitted = 0
        """Number of steps given to the launcher; only `launch` counts them."""
        self._enqueued = 0
        """Number of steps that the launcher has enqueued; only the launcher counts them."""
        self._plans: queue.SimpleQueue[tuple[StepPlan, CudaStep] | None] = queue.SimpleQueue()
        self._launcher = threading.Thread(target=self._run_launcher, name="headrace-launcher", daemon=True)
        self._launcher.start()

    @property
    def formats(self) -> tuple[str, ...]:
        """The names of the formats in which weights of products are kept, dense ones last."""
        return tuple(sorted(kind.name for kind in self._kinds if kind is not None)) + ("dense",) * (None in self._kinds)

    def rehearse(self, variant: Variant = PLAIN) -> None:
        """Run all kernels of prefills on the scratch page, on as many tokens as a plan may hold, then on few; blocks.

        Args:
            variant: The options of the rows.
        """
        sampling = Sampling(temperature=1.0, top_k=int(variant.filtered))
        request = Request(Asked(limit=2, sampling=sampling), [0])
        most = self._capacity.max_batched_tokens
        for tokens, cached in itertools.product((most, min(_FEW_TOKENS, most)), self._cached):
            plan = StepPlan(0, tokens=tokens)
            for row in range(self._capacity.max_rows):
                count = min(tokens, self._capacity.max_context - cached)
                tokens -= count
                if count:
                    plan.new_rows.append(NewRow(row, cached, [0] * count, sampling))
                    shaping, reporting = _ALL_OPTIONS if variant.shaped else None, None
                    if variant.places:
                        reporting = _ALL_REPORTS
                    if shaping or reporting:
                        known = cached + count
                        plan.options.append(RowOptions(row, [0] * known, known, shaping, reporting, None))
                    plan.works.append(Work(request, row, cached, count, True))
            self.launch(plan).wait()

    def warm_up(self, *, everything: bool = False) -> None:
        """Compile and capture the graphs of usual steps, or with `everything` of any step; blocks for seconds."""
        variants = VARIANTS if everything else (PLAIN,)
        for variant in variants:
            self.rehearse(variant)
        contexts = [_USUAL_CONTEXT, self._capacity.max_context] if everything else [_USUAL_CONTEXT]
        with torch.inference_mode(), self._stream, faults_are_fatal():
            self._graphs.capture(contexts=contexts, variants=variants)
            self._late.capture()
            self._stream.synchronize()

    def launch(self, plan: StepPlan) -> CudaStep:
        """Enqueue `plan` behind the steps launched before it.

        Decodes are enqueued at once, in 100 or 200 microseconds. Prefills take milliseconds and capturing a graph takes
        a hundred; copies of pages and masks of grammars wait for the device. A thread enqueues those, and all steps
        that come while it is busy.

        Raises:
            EngineCrashed: The device failed.
            torch.OutOfMemoryError: The device had no memory for this step.
        """
        result = self._results[self._turn % _RESULTS]
        if result.taken:
            raise RuntimeError(_LAUNCHED_TOO_FAR)
        step = CudaStep(result)
        if not (plan.is_bare and self._submitted == self._enqueued and self._launch_decodes(plan, step)):
            step.enqueued = threading.Event()
            self._submitted += 1
            self._plans.put((plan, step))
        result.taken = True
        self._turn += 1
        return step

    def draft_depths(self, rows: int) -> list[int]:
        """Return the depths above 0 of the graphs for steps of `rows` decodes, in rising order."""
        return self._graphs.draft_depths(rows)

    @property
    def most_pages(self) -> int:
        """Largest number of pages for `resize`."""
        return self._memory.most_pages

    def resize(self, num_pages: int) -> None:
        """Make room for `num_pages` pages; blocks until the device is idle. Graphs stay as they are.

        Raises:
            torch.OutOfMemoryError: The device has too little memory; nothing has changed.
            EngineCrashed: The device failed.
        """
        with torch.inference_mode(), self._stream, faults_are_fatal():
            self._late.read_all()
            self._settle()
            self._memory.resize(num_pages)

    def sleep(self, *, keep_weights: bool) -> None:
        """Release the memory of pages and weights; blocks until the device is idle. Graphs stay as they are."""
        assert self._weights is not None
        with torch.inference_mode(), self._stream, faults_are_fatal():
            self._late.read_all()
            self._settle()
            self._weights.sleep(self._memory, keep=keep_weights)
        return_device_memory()

    def wake(self, num_pages: int) -> None:
        """Restore the weights at their old addresses, and room for `num_pages` pages; blocks."""
        assert self._weights is not None
        with torch.inference_mode(), self._stream, faults_are_fatal():
            self._weights.wake(self._memory, num_pages)
        return_device_memory()

    def open_host_pool(self, places: int) -> float:
        """Make room for `places` pages in pinned memory and return the seconds to move one. No step may be in flight.

        Raises:
            Exception: The host has too little memory that can be pinned.
        """
        with torch.inference_mode(), self._stream, faults_are_fatal():
            return self._moves.open(places, self._capacity.num_pages, self._stream.synchronize)

    def close(self) -> None:
        """Wait for the device and return its memory; after a device fault, as much of it as can be returned."""
        self._plans.put(None)
        self._launcher.join()
        self._sampler.close()
        try:
            self._settle()
            self._late.close()
            self._graphs.close()
            self._memory.close()
            return_stream(self._stream)
            self._moves.close()
            if self._bank is not None:
                self._bank.close()
            if self._weights is not None:
                self._weights.close()
        except torch.AcceleratorError:
            # After a device fault, freeing pinned memory ends the process, so it is never freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(vars(self).copy()))
        del self._memory, self._rows, self._sampler, self._ids, self._results
        del self._graphs, self._late, self._prefills, self._drafts, self._bank, self._weights, self._moves
        return_device_memory()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait until the device is idle."""
        self._stream.synchronize()
        self._moves.settle()

    def _run_launcher(self) -> None:
        """Enqueue steps, in the launcher's thread, until a None arrives."""
        while (item := self._plans.get()) is not None:
            plan, step = item
            try:
                self._enqueue(plan, *split(plan), step)
            except BaseException as error:  # raised to whoever waits for the step
                step.error = error
                with contextlib.suppress(Exception):  # what was enqueued before the error is waited for here
                    self._stream.synchronize()
            self._enqueued += 1
            assert step.enqueued is not None
            step.enqueued.set()
            del item, plan, step

    def _launch_decodes(self, plan: StepPlan, step: CudaStep) -> bool:
        """Enqueue decodes that come alone; return False, with no effect, if a graph must be captured or waited for."""
        decodes = self._ordering.of(plan.rows, plan.starts, plan.drafts)
        variant = self._sampler.variant(decodes.rows)
        keys = self._graphs.keys(decodes, variant)
        if variant.masked or not self._graphs.ready(keys):
            return False
        if variant.places:
            self._enqueue(plan, decodes, [], step)
            return True
        with self._stream, faults_are_fatal():
            self._moves.before(plan.entries)
            self._late.before_changes(plan, decodes)
            self._rows.add((), plan.entries)
            self._decode(plan, decodes, (), keys, step)
            step.result.done.record(self._stream)
        return True

    def _enqueue(self, plan: StepPlan, decodes: Decodes | None, prefills: Sequence[Work], step: CudaStep) -> None:
        with torch.inference_mode(), self._stream, faults_are_fatal():
            lines = self._enqueue_all(plan, decodes, prefills, step)
            choices, forced = self._sampler.choices, self._sampler.grammars.forced
            if lines or choices or forced:
                index_of = {work.row: index for index, work in enumerate(plan.works)}
                step.lines = step.result.fetch(lines, index_of)
                step.choices = {index_of[row]: choice for row, choice in choices.items()}
                step.forced = {index_of[row]: tokens for row, tokens in forced.items()}
            if late := self._sampler.grammars.late:
                step.late = [index for index, work in enumerate(plan.works) if work.row in late]
            step.result.done.record(self._stream)
            self._sampler.grammars.sampled(step.gained, plan.each_work())

    def _enqueue_all(
        self, plan: StepPlan, decodes: Decodes | None, prefills: Sequence[Work], step: CudaStep
    ) -> list[Lines]:
        """Enqueue all work of `plan`, and the copy of its ids to `step`; return its lines of log-probabilities."""
        self._sampler.begin()
        copies = self._take_in(plan, decodes)
        count, result = 0 if decodes is None else len(decodes.rows), step.result
        lines: list[Lines] = []
        if decodes is not None:
            samples = not plan.alone or plan.works[0].samples
            variant = self._sampler.variant(decodes.rows) if samples else None
            keys = self._graphs.keys(decodes, variant)
            self._decode(plan, decodes, copies, keys, step)
            count = max(count, keys[0].lines) if keys[0].depth else count
            for ahead in range(keys[0].depth + 1) if samples else ():
                lines += self._sampler.lines(decodes.rows, ahead * keys[0].bucket, ahead)
        else:
            step.places = _NOWHERE
            self._rows.flush()
            page_copies.copy_pages(self._memory.pools, copies)
        if not prefills:
            return lines
        sampled, more, pooled = self._prefills.run(prefills, self._ids, count)
        step.pooled = result.keep(pooled, plan.works)
        result.ids[: count + sampled].copy_(self._ids[: count + sampled], non_blocking=True)
        step.ids, step.places = result.view, places_of(plan.works, _NOWHERE if decodes is None else decodes.back, count)
        return lines + more

    def _take_in(self, plan: StepPlan, decodes: Decodes | None) -> Sequence[tuple[int, int]]:
        """Apply the rows and pages of `plan`; return the copies of pages that are still to be enqueued."""
        plan = self._sampler.hosts.take(plan)
        copies = plan.copies
        self._late.before_changes(plan, decodes)
        if plan.spills or plan.fetches:
            self._moves.enqueue(plan)
            copies = []
        else:
            self._moves.before(plan.entries)
        self._rows.add(plan.new_rows, plan.entries, plan.options, plan.others)
        self._rows.give(self._sampler.take(plan))
        self._prefills.pools.update(plan)
        return copies

    def _decode(
        self,
        plan: StepPlan,
        decodes: Decodes,
        copies: Sequence[tuple[int, int]],
        keys: list[Key],
        step: CudaStep,
    ) -> None:
        """Enqueue one token of each row, and drafts behind it; tell `step` where what graphs of `keys` choose goes."""
        rows, depth = self._rows, keys[0].depth
        graphs = self._graphs.prepare(keys, decodes)
        step.reading = self._late.before_decodes(decodes, depth)
        rows.batch(decodes, keys[0].bucket)
        if depth:
            rows.draft(decodes)
        if copies:
            rows.flush()
            page_copies.copy_pages(self._memory.pools, copies)
        answer = rows.hand_over()
        if depth:
            step.runs, step.places = RowRuns.of(plan, decodes, answer, depth), np.zeros(plan.size, np.int64)
        else:
            step.ids, step.places = answer, decodes.back
        drafts: DraftsOf | None = None
        for key, graph in zip(keys, graphs, strict=True):
            if key.part == "choice":
                late, allowed = self._sampler.act_between(self._graphs.logits(keys), decodes.rows, drafts)
                rows.leave_out(decodes.rows[late], late)
                if self._drafts is not None and allowed:
                    self._drafts.allow(decodes.rows, depth, allowed)
            graph.replay()
            if key.part == "drafts":
                drafts = self._graphs.drafts(key, decodes.rows)
        if keys[-1].variant is None:
            rows.unsampled(decodes.rows)
