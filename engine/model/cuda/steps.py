"""A step of a CUDA engine from launch to result: its results in host memory, and the works that they belong to.

Owns the pinned memory of results; never enqueues a kernel. Next to read: runner.py.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.errors import EngineCrashed
from headrace.engine.model.cuda.decodes import Decodes, Ordering
from headrace.engine.model.cuda.reports import Lines, SentLines, read_reports
from headrace.engine.model.shared.results import LATE, step_result
from headrace.engine.model.shared.runs import Verified, with_verified
from headrace.engine.scheduling.plan import StepPlan, Work
from headrace.engine.scheduling.result import Choice, StepResult
from headrace.engine.scheduling.shaping import Report
from headrace.ops.cuda.drafts.accept import HEAD

__all__ = ["CudaStep", "DeviceTime", "Result", "RowRuns", "faults_are_fatal", "is_lost", "places_of", "split"]


class Result:
    """Pinned memory for the results of one step, and the event after which they are there."""

    def __init__(self, size: int) -> None:
        self.ids = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self.view: NDArray[np.int32] = self.ids.numpy()
        self.lines = self.ids[:0]
        """Words of lines of log-probabilities; grows to the most that a step needed."""
        self.vectors = torch.empty(0, pin_memory=True)
        """Vectors of pooled prompts; grows to the most that a step needed."""
        self.done = torch.cuda.Event(blocking=True)
        self.taken = False

    def fetch(self, lines: Sequence[Lines], index_of: Mapping[int, int]) -> list[SentLines]:
        """Enqueue the copy of lines to the host and return their places; `index_of` has the work of each row."""
        needed = sum(each.words_LW.numel() for each in lines)
        if needed > len(self.lines):
            self.lines = torch.empty(needed, dtype=torch.int32, pin_memory=True)
        sent, start = [], 0
        for words_LW, entries, of_prompt, ahead in lines:
            end = start + words_LW.numel()
            self.lines[start:end].copy_(words_LW.view(-1), non_blocking=True)
            indexed = [(line, index_of[row], top) for line, row, top in entries]
            sent.append(SentLines(start, (words_LW.shape[0], words_LW.shape[1]), indexed, of_prompt, ahead))
            start = end
        return sent

    def keep(self, pooled: Mapping[int, Tensor], works: Sequence[Work]) -> dict[int, Tensor]:
        """Enqueue the copy of pooled vectors, given by row; return them by index of the work, in pinned memory.

        Hidden states stay on the device, to be used on the default stream.
        """
        if not pooled:
            return {}
        index_of = {work.row: index for index, work in enumerate(works)}
        vectors = {row: value for row, value in pooled.items() if value.dim() == 1}
        for value in pooled.values():
            if value.is_cuda and value.dim() > 1:
                value.record_stream(torch.cuda.default_stream(value.device))
        if vectors:
            stacked_RE = torch.stack(list(vectors.values()))
            if stacked_RE.numel() > len(self.vectors):
                self.vectors = torch.empty(stacked_RE.numel(), pin_memory=True)
            here_RE = self.vectors[: stacked_RE.numel()].view(stacked_RE.shape)
            here_RE.copy_(stacked_RE, non_blocking=True)
            vectors = dict(zip(vectors, here_RE, strict=True))
        return {index_of[row]: value for row, value in {**pooled, **vectors}.items()}


class DeviceTime:
    """The time that the device takes for what is enqueued on the current stream until `end`."""

    def __init__(self) -> None:
        self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begun.record()

    def end(self) -> None:
        """Enqueue the end."""
        self._ended.record()

    def seconds(self) -> float:
        """Return the time, once something enqueued behind the end was waited for."""
        milliseconds: float = self._begun.elapsed_time(self._ended)
        return milliseconds / 1000.0


class RowRuns(NamedTuple):
    """What the rows of a step with drafts gained."""

    words_BW: NDArray[np.int32]
    """In the order of the batch: number of drafts, number of tokens, and these; there once the step is done."""
    places: Mapping[int, int]
    """Place in the batch of each decode, by the index of its work."""
    planned: int
    """Number of works that might have drafts, which are the first."""

    @classmethod
    def of(cls, plan: StepPlan, decodes: Decodes, words: NDArray[np.int32], depth: int) -> RowRuns:
        """Return the runs of a plan's `decodes`, which a graph of `depth` drafts leaves in `words`."""
        count, width = len(decodes.rows), HEAD + depth + 1
        more = (index for index, work in enumerate(plan.others, len(plan.rows)) if work.num_tokens == 1)
        indices = [*range(len(plan.rows)), *itertools.islice(more, count - len(plan.rows))]
        places = dict(zip(indices, decodes.back.tolist(), strict=True))
        return cls(words[: count * width].reshape(count, width), places, len(plan.rows))


