"""`adapter_device`: describes a device that takes adapters to the engine; puts no adapter on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from headrace.adapters.bank import AdapterBank, AdapterDevice
from headrace.adapters.files import TakePieces, read_adapter
from headrace.adapters.layout import SITES, BlockLayout, LatentSizes, LayerSizes, ModelShape
from headrace.adapters.loaded import LoadedAdapter, Stamp
from headrace.adapters.names import AdapterNames
from headrace.adapters.stored import PIECE_BYTES
from headrace.adapters.untrusted import refuse
from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable, InvalidParams
from headrace.engine.model.experts import ExpertsBesideDense, ExpertsFeed, SharedExpert, routing_of
from headrace.engine.model.latent import has_latents, uniform_latents
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
        ModelRejected: Layers have heads that differ in a way that adapters are not given in.
    """
    attention = uniform_latents(spec).rotated if has_latents(spec) else _attention_of(spec)
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
        latents=_latent_sizes(spec),
        takes_virtual=not has_normed_values(spec) and not has_latents(spec),
        left_out=_left_out(spec),
    )


def _latent_sizes(spec: DecoderSpec) -> LatentSizes | None:
    """Return the sizes of latent attention; None for a model without."""
    if not has_latents(spec):
        return None
    mixer = uniform_latents(spec)
    queries, values = mixer.heads * (mixer.plain_dim + mixer.rotated_dim), mixer.heads * mixer.value_dim
    return LatentSizes(mixer.query_latent_dim or 0, queries, mixer.cached_dim, values)


def _left_out(spec: DecoderSpec) -> str:
    """Return in words which products adapters do not update."""
    found = [] if routing_of(spec) is None else ["experts and their routers take none"]
    if has_latents(spec):
        found.append(f"{spec.names.roles['kv_b']} takes none, whose parts multiply queries and sums of latent vectors")
    return " and ".join(found)


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
    qkv = layer.mixer.parameters(spec.hidden_size).get("qkv")
    rows = {} if qkv is None else {part.role: part.rows for part in qkv.parts}
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
    llama, names, roles = AdapterNames(), spec.names, _roles(spec)
    if not names.is_peft:
        shared = _SHARED if "shared_up" in roles else ()
        return replace(llama, modules=(*llama.modules, *shared), homes=names.homes)
    found = {(names.roles[role], module) for role, module in roles.items() if role in names.roles}
    if found <= set(llama.modules):
        return replace(llama, homes=names.homes)
    top = names.roles["embedding"], names.roles["head"]
    return AdapterNames(names.layer_prefix, tuple(sorted(found)), *top, names.prefix, names.homes)


def _roles(spec: DecoderSpec) -> dict[str, str]:
    """Return the roles of the products that adapters update, each with what `AdapterNames` calls it."""
    feeds = [_updated_feed(layer) for layer in spec.layers]
    roles = ["qkv", *SITES["qkv"], "o"]
    if has_latents(spec):
        roles = ["q" if uniform_latents(spec).query_latent_dim is None else "q_b", "q_a", "kv_a", "o"]
    if any(isinstance(feed, (DenseFeed, PlainFeed)) for feed in feeds):
        roles += ["up", "down"]
    if any(isinstance(feed, DenseFeed) for feed in feeds):
        roles += ["gate", "gate_up"]
    if any(isinstance(feed, SharedExpert) for feed in feeds):
        roles += [f"shared_{role}" for role in ("gate", "gate_up", "up", "down")]
    in_joined = {role for several in spec.names.joined.values() for role in several}
    return {role: "q" if role == "q_b" else role for role in roles if role not in in_joined}


def adapter_granules(config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, granule_bytes: int) -> int:
    """Return the device's memory for adapters in granules; by default, one adapter of the largest allowed rank fits."""
    if config.adapter_memory is not None:
        return config.adapter_memory // granule_bytes
    shape = adapter_shape(spec)
    layers = range(spec.num_layers)
    modules = [(layer, module) for layer in layers for site in shape.sites for module in shape.modules(site, layer)]

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
