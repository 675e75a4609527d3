"""`cuda_ops`: the operations of a model's layers on a GPU, with the kernels that it can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.weights import DecoderWeights
from headrace.engine.model.cuda.compiling import compiles
from headrace.engine.model.experts import routing_of
from headrace.engine.model.latent import has_latents, uniform_latents
from headrace.engine.model.network.foreign import Network
from headrace.engine.model.network.rotation import growth_table, rotation_table
from headrace.engine.model.shared.heads import attention_kinds, head_shape
from headrace.engine.model.spec import DecoderSpec, MixerSpec, Paged
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.steps import CudaKv, CudaStep, PrefillStep
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.codes.kinds import Kind
from headrace.ops.cuda.codes.layout import CodeLayout
from headrace.ops.cuda.experts.packed import ExpertProducts
from headrace.ops.cuda.hazards import Chain
from headrace.ops.cuda.kernels import KERNELS, Kernels
from headrace.ops.cuda.latents.ops import CudaLatentOps
from headrace.ops.cuda.latents.shape import LatentShape
from headrace.ops.cuda.products.linear import LinearScratch
from headrace.ops.cuda.products.packed import CudaProduct, Products
from headrace.ops.cuda.products.registry import ProductRoom
from headrace.ops.formats import Stored
from headrace.ops.paged import KvScales

__all__ = ["CudaDecoder", "cuda_ops", "is_decode", "kinds_in", "kinds_of", "positions_of"]

_Kernel = TypeVar("_Kernel")
CudaDecoder: TypeAlias = Network[CudaProduct, CudaStep, CudaKv]


def cuda_ops(
    spec: DecoderSpec,
    *,
    page_size: int,
    max_positions: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    kv_scales: Mapping[int, KvScales],
    device: torch.device,
    arch: Arch,
    kernels: Kernels = KERNELS,
    codes: Sequence[Kind] = (),
) -> dict[MixerSpec, CudaOps]:
    """Return the operations of each kind of mixer that `spec` has; `codes` are the kinds of codes of its weights.

    Raises:
        ModelRejected: The layers differ in what the norms need alike, or an attention is a variant that no kernel
            computes.
    """
    if has_latents(spec):
        return _latent_ops(spec, page_size, max_positions, dtype, device, arch, kernels, codes)
    kinds = attention_kinds(spec)
    rotations = {
        (rope, each.rotary_dim): torch.cat(rotation_table(spec.ropes[rope], each, max_positions, device), dim=1)
        for each in kinds
        for rope in (each.rope, each.early_rope)
        if rope is not None
    }
    products, experts = _products(spec, dtype, kinds[0].head_dim, device, arch, kernels, codes)
    scales = _scales(spec, kv_scales)
    return {
        attention: CudaOps(
            head_shape(attention, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype),
            cos_sin_PD=rotations[attention.rope, attention.rotary_dim],
            products=products,
            experts=experts,
            kv_scales=scales,
            early_cos_sin_PD=(
                None if attention.early_rope is None else rotations[attention.early_rope, attention.rotary_dim]
            ),
            growth_P=growth_table(attention, max_positions, device),
        )
        for attention in kinds
    }


def _scales(spec: DecoderSpec, kv_scales: Mapping[int, KvScales]) -> dict[int, KvScales]:
    """Return the scales by layer, where layers that read the keys and values of another one have that one's."""
    found = {}
    for number, layer in enumerate(spec.layers):
        state = layer.mixer.state
        stored = number if not isinstance(state, Paged) or state.source is None else state.source
        if stored in kv_scales:
            found[number] = kv_scales[stored]
    return found


def _latent_ops(
    spec: DecoderSpec,
    page_size: int,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    arch: Arch,
    kernels: Kernels,
    codes: Sequence[Kind],
) -> dict[MixerSpec, CudaOps]:
    """Do what `cuda_ops` does, for a model with latent vectors in the cache."""
    mixer = uniform_latents(spec)
    shape = LatentShape(
        heads=mixer.heads, latent_dim=mixer.latent_dim, rotated_dim=mixer.rotated_dim, scale=mixer.scale,
        page_size=page_size, dtype=dtype,
    )  # fmt: skip
    products, experts = _products(spec, dtype, shape.head_dim, device, arch, kernels, codes)
    table_PR = torch.cat(rotation_table(spec.ropes[mixer.rope], mixer.rotated, max_positions, device), dim=1)
    return {
        mixer: CudaLatentOps(
            shape, cos_sin_PR=table_PR, paired=mixer.interleaved, products=products, experts=experts
        )
    }  # fmt: skip


def _products(
    spec: DecoderSpec,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
    arch: Arch,
    kernels: Kernels,
    codes: Sequence[Kind],
) -> tuple[Products, ExpertProducts]:
    """Return the kernels of products, and those of experts, on one stream."""
    room = ProductRoom(LinearScratch(device, arch), spec.uniform_epsilon, arch.has("dependent_launch"), Chain())
    able = [*(kernel for kind in codes for kernel in kernels.coded(kind)), *kernels.products]
    able = [each for each in able if each.lacks(arch, dtype, head_dim) is None]
    products = _built(
        able, lambda each: each.builds(updates=False), "products are left to Triton and cuBLAS, which are slower"
    )
    experts = () if routing_of(spec) is None else kernels.experts
    experts = _built(experts, lambda each: each.builds(arch, codes), "experts are left to Triton, which is slower")
    return Products(arch, room, products), ExpertProducts(arch, room, experts)


def positions_of(step: CudaStep) -> Tensor:
    """Return the position of each of a step's tokens, [N]."""
    return step.positions_N if isinstance(step, PrefillStep) else step.inputs.positions_B


def is_decode(step: CudaStep) -> bool:
    """Return whether each row of a step has one token, or few."""
    return not isinstance(step, PrefillStep)


def kinds_of(weights: DecoderWeights) -> list[Kind]:
    """Return the kinds of codes that a model's weights have, in the order of their names."""
    of_layers = (
        matrix
        for number in range(len(weights.layers))
        for sublayer in (weights.layers[number].mixer, weights.layers[number].feed)
        for matrix in sublayer.matrices.values()
    )
    others = () if weights.per_layer is None else (weights.per_layer.product_XE,)
    return kinds_in((*of_layers, *others, weights.head))


def kinds_in(matrices: Iterable[Stored]) -> list[Kind]:
    """Return the kinds of codes that matrices have, in the order of their names."""
    formats = [piece.format for matrix in matrices for piece in matrix.pieces()]
    kinds = {format.kind for format in formats if isinstance(format, CodeLayout)}
    return sorted(kinds, key=lambda kind: kind.name)


def _built(
    kernels: Sequence[_Kernel], builds: Callable[[_Kernel], Sequence[Callable[[], object]]], without: str
) -> tuple[_Kernel, ...]:
    """Compile the kernels that are compiled ahead; return all, or without these if one cannot be had.

    Args:
        kernels: Those that can run.
        builds: Returns the functions that compile a kernel ahead; none for others.
        without: As `compiles` takes it.
    """
    asked = [(each, builds(each)) for each in kernels]
    if compiles([build for _, some in asked for build in some], without):
        return tuple(kernels)
    return tuple(each for each, some in asked if not some)
