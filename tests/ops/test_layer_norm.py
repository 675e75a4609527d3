"""Layer norms and activations without a gate: near float64 on a CPU, row by row the same, and in Triton's kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.block import NativeOps
from headrace.ops.cpu.native.library import Context, library
from headrace.ops.stream import LayerNorm, PlainActivation

EPSILON = 1e-4
NATIVE = pytest.param(True, marks=pytest.mark.skipif(library() is None, reason="no compiled kernels"), id="native")
ACTIVATIONS: list[PlainActivation] = ["gelu", "gelu_tanh", "relu", "relu2"]


def make_ops(native: bool, threads: int = 1) -> CpuOps:
    tables = {"cos": torch.ones(1, 4), "sin": torch.zeros(1, 4)}
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 8, "page_size": 4, "eps": EPSILON, "dtype": torch.float32}
    return NativeOps(Context(threads), **sizes, **tables) if native else CpuOps(**sizes, **tables)


def normed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    found = centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()
    return found if bias is None else found + bias.double()


def activated(x: Tensor, activation: PlainActivation) -> Tensor:
    if activation.startswith("relu"):
        return x.double().clamp(min=0) ** (2 if activation == "relu2" else 1)
    return functional.gelu(x.double(), approximate="tanh" if activation == "gelu_tanh" else "none")


@pytest.mark.parametrize("native", [False, NATIVE])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norms_are_near_the_truth(native: bool, has_bias: bool) -> None:
    torch.manual_seed(1)
    ops, weight, bias = make_ops(native), torch.rand(96), torch.randn(96) if has_bias else None
    for x in (torch.randn(7, 96) + 3, 1e-3 * torch.randn(7, 96), 1e3 * torch.randn(1, 96)):
        before = x.clone()
        found = ops.layer_norm(x, LayerNorm(weight, bias))
        torch.testing.assert_close(found.double(), normed(x, weight, bias), rtol=1e-5, atol=1e-5)
        assert torch.equal(x, before), "the sum of the stream goes on"


def test_weights_in_16_bits_count_as_they_are() -> None:
    x, weight, bias = torch.randn(3, 96), torch.rand(96).bfloat16(), torch.randn(96).bfloat16()
    found = make_ops(False).layer_norm(x, LayerNorm(weight, bias))
    torch.testing.assert_close(found.double(), normed(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [False, NATIVE])
def test_each_head_has_a_norm_of_its_own_and_values_none(native: bool) -> None:
    torch.manual_seed(2)
    qkv, weight = torch.randn(5, 10 * 8), torch.rand(8 * 8)
    found = make_ops(native).layer_norm_heads(qkv.clone(), weight)
    wanted = normed(qkv.view(5, 10, 8)[:, :8], weight.view(8, 8)).flatten(1)
    torch.testing.assert_close(found[:, :64].double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[:, 64:], qkv[:, 64:])


@pytest.mark.parametrize("native", [False, NATIVE])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_near_the_truth(native: bool, activation: PlainActivation) -> None:
    x = torch.cat((torch.linspace(-12, 12, 5 * 113), torch.tensor([0.0, -1e9, 1e9, 1e30, -1e30]))).view(5, -1)
    found = make_ops(native).activate_plain(x.clone(), activation)
    wanted = activated(x, activation).float().double()  # infinite where the square is too large for float32
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)
    lost = make_ops(native).activate_plain(torch.full((1, 20), torch.nan), activation)
    assert not lost.isfinite().any(), "what is not a number stays so"


@pytest.mark.skipif(library() is None, reason="no compiled kernels")
@pytest.mark.parametrize("width", [112, 100, 3, 64])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(width: int) -> None:
    torch.manual_seed(3)
    x, weight, bias = torch.randn(37, width), torch.rand(width), torch.randn(width)
    ops = [make_ops(native=True, threads=threads) for threads in (1, 3)]
    norms = [each.layer_norm(x, LayerNorm(weight, bias)) for each in ops]
    assert torch.equal(*norms)
    for activation in ACTIVATIONS:
        whole = [each.activate_plain(x.clone(), activation) for each in ops]
        assert torch.equal(*whole)
        for row in range(len(x)):
            alone = x[row : row + 1].clone()
            assert torch.equal(ops[0].layer_norm(alone, LayerNorm(weight, bias))[0], norms[0][row])
            assert torch.equal(ops[0].activate_plain(alone, activation)[0], whole[0][row])


SCRIPT = """
import torch
from interpreted_bfloat16 import teach
from test_layer_norm import ACTIVATIONS, EPSILON, activated, normed

from headrace.ops.cuda.layer_norm import activate_plain, layer_norm

teach()
torch.manual_seed(0)
for size in (96, 1000):
    x, weight, bias = torch.randn(5, size).bfloat16() + 2, torch.rand(size).bfloat16(), torch.randn(size).bfloat16()
    for given in (None, bias):
        out = torch.full_like(x, torch.nan)
        layer_norm(x, weight, given, EPSILON, out)
        wanted = normed(x, weight, given)
        assert (out - wanted).abs().max() < 2**-7 * wanted.abs().max(), (size, given is None)
    wide = torch.randn(5, 4 * size).bfloat16()  # heads beside what is no head
    before, weights = wide.clone(), torch.rand(3 * size).bfloat16()
    layer_norm(wide[:, : 3 * size], weights, None, EPSILON, wide[:, : 3 * size], parts=3)
    wanted = normed(before[:, : 3 * size].view(5, 3, size), weights.view(3, size)).flatten(1)
    assert (wide[:, : 3 * size] - wanted).abs().max() < 2**-7 * wanted.abs().max()
    assert torch.equal(wide[:, 3 * size :], before[:, 3 * size :])
for size in (96, 1100):
    for activation in ACTIVATIONS:
        x = (3 * torch.randn(4, size)).bfloat16()
        wanted = activated(x, activation)
        activate_plain(x, activation)
        assert (x - wanted).abs().max() < 2**-7 * wanted.abs().max(), (size, activation)
print("done")
"""


def test_tritons_kernels_by_its_interpreter() -> None:
    """In a process of its own, since the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton")
    here = Path(__file__)
    paths = os.pathsep.join((str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr
