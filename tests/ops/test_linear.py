"""4-bit groups as a float matrix: every value as float32 arithmetic rounds it, in no more memory than that takes."""

from __future__ import annotations

import pytest
import torch
from stored_weights import random_groups
from torch.profiler import ProfilerActivity, profile

from headrace.ops.formats import Stored


def groups(outs: int, ins: int) -> Stored:
    torch.manual_seed(outs)
    return random_groups(outs, ins)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (64, 32), (300, 1024), (129, 576)])
def test_unpacked_values_are_computed_in_float32_and_rounded_once(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = groups(*shape)
    scale, minimum = (weight.parts[name].repeat_interleave(32, 1) for name in ("scale", "minimum"))
    assert torch.equal(weight.dense(dtype), (weight.parts["values"].float() * scale + minimum).to(dtype))


def test_unpacking_takes_memory_for_the_result_and_one_block() -> None:
    weight = groups(4096, 576)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        dense = weight.dense(torch.bfloat16)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in found.events())
    assert dense.nbytes <= allocated <= 1.2 * dense.nbytes
