"""Products of many rows with weights in codes, and of gates and ups with the activation, against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_tensors import poison, random
from stored_codes import RING, label, random_weight
from torch import Tensor

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.codes.layout import Codes, codes_of
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.products.linear import LinearScratch
from headrace.ops.cuda.products.many_rows import many_rows_linear
from headrace.ops.formats import Format
from headrace.ops.quantised import IntGroups

GPU = torch.device("cuda")
if not Arch.of(GPU).has("wgmma"):
    pytest.skip("needs Hopper", allow_module_level=True)

ROWS = [65, 127, 128, 129, 255, 256, 257, 1000, 2048]
SIZES = [(6144, 4096), (4096, 14336), (1000, 640), (320, 256)]
"""The last two: outputs that fill no tile, and fewer inputs than can be shared."""
SCRATCH = LinearScratch(GPU, Arch.of(GPU))


def held(format: Format, size_out: int, size_in: int) -> tuple[Codes, Tensor]:
    """A weight in codes, and its numbers in float64."""
    weight = random_weight(format, size_out, size_in, "cuda")
    return codes_of(in_codes(weight, torch.bfloat16)), weight.dense(torch.float32).double()


def ulps(out: Tensor, truth: Tensor) -> float:
    """The largest error in units of the last place of bfloat16 of each row's largest number."""
    return float(((out.double() - truth).abs().amax(1) / (truth.abs().amax(1) * 2**-8)).max())


@pytest.mark.parametrize("format", RING, ids=label)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size_out", "size_in"), SIZES)
def test_products_are_right_and_repeat_themselves(format: Format, gated: bool, size_out: int, size_in: int) -> None:
    lines = 2 * (size_out - size_out % 64) if gated and size_out < 4096 else size_out
    codes, dense = held(format, lines, size_in)
    width = codes.shape[0] // 2 if gated else codes.shape[0]
    for rows in ROWS:
        x, outs = random(rows, size_in), [poison(rows, width) for _ in range(3)]
        for out, pdl in zip(outs, (False, True, True), strict=True):
            many_rows_linear(x, codes, out, SCRATCH, gated=gated, pdl=pdl)
        truth = x.double() @ dense.T
        assert ulps(outs[0], reference.silu_mul(truth) if gated else truth) <= (3 if gated else 2)
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])
        assert not SCRATCH.counters.any()


def test_views_of_wider_tensors() -> None:
    """Nothing beside the output is written."""
    codes, dense = held(IntGroups(4, 32, zeros=True, scale=torch.float16), 328, 192)
    wide, target = random(300, 320), poison(300, 344)
    x, out = wide[:, 64:256], target[:, 8:336]
    many_rows_linear(x, codes, out, SCRATCH)
    assert ulps(out, x.double() @ dense.T) <= 2
    assert target[:, :8].isnan().all() and target[:, 336:].isnan().all()


@pytest.mark.parametrize("tiles", [1, 7])
def test_few_partial_sums_leave_fewer_clusters(tiles: int) -> None:
    """Clusters are as many as there is room for their partial sums."""
    codes, dense = held(IntGroups(4, 128, scale=torch.bfloat16), 4096, 4096)
    small = LinearScratch(GPU, Arch.of(GPU), floats=tiles * 2 * 128 * 256)
    x, out = random(256, 4096), poison(256, 4096)
    many_rows_linear(x, codes, out, small)
    assert ulps(out, x.double() @ dense.T) <= 2


def test_what_does_not_fit_is_refused() -> None:
    codes, _ = held(IntGroups(4, 128, scale=torch.bfloat16), 256, 256)
    with pytest.raises(ValueError, match="another number of inputs"):
        many_rows_linear(random(80, 512), codes, poison(80, 256), SCRATCH)
    with pytest.raises(ValueError, match="another number of outputs"):
        many_rows_linear(random(80, 256), codes, poison(80, 256), SCRATCH, gated=True)
    with pytest.raises(ValueError, match="too few"):
        many_rows_linear(random(80, 256), codes, poison(80, 256), LinearScratch(GPU, Arch.of(GPU), floats=1))
