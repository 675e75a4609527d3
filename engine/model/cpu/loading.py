"""Functions that read a decoder for the CPU, at opening and again after a sleep without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.life.progress import LoggedProgress, weights_read
from headrace.engine.model.checkpoint.reread import rereading
from headrace.engine.model.checkpoint.weights import Source, open_weights
from headrace.engine.model.cpu.runner import CpuDecoder
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.network.foreign import ForeignModel
from headrace.engine.model.shared.load_threads import load_threads
from headrace.engine.model.shared.memory import return_freed_memory
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.block import NativeOps

__all__ = ["foreign_loader", "is_native", "loader"]


def is_native(ops: Mapping[MixerSpec, CpuOps]) -> bool:
    """Return whether the operations are those in C."""
    return any(isinstance(each, NativeOps) for each in ops.values())


def foreign_loader(model: ForeignModel, ops: dict[MixerSpec, CpuOps], dtype: torch.dtype) -> Callable[[], CpuDecoder]:
    """Return a function that reads a model whose layers another library computes."""

    def load() -> CpuDecoder:
        decoder: CpuDecoder = model.open(
            ops,
            lambda step: step.positions_N,
            dtype=dtype,
            device=torch.device("cpu"),
            activations=torch.float32 if is_native(ops) else None,
        )
        return_freed_memory()
        return decoder

    return load


def loader(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source,
    ops: dict[MixerSpec, CpuOps],
    dtype: torch.dtype,
    threads: int,
    what: str = "weights",
) -> Callable[[], CpuDecoder]:
    """Return a function that reads a model with native code.

    Args:
        config: Options of the engine.
        spec: The shape of the model.
        source: Its weights, which are open at the first call; they are opened anew at every further one.
        ops: The operations that compute it.
        dtype: Dtype of the arithmetic.
        threads: Number of threads that read and pack.
        what: Name of what is read, for lines of the log.
    """
    again = rereading(source)  # what is open now is closed by then
    sources = iter([source])

    def load() -> CpuDecoder:
        packed = config.dtype == "auto"
        read_from = next(sources, None) or again()
        progress = LoggedProgress(partial(weights_read, what=what))
        with (
            load_threads(threads) as each,
            open_weights(
                read_from,
                spec,
                dtype=dtype,
                keep_packed=packed,
                keep_embedding=is_native(ops),
                seed=config.seed,
                progress=progress,
                quantize=config.quantize,
                quantize_head=config.quantize_head,
            ) as weights,
        ):
            decoder: CpuDecoder = Decoder(spec, weights, ops, each)
        del weights  # packed by now; loading passed through more than it keeps
        return_freed_memory()
        return decoder

    return load
