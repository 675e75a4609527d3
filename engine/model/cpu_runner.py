"""`CpuRunner`: carries out plans on the CPU in a thread of its own, which releases the GIL inside every operation.

Owns the thread, the model and the paged cache; never decides what runs. Sampled tokens stay with the rows, so the next
step can be launched before this one is done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch

from headrace.engine.model.decoder import Decoder
from headrace.engine.model.rows import CpuRows
from headrace.engine.scheduling.plan import Capacity, StepPlan
from headrace.ops.cpu import CpuOps
from headrace.ops.cpu_sample import sample

__all__ = ["CpuRunner"]


class _CpuStep:
    """A launched step: its result arrives from the runner's thread."""

    __slots__ = ("_done", "_error", "_tokens")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._tokens: Sequence[int] = ()
        self._error: BaseException | None = None

    def settle(self, tokens: Sequence[int], error: BaseException | None) -> None:
        """Set the result, from the runner's thread."""
        self._tokens = tokens
        self._error = error
        self._done.set()

    def wait(self) -> Sequence[int]:
        """Block until the step has run."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._tokens


class CpuRunner:
    """The device protocol on the CPU."""

    def __init__(self, decoder: Decoder, ops: CpuOps, capacity: Capacity, threads: int | None) -> None:
        """Allocate the paged cache and start the thread.

        Args:
            decoder: The model.
            ops: Any of the operations it was made with: they share one cache layout.
            capacity: Pages, rows and tokens.
            threads: Threads of one operation; None leaves torch's own setting alone.
        """
        self._decoder: Decoder | None = decoder
        self._ops = ops
        self._kv = ops.allocate_kv(decoder.spec.num_layers, capacity.num_pages)
        self._rows = CpuRows(capacity)
        self._plans: queue.SimpleQueue[tuple[StepPlan, _CpuStep] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads,), name="headrace-cpu", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> _CpuStep:
        """Queue `plan` behind the steps launched before it."""
        step = _CpuStep()
        self._plans.put((plan, step))
        return step

    def close(self) -> None:
        """Join the thread and drop the model and the cache."""
        self._plans.put(None)
        self._thread.join()
        self._decoder = None
        del self._kv, self._ops

    def _run(self, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            while (item := self._plans.get()) is not None:
                plan, step = item
                try:
                    tokens = self._carry_out(plan)
                except Exception as error:
                    step.settle((), error)
                else:
                    step.settle(tokens, None)
                del item, plan, step

    def _carry_out(self, plan: StepPlan) -> Sequence[int]:
        decoder = self._decoder
        assert decoder is not None
        self._rows.update(plan)
        self._ops.copy_pages(self._kv, plan.copies)
        batch = self._rows.batch(plan.works)
        hidden_NE = decoder.hidden(batch.tokens_N, batch.paged, self._kv)
        tokens = [0] * len(plan.works)
        if batch.samplers:
            chosen = sample(decoder.logits(hidden_NE[batch.last_S]), batch.choosing)
            self._rows.append(plan.works, batch.samplers, chosen)
            for index, token in zip(batch.samplers, chosen, strict=True):
                tokens[index] = token
        return tokens
