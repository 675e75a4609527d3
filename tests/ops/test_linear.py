"""4-bit groups as a float matrix: every value as float32 arithmetic rounds it, in no more memory than that takes."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from headrace.ops.quantised import GROUP, GroupQuantised


def groups(outs: int, ins: int) -> GroupQuantised:
    generator = torch.Generator().manual_seed(outs)
    return GroupQuantised(
        torch.randint(0, 16, (outs, ins), dtype=torch.uint8, generator=generator),
        torch.rand(outs, ins // GROUP, generator=generator),
        torch.randn(outs, ins // GROUP, generator=generator),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (64, 32), (300, 1024), (129, 576)])
def test_unpacked_values_are_computed_in_float32_and_rounded_once(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = groups(*shape)
    scale, minimum = (each.repeat_interleave(GROUP, 1) for each in (weight.scale_OG, weight.minimum_OG))
    assert torch.equal(weight.dense(dtype), (weight.values_OI.float() * scale + minimum).to(dtype))


def test_unpacking_takes_memory_for_the_result_and_one_block() -> None:
    weight = groups(4096, 576)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        dense = weight.dense(torch.bfloat16)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in found.events())
    assert dense.nbytes <= allocated <= 1.2 * dense.nbytes
