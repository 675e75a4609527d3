"""`adapter_device`: describes a device that takes adapters to the engine; puts no adapter on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from headrace.adapters.bank import AdapterBank, AdapterDevice
from headrace.adapters.files import TakePieces, read_adapter
from headrace.adapters.layout import MODULES, SITES, BlockLayout, LayerSizes, ModelShape
from headrace.adapters.loaded import LoadedAdapter, Stamp
from headrace.adapters.names import AdapterNames
from headrace.adapters.stored import PIECE_BYTES
from headrace.adapters.untrusted import refuse
from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable, InvalidParams
from headrace.engine.model.experts import ExpertsBesideDense, ExpertsFeed, SharedExpert, routing_of
from headrace.engine.model.latent import has_latents
from headrace.engine.model.rope import head_places
from headrace.engine.model.shared.memory import free_host_bytes
from headrace.engine.model.spec import Attention, DecoderSpec, DenseFeed, LayerSpec, PlainFeed
from headrace.engine.model.value_normed import has_normed_values
from headrace.ops.host_memory import PiecePool

__all__ = ["adapter_device", "adapter_granules", "adapter_shape", "host_room"]

_RANK = 16  # of the adapters for which memory is kept by default
_SHARED = tuple(
    (f"mlp.{expert}.{role}_proj", f"shared_{role}")
    for expert in ("shared_expert", "shared_experts")
    for role in ("gate", "up", "down")
)
"""Modules of a shared expert by the names that they have in most families, for files that have names of their own."""


def host_room(config: EngineConfig) -> PiecePool:
    """Allocate page-locked host memory for adapters, which may take seconds.

    Raises:
        InvalidParams: `adapter_host_memory` is more than is free.
        DeviceUnavailable: So much cannot be page-locked.
    """
    wanted, free = config.adapter_host_memory, free_host_bytes()
    if wanted > free:
        raise InvalidParams(
            f"adapter_host_memory: must be at most the {free} bytes of host memory that are free, got {wanted}",
            field="adapter_host_memory",
            value=wanted,
            limit=free,
        )
    try:
        return PiecePool(wanted, PIECE_BYTES)
    except RuntimeError as error:
        raise DeviceUnavailable(
            f"device: {wanted} bytes for adapter_host_memory cannot be page-locked: {error}"
        ) from None


def adapter_shape(spec: DecoderSpec) -> ModelShape:
    """Return the sizes of a model that decide the sizes of its adapters.

    Raises:
        ModelRejected: Layers differ, where the sites of adapters have one size in all layers; or they have latent
            attention, which adapters do not update.
    """
    if has_latents(spec):
        refuse(spec.architecture, "adapter_slots", "more than 0", "0: adapters do not update latent attention")
    attention = _attention_of(spec)
    places = head_places(attention.head_dim, attention.rotated_dim, interleaved=attention.interleaved)
    layers = tuple(_sizes(spec, layer) for layer in spec.layers)
    differs = has_normed_values(spec) or len(set(layers)) > 1 or layers[0].is_shared
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=attention.heads,
        num_kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        ffn_size=layers[0].ffn,
        vocab_size=spec.vocab_size,
        virtual_scale=1.0 if spec.scales_virtual_tokens else 1.0 / spec.embedding_scale,
        head_places=None if places is None else tuple(places.tolist()),
        gated=not isinstance(spec.layers[0].feed, PlainFeed),
        names=_names(spec),
        grouped=spec.names.grouped,
        layers=layers if differs else (),
        takes_virtual=not has_normed_values(spec),
        left_out="" if routing_of(spec) is None else "experts and their routers take none",
    )


def _attention_of(spec: DecoderSpec) -> Attention:
    """Return the attention of the first layer, whose heads the others have, too, or else sizes of their own."""
    if has_normed_values(spec):
        return next(kind for kind in spec.mixer_kinds if isinstance(kind, Attention))
    attention = spec.uniform_attention
    for other in spec.attention_kinds:
        if (other.rotated_dim, other.interleaved) != (attention.rotated_dim, attention.interleaved):
            refuse(spec.architecture, "the rotated part of a layer's heads", other, "the same in all layers")
    return attention


def _sizes(spec: DecoderSpec, layer: LayerSpec) -> LayerSizes:
    """Return the outputs of the products of one layer that adapters update."""
    parameters = layer.mixer.parameters(spec.hidden_size)
    rows = {part.role: part.rows for part in parameters["qkv"].parts}
    queries, keys, values = (rows.get(f"{role}.weight", 0) for role in "qkv")
    feed = _updated_feed(layer)
    ffn = 0 if feed is None else feed.size
    return LayerSizes(
        queries, keys, values, 0 if isinstance(feed, PlainFeed) else ffn, ffn, isinstance(feed, SharedExpert)
    )


def _updated_feed(layer: LayerSpec) -> DenseFeed | PlainFeed | SharedExpert | None:
    """Return the feed of a layer that computes every token, beside experts or alone; None for experts alone."""
    match layer.feed:
        case DenseFeed() | PlainFeed():
            return layer.feed
        case ExpertsBesideDense():
            return layer.feed.dense
        case ExpertsFeed():
            return layer.feed.shared
    return None


def _names(spec: DecoderSpec) -> AdapterNames:
    """Return the names of modules in adapters: those of the checkpoint's tensors, or of Llama's."""
    llama, names, feeds = AdapterNames(), spec.names, [_updated_feed(layer) for layer in spec.layers]
    has_shared = any(isinstance(feed, SharedExpert) for feed in feeds)
    if not names.is_peft:
        return replace(llama, modules=(*llama.modules, *_SHARED) if has_shared else llama.modules, homes=names.homes)
    known = {*MODULES, *SITES}
    if not any(isinstance(feed, DenseFeed) for feed in feeds):
        known -= {"gate", "gate_up"}
        if not any(isinstance(feed, PlainFeed) for feed in feeds):
            known -= {"up", "down"}
    if has_shared:
        known |= {f"shared_{role}" for role in ("gate", "gate_up", "up", "down")}
    known.difference_update(*names.joined.values())
    found = {(name, role) for role, name in names.roles.items() if role in known}
    if found <= set(llama.modules):
        return replace(llama, homes=names.homes)
    top = names.roles["embedding"], names.roles["head"]
    return AdapterNames(names.layer_prefix, tuple(sorted(found)), *top, names.prefix, names.homes)


def adapter_granules(config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, granule_bytes: int) -> int:
    """Return the device's memory for adapters in granules; by default, one adapter of the largest allowed rank fits."""
    if config.adapter_memory is not None:
        return config.adapter_memory // granule_bytes
    shape = adapter_shape(spec)
    layers = range(spec.num_layers)
    modules = [(layer, module) for layer in layers for site in SITES for module in shape.modules(site, layer)]

    def granules(rank: int, modules: list[tuple[int, str]]) -> int:
        layout = BlockLayout.of(shape, dict.fromkeys(modules, rank))
        return -(-layout.elements * dtype.itemsize // granule_bytes)

    largest = granules(config.max_adapter_rank, [*modules, (-1, "embed"), (-1, "head")])
    return max(config.adapter_slots * granules(_RANK, modules), largest)


def adapter_device(
    config: EngineConfig,
    spec: DecoderSpec,
    bank: AdapterBank,
    *,
    dtype: torch.dtype,
    granule_bytes: int,
    take: TakePieces | None = None,
) -> AdapterDevice:
    """Return the description of a device that takes adapters.

    Args:
        config: The number of adapters and their largest rank.
        spec: The model.
        bank: The device's slots.
        dtype: Dtype of the device's arithmetic.
        granule_bytes: Unit of the device's memory for adapters, in bytes.
        take: Returns memory to read an adapter into, where the device unpacks adapters itself.
    """
    shape = adapter_shape(spec)

    def read(path: str, root: Path | None, stamp: Stamp | None) -> LoadedAdapter:
        most = config.max_adapter_rank
        return read_adapter(path, shape, dtype, max_rank=most, root=root, take=take, stamp=stamp)

    granules = adapter_granules(config, spec, dtype, granule_bytes)
    return AdapterDevice(bank, config.adapter_slots, granules, granule_bytes, read)
