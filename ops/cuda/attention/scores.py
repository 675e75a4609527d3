"""Scores of keys, and the weights that their softmax begins with, as functions of Triton's kernels.

Scores are those of exp2: they have a factor of log2(e). Imports the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.paged import KvScales

__all__ = ["factors_of", "first_weights", "scores_of"]

_LOG2_E: Final = 1.4426950408889634


def factors_of(shape: HeadShape, scales: KvScales) -> tuple[float, float]:
    """Return the factors that `scores_of` takes: one within the bound of scores, and one outside of it."""
    scale = shape.scale * scales.k
    return (scale * _LOG2_E, 1.0) if shape.cap is None else (scale / shape.cap, shape.cap * _LOG2_E)


@triton.jit
def scores_of(products, scale, cap, CAP: tl.constexpr):
    """Return the scores of products of queries and keys: with CAP, cap * tanh(scale * product)."""
    scores = products * scale
    if CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))
    return scores


@triton.jit
def first_weights(sinks, lane, there, LANES: tl.constexpr, SINKS: tl.constexpr):
    """Return the largest score and the sum of weights of each lane before any key.

    A sink is a key without a value, whose weight is 1 beside its own score: that of `lane` is a lane's where it is
    `there`. Of the programs that share a row, one begins with it.
    """
    # A number below any score; unlike infinity it can be subtracted from itself.
    most = tl.full([LANES], -1e30, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    if SINKS:
        score = tl.load(sinks + lane, mask=there, other=0.0) * 1.4426950408889634
        most = tl.where(there, score, most)
        total = tl.where(there, 1.0, 0.0)
    return most, total
