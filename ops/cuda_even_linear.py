"""Products of 2 to 64 rows with residual, norm and activation inside (csrc/even_linear.cu); never chooses them.

Such a product is its weight's bytes and little else. Every multiprocessor reads for the same time, beginning while the
kernel before still runs. Needs Hopper for its copies and clusters. I input features, O output features, N rows.
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

__all__ = ["Division", "EvenLinear", "Squares", "division"]

_SOURCE = Path(__file__).parent / "csrc" / "even_linear.cu"
_LINE = 64
_PLAIN, _GATED, _ADD = range(3)
_HOPPER = 9


_PADDED = (16, 32, 64)
"""Numbers of rows that there are kernels for."""


class Division(NamedTuple):
    """How a product is divided: blocks that share the inner dimension, lines of 64 inputs in a chunk, chunks ahead."""

    splits: int
    lines: int
    slots: int
    early: bool = False
    """Let the next kernel start at once."""


class Squares(NamedTuple):
    """What a norm still needs of inputs that were multiplied by its weight."""

    total_NE: Tensor
    """The sum, of which the norm is."""
    parts_EN: Tensor
    """float32 [E / 64, N]: its squares, summed over 64 features each."""


class EvenLinear:
    """The products of one model."""

    def __init__(self, *, eps: float, pdl: bool = False) -> None:
        """Compute with `eps` of the norms; with `pdl` launch programmatically dependent.

        No kernel before a product may then write its weight.
        """
        self._eps, self._pdl = eps, pdl

    @staticmethod
    def build(dtype: torch.dtype) -> None:
        """Compile the kernels; takes half a minute and a compiler the first time.

        Raises:
            RuntimeError: They cannot be compiled.
            OSError: There is nothing to compile them with.
        """
        with ThreadPoolExecutor(len(_PADDED)) as pool:
            list(pool.map(lambda rows: _module(rows, dtype), _PADDED))

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernels can be compiled."""
        return torch.cuda.get_device_capability(device)[0] == _HOPPER and dtype in (torch.bfloat16, torch.float16)

    @staticmethod
    def fits(rows: int, size_out: int, size_in: int) -> bool:
        """Whether a product of such sizes can be computed; gates and ups both count as outputs."""
        return 1 < rows <= _PADDED[-1] and size_out % _LINE == 0 and size_in % _LINE == 0

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
        rows = next(rows for rows in _PADDED if len(x_NI) <= rows)
        _module(rows, x_NI.dtype).run(
            x_NI, weight, out,
            out if residual is None else residual, out if norm_E is None else norm_E,
            out if parts_EN is None else parts_EN, out if squares is None else squares.parts_EN,
            kind, squares is not None, self._eps, *division(rows, gated=kind == _GATED), self._pdl,
        )  # fmt: skip


def division(rows: int, *, gated: bool) -> Division:
    """The one that was fastest on an H200; leaves room on a multiprocessor for the next product."""
    splits = 2 if gated else 4
    return Division(splits, 2, 5) if rows <= 16 else Division(splits, 2, 4) if rows <= 32 else Division(splits, 1, 5)


@functools.cache
def _module(rows: int, dtype: torch.dtype) -> Any:
    """The kernels for up to `rows` rows, one of `_PADDED`, compiled unless kept."""
    version = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:8]  # a cache may hold an older one
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    spec = gen_jit_spec(
        f"headrace_even_linear_{kind}_r{rows}_{version}",
        [_SOURCE],
        extra_cuda_cflags=[f"-DROWS={rows}", f"-DELEMENT_F16={int(kind == 'f16')}"],
    )
    return spec.build_and_load()
