"""`open_cpu`: opens a model on the CPU; the only module that knows the CPU's defaults. Next to read: runner.py."""

from __future__ import annotations

import math
import traceback

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable, InvalidParams
from headrace.engine.life.progress import LoggedProgress, weights_read
from headrace.engine.model.checkpoint.plan import all_parts
from headrace.engine.model.checkpoint.reread import rereading
from headrace.engine.model.checkpoint.weights import Source, open_weights, stored_formats
from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.cpu.runner import CpuDecoder, CpuRunner, cpu_ops
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.shared.adapter_device import adapter_device
from headrace.engine.model.shared.device import Device, Limits, fit
from headrace.engine.model.shared.load_threads import load_threads
from headrace.engine.model.shared.memory import free_host_bytes, return_freed_memory
from headrace.engine.model.shared.torch_threads import default_threads
from headrace.engine.model.spec import Attention, DecoderSpec, MixerSpec
from headrace.engine.scheduling.plan import Capacity
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.block import NativeOps
from headrace.ops.cpu.native.library import Context, library
from headrace.ops.cpu.native.linear import is_native

__all__ = ["open_cpu"]

_GRANULE_BYTES = 4096  # bounds what slots may hold; on a CPU they take no memory of their own
_ROWS = 64
_BATCHED_TOKENS = 512
_FREE_SHARE = 0.125  # of the memory that the model leaves free: the application needs some, too


def open_cpu(config: EngineConfig, spec: DecoderSpec, source: Source) -> Device:
    """Load the weights and make the runner.

    Raises:
        ModelRejected: The weights cannot be used.
        DeviceUnavailable: The host has too little memory for the model.
        InvalidParams: An option does not fit the model or the device.
    """
    if config.kv_dtype != "auto":
        raise InvalidParams(
            f"kv_dtype: {config.kv_dtype} is for GPUs; a CPU keeps its dtype", field="kv_dtype", value=config.kv_dtype
        )
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    limits = Limits.of(config, spec, rows=_ROWS, batched_tokens=_BATCHED_TOKENS)
    threads = config.cpu_threads or default_threads()
    context = Context(threads) if _runs_native(config, spec, source) else None
    ops = cpu_ops(spec, page_size=config.page_size, max_positions=limits.context, dtype=dtype, context=context)
    page_bytes = next(iter(ops.values())).page_bytes(spec.num_layers)
    free = _free_beside(config, spec, dtype)
    capacity = fit(config, spec, limits, page_bytes=page_bytes, free_bytes=int(free * _FREE_SHARE))
    kv_bytes = capacity.num_pages * page_bytes
    if kv_bytes > free:  # the system might grant the memory, and kill the process once the pages are written
        raise InvalidParams(
            f"kv_memory: the host has {free} bytes free beside the model, got {config.kv_memory}",
            field="kv_memory",
            value=config.kv_memory,
            limit=free,
        )
    activations = dtype if context is None else torch.float32
    bank = CpuBank(config.adapter_slots, capacity.max_rows, activations) if config.adapter_slots else None
    adapters = None
    if bank is not None:
        adapters = adapter_device(config, spec, bank, dtype=torch.float32, granule_bytes=_GRANULE_BYTES)
    failure = ""
    try:
        runner = _make_runner(config, spec, source, ops, capacity, dtype, bank, threads)
    except MemoryError as error:
        failure = str(error)
        traceback.clear_frames(error.__traceback__)  # the frames hold what was loaded so far
    else:
        name = str(dtype).removeprefix("torch.")
        return Device(runner, capacity, "cpu", name, page_bytes, CpuRunner.abilities, adapters)
    return_freed_memory()
    raise DeviceUnavailable(
        f"device: the host has too little memory for this model and {kv_bytes} bytes of pages: {failure}",
        field="device",
        value=config.device,
    )


def _runs_native(config: EngineConfig, spec: DecoderSpec, source: Source) -> bool:
    """Return whether the operations in C run the model: those for quantised weights, which are kept as stored."""
    if config.dtype != "auto" or any(kind.scores != Attention.scores for kind in spec.attention_kinds):
        return False
    return any(map(is_native, stored_formats(source, spec))) and library() is not None


def _free_beside(config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Return the bytes of host memory that a model leaves free.

    Raises:
        DeviceUnavailable: The host has too little memory for the model alone.
    """
    free = free_host_bytes()
    elements = sum(math.prod(shape) for _, shape in all_parts(spec))
    if spec.has_head and (spec.tied_head or dtype is torch.bfloat16):
        elements += (
            spec.vocab_size * spec.hidden_size
        )  # the table of embeddings, or the head's rows, beside its packing
    needed = elements * dtype.itemsize
    if needed > free:
        raise DeviceUnavailable(
            f"device: the weights take {needed} bytes in {str(dtype).removeprefix('torch.')}, the host has {free} free",
            field="device",
            value=config.device,
            limit=free,
        )
    return free - needed


def _make_runner(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source,
    ops: dict[MixerSpec, CpuOps],
    capacity: Capacity,
    dtype: torch.dtype,
    bank: CpuBank | None,
    threads: int,
) -> CpuRunner:
    again = rereading(source)  # an open file is closed by then
    sources = iter([source])

    keeps_embedding = any(isinstance(each, NativeOps) for each in ops.values())

    def load() -> CpuDecoder:
        packed = config.dtype == "auto"
        read_from = next(sources, None) or again()
        progress = LoggedProgress(weights_read)
        with (
            load_threads(threads) as each,
            open_weights(
                read_from,
                spec,
                dtype=dtype,
                keep_packed=packed,
                keep_embedding=keeps_embedding,
                seed=config.seed,
                progress=progress,
                quantize=config.quantize,
            ) as weights,
        ):
            decoder: CpuDecoder = Decoder(spec, weights, ops, each)
        del weights  # packed by now; loading passed through more than it keeps
        return_freed_memory()
        return decoder

    return CpuRunner(load, ops, capacity, threads, bank)
