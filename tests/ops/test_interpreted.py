"""Triton's kernels for weights in codes, run by its interpreter on a CPU, against float64."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commit import chosen, head
from interpreting import interpret
from stored_codes import FORMATS, label

pytest.importorskip("triton")

SCRIPT = """
import sys

import torch
from emulated_cuda import modules
from gguf import GGMLQuantizationType as Block
from interpreted_bfloat16 import teach
from stored_codes import FORMATS, label, random_weight, whole

from headrace.ops import reference
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.codes.kinds import E4M3
from headrace.ops.cuda.codes.layout import codes_of
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.codes.rows import CodeRows
from headrace.ops.cuda.hazards import Chain
from headrace.ops.cuda.products.coded import coded
from headrace.ops.cuda.products.coded_tiles import TileTiling, coded_tiles_linear
from headrace.ops.cuda.products.coded_vector import VectorTiling, coded_vector_linear
from headrace.ops.cuda.products.gathered import gather
from headrace.ops.cuda.products.linear import LinearScratch
from headrace.ops.cuda.products.packed import Products
from headrace.ops.cuda.products.registry import ProductRoom
from headrace.ops.cuda.products.scaled.inputs import to_codes, to_codes_of_groups
from headrace.ops.cuda.products.scaled.tiles import ScaledTiling, scaled_tiles_linear
from headrace.ops.cuda.products.unpacked import unpack
from headrace.ops.formats import Stored
from headrace.ops.gguf_formats import GgufBlocks
from headrace.ops.quantised import Fp8, IntGroups

teach()
torch.manual_seed(0)
SCRATCH = LinearScratch("cpu", Arch.named("sm_90"))
ROWS = (2, 7, 8, 9, 16, 17, 63, 64)
ULP = 2**-8


def product(codes, dense, rows, gated, dtype, run):
    # The largest error of a row, relative to its largest number.
    x = torch.randn(rows, codes.shape[1]).bfloat16()
    truth = x.double() @ dense.T
    truth = reference.silu_mul(truth) if gated else truth
    out = torch.full(truth.shape, torch.nan, dtype=dtype)
    if codes.kind.ordered:
        given, x = x, torch.full_like(x, torch.nan)
        gather(given, codes.order_I, x)
        codes = codes._replace(kind=codes.kind.in_order)
    run(x, codes, out)
    return ((out - truth).abs().amax(1) / truth.abs().amax(1)).max()


def vector(codes, dense, rows, gated, how):
    def run(x, codes, out):
        coded_vector_linear(x, codes, out, gated=gated, how=how)

    worst = product(codes, dense, rows, gated, torch.float32, run)
    assert worst < 3e-6, (codes.kind.name, rows, gated, how, worst)


def tiles(codes, dense, rows, gated, dtype, how):
    def run(x, codes, out):
        coded_tiles_linear(x, codes, out, SCRATCH, gated=gated, how=how)
        if how is not None and rows < 9:
            again = torch.full_like(out, torch.nan)
            coded_tiles_linear(x, codes, again, SCRATCH, gated=gated, how=how)
            assert torch.equal(out, again) and not SCRATCH.counters.any()

    kept = dense.bfloat16().double() if codes.kind.group else dense  # codes with a scale for each output are exact
    worst = product(codes, kept, rows, gated, dtype, run)
    assert worst < (2 * ULP if dtype == torch.bfloat16 else 3e-6), (codes.kind.name, rows, gated, how, worst)


