"""Products with weights in codes, against float64 of the numbers that the codes stand for."""

from __future__ import annotations

import pytest
import torch
from gpu_tensors import error, poison, random
from stored_codes import FORMATS, RING, label, random_weight, whole
from torch import Tensor

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.codes.layout import Codes, codes_of
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.codes.rows import CodeRows
from headrace.ops.cuda.hazards import Chain
from headrace.ops.cuda.products import running
from headrace.ops.cuda.products.coded import UnpackedProducts, coded
from headrace.ops.cuda.products.coded_tiles import coded_tiles_linear
from headrace.ops.cuda.products.coded_vector import MAX_ROWS, coded_vector_linear
from headrace.ops.cuda.products.even_linear import EvenLinear
from headrace.ops.cuda.products.linear import LinearScratch
from headrace.ops.cuda.products.registry import ProductRoom, WeightShape, resolve
from headrace.ops.cuda.products.scaled.inputs import to_codes
from headrace.ops.cuda.products.unpacked import unpack
from headrace.ops.formats import Format
from headrace.ops.quantised import Fp8, IntGroups

GPU = torch.device("cuda")
EPS = 1e-5
HOPPER = pytest.mark.skipif(not Arch.of(GPU).has("wgmma"), reason="needs Hopper")
PDL = Arch.of(GPU).has("dependent_launch")
SCRATCH = LinearScratch(GPU, Arch.of(GPU))
ROWS = [1, 2, 7, 8, 9, 16, 17, 63, 64]
names = pytest.mark.parametrize("format", FORMATS, ids=label)
of_ring = pytest.mark.parametrize("format", RING, ids=label)


def held(format: Format, size_out: int, size_in: int) -> tuple[Codes, Tensor]:
    """A weight in codes in the order of the inputs, and its numbers in float64."""
    weight = random_weight(format, size_out, whole(format, size_in), "cuda")
    codes, dense = codes_of(in_codes(weight, torch.bfloat16)), weight.dense(torch.float32).double()
    if not codes.kind.ordered:
        return codes, dense
    return codes._replace(kind=codes.kind.in_order), dense[:, codes.order_I]


def ulps(out: Tensor, truth: Tensor) -> float:
    """The largest error in units of the last place of bfloat16 of each row's largest number."""
    return float(((out.double() - truth).abs().amax(1) / (truth.abs().amax(1) * 2**-8)).max())


