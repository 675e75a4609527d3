"""The CPU kernels in C: exact integers inside, the same bits in every batch and on every instruction set; threads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import UNWRITTEN_KINDS
from torch import Tensor

from headrace.ops.cpu.native import library as native
from headrace.ops.cpu.native.integers import as_integers
from headrace.ops.cpu.native.library import LEVELS, Context
from headrace.ops.cpu.native.linear import NativeDenseKernel, NativeKernel, NativeLinear
from headrace.ops.formats import Format, Int4Groups, Stored
from headrace.ops.gguf_formats import BLOCK_KINDS, GgufBlocks
from headrace.ops.quantised import Fp8, IntGroups

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler, or a processor without AVX2")

LIBRARY = native.library()
WHOLE = "" if LIBRARY is None else LIBRARY._name  # before a test takes the library away
ROWS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 256)
OUTS, INS = 83, 512
BYTES_KEPT = {Kind.Q2_K: 1.25, Kind.Q3_K: 210 / 256, Kind.IQ4_NL: 34 / 32, Kind.IQ4_XS: 36 / 32}
"""Bytes of a packed weight of the kinds that become integers of more bits."""
FORMATS = (
    *BLOCK_KINDS,
    Int4Groups(64),
    IntGroups(4, 128),
    IntGroups(4, 32, zeros=True, scale=torch.float16),
    IntGroups(8, None, scale=torch.bfloat16),
    IntGroups(8, 384, zeros=True),
    IntGroups(4, 64, zeros=True, ordered=True),
    IntGroups(8, 384, ordered=True),
)


def levels() -> list[int]:
    kernels = native.library()
    if kernels is None:
        return []
    return [level for level in range(1, len(LEVELS)) if kernels.headrace_supports(level)]


def raw_blocks(kind: Kind, outs: int, ins: int) -> np.ndarray:
    """Random codes; scales and minima around 0.01."""
    generator = np.random.default_rng(int(kind))
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    raw = generator.integers(0, 256, (outs, ins // weights, size), np.uint8)
    for place in UNWRITTEN_KINDS.get(kind, (0, 2) if kind in (Kind.Q4_1, Kind.Q5_1) else (0,)):
        scales = (generator.standard_normal((outs, ins // weights, 1)) * 0.01).astype(np.float16)
        raw[..., place : place + 2] = scales.view(np.uint8)
    return raw.reshape(outs, -1)


def stored(kind: Kind | Format, outs: int = OUTS, ins: int = INS) -> Stored:
    """A matrix of blocks or groups."""
    if isinstance(kind, Kind):
        return GgufBlocks(kind).from_file(torch.from_numpy(raw_blocks(kind, outs, ins)), (outs, ins))
    torch.manual_seed(0)

    def random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype is torch.int32:
            return torch.randperm(*shape, dtype=dtype)
        if dtype is torch.uint8:
            return torch.randint(0, 16 if isinstance(kind, Int4Groups) else 256, shape, dtype=dtype)
        return (torch.randn(shape) / 99).to(dtype)

    return Stored.allocate(kind, (outs, ins), random)


def packed(weight: Stored, bias: Tensor | None = None) -> NativeLinear:
    linear = NativeKernel().pack(weight, bias, torch.bfloat16)
    assert isinstance(linear, NativeLinear)
    return linear


def product(linear: NativeLinear, x: Tensor, level: int, threads: int = 1) -> Tensor:
    y = torch.empty(len(x), linear.outs)
    context = Context(threads, level)
    linear.run(context, x, y)
    context.close()
    return y


def with_rounded_activations(x: Tensor, order: Tensor | None = None) -> Tensor:
    """What the kernels make of activations: 8-bit codes in groups of 32, times the group's scale; float64.

    With an order groups are of inputs in that order.
    """
    if order is not None:
        return with_rounded_activations(x[:, order])[:, order.argsort()]
    groups = x.unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # torch divides a number by a tensor in two roundings
    codes = torch.round(groups * torch.where(largest > 0, inverse, 0))
    return (codes.double() * (largest / 127).double()).flatten(-2)


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_blocks_are_the_numbers_of_the_package(kind: Kind) -> None:
    expected = gguf.quants.dequantize(raw_blocks(kind, OUTS, INS), kind)
    weight = stored(kind)
    assert np.array_equal(weight.dense(torch.float32).numpy(), expected)
    some = torch.tensor([5, 0, 82, 5])
    assert np.array_equal(weight.rows(some, torch.float32).numpy(), expected[some])
    found = packed(weight).read_rows(some).numpy()
    if kind is Kind.Q2_K:  # of the range of 32 weights, half of one step of 255
        groups = expected[some].reshape(len(some), -1, 32)
        steps = (groups.max(-1).clip(min=0) - groups.min(-1).clip(max=0)) / 255
        assert (np.abs(found.reshape(groups.shape) - groups).max(-1) <= 0.501 * steps).all()
    else:
        assert np.array_equal(found, expected[some])
    assert weight.nbytes == raw_blocks(kind, OUTS, INS).nbytes
    even = stored(kind, 96)
    (kept,) = NativeKernel().kept(even, torch.bfloat16)
    assert packed(even).nbytes == kept.nbytes <= 1.03 * BYTES_KEPT.get(kind, even.nbytes / (96 * INS)) * 96 * INS


@pytest.mark.parametrize("level", levels(), ids=lambda level: LEVELS[level])
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_products_are_those_of_exact_integers(kind: Kind | Format, level: int) -> None:
    torch.manual_seed(1)
    weight, bias, x = stored(kind), torch.randn(OUTS), torch.randn(max(ROWS), INS)
    rounded = with_rounded_activations(x, weight.parts.get("order"))
    expected = rounded @ as_integers(weight).dense(torch.float64).T + bias.double()
    found = product(packed(weight, bias), x, level)
    # What is left is the rounding of 16 float32 additions.
    assert (found - expected).abs().amax() < 4e-6 * expected.abs().amax()


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_in_every_company(kind: Kind | Format) -> None:
    """Whatever the number of rows, the threads and the instruction set."""
    torch.manual_seed(2)
    linear, x = packed(stored(kind)), torch.randn(max(ROWS), INS)
    expected = product(linear, x, levels()[-1])
    for level in levels():
        assert torch.equal(product(linear, x[:65], level, threads=3), expected[:65]), LEVELS[level]
        for rows in ROWS:
            assert torch.equal(product(linear, x[-rows:], level), expected[-rows:]), (LEVELS[level], rows)


@pytest.mark.parametrize("size", [(83, 77), (1, 1), (32, 2), (31, 600), (160, 513), (64, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dense_matrices_multiply_alike_in_every_company(dtype: torch.dtype, size: tuple[int, int]) -> None:
    """Near the truth, and with the same bits whatever the number of rows, the threads and the instruction set."""
    torch.manual_seed(3)
    weight, bias, x = torch.randn(size).to(dtype), torch.randn(size[0]), torch.randn(max(ROWS), size[1])
    linear = NativeDenseKernel().pack(Stored.from_dense(weight), bias, dtype)
    assert isinstance(linear, NativeLinear)
    expected = product(linear, x, levels()[-1])
    truth = x.to(dtype).double() @ weight.double().T + bias.double()
    assert (expected - truth).abs().amax() < 2e-6 * truth.abs().amax()
    for level in levels():
        assert torch.equal(product(linear, x[:65], level, threads=3), expected[:65]), LEVELS[level]
        for rows in ROWS:
            assert torch.equal(product(linear, x[-rows:], level), expected[-rows:]), (LEVELS[level], rows)
    added = torch.randn(9, size[0])
    context, found = Context(1), added.clone()
    linear.run(context, x[:9], found, adds=True)
    context.close()
    assert torch.equal(found, added + expected[:9])
    some = torch.randint(size[0], (7,))
    read = NativeDenseKernel().pack(Stored.from_dense(weight), None, dtype)
    assert isinstance(read, NativeLinear) and torch.equal(read.read_rows(some), weight[some].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -3e38])
def test_what_is_not_finite_or_overflows_stays_so_and_alone(dtype: torch.dtype, wrong: float) -> None:
    linear, x = NativeDenseKernel().pack(Stored.from_dense(torch.full((40, 5), 2.0)), None, dtype), torch.ones(9, 5)
    x[4, 3] = wrong
    assert isinstance(linear, NativeLinear)
    for level in levels():
        finite = product(linear, x, level).isfinite().all(1)
        assert finite.tolist() == [row != 4 for row in range(9)]


def test_matrices_of_several_formats_multiply_as_one() -> None:
    pieces = [stored(Kind.Q4_K), stored(Kind.Q6_K, 40), Stored.from_dense(torch.randn(20, INS).bfloat16())]
    x = torch.randn(9, INS)
    together = Stored.stack(pieces)
    assert NativeKernel().refuses(together, torch.bfloat16) == (
        "multiplies by blocks of GGUF and by groups of integers, not by bfloat16"
    )
    linear = NativeDenseKernel().pack(together, None, torch.bfloat16)
    assert isinstance(linear, NativeLinear)
    apart = [NativeDenseKernel().pack(piece, None, torch.bfloat16) for piece in pieces]
    found = [product(each, x, levels()[-1]) for each in apart if isinstance(each, NativeLinear)]
    assert torch.equal(product(linear, x, levels()[-1]), torch.cat(found, 1))


def test_matrices_with_orders_of_their_own_multiply_as_one() -> None:
    """Two orders, one of them twice, beside columns as the inputs are and a dense matrix."""
    ordered = IntGroups(4, 64, ordered=True)
    first, second = stored(ordered), stored(ordered, 40)
    again = Stored(ordered, first.shape, {**first.parts, "order": first.parts["order"].clone()})
    natural, dense = stored(IntGroups(4, 64)), Stored.from_dense(torch.randn(20, INS).bfloat16())
    assert not torch.equal(first.parts["order"], second.parts["order"])
    pieces, x = [natural, first, second, dense, again], torch.randn(70, INS)
    apart = [NativeDenseKernel().pack(piece, None, torch.bfloat16) for piece in pieces]
    together = NativeDenseKernel().pack(Stored.stack(pieces), None, torch.bfloat16)
    assert isinstance(together, NativeLinear)
    for level in levels():
        for rows in (1, 9, 70):
            found = [product(each, x[:rows], level) for each in apart if isinstance(each, NativeLinear)]
            assert torch.equal(product(together, x[:rows], level), torch.cat(found, 1))
            assert torch.equal(product(together, x[:rows], level, threads=3), torch.cat(found, 1))
    some = torch.tensor([5, 0, 39])
    assert torch.equal(packed(second).read_rows(some), second.rows(some, torch.float32))
    (kept,) = NativeKernel().kept(second, torch.bfloat16)
    assert packed(second).nbytes == kept.nbytes


@pytest.mark.parametrize(
    ("format", "ins", "reason"),
    [
        (Fp8(), 64, "multiplies by blocks of GGUF and by groups of integers, not by fp8"),
        (IntGroups(4, 48), 96, "takes groups of a multiple of 32 inputs, not of 48"),
        (IntGroups(8, None), 80, "takes inputs in a multiple of 32, not 80"),
    ],
)
def test_what_the_kernels_refuse(format: Format, ins: int, reason: str) -> None:
    weight = Stored.allocate(format, (16, ins), lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
    assert NativeKernel().refuses(weight, torch.bfloat16) == reason


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_alone(wrong: float) -> None:
    linear, x = packed(stored(Kind.Q4_0)), torch.randn(9, INS)
    good = product(linear, x, levels()[-1])
    x[4, 100] = wrong
    found = product(linear, x, levels()[-1])
    assert found[4].isnan().all()
    assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], good[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_rows_too_small_for_a_scale_count_as_zero() -> None:
    x = torch.full((2, INS), 1e-40)
    assert torch.equal(product(packed(stored(Kind.Q4_1)), x, levels()[-1]), torch.zeros(2, OUTS))


# --- the library


@pytest.fixture
def fresh_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder and no library of an installation; what was loaded before is used again afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_BUILT", tmp_path / "nothing")
    native.library.cache_clear()
    yield tmp_path / "headrace" / "native"
    monkeypatch.undo()
    native.library.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("{folder}/none", "No such file"),
        ("false", "the compiler ended with status 1"),
        ("sh -c 'echo native.c:1: error: no such intrinsic >&2; exit 1' sh", "error: no such intrinsic"),
        ("true", "file too short"),
    ],
)
def test_without_a_compiler_that_works_torch_multiplies(
    compiler: str, reason: str, fresh_library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler.format(folder=fresh_library))
    with caplog.at_level(logging.WARNING, "headrace"):
        assert native.library() is None and native.library() is None
    (record,) = caplog.records
    assert "multiplied by torch's operations" in record.message and reason in record.message
    assert "compiled at the next start if there is gcc or clang" in record.message
    assert NativeKernel().refuses(stored(Kind.Q4_0), torch.bfloat16) == "there are no compiled kernels"
    assert not [path for path in fresh_library.glob("*") if compiler != "true"]


def test_a_library_that_does_not_load_is_compiled_again(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that another machine has left in a folder that both share; the compiler here copies a whole library."""
    monkeypatch.setenv("CC", "true")
    assert native.library() is None
    (broken,) = fresh_library.iterdir()
    assert broken.read_bytes() == b""
    native.library.cache_clear()
    script = f"while [ $1 != -o ]; do shift; done; cp {WHOLE} $2"
    monkeypatch.setenv("CC", f"sh -c '{script}' sh")
    assert native.library() is not None and list(fresh_library.iterdir()) == [broken]