kinds, names = sys.argv[1], sys.argv[2:]
for number, format in enumerate(FORMATS):
    if label(format) not in names:
        continue
    size_in = whole(format, 320)
    if isinstance(format, IntGroups) and size_in % (format.group or 1):
        size_in = 256
    weight = random_weight(format, 72, size_in)
    dense, codes = weight.dense(torch.float32).double(), codes_of(in_codes(weight, torch.bfloat16))
    if number % 2:
        vector(codes, dense, 1, False, VectorTiling(32, 16, 4))
        tiles(codes, dense, ROWS[number % 8], False, torch.bfloat16, None)
    else:
        vector(codes, dense, 2, True, VectorTiling(8, 32, 4))
        tiles(codes, dense, ROWS[number % 8], False, torch.float32, TileTiling(4, 64, 4, 4))
    tiles(codes, dense, ROWS[(number + 3) % 8], True, torch.bfloat16, None)
    some = torch.empty(4, size_in, dtype=torch.bfloat16)
    unpack(codes._replace(kind=codes.kind.in_order), 13, some)
    truth = dense[13:17].bfloat16()
    assert torch.equal(some, truth[:, codes.order_I] if codes.kind.ordered else truth), codes.kind.name
    for ids in (torch.tensor([71, 0, 13, 13]), torch.tensor([[8, 9], [40, 9]], dtype=torch.int32)[:, 0]):
        read = CodeRows(codes, torch.bfloat16)[ids]
        assert torch.equal(read, dense[ids].bfloat16()), codes.kind.name
    if codes.kind.codes == E4M3 and not codes.kind.group:
        x = torch.randn(5, size_in).bfloat16()
        rounded, scales = to_codes(x)
        product_NO = rounded.double() @ codes.codes_OB.view(torch.float8_e4m3fn).double().T * scales * codes.scales
        truth = x.double() @ dense.T
        assert (product_NO - truth).abs().max() < 0.15 * truth.abs().max()  # the interpreter rounds to 8 bits badly
    if codes.kind.codes == E4M3 and codes.kind.group:  # whose last group and last block are partial
        for rows, how in ((5, ScaledTiling(16, 32, 4, 2)), (37, ScaledTiling(16, 64, 4, 2))):
            x, out = torch.randn(rows, size_in).bfloat16(), torch.full((rows, 80), torch.nan)[:, :72]
            x *= torch.tensor([1e-3, 1, 100])[torch.arange(size_in) // 128]
            rounded = to_codes_of_groups(x)
            truth_GN = torch.stack([part.abs().amax(1) for part in x.float().split(128, 1)]) / 448
            assert torch.equal(rounded.scales_GN[:, :rows], truth_GN)
            spread = truth_GN.T.repeat_interleave(128, 1)[:, :size_in]
            values = (x.float() / spread).to(torch.float8_e4m3fn).double() * spread
            scaled_tiles_linear(rounded, codes, out, how)
            truth = values @ dense.T
            assert ((out - truth).abs().amax(1) / truth.abs().amax(1)).max() < 3e-6, rows
            assert (x.double() @ dense.T - truth).norm() < 0.05 * truth.norm()
    print(label(format), flush=True)

if kinds == "several":  # scales of whole blocks, which the launch that rounds an input lays out for cuBLAS
    blocks = random_weight(Fp8((128, 128)), 384, 640)
    codes = codes_of(in_codes(blocks, torch.bfloat16))
    assert codes.kind.blocks
    laid_out = to_codes_of_groups(torch.randn(3, 640).bfloat16(), codes.scales, 384)
    assert torch.equal(laid_out.blocks_LG, blocks.parts["scale"]) and len(laid_out.codes_NI) == 4

if kinds == "several":  # weights of three kinds, one above the other, as an engine multiplies by them
    sys.modules.update({name: each for name, each in modules().items() if name.startswith("flashinfer")})
    several = [GgufBlocks(Block.Q4_K), GgufBlocks(Block.Q6_K), IntGroups(4, 32, ordered=True, scale=torch.float16)]
    sizes = zip(several, (40, 24, 16), strict=True)
    weight = Stored.stack([random_weight(format, size, 256) for format, size in sizes])
    codes = [codes_of(piece) for piece in in_codes(weight, torch.bfloat16).pieces()]
    room = ProductRoom(LinearScratch("cpu", Arch.named("sm_80")), 1e-6, False, Chain())
    able = [kernel for each in codes for kernel in coded(each.kind)]
    packed = Products(room.scratch.arch, room, able).pack_codes(codes, None, 64, torch.bfloat16)
    for rows, dtype in ((1, torch.bfloat16), (5, torch.bfloat16), (5, torch.float32), (70, torch.bfloat16)):
        x, out = torch.randn(rows, 256).bfloat16(), torch.full((rows, 80), torch.nan, dtype=dtype)
        table = packed.runs.plain if dtype == torch.bfloat16 else packed.runs.logits
        packed.run(table[rows], x, out)
        truth = x.double() @ weight.dense(torch.float32).double().T
        assert ((out - truth).abs().amax(1) / truth.abs().amax(1)).max() < 4 * ULP, rows
    assert packed.size_out == 80 and packed.runs.gated.at(1) is None
"""


LABELS = [label(format) for format in FORMATS]
EVERYTHING = os.environ.get("HEADRACE_MATRIX") == "all"
SAMPLE = LABELS if EVERYTHING else chosen(LABELS, len(LABELS) // 5, head(Path(__file__).parent))
"""A fifth of all formats, as the commit chooses; `make soak` takes all."""


@pytest.mark.parametrize("part", range(2))
def test_kernels_for_codes_compute_what_the_codes_stand_for(part: int) -> None:
    """The formats in two processes, each with some of all numbers of rows, and with partial tiles."""
    names = SAMPLE[part::2]
    assert sorted(interpret(SCRIPT, ("several", "one")[part], *names)) == sorted(names)
