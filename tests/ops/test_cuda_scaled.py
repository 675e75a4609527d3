"""Products of 8-bit floats by 8-bit floats, against float64 of the rounded activations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_tensors import error, poison
from stored_codes import random_weight
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.codes.layout import EIGHT_BITS, Codes, codes_of
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.hazards import Chain
from headrace.ops.cuda.products.coded import coded
from headrace.ops.cuda.products.linear import LinearScratch
from headrace.ops.cuda.products.registry import ProductRoom, WeightShape, resolve
from headrace.ops.cuda.products.scaled.inputs import to_codes_of_groups
from headrace.ops.cuda.products.scaled.tiles import scaled_tiles_linear, scaled_tiling
from headrace.ops.formats import Stored
from headrace.ops.quantised import Fp8

GPU = torch.device("cuda")
ARCH = Arch.of(GPU)
if not ARCH.has("fp8"):
    pytest.skip("needs a GPU with 8-bit floats", allow_module_level=True)
PDL = ARCH.has("dependent_launch")
SCRATCH = LinearScratch(GPU, ARCH)
ROWS = [1, 65, 72, 127, 128, 129, 256, 300, 1000, 2048]
SIZES = [(6144, 4096), (4096, 14336), (128, 512), (576, 7168), (320, 192), (1000, 640), (8, 64)]
"""The last four: outputs that fill no tile or no block, and groups of which the last is half a group."""
BLOCKS = Fp8((128, 128))
Kernel = Callable[[Tensor, Codes, Tensor, bool], None]


def by_triton(x: Tensor, codes: Codes, out: Tensor, pdl: bool) -> None:
    scaled_tiles_linear(to_codes_of_groups(x, pdl=pdl), codes, out, scaled_tiling(len(out), ARCH), pdl=pdl)


def by_choice(x: Tensor, codes: Codes, out: Tensor, pdl: bool) -> None:
    """By the kernel that an engine chooses for so many rows, or for 65: on Hopper cuBLAS, where it takes the weight."""
    shape = WeightShape(len(codes.codes_OB), x.shape[1], 128, kind=codes.kind)
    kernel = resolve(coded(codes.kind), ARCH, shape).kernels["plain"][max(len(x), 65)]
    if not kernel.name.startswith("scaled"):
        pytest.skip(f"{kernel.name} rounds nothing")
    kernel.open(ProductRoom(SCRATCH, 1e-5, pdl, Chain())).run(x, codes, out)


KERNELS = [by_triton, by_choice]


def held(size_out: int, size_in: int, format: Fp8 = BLOCKS) -> tuple[Codes, Tensor]:
    """A weight whose scales differ from block to block, or from output to output, and its numbers in float64."""
    weight = random_weight(format, size_out, size_in, "cuda")
    return codes_of(in_codes(weight, torch.bfloat16)), weight.dense(torch.float32).double()


def activations(rows: int, size_in: int) -> Tensor:
    """Normally distributed numbers, some groups of which are a thousand times as large as others."""
    sizes = 10.0 ** torch.randint(-2, 2, (rows, -(-size_in // 128)), device=GPU)
    return (torch.randn(rows, size_in, device=GPU) * sizes.repeat_interleave(128, 1)[:, :size_in]).bfloat16()


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers that DeepSeek-V3's report makes of activations, in float64, and the scales, [G, N]."""
    scales = torch.stack([part.abs().amax(1) for part in x.float().split(128, 1)]) / torch.tensor(448.0, device=GPU)
    spread = scales.T.repeat_interleave(128, 1)[:, : x.shape[1]]
    return (x.float() / spread).to(torch.float8_e4m3fn).double() * spread, scales


def numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes in the order of a weight's columns stand for, in that of the inputs, in float64."""
    order = torch.tensor(EIGHT_BITS, device=GPU).argsort()
    made = codes.contiguous().view(torch.uint8).view(len(codes), -1, 16)[..., order].reshape(codes.shape)
    return made.view(torch.float8_e4m3fn).double() * scales


