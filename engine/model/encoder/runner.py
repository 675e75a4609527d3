"""`EncoderRunner`: carries out plans for an encoder, on a CPU or a GPU, in a thread of its own.

Owns the model, and each row's tokens and pooling; never decides what runs. An encoder's tokens attend to those after
them, so a text is computed as a whole in the step that has its last token; earlier chunks only count. Pages stand for
no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

import torch
from torch import Tensor

from headrace.engine.errors import EngineCrashed
from headrace.engine.model.encoder.network import Encoder, Texts
from headrace.engine.model.encoder.spec import EncoderSpec
from headrace.engine.model.encoder.weights import EncoderWeights
from headrace.engine.model.shared.memory import (
    borrow_stream,
    free_host_bytes,
    return_device_memory,
    return_freed_memory,
    return_stream,
)
from headrace.engine.model.shared.plan_thread import PlanStep, PlanThread
from headrace.engine.model.shared.results import step_result
from headrace.engine.scheduling.plan import Ability, StepPlan
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.result import StepResult

__all__ = ["EncoderRunner"]


class _Row(NamedTuple):
    tokens: list[int]
    pooling: Pooling


class _Ended(NamedTuple):
    """A text whose last token is in this step."""

    work: int
    row: _Row


class EncoderRunner:
    """The runner of an encoder on a CPU or a GPU."""

    abilities: Final[frozenset[Ability]] = frozenset(("pooling",))

    def __init__(
        self, spec: EncoderSpec, load: Callable[[], EncoderWeights], *, device: torch.device, threads: int
    ) -> None:
        """Load the model and start the thread.

        Args:
            spec: The model's shape.
            load: Reads the weights to `device`, now and after a sleep without them.
            device: The device that the model runs on.
            threads: Number of threads that one operation uses on a CPU.
        """
        self._spec = spec
        self._load = load
        self._device = device
        self._kept: EncoderWeights | None = None
        """Weights in host memory while a GPU sleeps."""
        self._encoder: Encoder | None = Encoder(spec, load())
        self._stream = borrow_stream(device) if device.type == "cuda" else None
        self._await_weights()
        self._rows: dict[int, _Row] = {}
        self._thread = PlanThread(self._carry_out, name="headrace-encoder", threads=threads)

    def launch(self, plan: StepPlan) -> PlanStep:
        """Queue `plan` behind the steps launched before it; return its step."""
        return self._thread.launch(plan)

    def sleep(self, *, keep_weights: bool) -> None:
        """Release the memory of the weights; with `keep_weights` a CPU releases nothing.

        Raises:
            MemoryError: The host has no room for the weights of a GPU.
        """
        if not keep_weights:
            self._kept = self._encoder = None
        elif self._encoder is not None and self._stream is not None:
            size, free = self._encoder.weights.nbytes, free_host_bytes()
            if size > free:
                raise MemoryError(f"{size} bytes of weights, of which {free} are free")
            self._kept, self._encoder = self._encoder.weights.to(torch.device("cpu")), None
        self._return_memory()

    def wake(self, num_pages: int) -> None:
        """Restore the weights; an encoder has no pages.

        Raises:
            ModelRejected: The model's files cannot be used any more; the encoder still sleeps.
            torch.OutOfMemoryError: The device has no room for the weights; the encoder still sleeps.
        """
        if self._encoder is None:
            try:
                with torch.inference_mode():
                    weights = self._load() if self._kept is None else self._kept.to(self._device)
            except BaseException as error:
                error.__traceback__ = None  # the frames hold weights that were moved already
                self._return_memory()
                raise
            self._encoder, self._kept = Encoder(self._spec, weights), None
            self._await_weights()

    def close(self) -> None:
        """Join the thread and drop the model."""
        self._thread.close()
        self._encoder = self._kept = None
        self._rows.clear()
        if self._stream is not None:
            return_stream(self._stream)
        self._return_memory()

    def _await_weights(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the stream of the weights

    def _return_memory(self) -> None:
        if self._stream is None:
            return_freed_memory()
        else:
            return_device_memory()

    def _carry_out(self, plan: StepPlan) -> StepResult:
        for options in plan.options:
            assert options.pooling is not None
            self._rows[options.row] = _Row(options.tokens, options.pooling)
        ended = [
            _Ended(index, row)
            for index, work in enumerate(plan.works)
            if work.start + work.num_tokens == len((row := self._rows[work.row]).tokens)
        ]
        tokens = [0] * len(plan.works)
        if not ended:
            return StepResult(tokens)
        ended.sort(key=lambda each: len(each.row.tokens))
        with self._on_stream(), _faults_are_fatal():
            pooled = self._pool(ended)
        return step_result(tokens, pooled=pooled)

    def _on_stream(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _pool(self, ended: Sequence[_Ended]) -> dict[int, Tensor]:
        """Return results of texts that end, by index of the work: float32 vectors in host memory, or hidden states."""
        encoder = self._encoder
        assert encoder is not None
        rows = [each.row for each in ended]
        seconds = [row.pooling.second for row in rows]
        texts = Texts.of([row.tokens for row in rows], seconds, self._device, pads=encoder.pads)
        hidden_NE = encoder.hidden(texts)
        found: dict[int, Tensor] = {}
        for kind in dict.fromkeys(row.pooling.kind for row in rows):
            places = [place for place, row in enumerate(rows) if row.pooling.kind == kind]
            if kind == "all":
                starts = [0, *torch.tensor([len(row.tokens) for row in rows]).cumsum(0).tolist()]
                vectors = [hidden_NE[starts[place] : starts[place + 1]] for place in places]
                if hidden_NE.is_cuda:
                    hidden_NE.record_stream(torch.cuda.default_stream(self._device))
            else:
                vectors = list(self._vectors(kind, encoder, texts, hidden_NE)[places].cpu())
            found.update(zip([ended[place].work for place in places], vectors, strict=True))
        if self._stream is not None:
            self._stream.synchronize()
        return found

    @staticmethod
    def _vectors(kind: str, encoder: Encoder, texts: Texts, hidden_NE: Tensor) -> Tensor:
        """Return one float32 vector for each of the texts, [B, E] or [B, 1]."""
        if kind == "mean":
            sums_BE = torch.zeros(len(texts.lengths_B), hidden_NE.shape[1], device=hidden_NE.device)
            return sums_BE.index_add_(0, texts.texts_N, hidden_NE.float()) / texts.lengths_B[:, None]
        if kind == "last":
            return hidden_NE[texts.starts_B + texts.lengths_B - 1].float()
        first_BE = hidden_NE[texts.starts_B]
        return (encoder.scores(first_BE) if kind == "score" else first_BE).float()


@contextlib.contextmanager
def _faults_are_fatal() -> Iterator[None]:
    """Turn a fault of the device, after which its context is lost, into `EngineCrashed`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except torch.AcceleratorError as error:
        raise EngineCrashed(f"the device failed: {error}") from error
