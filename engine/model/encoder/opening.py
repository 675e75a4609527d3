"""`open_encoder`: opens an encoder on a CPU or a GPU; the only module that knows its defaults. Next: network.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable, InvalidParams
from headrace.engine.model.encoder.runner import EncoderRunner
from headrace.engine.model.encoder.spec import EncoderSpec, longest_text
from headrace.engine.model.encoder.weights import encoder_parts, load_encoder
from headrace.engine.model.shared.device import Device
from headrace.engine.model.shared.find_gpu import find_gpu, means_cpu
from headrace.engine.model.shared.torch_threads import default_threads
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.stats import WeightPart

__all__ = ["describe_encoder", "encoder_dtype", "open_encoder"]

_ROWS = {"cpu": 64, "cuda": 256}
_BATCHED_TOKENS = {"cpu": 2048, "cuda": 16384}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_AUTO = {"cpu": torch.float32, "cuda": torch.float16}  # float16 keeps three more bits than bfloat16


def open_encoder(config: EngineConfig, spec: EncoderSpec, folder: Path) -> Device:
    """Load the weights and make the runner.

    Raises:
        ModelRejected: The weights cannot be used.
        DeviceUnavailable: There is no such GPU, or too little memory for the model.
        InvalidParams: An option does not fit an encoder.
    """
    for field in ("kv_dtype", "load_format", "adapter_slots", "quantize"):
        value, limit = getattr(config, field), EngineConfig.model_fields[field].default
        if value != limit:
            raise InvalidParams(
                f"{field}: an encoder takes {limit}, got {value}", field=field, value=value, limit=limit
            )
    device = torch.device("cpu") if means_cpu(config.device) else find_gpu(config.device)
    dtype = encoder_dtype(config, device)
    capacity = _capacity(config, spec, folder, device.type)
    threads = config.cpu_threads or default_threads()
    load = partial(load_encoder, folder, spec, dtype=dtype, device=device)
    try:
        with torch.inference_mode():
            runner = EncoderRunner(spec, load, device=device, threads=threads)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise DeviceUnavailable(f"device: {device} has too little memory for this model: {error}") from None
    name = str(dtype).removeprefix("torch.")
    return Device(
        runner, capacity, str(device), name, 0, runner.abilities, weights=describe_encoder(spec, folder, dtype)
    )


def encoder_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights and of the arithmetic on a device."""
    return _AUTO[device.type] if config.dtype == "auto" else _DTYPES[config.dtype]


def describe_encoder(spec: EncoderSpec, folder: Path, dtype: torch.dtype) -> tuple[WeightPart, ...]:
    """Return the bytes of an encoder's weights in `dtype` from the headers of its files.

    Raises:
        ModelRejected: A tensor is missing, left over or of another shape, or a file is damaged.
    """
    return encoder_parts(load_encoder(folder, spec, dtype=dtype, device=torch.device("meta")))


def _capacity(config: EngineConfig, spec: EncoderSpec, folder: Path, kind: str) -> Capacity:
    """Return the size of a step; there are as many pages as all rows can fill, though they stand for no memory."""
    context = config.max_context or longest_text(folder, spec)
    if context > spec.max_context:
        raise InvalidParams(
            f"max_context: this model was made for {spec.max_context}, got {context}",
            field="max_context",
            value=context,
            limit=spec.max_context,
        )
    rows = config.max_rows or min(_ROWS[kind], config.max_batched_tokens or _ROWS[kind])
    return Capacity(
        num_pages=rows * -(-context // config.page_size),
        page_size=config.page_size,
        max_rows=rows,
        max_batched_tokens=config.max_batched_tokens or max(_BATCHED_TOKENS[kind], rows),
        max_context=context,
        vocab_size=spec.vocab_size,
    )