class CudaStep:
    """A launched step; `enqueued` is the event that is set once a step that waits in a queue is enqueued."""

    __slots__ = (
        "_has_codes", "_reading", "_tokens", "_words", "choices", "enqueued", "error", "forced", "ids", "late", "lines",
        "places", "pooled", "reading", "result", "runs",
    )  # fmt: skip

    def __init__(self, result: Result) -> None:
        self.result = result
        self.enqueued: threading.Event | None = None
        self.error: BaseException | None = None
        self.ids: NDArray[np.int32] = result.view
        """Ids of the step in the order of the device, once it is done."""
        self.places: NDArray[np.int64]
        """Place in `ids` of each of the plan's works."""
        self.runs: RowRuns | None = None
        """Tokens of the decodes in place of those in `ids`, of a step with drafts."""
        self.reading: DeviceTime | None = None
        """The time of what a drafter reads late before the step, if anything."""
        self.lines: list[SentLines] = []
        """Lines of log-probabilities, in the memory of `result`."""
        self.pooled: dict[int, Tensor] = {}
        """Pooled hidden states, by index of the work."""
        self.choices: dict[int, Callable[[], Choice]] = {}
        """Functions that choose on the host once the logits are there, by index of the work."""
        self.forced: dict[int, Sequence[Sequence[int]]] = {}
        """Tokens forced behind what rows with grammars choose, for each place in their runs, by index of the work."""
        self.late: Sequence[int] = ()
        """Indices of the works whose rows were left out."""
        self._reading = threading.Lock()
        self._tokens: list[int] | None = None
        self._words: dict[int, list[int]] = {}
        """Words of each run by index of the work, once they have been read."""
        self._has_codes = False
        """Whether `_tokens` has codes of `NoToken` among its ids."""

    def wait(self) -> StepResult:
        """Return the step's result once it has run.

        Raises:
            EngineCrashed: The device failed; nothing on it can be trusted any more.
            torch.OutOfMemoryError: The device had no memory for this step.
        """
        if self.enqueued is not None:
            self.enqueued.wait()
        try:
            if self.error is not None:
                raise self.error
            with faults_are_fatal():
                tokens = self._read()
            if not (self.lines or self.pooled or self.choices or self.forced or self.runs):
                return step_result(tokens, has_codes=self._has_codes)
            reports, prompt_reports = read_reports(self.result.lines.numpy(), self.lines)
            choices = {work: ready() for work, ready in self.choices.items()}
            forced = {work: places[len(self._ids_of(work, tokens)) - 1] for work, places in self.forced.items()}
            result = step_result(
                tokens,
                has_codes=self._has_codes,
                reports={work: report for (work, ahead), report in reports.items() if not ahead},
                prompt_reports=prompt_reports,
                pooled=self.pooled,
                choices=choices,
                forced={work: more for work, more in forced.items() if more},
            )
            return result if self.runs is None else self._with_runs(result, self.runs, reports)
        finally:
            self.result.taken = False

    def gained(self, work: int) -> Sequence[int]:
        """Return the ids that a work item has chosen, the last of which may be a code; none if enqueuing failed.

        May be called before or after `wait`.
        """
        return self._ids_of(work, self._read()) if self.error is None else ()

    def _with_runs(self, result: StepResult, runs: RowRuns, reports: Mapping[tuple[int, int], Report]) -> StepResult:
        """Return a result of first tokens with all that drafts gave."""
        verified = {work: Verified([result.ids[work]], {0: report}) for work, report in result.reports.items()}
        drafted = [0] * runs.planned
        for work, (drafts, count, *ids) in self._words.items():
            told = {ahead: reports[work, ahead] for ahead in range(count) if (work, ahead) in reports}
            verified[work] = Verified(ids[:count], told)
            if work < runs.planned and work not in self.late:
                drafted[work] = drafts
        result = with_verified(result, verified, drafted)
        return result if self.reading is None else result._replace(late_seconds=self.reading.seconds())

    def _ids_of(self, work: int, tokens: Sequence[int]) -> Sequence[int]:
        """Return the ids, or a code, that a work item has chosen; `tokens` are the first ones of all."""
        if tokens[work] < 0 or work not in self._words:
            return tokens[work : work + 1]
        _, count, *ids = self._words[work]
        return ids[:count]

    def _read(self) -> list[int]:
        with self._reading:  # after `wait`, another step may use the result
            if self._tokens is None:
                self.result.done.synchronize()
                found = self.ids[self.places]
                if self.runs is not None:  # later steps use the memory of its words
                    words = self.runs.words_BW.tolist()
                    self._words = {work: words[place] for work, place in self.runs.places.items()}
                    found[list(self._words)] = [run[HEAD] for run in self._words.values()]
                self._has_codes = len(self.late) > 0 or bool(found.min(initial=0) < 0)
                self._tokens = found.tolist()
                for work in self.late:
                    self._tokens[work] = LATE
            return self._tokens


