"""Products with weights in codes, against float64 of the numbers that the codes stand for."""

from __future__ import annotations

import pytest
import torch
from gpu_tensors import error, poison, random
from stored_codes import FORMATS, random_weight
from torch import Tensor

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.codes.layout import Codes, codes_of
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.hazards import Chain
from headrace.ops.cuda.products import running
from headrace.ops.cuda.products.coded import UnpackedProducts
from headrace.ops.cuda.products.coded_vector import MAX_ROWS, coded_vector_linear
from headrace.ops.cuda.products.even_linear import EvenLinear
from headrace.ops.cuda.products.linear import LinearScratch
from headrace.ops.cuda.products.registry import ProductRoom
from headrace.ops.cuda.products.scaled import to_codes
from headrace.ops.cuda.products.unpacked import unpack
from headrace.ops.formats import Format
from headrace.ops.quantised import Fp8

GPU = torch.device("cuda")
EPS = 1e-5
if not Arch.of(GPU).has("wgmma"):
    pytest.skip("needs Hopper", allow_module_level=True)

SCRATCH = LinearScratch(GPU, Arch.of(GPU))
ROWS = [1, 2, 7, 8, 9, 16, 17, 63, 64]
names = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def held(format: Format, size_out: int, size_in: int) -> tuple[Codes, Tensor]:
    """A weight in codes, and its numbers in float64."""
    weight = random_weight(format, size_out, size_in, "cuda")
    return codes_of(in_codes(weight, torch.bfloat16)), weight.dense(torch.float32).double()


def ulps(out: Tensor, truth: Tensor) -> float:
    """The largest error in units of the last place of bfloat16 of each row's largest number."""
    return float(((out.double() - truth).abs().amax(1) / (truth.abs().amax(1) * 2**-8)).max())


@names
@pytest.mark.parametrize(("size_out", "size_in"), [(6144, 4096), (1024, 4096), (4096, 896), (320, 256)])
def test_products(format: Format, size_out: int, size_in: int) -> None:
    codes, dense = held(format, size_out, size_in)
    for rows in ROWS:
        x, out, again = random(rows, size_in), poison(rows, size_out), poison(rows, size_out)
        even = EvenLinear(SCRATCH, eps=EPS, pdl=True)
        even.product(x, codes, out)
        even.product(x, codes, again)
        assert ulps(out, x.double() @ dense.T) <= 2
        assert torch.equal(out, again)


@names
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size_out", "size_in"), [(1024, 14336), (4096, 896), (328, 256)])
def test_products_without_tensor_cores(format: Format, size_out: int, size_in: int, gated: bool) -> None:
    codes, dense = held(format, size_out, size_in)
    for rows in (1, 2, MAX_ROWS):
        x = random(rows, size_in)
        out, again = (poison(rows, size_out // 2 if gated else size_out) for _ in range(2))
        coded_vector_linear(x, codes, out, gated=gated, pdl=True)
        coded_vector_linear(x, codes, again, gated=gated, pdl=True)
        truth = x.double() @ dense.T
        assert ulps(out, reference.silu_mul(truth) if gated else truth) <= 2
        assert torch.equal(out, again)


@names
def test_the_rest_of_a_layer(format: Format) -> None:
    """Residual, norm and activation, with the codes of gates above those of ups."""
    (down, down_OI), (up, up_OI) = held(format, 1024, 3072), held(format, 6144, 1024)
    for rows in ROWS:
        x, residual, norm = random(rows, 3072), random(rows, 1024), random(1024)
        even = EvenLinear(SCRATCH, eps=EPS, pdl=True)
        kept, scaled, fed = residual.clone(), poison(rows, 1024), poison(rows, 3072)
        squares = even.add(x, down, kept, norm, scaled)
        even.silu_mul(scaled, up, fed, squares)
        total = x.double() @ down_OI.T + residual.double()
        truth = reference.rms_norm(total.float(), norm, EPS).double() @ up_OI.T
        assert ulps(kept, total) <= 2
        assert error(fed, reference.silu_mul(truth)) < 8e-3


@names
@pytest.mark.parametrize("first", [0, 64])
def test_unpacked_numbers_are_exact(format: Format, first: int) -> None:
    codes, dense = held(format, 320, 896)
    out = torch.empty(200, 896, dtype=torch.bfloat16, device=GPU)
    unpack(codes, first, out)
    assert torch.equal(out, dense[first : first + 200].bfloat16())


@names
def test_logits_of_a_head_that_is_unpacked_in_slices(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SLICE", 128 * 896)
    codes, dense = held(format, 320, 896)
    room = ProductRoom(LinearScratch(GPU, Arch.of(GPU)), EPS, True, Chain())
    run = running.UnpackedRun(room, UnpackedProducts(codes.kind))
    for rows in (1, 7, 64, 100):
        x, out = random(rows, 896), torch.empty(rows, 320, dtype=torch.float32, device=GPU)
        run.run(x, codes, out)
        assert error(out, x.double() @ dense.T) < 5e-3


def test_activations_are_rounded_to_8_bits_by_row() -> None:
    """Products of 8-bit floats are those of the rounded activations, in the order of the weight's columns."""
    codes, dense = held(Fp8(), 512, 1024)
    x = random(100, 1024) * torch.arange(1, 101, device=GPU)[:, None].bfloat16()
    rounded, scales = to_codes(x)
    out = torch._scaled_mm(
        rounded, codes.codes_OB.view(torch.float8_e4m3fn).t(), scale_a=scales, scale_b=codes.scales[None],
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    steps = (x.float() / scales).to(torch.float8_e4m3fn).double() * scales
    assert error(out, steps @ dense.T) < 5e-3
    assert error(out, x.double() @ dense.T) < 5e-2
