"""The fused CUDA operations against the slow truth, on random inputs."""

from __future__ import annotations

import pytest
import torch
from gpu_tensors import poison

from headrace.ops import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from headrace.ops.cuda.attention.shape import Values
from headrace.ops.cuda.fused import (
    DecodeInputs,
    activate_mul,
    add_rms_norm,
    prepare_decode,
    rms_norm,
)
from headrace.ops.cuda.heads import norm_rope_write

GPU = torch.device("cuda")
PAGE = 16


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2 distance; infinite for NaN."""
    distance = (out.double().cpu() - truth.double().cpu()).norm() / truth.double().cpu().norm()
    return float("inf") if torch.isnan(distance) else float(distance)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("size", [576, 1024, 4096, 5120])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_norms(rows: int, size: int, pdl: bool) -> None:
    x = torch.randn(rows, size, dtype=torch.bfloat16, device=GPU)
    residual = torch.randn_like(x)
    weight = torch.randn(size, dtype=torch.bfloat16, device=GPU)
    out = poison(rows, size)
    rms_norm(x, weight, 1e-6, out, pdl=pdl)
    assert error(out, reference.rms_norm(x, weight, 1e-6)) < 4e-3
    summed = x.float() + residual.float()
    add_rms_norm(x, residual, weight, 1e-6, out, pdl=pdl)
    assert error(residual, summed) < 4e-3
    assert error(out, reference.rms_norm(summed, weight, 1e-6)) < 4e-3


@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (5, 3072), (64, 14336)])
def test_silu_mul(rows: int, size: int) -> None:
    gate_up = torch.randn(rows, 2 * size, dtype=torch.bfloat16, device=GPU)
    out = poison(rows, size)
    activate_mul(gate_up, out)
    assert error(out, reference.silu_mul(gate_up)) < 4e-3


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (16, 8, 128), (32, 8, 128), (4, 4, 96)])
@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_norm_rope_write(tokens: int, heads: int, kv_heads: int, dim: int, norm: bool, fp8: bool) -> None:
    pages, k_scale, v_scale = 40, (0.05, 0.02) if fp8 else (1.0, 1.0), None
    k_scale, v_scale = k_scale
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16, device=GPU)
    angles = torch.rand(500, dim // 2, device=GPU) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = [torch.randn(dim, dtype=torch.bfloat16, device=GPU) for _ in range(2)] if norm else [None, None]
    positions = torch.randint(0, 500, (tokens,), device=GPU)
    slots = torch.randperm(pages * PAGE, device=GPU)[:tokens]
    slots[0] = -1 if tokens > 1 else slots[0]
    kv = torch.randn(pages, 2, PAGE, kv_heads, dim, device=GPU).to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    before = kv.float().clone()
    q_out = poison(tokens, heads, dim)

    q, k, v = reference.split_qkv(qkv.cpu(), heads, kv_heads, dim)
    if norm:
        assert weights[0] is not None and weights[1] is not None
        q = reference.rms_norm(q, weights[0].cpu(), 1e-6)
        k = reference.rms_norm(k, weights[1].cpu(), 1e-6)
    q = reference.rope(q, positions.cpu(), angles.cos().cpu(), angles.sin().cpu())
    k = reference.rope(k, positions.cpu(), angles.cos().cpu(), angles.sin().cpu())
    untouched = qkv.clone()
    norm_rope_write(
        qkv,
        *weights,
        cos_sin,
        positions,
        slots,
        kv,
        heads=heads,
        kv_heads=kv_heads,
        eps=1e-6,
        q_out=q_out,
        k_scale=k_scale,
        v_scale=v_scale,
        pdl=True,
    )
    assert torch.equal(qkv, untouched)
    assert error(q_out, q) < 4e-3
    kept = [token for token, slot in enumerate(slots.tolist()) if slot >= 0]
    flat = kv.float().transpose(1, 2).reshape(pages * PAGE, 2, kv_heads, dim)
    bound = 4e-2 if fp8 else 4e-3
    assert error(flat[slots[kept], 0] * k_scale, k[kept]) < bound
    assert error(flat[slots[kept], 1] * v_scale, v[kept]) < bound
    others = torch.ones(pages * PAGE, dtype=torch.bool, device=GPU)
    others[slots[kept]] = False
    assert torch.equal(flat[others], before.transpose(1, 2).reshape(flat.shape)[others])
    norm_rope_write(qkv, *weights, cos_sin, positions, slots, kv, heads=heads, kv_heads=kv_heads, eps=1e-6)
    assert torch.equal(qkv[:, : heads * dim].reshape(q_out.shape), q_out)


@pytest.mark.parametrize(("values", "kinds"), [("normed", 2), ("normed keys", 1), ("stored", 0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 256), (16, 2, 512), (8, 1, 512)])
@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_values_are_normed_as_they_are_stored(
    tokens: int, heads: int, kv_heads: int, dim: int, values: Values, kinds: int
) -> None:
    qkv = 3 * torch.randn(tokens, (heads + kinds * kv_heads) * dim, dtype=torch.bfloat16, device=GPU)
    angles = torch.rand(500, dim // 2, device=GPU) * 6.28
    weights = [torch.randn(dim, dtype=torch.bfloat16, device=GPU) for _ in range(2)]
    positions = torch.randint(0, 500, (tokens,), device=GPU)
    slots = torch.randperm(20 * PAGE, device=GPU)[:tokens]
    kv = torch.zeros(20, 2, PAGE, kv_heads, dim, device=GPU, dtype=torch.bfloat16)
    q_out = poison(tokens, heads, dim)
    norm_rope_write(
        qkv, *weights, torch.cat([angles.cos(), angles.sin()], dim=1), positions, slots, kv, heads=heads,
        kv_heads=kv_heads, eps=1e-6, q_out=q_out, values=values, pdl=True,
    )  # fmt: skip
    parts, turns = qkv.cpu().view(tokens, -1, dim), (positions.cpu(), angles.cos().cpu(), angles.sin().cpu())
    assert error(q_out, reference.rope(reference.rms_norm(parts[:, :heads], weights[0].cpu(), 1e-6), *turns)) < 4e-3
    flat = kv.transpose(1, 2).reshape(20 * PAGE, 2, kv_heads, dim)
    if values == "stored":
        assert not flat.any()
        return
    k = reference.rms_norm(parts[:, heads : heads + kv_heads], weights[1].cpu(), 1e-6)
    assert error(flat[slots, 0], reference.rope(k, *turns)) < 4e-3
    ones = torch.ones(dim, dtype=torch.bfloat16)
    assert error(flat[slots, 1], reference.rms_norm(parts[:, -kv_heads:], ones, 1e-6)) < 4e-3


def test_prepare_derives_inputs_and_keeps_other_columns() -> None:
    rows, context, columns = 12, 512, 32
    pool = torch.randint(0, 1000, (rows + 1, context), dtype=torch.int32, device=GPU)
    table = torch.randint(0, 900, (rows + 1, columns), dtype=torch.int32, device=GPU)
    lengths = torch.randint(0, context - 1, (rows + 1,), dtype=torch.int32, device=GPU)
    lengths[3], lengths[rows] = 15, 0
    table[rows] = 900
    chosen = torch.tensor([5, 3, 0, rows, rows], dtype=torch.int32, device=GPU)
    out = DecodeInputs(
        tokens_B=torch.full((5,), -7, dtype=torch.int32, device=GPU),
        positions_B=torch.full((5,), -7, dtype=torch.int64, device=GPU),
        slots_B=torch.full((5,), -7, dtype=torch.int64, device=GPU),
        seq_lens_B=torch.full((5,), -7, dtype=torch.int32, device=GPU),
        pages_BP=torch.full((5, columns), 900, dtype=torch.int32, device=GPU),
        tails_B=torch.full((5,), -7, dtype=torch.int32, device=GPU),
    )
    prepare_decode(chosen, pool, lengths, table, out, page_size=PAGE)
    for at, row in enumerate(chosen.tolist()):
        position = int(lengths[row])
        assert out.tokens_B[at] == pool[row, position]
        assert out.positions_B[at] == position
        assert out.slots_B[at] == int(table[row, position // PAGE]) * PAGE + position % PAGE
        assert out.seq_lens_B[at] == position + 1
        assert out.tails_B[at] == position + 1 - (columns - 1) * PAGE
        used = position // PAGE + 1
        assert torch.equal(out.pages_BP[at, :used], table[row, :used])
        assert bool((out.pages_BP[at, used:] == 900).all())
