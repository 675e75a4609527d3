"""`Device`: an opened device with a model on it, and how many pages fit its memory; allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headrace.adapters.bank import AdapterDevice
from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams
from headrace.engine.model.spec import Attention, DecoderSpec
from headrace.engine.scheduling.plan import Ability, Capacity, Runner
from headrace.engine.stats import WeightPart

__all__ = ["BuiltKernels", "Device", "Limits", "fit", "within_context"]


@dataclass(frozen=True, slots=True)
class BuiltKernels:
    """The kernels that were compiled ahead for a model."""

    folder: Path
    """Folder of the kernels, in `EngineConfig.kernel_cache`."""
    count: int
    """Number of kernels that the folder holds, those of other models among them."""
    formats: tuple[str, ...]
    """Names of the formats in which the model's weights are multiplied, dense ones last."""


@dataclass(frozen=True, slots=True)
class Device:
    """An opened device with a model on it."""

    runner: Runner
    capacity: Capacity
    name: str
    """Name as in `EngineConfig.device`, but never "auto"."""
    dtype: str
    """Name of the dtype of the arithmetic."""
    page_bytes: int
    """Memory of one page over all layers."""
    abilities: frozenset[Ability] = frozenset()
    """Abilities of the runner, as in `Opened`."""
    adapters: AdapterDevice | None = None
    """Description of the device's adapters, as in `Opened`; None without adapters."""
    weights: tuple[WeightPart, ...] = ()
    """Formats and bytes of the weights, as in `EngineInfo`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a step that a configuration set or left to the device."""

    context: int
    rows: int
    batched_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, spec: DecoderSpec, *, rows: int, batched_tokens: int) -> Limits:
        """Return the sizes that `config` asks for, with the device's defaults for the rest.

        Raises:
            InvalidParams: The context is longer than the model was made for.
        """
        context = spec.max_context
        if config.max_context is not None:
            if config.max_context > context:
                raise InvalidParams(
                    f"max_context: this model was made for {context}, got {config.max_context}",
                    field="max_context",
                    value=config.max_context,
                    limit=context,
                )
            context = config.max_context
        rows = config.max_rows or min(rows, config.max_batched_tokens or rows)
        return cls(context, rows, config.max_batched_tokens or max(batched_tokens, rows))


def within_context(spec: DecoderSpec, context: int) -> DecoderSpec:
    """Return the spec of a model that runs with `context` tokens at most: what no position of it needs is left out."""
    layers = []
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention) and mixer.growth is not None and context <= mixer.growth.context:
            layer = replace(layer, mixer=replace(mixer, growth=None))
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def fit(config: EngineConfig, spec: DecoderSpec, limits: Limits, *, page_bytes: int, free_bytes: int) -> Capacity:
    """Return the capacity of a device: pages from `kv_memory`, or from `free_bytes` up to what all rows can use.

    Raises:
        InvalidParams: Not even one page fits.
    """
    if config.kv_memory is None:
        pages = min(limits.rows * -(-limits.context // config.page_size), free_bytes // page_bytes)
    else:
        pages = config.kv_memory // page_bytes
    if pages < 1:
        have = free_bytes if config.kv_memory is None else config.kv_memory
        raise InvalidParams(
            f"kv_memory: one page takes {page_bytes} bytes, got {have}",
            field="kv_memory",
            value=have,
            limit=page_bytes,
        )
    return Capacity(
        num_pages=pages,
        page_size=config.page_size,
        max_rows=limits.rows,
        max_batched_tokens=limits.batched_tokens,
        max_context=limits.context,
        vocab_size=spec.vocab_size,
        window=_window(spec),
    )


def _window(spec: DecoderSpec) -> int | None:
    """Return the longest attention window of the layers, in tokens; None if some layer attends to all tokens."""
    windows = [window for window in spec.windows if window is not None]
    return max(windows) if len(windows) == spec.num_layers else None
