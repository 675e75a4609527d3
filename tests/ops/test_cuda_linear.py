"""Small-batch products on CUDA against float64."""

from __future__ import annotations

import pytest
import torch

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from headrace.ops.cuda_linear import LinearScratch, Tiling, linear, linear_silu_mul

GPU = torch.device("cuda")


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    distance = (out.double() - truth.double()).norm() / truth.double().norm()
    return float("inf") if torch.isnan(distance) else float(distance)


@pytest.mark.parametrize("how", [None, Tiling(64, 128, 4, 4, 4), Tiling(16, 128, 8, 4, 3)])
@pytest.mark.parametrize(("size_out", "size_in"), [(6144, 4096), (1024, 3072), (1000, 576)])
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
def test_linear_is_right_and_repeats_itself(rows: int, size_out: int, size_in: int, how: Tiling | None) -> None:
    x = torch.randn(rows, size_in, dtype=torch.bfloat16, device=GPU)
    weight = torch.randn(size_out, size_in, dtype=torch.bfloat16, device=GPU) / size_in**0.5
    scratch = LinearScratch(GPU)
    outs = []
    for pdl in (False, True, True):
        out = torch.full((rows, size_out), float("nan"), dtype=torch.bfloat16, device=GPU)
        linear(x, weight, out, scratch, how=how, pdl=pdl)
        outs.append(out)
    assert error(outs[0], reference.linear(x, weight, None)) < 4e-3
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])
    assert int(scratch.counters.abs().sum()) == 0


@pytest.mark.parametrize(("size_out", "size_in"), [(3072, 1024), (14336, 4096), (1500, 576)])
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_linear_silu_mul(rows: int, size_out: int, size_in: int) -> None:
    x = torch.randn(rows, size_in, dtype=torch.bfloat16, device=GPU)
    weight = torch.randn(2 * size_out, size_in, dtype=torch.bfloat16, device=GPU) / size_in**0.5
    out = torch.full((rows, size_out), float("nan"), dtype=torch.bfloat16, device=GPU)
    linear_silu_mul(x, weight, out, pdl=True)
    truth = reference.silu_mul(torch.cat([x.float() @ weight[:size_out].float().T, x.float() @ weight[size_out:].float().T], 1))
    assert error(out, truth) < 4e-3
