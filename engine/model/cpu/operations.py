"""`cpu_ops`: the operations of each kind of mixer on the CPU, and where its layers keep keys and values.

Makes no weights and runs nothing. Next to read: runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias, TypedDict

import torch
from torch import Tensor

from headrace.adapters.untrusted import refuse
from headrace.engine.model.latent import has_latents, uniform_latents
from headrace.engine.model.network.rotation import growth_table, rotation_table
from headrace.engine.model.spec import Attention, DecoderSpec, MixerSpec, SinkAttention, SoftcappedAttention
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.latents import LatentPages, NativeLatentOps, TorchLatentOps
from headrace.ops.cpu.native.block import NativeOps
from headrace.ops.cpu.native.library import Context
from headrace.ops.cpu.products import PRODUCTS, CpuKernel
from headrace.ops.cpu.scores import Weigh

__all__ = ["Variants", "cpu_ops"]

Variants: TypeAlias = Mapping[str, Callable[[Attention], Weigh]]
"""For each `Attention.scores` beside softmax, a function that returns how the scores of an attention become weights."""


def _softcapped(attention: Attention) -> Weigh:
    """Return the function by which bounded scores become weights."""
    assert isinstance(attention, SoftcappedAttention)
    cap = attention.cap

    def weigh(scores: Tensor, bias: Tensor, scale: float) -> Tensor:
        capped = (scores.float() * (scale / cap)).tanh_().mul_(cap)
        return torch.softmax(capped.add_(bias), -1).to(scores.dtype)

    return weigh


_VARIANTS: Variants = MappingProxyType({SoftcappedAttention.scores: _softcapped})


_OWN_SCORES: Final = (Attention.scores, SinkAttention.scores)
"""Scores that `CpuOps` weighs by itself."""


class _Sizes(TypedDict):
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    eps: float
    cos: Tensor
    sin: Tensor
    window: int | None
    scale: float | None
    early: tuple[Tensor, Tensor] | None
    growth_P: Tensor | None
    only_queries: bool


def cpu_ops(
    spec: DecoderSpec,
    *,
    page_size: int,
    max_positions: int,
    dtype: torch.dtype,
    variants: Variants = _VARIANTS,
    products: Sequence[CpuKernel] = PRODUCTS,
    context: Context | None = None,
) -> dict[MixerSpec, CpuOps]:
    """Return the operations of each kind of mixer that `spec` has.

    Args:
        spec: A model whose layers all attend to keys and values, or all to latent vectors.
        page_size: Tokens of a page.
        max_positions: Number of positions for which rotations are made.
        dtype: Dtype of activations, keys and values.
        variants: The variants of attention that can be computed beside softmax.
        products: The kernels for products by weights, in order of preference.
        context: Threads and memory of the operations in C, which are used if it is given. They know no variants of
            attention, have kernels of their own, and activations in float32.

    Raises:
        ModelRejected: The layers differ in what the norms need alike, one does not attend, or an attention is of no
            variant in `variants`.
    """

    def table(attention: Attention, rope: int) -> tuple[Tensor, Tensor]:
        return rotation_table(spec.ropes[rope], attention, max_positions, torch.device("cpu"))

    if has_latents(spec):
        return _latent_ops(spec, page_size, max_positions, dtype, products, context)
    found: dict[MixerSpec, CpuOps] = {}
    for attention in _attentions(spec):
        variant = variants.get(attention.scores)
        if variant is None and attention.scores not in _OWN_SCORES:
            known = ", ".join((*_OWN_SCORES, *variants))
            refuse(spec.architecture, "the scores of a layer's attention", attention.scores, known)
        cos, sin = table(attention, attention.rope)
        sizes: _Sizes = {
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "page_size": page_size,
            "eps": spec.uniform_epsilon,
            "cos": cos,
            "sin": sin,
            "window": attention.window,
            "scale": attention.scale,
            "early": None if attention.early_rope is None else table(attention, attention.early_rope),
            "growth_P": growth_table(attention, max_positions, torch.device("cpu")),
            "only_queries": attention.state.source is not None,
        }
        if context is not None:
            found[attention] = NativeOps(context, **sizes, dtype=dtype)
        else:
            weigh = None if variant is None else variant(attention)
            has_sinks = isinstance(attention, SinkAttention)
            found[attention] = CpuOps(**sizes, dtype=dtype, weigh=weigh, has_sinks=has_sinks, products=products)
    return found


def _attentions(spec: DecoderSpec) -> Iterator[Attention]:
    for mixer in spec.mixer_kinds:
        if not isinstance(mixer, Attention):
            refuse(spec.architecture, "the mixer of a layer", mixer, "attention")
        yield mixer


def _latent_ops(
    spec: DecoderSpec,
    page_size: int,
    max_positions: int,
    dtype: torch.dtype,
    products: Sequence[CpuKernel],
    context: Context | None,
) -> dict[MixerSpec, CpuOps]:
    """Do what `cpu_ops` does, for a model with latent vectors in the cache."""
    mixer = uniform_latents(spec)
    cos_PC, sin_PC = rotation_table(spec.ropes[mixer.rope], mixer.rotated, max_positions, torch.device("cpu"))
    pages = LatentPages(
        heads=mixer.heads, latent_dim=mixer.latent_dim, rotated_dim=mixer.rotated_dim, page_size=page_size,
        scale=mixer.scale, cos_PC=cos_PC, sin_PC=sin_PC, dtype=dtype, interleaved=mixer.interleaved,
    )  # fmt: skip
    eps = spec.uniform_epsilon
    if context is not None:
        return {mixer: NativeLatentOps(context, pages, eps=eps, dtype=dtype)}
    return {mixer: TorchLatentOps(pages, eps=eps, dtype=dtype, products=products)}