# --- threads


def test_two_contexts_work_at_the_same_time() -> None:
    linear, x = packed(stored(Kind.Q4_1, 640)), torch.randn(3, INS)
    expected = product(linear, x, levels()[-1])
    wrong = []

    def work() -> None:
        context = Context(2)
        for _ in range(200):
            y = torch.empty_like(expected)
            linear.run(context, x, y)
            if not torch.equal(y, expected):
                wrong.append(y)
        context.close()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_helpers_sleep_between_steps() -> None:
    context = Context(3)
    context.kernels.headrace_step(context.handle, 1)
    linear = packed(stored(Kind.Q4_1, 640))
    linear.run(context, torch.randn(3, INS), torch.empty(3, 640))
    context.kernels.headrace_step(context.handle, 0)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1  # two that spin would take up to 0.6 on two cores
    context.close()


FORK = """
import os, sys, torch
from headrace.ops.cpu.native.library import Context
from headrace.ops.cpu.native.linear import NativeDenseKernel
from headrace.ops.formats import Stored
linear = NativeDenseKernel().pack(Stored.from_dense(torch.randn(640, 64).bfloat16()), None, torch.bfloat16)
context, x, expected = Context(2), torch.randn(3, 64), torch.empty(3, 640)
linear.run(context, x, expected)
child = os.fork()
found = torch.empty(3, 640)
linear.run(context, x, found)
same = torch.equal(found, expected)
context.close()
if not child:
    other = Context(2)
    linear.run(other, x, found)
    same &= torch.equal(found, expected)
    other.close()
    os._exit(0 if same else 1)
sys.exit(os.waitpid(child, 0)[1] or not same)
"""


def test_a_fork_has_threads_of_its_own() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=60, env=environment)
