"""`Kernels`: all kernels among which an engine on CUDA chooses; a new one is named in one of its tuples.

Imports no compiler and needs no GPU. The declarations are in products/kernels.py, experts/kernels.py,
attention/kernels.py and latents/kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from headrace.ops.cuda.attention.kernels import DECODES, PREFILLS
from headrace.ops.cuda.attention.registry import DecodeKernel, PrefillKernel
from headrace.ops.cuda.codes.kinds import Kind
from headrace.ops.cuda.experts.kernels import EXPERTS
from headrace.ops.cuda.experts.registry import ExpertKernel
from headrace.ops.cuda.latents.kernels import LATENT_DECODES, LATENT_PREFILLS
from headrace.ops.cuda.products.coded import coded
from headrace.ops.cuda.products.kernels import PRODUCTS
from headrace.ops.cuda.products.registry import ProductKernel

__all__ = ["KERNELS", "Kernels"]


class Kernels(NamedTuple):
    """Declarations of kernels; of each kind the first are preferred."""

    products: tuple[ProductKernel, ...] = PRODUCTS
    coded: Callable[[Kind], tuple[ProductKernel, ...]] = coded
    """Function that returns the kernels of products for a kind of codes."""
    experts: tuple[ExpertKernel, ...] = EXPERTS
    decodes: tuple[DecodeKernel, ...] = DECODES
    prefills: tuple[PrefillKernel, ...] = PREFILLS
    latent_decodes: tuple[DecodeKernel, ...] = LATENT_DECODES
    latent_prefills: tuple[PrefillKernel, ...] = LATENT_PREFILLS

    def to_latents(self) -> Kernels:
        """Return those of a model with latent attention: its decodes and prefills attend to latent vectors."""
        return self._replace(decodes=self.latent_decodes, prefills=self.latent_prefills)


KERNELS: Final = Kernels()
