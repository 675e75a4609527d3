"""`CpuSizes`: the CPU's defaults, what a model takes there, and the pages that fit beside it; keeps no memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable, InvalidParams
from headrace.engine.model.checkpoint.weights import Source, describe_weights
from headrace.engine.model.cpu.kept import kept_parts
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.latent import has_latents
from headrace.engine.model.network.foreign import ForeignModel
from headrace.engine.model.shared.device import Limits, fit
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.engine.model.shared.memory import free_host_bytes
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.stats import WeightPart
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.block import NativeOps
from headrace.ops.cpu.native.library import Context, library

__all__ = ["FREE_SHARE", "CpuSizes", "cpu_dtype", "cpu_limits", "cpu_sizes", "runs_native"]

FREE_SHARE = 0.125
"""Share of the memory that the model leaves free that pages take by default: the application needs some, too."""
_ROWS = 64
_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class CpuSizes:
    """The memory of one model on the CPU."""

    config: EngineConfig
    spec: DecoderSpec
    limits: Limits
    dtype: torch.dtype
    """Dtype of the arithmetic."""
    page_bytes: int
    weights: tuple[WeightPart, ...]
    """Formats and bytes of the weights as they are kept."""

    def free_beside(self) -> int:
        """Return the bytes of host memory that the model leaves free now.

        Raises:
            DeviceUnavailable: The host has too little memory for the model alone.
        """
        free, needed = free_host_bytes(), sum(part.nbytes for part in self.weights)
        if needed > free:
            raise DeviceUnavailable(
                f"device: the weights take {needed} bytes as the CPU keeps them, the host has {free} free",
                field="device",
                value=self.config.device,
                limit=free,
            )
        return free - needed

    def capacity(self) -> Capacity:
        """Return the pages, rows and tokens of an engine that opens now.

        Raises:
            DeviceUnavailable: The host has too little memory for the model alone.
            InvalidParams: Not even one page fits, or `kv_memory` is more than is free.
        """
        free = self.free_beside()
        found = fit(self.config, self.spec, self.limits, page_bytes=self.page_bytes, free_bytes=int(free * FREE_SHARE))
        if found.num_pages * self.page_bytes > free:
            # The system might grant the memory, and kill the process once the pages are written.
            raise InvalidParams(
                f"kv_memory: the host has {free} bytes free beside the model, got {self.config.kv_memory}",
                field="kv_memory",
                value=self.config.kv_memory,
                limit=free,
            )
        return found


def cpu_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of the arithmetic.

    Raises:
        InvalidParams: The dtype of keys and values is one of GPUs.
    """
    if config.kv_dtype != "auto":
        raise InvalidParams(
            f"kv_dtype: {config.kv_dtype} is for GPUs; a CPU keeps its dtype", field="kv_dtype", value=config.kv_dtype
        )
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def cpu_limits(config: EngineConfig, spec: DecoderSpec) -> Limits:
    """Return the sizes of a step on a CPU.

    Raises:
        InvalidParams: The context is longer than the model was made for.
    """
    return Limits.of(config, spec, rows=_ROWS, batched_tokens=_BATCHED_TOKENS)


def runs_native(spec: DecoderSpec) -> bool:
    """Return whether the operations in C run the model: where they could be compiled, but for variants of attention."""
    return (spec.has_softmax_alone or has_latents(spec)) and library() is not None


def cpu_sizes(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source | ForeignModel,
    ops: Mapping[MixerSpec, CpuOps] | None = None,
) -> CpuSizes:
    """Return the memory of a model that `ops` run; None makes such as would run it, for the time of the call.

    Raises:
        ModelRejected: A tensor is missing, left over or of another shape, or a file is damaged.
        InvalidParams: An option does not fit the model or the device.
    """
    dtype, limits = cpu_dtype(config), cpu_limits(config, spec)
    if ops is None:
        context = Context(1) if runs_native(spec) else None
        made = cpu_ops(spec, page_size=config.page_size, max_positions=1, dtype=dtype, context=context)
        with closing(next(iter(made.values()))):
            return cpu_sizes(config, spec, source, made)
    first = next(iter(ops.values()))
    page_bytes = kv_layout(spec, ops).page_bytes(dtype)
    if isinstance(source, ForeignModel):
        return CpuSizes(config, spec, limits, dtype, page_bytes, source.parts(dtype))
    weights = describe_weights(
        source,
        spec,
        dtype=dtype,
        keep_packed=config.dtype == "auto",
        keep_embedding=isinstance(first, NativeOps),
        quantize=config.quantize,
        quantize_head=config.quantize_head,
    )
    return CpuSizes(config, spec, limits, dtype, page_bytes, kept_parts(weights, first))
