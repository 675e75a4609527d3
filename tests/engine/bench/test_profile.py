"""Which intervals count as decode steps, whose time a part is, what a kernel's name says, and when a GPU idles."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tiny_models

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.gpu_trace import Activity, kernel_class, summarise
from headrace.engine.bench.profile import Commit, HostProfile, host_profile, steady_intervals, watching


def commits(*steps: tuple[float, int]) -> list[Commit]:
    return [Commit(*step) for step in steps]


def test_only_steps_between_full_steps_count() -> None:
    seen = commits((0, 0), (5, 1), (9, 2), (10, 2), (12, 2), (20, 1), (21, 2), (24, 2))
    assert steady_intervals(seen, rows=2, skip=0) == [1, 2, 3]  # 9 ended the prefill, 21 followed a step of one row
    assert steady_intervals(seen, rows=2, skip=2) == [3]
    assert steady_intervals(seen, rows=3, skip=0) == []
    assert steady_intervals([], rows=1, skip=0) == []


def test_a_part_inside_another_is_booked_once() -> None:
    profile = HostProfile()
    inner = profile.timed("pack")(lambda: time.sleep(0.02))
    outer = profile.timed("launch")(lambda: (inner(), inner(), time.sleep(0.01)))
    ends = profile.timed("deliver", ends_step=True)(lambda: None)
    outer()
    ends()
    ends()
    first, second = profile.steps
    assert 0.04 <= first["pack"] < 0.06
    assert 0.01 <= first["launch"] < 0.03
    assert second.keys() == {"deliver"}
    rows = {part: middle for part, middle, _ in profile.rows()}
    assert list(rows) == ["pack", "launch", "deliver", "all but deliver", "all"]


def test_a_part_that_raises_is_booked_too() -> None:
    profile = HostProfile()
    with pytest.raises(ZeroDivisionError):
        profile.timed("launch")(lambda: 1 // 0)()
    profile.timed("deliver", ends_step=True)(lambda: None)()
    assert "launch" in profile.steps[0]


@pytest.mark.anyio
async def test_what_was_replaced_is_put_back(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    async with Engine(tiny_models.random_folder(tmp_path), load_format="random", device="cpu") as engine:
        loop = engine._life.loop
        assert loop is not None
        before = dict(vars(loop)), dict(vars(loop.scheduler)), set(vars(loop._runner)), set(vars(loop.meter))
        with watching(engine, 1) as watch, host_profile(engine) as profile:
            await engine.generate([1, 2, 3], params)
        assert before[0].keys() == vars(loop).keys()
        assert before[1].keys() == vars(loop.scheduler).keys()
        assert (before[2], before[3]) == (set(vars(loop._runner)), set(vars(loop.meter)))
        await engine.generate([1, 2, 3], params)
    assert [commit.generated for commit in watch.commits if commit.generated] == [1] * 5
    assert len(watch.first_tokens) == 1
    assert watch.commits[0].at <= watch.first_tokens[0] <= watch.commits[1].at
    assert len(profile.steps) == len(watch.commits)
    assert all("commit" in step for step in profile.steps)
    assert {"plan", "launch"} <= profile.steps[0].keys()
    assert all("deliver" in step for step in profile.steps[2:])  # what the step before it gave


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::(anonymous namespace)::direct_copy_kernel_cuda", "copies"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel", "attention"),
        ("kernel_mha", "attention"),
        ("_fused_decode_kernel", "attention"),
        ("(anonymous namespace)::attend((anonymous namespace)::Arguments)", "attention"),
        ("nvjet_tst_128x64_64x6_2x1_v_bz_TNT", "product"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "product"),
        ("_router_vector_kernel", "experts"),
        ("_gather_rows_kernel", "experts"),
        ("(anonymous namespace)::expert_dense<Tiling<256, true, false>>", "experts"),
        ("_linear_kernel", "product"),
        ("_vector_kernel", "product"),
        ("_coded_tiles_kernel", "product"),
        ("(anonymous namespace)::many_rows<Tiling<128, true>>", "product"),
        ("_scaled_tiles_kernel", "product"),
        ("_gather_inputs_kernel", "product"),
        ("_norm_rope_kernel", "norm, rope, silu, embedding"),
        ("_activate_mul_kernel", "norm, rope, silu, embedding"),
        ("void at::native::vectorized_gather_kernel<16, long>", "norm, rope, silu, embedding"),
        ("_choose_kernel", "sampling"),
        ("_gather_kernel", "sampling"),
        ("_prepare_kernel", "prepare"),
        ("_scatter_kernel", "prepare"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kernels_by_name(name: str, expected: str) -> None:
    assert kernel_class(name) == expected


def test_idle_is_what_no_kernel_covers() -> None:
    us = 1e-6
    window = summarise(
        [
            Activity("_linear_kernel", 0, 10 * us),
            Activity("_choose_kernel", 4 * us, 8 * us),  # inside the first
            Activity("_linear_kernel", 12 * us, 20 * us),  # 2 µs later
            Activity("Memcpy", 50 * us, 60 * us),  # 30 µs later
            Activity("_linear_kernel", 55 * us, 100 * us),
        ]
    )
    assert window is not None
    assert window.seconds == pytest.approx(100 * us)
    assert window.idle == pytest.approx(0.32)
    assert window.idle_between == pytest.approx(0.30)
    assert window.by_class == pytest.approx({"product": 63 * us, "copies": 10 * us, "sampling": 4 * us})
    assert list(window.by_class) == ["product", "copies", "sampling"]


def test_nothing_ran() -> None:
    assert summarise([]) is None