@HOPPER
@of_ring
@pytest.mark.parametrize(("size_out", "size_in"), [(6144, 4096), (1024, 4096), (4096, 896), (4096, 640), (320, 256)])
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
        x = random(rows, codes.shape[1])
        out, again = (poison(rows, size_out // 2 if gated else size_out) for _ in range(2))
        coded_vector_linear(x, codes, out, gated=gated, pdl=PDL)
        coded_vector_linear(x, codes, again, gated=gated, pdl=PDL)
        truth = x.double() @ dense.T
        assert ulps(out, reference.silu_mul(truth) if gated else truth) <= 2
        assert torch.equal(out, again)


@names
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size_out", "size_in"), [(1024, 14336), (6144, 4096), (4096, 896), (328, 256)])
def test_products_by_tiles(format: Format, size_out: int, size_in: int, gated: bool) -> None:
    codes, dense = held(format, size_out, size_in)
    for rows in ROWS:
        x = random(rows, codes.shape[1])
        truth = x.double() @ dense.bfloat16().double().T if codes.kind.group else x.double() @ dense.T
        truth = reference.silu_mul(truth) if gated else truth
        out, again = (poison(rows, size_out // 2 if gated else size_out) for _ in range(2))
        coded_tiles_linear(x, codes, out, SCRATCH, gated=gated, pdl=PDL)
        coded_tiles_linear(x, codes, again, SCRATCH, gated=gated, pdl=PDL)
        assert ulps(out, truth) <= 2
        assert torch.equal(out, again)
        logits = torch.empty(out.shape, dtype=torch.float32, device=GPU)
        coded_tiles_linear(x, codes, logits, SCRATCH, gated=gated, pdl=PDL)
        assert error(logits, truth) < 1e-4


@names
@pytest.mark.parametrize("rows", [65, 256])
def test_products_of_many_rows(format: Format, rows: int) -> None:
    """By the kernels that an engine takes: unpacked or not, and of 8-bit floats by those of rounded activations."""
    codes, dense = held(format, 320, 896)
    room = ProductRoom(LinearScratch(GPU, Arch.of(GPU)), EPS, PDL, Chain())
    shape = WeightShape(320, codes.shape[1], 128, kind=codes.kind)
    chosen = resolve(coded(codes.kind), Arch.of(GPU), shape).kernels
    x = random(rows, codes.shape[1])
    for fusion, dtype in (("plain", torch.bfloat16), ("logits", torch.float32)):
        kernel = chosen[fusion].at(rows)
        assert kernel is not None
        out, again = (torch.full((rows, 320), torch.nan, dtype=dtype, device=GPU) for _ in range(2))
        run = kernel.open(room)
        run.run(x, codes, out)
        run.run(x, codes, again)
        assert torch.equal(out, again)
        is_rounded, is_unpacked = kernel.name.startswith("scaled"), kernel.name.startswith("unpacked")
        truth = x.double() @ (dense.bfloat16().double() if is_unpacked else dense).T
        assert error(out, truth) < (5e-2 if is_rounded else 8e-3), kernel.name
        assert is_rounded or dtype == torch.float32 or ulps(out, truth) <= 2, kernel.name


@names
def test_rows_of_a_table_are_those_of_a_dense_one(format: Format) -> None:
    weight = random_weight(format, 320, whole(format, 896), "cuda")
    table, dense = CodeRows(codes_of(in_codes(weight, torch.bfloat16)), torch.bfloat16), weight.dense(torch.bfloat16)
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([319, 0, 17, 17, 256], dtype=dtype, device=GPU)
        assert torch.equal(table[ids], dense[ids])
        assert torch.equal(table[ids[1:]], dense[ids[1:]])


def test_inputs_are_gathered_in_the_order_of_the_columns() -> None:
    """By every kernel of a weight in an order of its own: launched one after the other, each waits for its input."""
    weight = random_weight(IntGroups(4, 32, zeros=True, ordered=True, scale=torch.float16), 320, 896, "cuda")
    codes, dense = codes_of(in_codes(weight, torch.bfloat16)), weight.dense(torch.float32).double()
    room = ProductRoom(SCRATCH, EPS, PDL, Chain())
    for kernel in coded(codes.kind):
        rows = kernel.rows(SCRATCH.arch, WeightShape(320, 896, 128, kind=codes.kind), "plain")
        if kernel.refuses(SCRATCH.arch, WeightShape(320, 896, 128, kind=codes.kind), "plain") is not None:
            continue
        run = kernel.open(room)
        for count in {rows.start, min(rows.stop - 1, 200)}:
            x, out = random(count, 896), poison(count, 320)
            run.run(x, codes, out)
            assert error(out, x.double() @ dense.T) < 8e-3


@HOPPER
@of_ring
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
    out = torch.empty(200, codes.shape[1], dtype=torch.bfloat16, device=GPU)
    unpack(codes, first, out)
    assert torch.equal(out, dense[first : first + 200].bfloat16())


@names
def test_logits_of_a_head_that_is_unpacked_in_slices(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SLICE", 128 * 896)
    codes, dense = held(format, 320, 896)
    room = ProductRoom(LinearScratch(GPU, Arch.of(GPU)), EPS, PDL, Chain())
    run = running.UnpackedRun(room, UnpackedProducts(codes.kind))
    for rows in (1, 7, 64, 100):
        x, out = random(rows, codes.shape[1]), torch.empty(rows, 320, dtype=torch.float32, device=GPU)
        run.run(x, codes, out)
        assert error(out, x.double() @ dense.T) < 5e-3


@HOPPER
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
