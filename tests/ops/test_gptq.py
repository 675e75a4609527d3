"""GPTQ against rounding, and against a second implementation that inverts the Hessian anew for every column."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.ops.formats import Stored
from headrace.ops.gptq import DAMPING, Hessian, gptq
from headrace.ops.quantise import quantise
from headrace.ops.quantised import IntGroups, unpack_nibbles

Floats = NDArray[np.float64]
CPU = torch.device("cpu")
KINDS: list[tuple[Literal["int8", "int4"], bool]] = [("int8", False), ("int4", False), ("int4", True)]


def drawn(outs: int, ins: int, count: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and inputs that are correlated, of very different sizes, and zero in one place."""
    generator = torch.Generator().manual_seed(4)
    weight_OI = torch.randn(outs, ins, generator=generator) * 0.05
    mixed_II = torch.randn(ins, ins, generator=generator) / ins**0.5
    x_NI = torch.randn(count, ins, generator=generator) @ mixed_II + torch.randn(count, 1, generator=generator)
    x_NI *= torch.logspace(-1, 1, ins)
    x_NI[:, 5] = 0.0
    return weight_OI, x_NI


def hessian_of(x_NI: torch.Tensor) -> Hessian:
    hessian = Hessian(x_NI.shape[1], CPU)
    for batch in x_NI.split(100):
        hessian.add(batch)
    return hessian


def column_by_column(weight_OI: Floats, x_NI: Floats, scale_OI: Floats, zero_OI: Floats, top: int) -> Floats:
    """Codes by the equations of Optimal Brain Quantisation: no Cholesky factor, no blocks, no order of rows."""
    hessian = x_NI.T @ x_NI
    order = np.argsort(-np.diag(hessian), kind="stable")
    hessian += DAMPING * np.diag(hessian).mean() * np.eye(len(hessian))
    left, codes = weight_OI.copy(), np.zeros_like(weight_OI)
    for position, column in enumerate(order):
        remaining = order[position:]
        inverse = np.linalg.inv(hessian[np.ix_(remaining, remaining)])
        scale, zero = scale_OI[:, column], zero_OI[:, column]
        codes[:, column] = np.clip(np.round(left[:, column] / scale + zero), 0, top)
        error = left[:, column] - (codes[:, column] - zero) * scale
        left[:, remaining] -= np.outer(error, inverse[0] / inverse[0, 0])
    return codes


@pytest.mark.parametrize(("method", "symmetric"), KINDS)
def test_products_change_less_than_by_rounding(method: Literal["int8", "int4"], symmetric: bool) -> None:
    weight_OI, x_NI = drawn(96, 256)
    dense = Stored.from_dense(weight_OI)
    found = gptq(dense, hessian_of(x_NI), method, symmetric=symmetric)
    rounded = quantise(dense, method, symmetric=symmetric, refine=False)
    errors = [(x_NI @ (each.dense(torch.float32) - weight_OI).T).square().sum() for each in (found, rounded)]
    assert errors[0] < 0.5 * errors[1]
    assert found.format == rounded.format
    for part in found.parts.keys() - {"values"}:
        assert torch.equal(found.parts[part], rounded.parts[part])


@pytest.mark.parametrize("ins", [96, 192], ids=["one block", "two blocks"])
@pytest.mark.parametrize(("method", "symmetric"), KINDS)
def test_codes_are_those_of_the_equations(method: Literal["int8", "int4"], symmetric: bool, ins: int) -> None:
    weight_OI, x_NI = drawn(24, ins)
    dense = Stored.from_dense(weight_OI)
    found = gptq(dense, hessian_of(x_NI), method, symmetric=symmetric)
    assert isinstance(found.format, IntGroups)
    group = found.format.group or ins
    scale_OI = np.repeat(found.parts["scale"].double().numpy(), group, axis=1)
    middle = np.full_like(scale_OI, 8.0 if method == "int4" else 128.0)
    zero_OI = np.repeat(found.parts["zero"].double().numpy(), group, axis=1) if found.format.zeros else middle
    top = 15 if method == "int4" else 255
    wanted = column_by_column(weight_OI.double().numpy(), x_NI.double().numpy(), scale_OI, zero_OI, top)
    values = found.parts["values"]
    codes = (unpack_nibbles(values, ins) if method == "int4" else values).numpy()
    # Where a number lies between two codes, the last bit of float32 decides, and the columns after it differ.
    assert np.abs(codes - wanted).max() <= 1
    assert (codes == wanted).mean() > 0.99


def test_without_inputs_it_rounds() -> None:
    dense = Stored.from_dense(drawn(16, 64)[0])
    found = gptq(dense, Hessian(64, CPU), "int8")
    assert torch.equal(found.parts["values"], quantise(dense, "int8").parts["values"])


def test_a_hessian_that_is_not_finite_is_refused() -> None:
    hessian = Hessian(64, CPU)
    hessian.add(torch.full((2, 64), torch.nan))
    with pytest.raises(ValueError, match="not finite"):
        gptq(Stored.from_dense(drawn(16, 64)[0]), hessian, "int4")


def test_inputs_that_are_no_whole_groups_stay_dense() -> None:
    dense = Stored.from_dense(drawn(16, 48)[0])
    assert gptq(dense, Hessian(48, CPU), "int4") is dense


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_scales_are_numbers_of_bfloat16(method: Literal["fp8", "int8", "int4"]) -> None:
    """Programs that keep scales in the model's dtype compute with the same ones."""
    scale = quantise(Stored.from_dense(drawn(40, 128)[0]), method).parts["scale"]
    assert torch.equal(scale.bfloat16().to(scale.dtype), scale)


def test_symmetric_groups_reach_from_extreme_to_extreme() -> None:
    weight_OI, _ = drawn(64, 128)
    found = quantise(Stored.from_dense(weight_OI), "int4", symmetric=True)
    scale_O1 = found.parts["scale"].float()
    extremes_O1 = torch.maximum(weight_OI.amax(1) / 7, weight_OI.amin(1) / -8).unsqueeze(1)
    assert (scale_O1 / extremes_O1 - 1).abs().max() <= 2**-8
    wanted = (weight_OI / scale_O1).round().clamp(-8, 7) * scale_O1
    assert torch.equal(found.dense(torch.float32), wanted)
