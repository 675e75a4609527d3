"""Products of few rows, their weights dealt out evenly among multiprocessors (csrc/even_linear.cu); never for prefills.

A product is its weight's bytes and little else. This one keeps every multiprocessor reading for the same time, begins
with its own weights while the kernel before it still runs, and takes residual, norm and activation into itself. Needs
Hopper for its copies and products. I input features, O output features, N rows.
"""

from __future__ import annotations

import functools
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from flashinfer.jit.core import gen_jit_spec

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda_linear import LinearScratch

__all__ = ["EvenLinear", "Squares"]

_SOURCE = Path(__file__).parent / "csrc" / "even_linear.cu"
_LINE = 64
_PLAIN, _GATED, _ADD = range(3)
_HOPPER = 9


class _Tile(NamedTuple):
    """How a product is divided: blocks of 64 features, lines of 64 inputs in a chunk, and chunks in shared memory."""

    blocks: int
    lines: int
    slots: int


# Measured on an H200. Up to 64 rows two launches have room on a multiprocessor.
_TILES = {16: _Tile(1, 2, 5), 32: _Tile(1, 2, 4), 64: _Tile(2, 1, 4), 128: _Tile(2, 1, 6), 256: _Tile(2, 1, 4)}
_MOST_ROWS = max(_TILES)
_MOST_BLOCKS = 4  # of a tile, on two multiprocessors


class Squares(NamedTuple):
    """What a norm still needs of inputs that were multiplied by its weight."""

    total_NE: Tensor
    """The sum, of which the norm is."""
    parts_EN: Tensor
    """float32 [E / 64, N]: its squares, summed over 64 features each."""


class EvenLinear:
    """The products of one stream, whose scratch they share."""

    def __init__(self, scratch: LinearScratch, *, eps: float, pdl: bool = False) -> None:
        """Compute with `scratch`, and `eps` of the norms; with `pdl` launch programmatically dependent.

        No kernel before a product may then write its weight.
        """
        self._scratch, self._eps, self._pdl = scratch, eps, pdl
        device = scratch.planes.device
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count

    @staticmethod
    def build(dtype: torch.dtype) -> None:
        """Compile the kernels; takes half a minute and a compiler the first time.

        Raises:
            RuntimeError: They cannot be compiled.
            OSError: There is nothing to compile them with.
        """
        with ThreadPoolExecutor(len(_TILES)) as pool:
            list(pool.map(lambda rows: _module(rows, dtype), _TILES))

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernels can be compiled."""
        return torch.cuda.get_device_capability(device)[0] == _HOPPER and dtype in (torch.bfloat16, torch.float16)

    def fits(self, rows: int, size_out: int, size_in: int) -> bool:
        """Whether a product of such sizes can be computed; gates and ups both count as outputs."""
        whole = size_out % _LINE == 0 and size_in % _LINE == 0
        return 1 < rows <= _MOST_ROWS and whole and size_out // _LINE + _MOST_BLOCKS <= len(self._scratch.counters)

    def product(self, x_NI: Tensor, weight_OI: Tensor, out_NO: Tensor, squares: Squares | None = None) -> None:
        """`out = x W^T`, accumulated in float32.

        Args:
            x_NI: bf16 or fp16, last dimension contiguous.
            weight_OI: Same dtype, contiguous.
            out_NO: Same dtype, last dimension contiguous; must not overlap `x_NI`.
            squares: Of the norm whose factors are still missing from `x_NI`.
        """
        self._run(_PLAIN, x_NI, weight_OI, out_NO, squares)

    def silu_mul(self, x_NI: Tensor, weight_2FI: Tensor, out_NF: Tensor, squares: Squares | None = None) -> None:
        """`out = silu(x G^T) * (x U^T)`: as `product`, with a weight of F rows of G, then F of U."""
        self._run(_GATED, x_NI, weight_2FI, out_NF, squares)

    def add(self, x_NI: Tensor, weight_EI: Tensor, residual_NE: Tensor, norm_E: Tensor, out_NE: Tensor) -> Squares:
        """`residual += x W^T`, then `out = residual * norm`, which lacks the factors of its norm.

        Sums, squares and `out` are computed in float32 and rounded once.
        """
        parts_EN = torch.empty(len(norm_E) // _LINE, len(x_NI), dtype=torch.float32, device=x_NI.device)
        self._run(_ADD, x_NI, weight_EI, out_NE, None, residual_NE, norm_E, parts_EN)
        return Squares(residual_NE, parts_EN)

    def _run(
        self,
        kind: int,
        x_NI: Tensor,
        weight: Tensor,
        out: Tensor,
        squares: Squares | None,
        residual: Tensor | None = None,
        norm_E: Tensor | None = None,
        parts_EN: Tensor | None = None,
    ) -> None:
        rows = next(rows for rows in _TILES if len(x_NI) <= rows)
        tile, planes = _TILES[rows], self._scratch.planes
        _module(rows, x_NI.dtype).run(
            x_NI, weight, out,
            out if residual is None else residual, out if norm_E is None else norm_E,
            planes if parts_EN is None else parts_EN, planes if squares is None else squares.parts_EN,
            planes, self._scratch.counters,
            kind, squares is not None, self._eps, *tile, self._blocks, self._pdl,
        )  # fmt: skip


@functools.cache
def _module(rows: int, dtype: torch.dtype) -> Any:
    """The kernels for up to `rows` rows, compiled unless kept."""
    version = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:8]  # a cache may hold an older one
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    spec = gen_jit_spec(
        f"headrace_even_linear_{kind}_r{rows}_{version}",
        [_SOURCE],
        extra_cuda_cflags=[f"-DROWS={rows}", f"-DELEMENT_F16={int(kind == 'f16')}"],
    )
    return spec.build_and_load()
