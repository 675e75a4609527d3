"""Quantising without data: groups beside rounding, beside a finer search, and beside what a large weight needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.ops.formats import Stored
from headrace.ops.quantise import Method, quantise

KINDS = pytest.mark.parametrize("symmetric", [False, True], ids=["zero points", "symmetric"])


def drawn(outs: int = 64, ins: int = 256) -> torch.Tensor:
    """Weights with heavy tails."""
    generator = torch.Generator().manual_seed(8)
    normal = torch.randn(outs, ins, generator=generator)
    return normal * normal.abs().sqrt() * 0.03


def made(weight_OI: torch.Tensor, symmetric: bool, importance_I: torch.Tensor | None = None) -> torch.Tensor:
    stored = quantise(Stored.from_dense(weight_OI), "int4", symmetric=symmetric, importance_I=importance_I)
    return stored.dense(torch.float32)


def rounded(weight_OI: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """Every weight at the nearest code of a range from extreme to extreme."""
    groups_OGg = weight_OI.view(len(weight_OI), -1, 128)
    low, high = groups_OGg.amin(-1, keepdim=True), groups_OGg.amax(-1, keepdim=True)
    scale = torch.maximum(high / 7, low / -8) if symmetric else (high - low) / 15
    zero = torch.full_like(scale, 8.0) if symmetric else (-low / scale).round()
    return (((groups_OGg / scale + zero).round().clamp(0, 15) - zero) * scale).view_as(weight_OI)


@KINDS
def test_products_change_less_than_by_rounding(symmetric: bool) -> None:
    weight_OI, generator = drawn(), torch.Generator().manual_seed(9)
    mixed_II = torch.randn(256, 256, generator=generator) / 16
    x_NI = (torch.randn(500, 256, generator=generator) @ mixed_II) * torch.logspace(-1, 1, 256)
    found, nearest = (
        (x_NI @ (each - weight_OI).T).square().sum()
        for each in (made(weight_OI, symmetric), rounded(weight_OI, symmetric))
    )
    assert found < 0.95 * nearest


@KINDS
def test_a_large_weight_is_not_given_up_for_the_others(symmetric: bool) -> None:
    """A norm of the errors below 1 would cut it down, and a few such weights decide what a real model computes."""
    weight_OI = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)) * 0.02
    weight_OI[:, 17] = 0.3
    found_OI = made(weight_OI, symmetric)
    assert (found_OI[:, 17] - 0.3).abs().max() < 0.06


@KINDS
def test_errors_are_close_to_the_least_there_are(symmetric: bool) -> None:
    """Beside a search over 200 scales and all zero points, with errors that count differently in each column."""
    weight_OI = torch.randn(12, 128, generator=torch.Generator().manual_seed(3)) * 0.03
    importance_I = torch.logspace(-1, 1, 128)[torch.arange(128) * 37 % 128]
    importance = importance_I.double().numpy()
    rows = weight_OI.double().numpy()
    least = np.full(12, np.inf)
    for share in np.linspace(0.4, 1.4, 200):
        scale = share * (rows.max(1) - rows.min(1))[:, None] / 15
        for zero in [8] if symmetric else range(16):
            codes = np.clip(np.round(rows / scale + zero), 0, 15)
            least = np.minimum(least, (((codes - zero) * scale - rows) ** 2 * importance).sum(1))
    found, nearest = (
        (each.double().numpy() - rows) ** 2 @ importance
        for each in (made(weight_OI, symmetric, importance_I), rounded(weight_OI, symmetric))
    )
    assert found.sum() < 1.08 * least.sum()
    assert nearest.sum() > 1.15 * least.sum(), "else the search would prove nothing"


@KINDS
def test_neither_threads_nor_other_rows_change_a_row(symmetric: bool) -> None:
    weight_OI = drawn(1100)  # rows of three blocks
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole_OI = made(weight_OI, symmetric)
        torch.set_num_threads(1)
        alone_OI = torch.cat([made(rows, symmetric) for rows in weight_OI.split(77)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole_OI, alone_OI)


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_scales_are_numbers_of_bfloat16(method: Method) -> None:
    """Programs that keep scales in the model's dtype compute with the same ones."""
    scale = quantise(Stored.from_dense(drawn(40, 128)), method).parts["scale"]
    assert torch.equal(scale.bfloat16().to(scale.dtype), scale)


def test_groups_of_zeros_stay_zeros() -> None:
    weight_OI = drawn(8, 256)
    weight_OI[3, 128:] = 0.0
    assert not made(weight_OI, False)[3, 128:].any() and not made(weight_OI, True)[3, 128:].any()
