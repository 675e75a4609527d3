"""`open_cpu`: opens a model on the CPU. Next to read: sizing.py, runner.py."""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from dataclasses import replace

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable
from headrace.engine.model.checkpoint.weights import Source, open_inventory
from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.cpu.draft_opening import CpuDraftSource
from headrace.engine.model.cpu.head_opening import CpuHeadSource
from headrace.engine.model.cpu.heads import LoadHead
from headrace.engine.model.cpu.loading import foreign_loader, is_native, loader
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cpu.runner import CpuRunner
from headrace.engine.model.cpu.sizing import CpuSizes, cpu_dtype, cpu_limits, cpu_sizes, runs_native
from headrace.engine.model.drafting.draft_model import Drafting, DraftSource
from headrace.engine.model.drafting.heads.source import head_source
from headrace.engine.model.drafting.ngram import NgramDrafter
from headrace.engine.model.network.foreign import ForeignModel
from headrace.engine.model.shared.adapter_device import adapter_device
from headrace.engine.model.shared.device import Device, within_context
from headrace.engine.model.shared.memory import return_freed_memory
from headrace.engine.model.shared.torch_threads import default_threads
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.speculation import Ngram
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.library import Context

__all__ = ["open_cpu"]

_GRANULE_BYTES = 4096  # bounds what slots may hold; on a CPU they take no memory of their own


def open_cpu(
    config: EngineConfig, spec: DecoderSpec, source: Source | ForeignModel, draft: Drafting | None = None
) -> Device:
    """Load the weights and make the runner.

    Args:
        config: Options of the engine.
        spec: The shape of the model.
        source: Its weights.
        draft: The draft model that guesses tokens, or the folder of the head that does; None where neither does.

    Raises:
        ModelRejected: The weights cannot be used.
        DeviceUnavailable: The host has too little memory for the model.
        InvalidParams: An option does not fit the model or the device.
    """
    dtype, limits = cpu_dtype(config), cpu_limits(config, spec)
    spec = within_context(spec, limits.context)
    threads = config.cpu_threads or default_threads()
    context = Context(threads) if runs_native(spec) else None
    ops = cpu_ops(spec, page_size=config.page_size, max_positions=limits.context, dtype=dtype, context=context)
    head = None
    if draft is not None and not isinstance(draft, DraftSource):
        named, packed = head_source(config, spec, draft), config.dtype == "auto"
        head = CpuHeadSource.of(named, ops, max_positions=limits.context, context=context, keep_packed=packed)
    with ExitStack() as files:
        if not isinstance(source, ForeignModel) and source != "random":
            source = files.enter_context(open_inventory(source, spec))  # once, for the sizes and for the weights
        sizes = cpu_sizes(config, spec, source, ops)
        if head is not None:
            page_bytes, weights = sizes.page_bytes + head.page_bytes, (*sizes.weights, *head.parts())
            sizes = replace(sizes, page_bytes=page_bytes, weights=weights)
        drafting = None
        if isinstance(draft, DraftSource):
            drafting = CpuDraftSource.of(draft, files, max_context=limits.context, threads=threads, context=context)
            sizes = drafting.beside(sizes)
        return _open(config, spec, source, ops, sizes, threads, None if head is None else head.load, drafting)


def _open(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source | ForeignModel,
    ops: dict[MixerSpec, CpuOps],
    sizes: CpuSizes,
    threads: int,
    load_head: LoadHead | None,
    drafting: CpuDraftSource | None,
) -> Device:
    dtype, capacity = sizes.dtype, sizes.capacity()
    if drafting is not None:
        capacity = drafting.draft.within_windows(capacity)
    kv_bytes = capacity.num_pages * sizes.page_bytes
    activations = torch.float32 if is_native(ops) else dtype
    bank = CpuBank(config.adapter_slots, capacity.max_rows, activations) if config.adapter_slots else None
    adapters = None
    if bank is not None:
        adapters = adapter_device(config, spec, bank, dtype=torch.float32, granule_bytes=_GRANULE_BYTES)
    failure = ""
    try:
        runner = _make_runner(config, spec, source, ops, capacity, dtype, bank, threads, load_head, drafting)
    except MemoryError as error:
        failure = str(error)
        traceback.clear_frames(error.__traceback__)  # the frames hold what was loaded so far
    else:
        name = str(dtype).removeprefix("torch.")
        return Device(runner, capacity, "cpu", name, sizes.page_bytes, CpuRunner.abilities, adapters, sizes.weights)
    return_freed_memory()
    raise DeviceUnavailable(
        f"device: the host has too little memory for this model and {kv_bytes} bytes of pages: {failure}",
        field="device",
        value=config.device,
    )


def _make_runner(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source | ForeignModel,
    ops: dict[MixerSpec, CpuOps],
    capacity: Capacity,
    dtype: torch.dtype,
    bank: CpuBank | None,
    threads: int,
    load_head: LoadHead | None,
    drafting: CpuDraftSource | None,
) -> CpuRunner:
    if isinstance(source, ForeignModel):
        load = foreign_loader(source, ops, dtype)
    else:
        load = loader(config, spec, source, ops, dtype, threads)
    drafter = NgramDrafter(config.speculation.longest) if isinstance(config.speculation, Ngram) else None
    load_draft = None if drafting is None else drafting.load
    return CpuRunner(load, ops, capacity, threads, bank, drafter, load_head, load_draft)
