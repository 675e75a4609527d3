"""The output head on the CPU: logits near the largest are those of float32, whatever the weight's form."""

from __future__ import annotations

import pytest
import torch
from stored_weights import random_groups
from torch import Tensor

from headrace.ops.cpu.head import CpuHead
from headrace.ops.formats import Stored


def near_largest(logits_SV: Tensor) -> Tensor:
    largest_S1 = logits_SV.amax(-1, keepdim=True)
    return logits_SV >= largest_S1 - largest_S1.abs() / 65


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("form", ["bfloat16", "float32", "4 bits"])
@torch.inference_mode()
def test_logits_near_the_largest_are_exact(form: str, rows: int) -> None:
    torch.manual_seed(rows)
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    weight = random_groups(512, 64) if form == "4 bits" else Stored.from_dense((0.3 * torch.randn(512, 64)).to(dtype))
    x_SE = torch.randn(rows, 64).to(dtype)
    truth_SV = x_SE.float() @ weight.dense(torch.float32).T
    logits_SV = CpuHead(weight, dtype=dtype)(x_SE)
    assert logits_SV.dtype is torch.float32
    assert torch.equal(logits_SV.argmax(-1), truth_SV.argmax(-1))
    near_SV = near_largest(truth_SV)
    torch.testing.assert_close(logits_SV[near_SV], truth_SV[near_SV], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_two_logits_closer_than_a_step_of_bfloat16_do_not_tie() -> None:
    weight_VE = torch.full((128, 64), 0.5)
    weight_VE[[7, 100]] = 1.0
    weight_VE[100, 0] += 1 / 128
    logits_SV = CpuHead(Stored.from_dense(weight_VE.bfloat16()), dtype=torch.bfloat16)(torch.ones(2, 64).bfloat16())
    assert logits_SV.argmax(-1).tolist() == [100, 100]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@torch.inference_mode()
def test_rows_without_an_order_are_left_alone(value: float) -> None:
    weight_VE = Stored.from_dense(torch.ones(1000, 64).bfloat16())
    logits_SV = CpuHead(weight_VE, dtype=torch.bfloat16)(torch.full((1, 64), value).bfloat16())
    torch.testing.assert_close(logits_SV, torch.full((1, 1000), value), equal_nan=True)
