"""Tensors of bf16 on the GPU, random or poisoned, and how far a result is from the truth; holds no tests."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["error", "poison", "random"]

_GPU = torch.device("cuda")


def error(out: Tensor, truth: Tensor) -> float:
    """Relative L2 distance in float64; infinite for NaN."""
    distance = (out.double() - truth.double()).norm() / truth.double().norm()
    return float("inf") if torch.isnan(distance) else float(distance)


def random(*shape: int) -> Tensor:
    """Normally distributed."""
    return torch.randn(*shape, dtype=torch.bfloat16, device=_GPU)


def poison(*shape: int) -> Tensor:
    """NaN, which what is not written keeps."""
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=_GPU)
