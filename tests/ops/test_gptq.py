"""GPTQ against rounding, and against a second implementation that inverts the Hessian anew for every column."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.ops.formats import Stored
from headrace.ops.gptq import DAMPING, Hessian, gptq
from headrace.ops.quantise import Method, format_for, quantise
from headrace.ops.quantised import Fp8, IntGroups, unpack_nibbles

Floats = NDArray[np.float64]
CPU = torch.device("cpu")
KINDS: list[tuple[Method, bool]] = [("fp8", False), ("int8", False), ("int4", False), ("int4", True)]


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


def rounded(weight_OI: torch.Tensor, method: Method, symmetric: bool) -> torch.Tensor:
    """Every weight at the nearest code of a range from extreme to extreme."""
    if method == "fp8":
        scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 448
        return (weight_OI / scale_O1).to(torch.float8_e4m3fn).float() * scale_O1
    if method == "int8":
        scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
        return (weight_OI / scale_O1).round() * scale_O1
    groups_OGg = weight_OI.view(len(weight_OI), -1, 128)
    low, high = groups_OGg.amin(-1, keepdim=True), groups_OGg.amax(-1, keepdim=True)
    scale = torch.maximum(high / 7, low / -8) if symmetric else (high - low) / 15
    zero = torch.full_like(scale, 8.0) if symmetric else (-low / scale).round()
    return (((groups_OGg / scale + zero).round().clamp(0, 15) - zero) * scale).view_as(weight_OI)


def column_by_column(
    weight_OI: Floats, x_NI: Floats, scale_OI: Floats, zero_OI: Floats, nearest: Callable[[Floats], Floats]
) -> Floats:
    """Codes by the equations of Optimal Brain Quantisation: no Cholesky factor, no blocks, no order of rows."""
    hessian = x_NI.T @ x_NI
    order = np.argsort(-np.diag(hessian), kind="stable")
    hessian += DAMPING * np.diag(hessian).mean() * np.eye(len(hessian))
    left, codes = weight_OI.copy(), np.zeros_like(weight_OI)
    for position, column in enumerate(order):
        remaining = order[position:]
        inverse = np.linalg.inv(hessian[np.ix_(remaining, remaining)])
        scale, zero = scale_OI[:, column], zero_OI[:, column]
        codes[:, column] = nearest(left[:, column] / scale + zero)
        error = left[:, column] - (codes[:, column] - zero) * scale
        left[:, remaining] -= np.outer(error, inverse[0] / inverse[0, 0])
    return codes


def nearest_float8(exact: Floats) -> Floats:
    """The nearest numbers with four significant bits, or multiples of 2 ** -9."""
    step = 2.0 ** np.maximum(np.floor(np.log2(np.abs(exact) + 1e-30)) - 3, -9)
    return np.clip(np.round(exact / step) * step, -448, 448)


@pytest.mark.parametrize(("method", "symmetric"), KINDS)
def test_products_change_less_than_by_rounding(method: Method, symmetric: bool) -> None:
    weight_OI, x_NI = drawn(96, 256)
    found = gptq(Stored.from_dense(weight_OI), hessian_of(x_NI), method, symmetric=symmetric)
    nearest_OI = rounded(weight_OI, method, symmetric)
    errors = [(x_NI @ (each - weight_OI).T).square().sum() for each in (found.dense(torch.float32), nearest_OI)]
    assert errors[0] < (0.5 if method in ("fp8", "int8") else 0.3) * errors[1]
    assert found.format == format_for(method, 256, symmetric=symmetric)


@pytest.mark.parametrize("ins", [96, 192], ids=["one block", "two blocks"])
@pytest.mark.parametrize(("method", "symmetric"), KINDS)
def test_codes_are_those_of_the_equations(method: Method, symmetric: bool, ins: int) -> None:
    weight_OI, x_NI = drawn(24, ins)
    found = gptq(Stored.from_dense(weight_OI), hessian_of(x_NI), method, symmetric=symmetric)
    format, parts = found.format, {name: part.double().numpy() for name, part in found.parts.items()}
    assert isinstance(format, (Fp8, IntGroups))
    group = ins if isinstance(format, Fp8) else format.group or ins
    scale_OI = np.repeat(parts["scale"].reshape(24, -1), group, axis=1)
    middle = np.full_like(scale_OI, {"fp8": 0.0, "int4": 8.0, "int8": 128.0}[method])
    zero_OI = np.repeat(parts["zero"], group, axis=1) if "zero" in parts else middle
    top = 15 if method == "int4" else 255
    nearest = nearest_float8 if method == "fp8" else lambda exact: np.clip(np.round(exact), 0, top)
    wanted = column_by_column(weight_OI.double().numpy(), x_NI.double().numpy(), scale_OI, zero_OI, nearest)
    codes = unpack_nibbles(found.parts["values"], ins).numpy() if method == "int4" else parts["values"]
    # Where a number lies between two codes, the last bit of float32 decides, and the columns after it differ.
    assert (np.abs(codes - wanted) <= (np.abs(wanted) / 8 + 2**-9 if method == "fp8" else 1)).all()
    assert (codes == wanted).mean() > 0.99


def test_it_does_not_matter_how_inputs_are_split() -> None:
    """Inputs are small integers, so that their sums are exact in any order."""
    weight_OI = drawn(32, 128)[0]
    x_NI = torch.randint(-9, 10, (600, 128), generator=torch.Generator().manual_seed(6)).float()
    made = []
    for batch in (600, 7):
        hessian = Hessian(128, CPU)
        for rows in x_NI.split(batch):
            hessian.add(rows)
        made.append(gptq(Stored.from_dense(weight_OI), hessian, "int4"))
    assert all(torch.equal(made[0].parts[part], made[1].parts[part]) for part in made[0].parts)


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
