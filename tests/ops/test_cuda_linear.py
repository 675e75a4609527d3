"""Small-batch products on CUDA against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_tensors import error

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.products.fusion import AddNorm
from headrace.ops.cuda.products.linear import LinearScratch, Tiling, linear, linear_silu_mul
from headrace.ops.cuda.products.vector import vector_linear

GPU = torch.device("cuda")


@pytest.mark.parametrize("how", [None, Tiling(64, 128, 4, 4, 4), Tiling(16, 128, 8, 4, 3)])
@pytest.mark.parametrize(("size_out", "size_in"), [(6144, 4096), (1024, 3072), (1000, 576)])
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
def test_linear_is_right_and_repeats_itself(rows: int, size_out: int, size_in: int, how: Tiling | None) -> None:
    x = torch.randn(rows, size_in, dtype=torch.bfloat16, device=GPU)
    weight = torch.randn(size_out, size_in, dtype=torch.bfloat16, device=GPU) / size_in**0.5
    scratch = LinearScratch(GPU, Arch.of(GPU))
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
    truth = reference.silu_mul(
        torch.cat([x.float() @ weight[:size_out].float().T, x.float() @ weight[size_out:].float().T], 1)
    )
    assert error(out, truth) < 4e-3


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normed", ["", "norm", "add"])
@pytest.mark.parametrize(("size_out", "size_in"), [(4096, 1024), (1000, 576), (2048, 4096), (1024, 3072)])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_vector_linear(rows: int, size_out: int, size_in: int, normed: str, gated: bool) -> None:
    x, residual = (torch.randn(rows, size_in, dtype=torch.bfloat16, device=GPU) for _ in range(2))
    weight = torch.randn(size_out * (2 if gated else 1), size_in, dtype=torch.bfloat16, device=GPU) / size_in**0.5
    scale = torch.randn(size_in, dtype=torch.bfloat16, device=GPU)
    kept = torch.full_like(x, float("nan"))
    out = torch.full((rows, size_out), float("nan"), dtype=torch.bfloat16, device=GPU)
    norm = AddNorm(scale, 1e-6, *((residual, kept) if normed == "add" else ())) if normed else None
    vector_linear(x, weight, out, norm=norm, gated=gated, pdl=True)
    given = x.float() + residual.float() if normed == "add" else x.float()
    if normed == "add":
        assert error(kept, given) < 4e-3
    if normed:
        given = reference.rms_norm(given, scale, 1e-6)
    truth = reference.linear(given, weight, None)
    assert error(out, reference.silu_mul(truth) if gated else truth) < 6e-3


def test_vector_linear_over_a_long_inner_dimension_and_its_limits() -> None:
    x = torch.randn(2, 14336, dtype=torch.bfloat16, device=GPU)
    weight = torch.randn(512, 14336, dtype=torch.bfloat16, device=GPU) / 120
    out = torch.full((2, 512), float("nan"), dtype=torch.bfloat16, device=GPU)
    vector_linear(x, weight, out)
    assert error(out, reference.linear(x, weight, None)) < 4e-3
    with pytest.raises(ValueError, match="2 rows of 14336 features"):
        vector_linear(x, weight, out, norm=AddNorm(weight[0], 1e-6))