def worst(out: Tensor, truth: Tensor) -> float:
    """The largest error of a row, relative to its largest number."""
    distance = (out.double() - truth).abs().amax(1) / truth.abs().amax(1)
    return float("inf") if distance.isnan().any() else float(distance.max())


@pytest.mark.parametrize(("rows", "size_in"), [(2, 64), (65, 192), (300, 4096), (129, 14336)])
def test_activations_are_rounded_in_groups_of_128(rows: int, size_in: int) -> None:
    x = activations(rows, size_in)
    x[0, :64] = 0
    codes, scales, _ = to_codes_of_groups(x, pdl=PDL)
    codes = codes[:rows]
    values, truth = rounded(x[1:])
    assert torch.equal(scales[:, 1:rows], truth)
    assert not codes[0, :64].float().any()
    spread = scales[:, 1:rows].T.repeat_interleave(128, 1)[:, :size_in]
    assert error(numbers(codes[1:], spread), values) < 1e-4


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("size_out", "size_in"), SIZES)
def test_products_are_those_of_rounded_activations(kernel: Kernel, size_out: int, size_in: int) -> None:
    codes, dense = held(size_out, size_in)
    for rows in ROWS:
        x = activations(rows, size_in)
        values, _ = rounded(x)
        outs = [poison(rows, size_out) for _ in range(3)]
        for out, pdl in zip(outs, (False, PDL, PDL), strict=True):
            kernel(x, codes, out, pdl)
        assert worst(outs[0], values @ dense.T) < 6e-3, rows
        assert error(outs[0], values @ dense.T) < 4e-3, rows
        if outs[0].numel() > 1000:
            assert error(outs[0], x.double() @ dense.T) < 5e-2, rows
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", [(576, 1024, 192), (512, 128, 256)])
def test_weights_that_lie_one_above_the_other_keep_their_own_blocks(sizes: tuple[int, ...], kernel: Kernel) -> None:
    """As queries, keys and values do; where the first has no whole blocks, those of the others begin elsewhere."""
    pieces = [random_weight(BLOCKS, size, 512, "cuda", seed) for seed, size in enumerate(sizes)]
    codes = codes_of(in_codes(Stored.stack(pieces), torch.bfloat16))
    assert codes.kind.blocks == (sizes[0] == 512)
    dense = torch.cat([piece.dense(torch.float32) for piece in pieces]).double()
    x, out = activations(200, 512), poison(200, sum(sizes))
    kernel(x, codes, out, PDL)
    assert worst(out, rounded(x)[0] @ dense.T) < 6e-3


def test_an_engine_multiplies_so_and_replays_it() -> None:
    """By the kernels that it chooses, in a graph, and into views of wider tensors, beside which nothing is written."""
    codes, dense = held(256, 512)
    room = ProductRoom(SCRATCH, 1e-5, PDL, Chain())
    kernel = resolve(coded(codes.kind), ARCH, WeightShape(256, 512, 128, kind=codes.kind)).kernels["plain"].at(201)
    assert kernel is not None and kernel.name.startswith("scaled")
    run = kernel.open(room)
    wide, target = activations(201, 640), poison(201, 272)
    x, out = wide[:, 64:576], target[:, 8:264]
    run.run(x, codes, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.run(x, codes, out)
    wide.copy_(activations(201, 640))
    graph.replay()
    assert worst(out, rounded(x)[0] @ dense.T) < 6e-3
    assert target[:, :8].isnan().all() and target[:, 264:].isnan().all()


def test_what_is_not_finite_stays_in_its_row() -> None:
    codes, dense = held(320, 192)
    x = activations(200, 192)
    x[3, 5], x[77, 100] = torch.nan, torch.inf
    others = torch.ones(200, dtype=torch.bool, device=GPU)
    others[[3, 77]] = False
    out = poison(200, 320)
    by_triton(x, codes, out, PDL)
    assert not out[[3, 77]].isfinite().any()
    assert worst(out[others], rounded(x[others])[0] @ dense.T) < 6e-3