def split(plan: StepPlan) -> tuple[Decodes | None, list[Work]]:
    """Return the works that a graph computes, and the others: prefills, and single tokens without sampling.

    In a plan for one request alone, single tokens never count as prefills, whose kernels may round otherwise.
    """
    more = [work for work in plan.others if work.num_tokens == 1 and (work.samples or plan.alone)]
    prefills = [work for work in plan.others if work.num_tokens > 1 or not (work.samples or plan.alone)]
    rows = [*plan.rows, *(work.row for work in more)]
    starts = [*plan.starts, *(work.start for work in more)]
    return Ordering().of(rows, starts, plan.drafts) if rows else None, prefills


def places_of(works: Sequence[Work], decodes: NDArray[np.int64], prefill: int) -> NDArray[np.int64]:
    """Return the place of each work's id: for decodes `decodes`, for sampling prefills from `prefill` on, else 0."""
    places = np.zeros(len(works), np.int64)
    of_decodes = iter(decodes)
    for index, work in enumerate(works):
        if work.samples and work.num_tokens == 1:
            places[index] = next(of_decodes)
        elif work.samples:
            places[index] = prefill
            prefill += 1
    return places


class _FaultsAreFatal:
    """Context manager that turns a fault of the device, after which its context is lost, into `EngineCrashed`."""

    def __enter__(self) -> None:
        """Enter without a check: nothing can have failed yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise `EngineCrashed` for a fault of the device; let other errors pass."""
        if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
            return
        if isinstance(error, torch.AcceleratorError) or is_lost():  # Triton and FlashInfer raise errors of their own
            raise EngineCrashed(f"the device failed: {error}") from error


_FAULTS_ARE_FATAL = _FaultsAreFatal()


def faults_are_fatal() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that turns a fault of the device, which loses its context, into `EngineCrashed`."""
    return _FAULTS_ARE_FATAL


def is_lost() -> bool:
    """Return whether the current device has stopped answering."""
    try:
        torch.cuda.current_stream().query()
    except torch.AcceleratorError:
        return True
    return False
