"""silu(gate) * up with its product, of many rows, against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_tensors import error, poison, random

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.products.many_rows import TileLinear

GPU = torch.device("cuda")
if not Arch.of(GPU).has("wgmma"):
    pytest.skip("needs Hopper", allow_module_level=True)

ROWS = [1, 65, 300, 2048, 8192]
SIZES = [(3072, 1024), (14336, 4096), (1568, 576), (8, 64), (72, 40)]
"""The last three: features and inputs that fill neither a tile nor a chunk."""


@pytest.mark.parametrize(("size_out", "size_in"), SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul_is_right_and_repeats_itself(rows: int, size_out: int, size_in: int) -> None:
    x, weight = random(rows, size_in), random(2 * size_out, size_in) / size_in**0.5
    outs = [poison(rows, size_out) for _ in range(3)]
    for out, pdl in zip(outs, (False, True, True), strict=True):
        TileLinear.silu_mul(x, weight, out, pdl=pdl)
    assert error(outs[0], reference.silu_mul(reference.linear(x, weight, None))) < 5e-3
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])


def test_views_of_wider_tensors() -> None:
    """Nothing beside the output is written."""
    wide, weight, target = random(200, 320), random(256, 192) / 14, poison(200, 144)
    x, out = wide[:, 64:256], target[:, 8:136]
    TileLinear.silu_mul(x, weight, out)
    assert error(out, reference.silu_mul(reference.linear(x, weight, None))) < 5e-3
    assert target[:, :8].isnan().all() and target[:, 136:].isnan().all()


def test_gates_of_any_size_leave_nothing_but_numbers() -> None:
    x = torch.tensor([[-1.0], [1.0]], device=GPU, dtype=torch.bfloat16).repeat(40, 64)
    weight = torch.tensor([2.0**at for at in range(-8, 8)] * 2, device=GPU, dtype=torch.bfloat16)[:, None].repeat(1, 64)
    out = poison(80, 16)
    TileLinear.silu_mul(x, weight, out)
    assert error(out, reference.silu_mul(reference.linear(x, weight, None))) < 5e-3
