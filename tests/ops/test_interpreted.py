"""Triton's kernels for weights in codes, run by its interpreter on a CPU, against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from stored_codes import FORMATS, random_weight

from headrace.ops import reference
from headrace.ops.cuda.products.coded_vector import VectorTiling, coded_vector_linear
from headrace.ops.cuda.products.codes import E4M3, codes_of, in_codes
from headrace.ops.cuda.products.scaled import to_codes
from headrace.ops.cuda.products.unpacked import unpack

torch.manual_seed(0)


def check_vector(codes, dense, rows, gated, block):
    x = torch.randn(rows, codes.shape[1]).bfloat16()
    truth = x.double() @ dense.T
    truth = reference.silu_mul(truth) if gated else truth
    out = torch.full(truth.shape, torch.nan)
    coded_vector_linear(x, codes, out, gated=gated, how=block and VectorTiling(block, 4, 4))
    worst = (out - truth).abs().amax(1) / truth.abs().amax(1)
    assert worst.max() < 2e-6, (codes.kind.name, rows, gated, block, worst)


for format in FORMATS:
    weight = random_weight(format, 72, 384)
    dense, codes = weight.dense(torch.float32).double(), codes_of(in_codes(weight, torch.bfloat16))
    check_vector(codes, dense, 1, False, None)
    check_vector(codes, dense, 3, True, 4)
    some = torch.empty(50, 384, dtype=torch.bfloat16)
    unpack(codes, 13, some)
    # The interpreter cuts numbers off where a GPU rounds them, and bfloat16's smallest ones sooner.
    assert torch.allclose(some.double(), dense[13:63], rtol=2**-7, atol=dense.abs().max() * 2**-14), codes.kind.name
    if codes.kind.codes == E4M3 and not codes.kind.group:
        x = torch.randn(5, 384).bfloat16()
        rounded, scales = to_codes(x)
        product = rounded.double() @ codes.codes_OB.view(torch.float8_e4m3fn).double().T * scales * codes.scales
        truth = x.double() @ dense.T
        assert (product - truth).abs().max() < 0.15 * truth.abs().max()  # the interpreter rounds to 8 bits badly
    print(format.name)
"""


def test_kernels_for_codes_compute_what_the_codes_stand_for() -> None:
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join((tests, os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) >= 7
