"""`Kernels`: all kernels among which an engine on CUDA chooses; a new one is named in one of four tuples.

Imports no compiler and needs no GPU. The declarations are in products/kernels.py, experts/kernels.py and
attention/kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from headrace.ops.cuda.attention.kernels import DECODES, PREFILLS
from headrace.ops.cuda.attention.registry import DecodeKernel, PrefillKernel
from headrace.ops.cuda.codes.kinds import Kind
from headrace.ops.cuda.experts.kernels import EXPERTS
from headrace.ops.cuda.experts.registry import ExpertKernel
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


KERNELS: Final = Kernels()
