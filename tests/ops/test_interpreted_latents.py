"""Triton's kernels for latent attention, run by its interpreter on a CPU, against float64."""

from __future__ import annotations

import pytest
from interpreting import interpret

pytest.importorskip("triton")

SCRIPT = """
import torch
from interpreted_bfloat16 import teach

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.latents.attend import Parts, LatentTiling, attend_decode, attend_prefill
from headrace.ops.cuda.latents.expand import attend_expanded
from headrace.ops.cuda.latents.running import LatentDecode, decode_tiling, parts_of
from headrace.ops.cuda.latents.shape import LatentShape
from headrace.ops.cuda.latents.store import store_latents

teach()
torch.manual_seed(0)
ULP = 2**-8
PAGES = 40
SHAPES = (
    LatentShape(heads=3, latent_dim=16, rotated_dim=8, scale=0.3),
    LatentShape(heads=18, latent_dim=96, rotated_dim=24, scale=0.2),
    LatentShape(heads=5, latent_dim=512, rotated_dim=64, scale=0.08),
)


def close(found, truth, what):
    worst = (found.double() - truth).abs().max() / truth.abs().max()
    assert worst < 2 * ULP, (what, float(worst))


def attended(q_HD, kv, pages, length, shape):
    line_SD = kv[pages.long()].reshape(-1, shape.head_dim)[:length].double()
    weights_HS = torch.softmax(q_HD.double() @ line_SD.T * shape.scale, -1)
    return weights_HS @ line_SD[:, : shape.latent_dim]


def cache(shape):
    return torch.randn(PAGES, shape.page_size, shape.head_dim).bfloat16()


def check_decodes(shape):
    lengths = torch.tensor([1, 17, 70, 200], dtype=torch.int32)
    rows, kv = len(lengths), cache(shape)
    pages = torch.stack([torch.randperm(PAGES)[:13] for _ in range(rows)]).int()
    q = torch.randn(rows, shape.heads, shape.head_dim).bfloat16()
    for lanes, tile, splits, least in ((16, 16, 1, 1), (16, 32, 4, 1), (32, 16, 8, 2)):
        count = rows * shape.heads * splits
        room = (torch.full((size,), torch.nan) for size in (count * shape.latent_dim, count))
        parts = Parts(*room, splits, least)
        out = torch.full((rows, shape.heads, shape.latent_dim), torch.nan).bfloat16()
        attend_decode(q, kv, lengths, pages, out, parts, shape, LatentTiling(lanes, tile, 4, 2))
        for row, length in enumerate(lengths.tolist()):
            close(out[row], attended(q[row], kv, pages[row], length, shape), ("decode", shape.heads, splits, length))
        assert out[0].equal(kv[pages[0, 0], 0, : shape.latent_dim].expand(shape.heads, -1)), "not the one token"


def check_prefills(shape):
    # Rows that begin, that go on behind others, and one token alone; more lanes than a job has, and fewer.
    rows, kv = ((19, 19), (5, 70), (1, 33)), cache(shape)
    pages = [torch.randperm(PAGES)[: -(-length // shape.page_size)] for _, length in rows]
    tokens = sum(count for count, _ in rows)
    q = torch.randn(tokens, shape.heads, shape.head_dim).bfloat16()
    tiling, jobs, done, page = LatentTiling(16, 32, 4, 2), [], 0, 0
    for (count, length), own in zip(rows, pages, strict=True):
        ends = range(done * shape.heads, (done + count) * shape.heads)
        jobs += [(at, min(16, ends.stop - at), length - count - done + 1, page) for at in ends[::16]]
        done, page = done + count, page + len(own)
    out = torch.full((tokens, shape.heads, shape.latent_dim), torch.nan).bfloat16()
    jobs_J4 = torch.tensor(jobs, dtype=torch.int32)
    attend_prefill(q, kv, jobs_J4, torch.cat(pages).int(), out, shape, tiling)
    token = 0
    for (count, length), own in zip(rows, pages, strict=True):
        for seen in range(length - count + 1, length + 1):
            close(out[token], attended(q[token], kv, own, seen, shape), ("prefill", shape.heads, seen))
            token += 1


def check_whole(heads, plain, rotated, value):
    # Rows of which each token sees those of its own row up to itself; keys and queries within wider lines.
    counts, tiling = (37, 1, 18), LatentTiling(16, 32, 4, 2)
    tokens, jobs, done = sum(counts), [], 0
    for count in counts:
        jobs += [(done, done + at, min(16, count - at)) for at in range(0, count, 16)]
        done += count
    q = torch.randn(tokens, heads, plain + rotated).bfloat16()
    up = torch.randn(tokens, heads * (plain + value)).bfloat16()
    keys = torch.randn(tokens, 9 + rotated).bfloat16()[:, 9:]
    turned_q, out = q[:, :, plain:].contiguous(), torch.full((tokens, heads, value), torch.nan).bfloat16()
    jobs_J3 = torch.tensor(jobs, dtype=torch.int32)
    attend_expanded(q[:, :, :plain], turned_q, up, keys, jobs_J3, out, tiling, scale=0.3)
    k, v = up.view(tokens, heads, -1).double().split((plain, value), 2)
    k = torch.cat((k, keys.double()[:, None].expand(-1, heads, -1)), 2)
    scores = torch.einsum("nhx,shx->hns", q.double(), k) * 0.3
    row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    at = torch.arange(tokens)
    unseen = (row[:, None] != row) | (at > at[:, None])
    close(out, torch.einsum("hns,shv->nhv", scores.masked_fill(unseen, -torch.inf).softmax(-1), v), ("whole", plain))


def turned(x, cos_sin, paired):
    first, second = (x[..., ::2], x[..., 1::2]) if paired else x.chunk(2, -1)
    cos, sin = cos_sin.double().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def check_storage(shape, paired):
    rank, size, plain = shape.latent_dim, shape.head_dim, 5
    queries = torch.randn(6, shape.heads, plain + shape.rotated_dim).bfloat16()
    vectors, norm = torch.randn(6, size + 3).bfloat16()[:, :size], torch.rand(rank) + 0.5
    vectors[4, :2] = torch.inf
    positions, slots = torch.tensor([3, 0, 9, 1, 2, 8]), torch.tensor([0, 17, -1, 639, 5, 100])
    cos_sin = torch.randn(10, shape.rotated_dim)
    out, kv = torch.full((6, shape.heads, size), 7.0).bfloat16(), torch.zeros(PAGES, shape.page_size, size).bfloat16()
    lines = torch.full((6, size), torch.nan).bfloat16() if paired else None
    store_latents(
        queries[:, :, plain:], vectors, norm, cos_sin, positions, slots, out[:, :, rank:], kv, shape, lines, eps=1e-2,
        paired=paired,
    )
    own = cos_sin[positions]
    close(out[:, :, rank:], turned(queries[:, :, plain:].double(), own[:, None], paired), "rotated queries")
    assert (out[:, :, :rank] == 7).all()
    c, line = vectors[:, :rank].double(), kv.view(-1, size)
    normed = c * torch.rsqrt((c * c).mean(1, keepdim=True) + 1e-2) * norm
    real = torch.tensor([0, 1, 3, 5])
    assert lines is None or lines.isfinite().all() and torch.equal(lines[real], line[slots[real]])
    close(line[slots[real], :rank], normed[real], "latent vectors")
    close(line[slots[real], rank:], turned(vectors[real, rank:].double(), own[real], paired), "keys")
    assert line.isfinite().all() and (line != 0).any(1).sum() <= 5, "a place that no token has"


def check_shares():
    # Whatever the batch, its parts have room.
    for name in ("sm_80", "sm_86", "sm_90"):
        arch = Arch.named(name)
        for heads in (1, 16, 20, 128):
            shape = LatentShape(heads=heads, latent_dim=16, rotated_dim=8, scale=1.0)
            memory, tiling = LatentDecode.memory(shape, arch, torch.device("cpu")), decode_tiling(shape, arch)
            for rows in (1, 2, 7, 16, 64, 100, 256, 1000):
                parts = parts_of(shape, arch, tiling, rows, memory)
                if parts.splits > 1:
                    wanted = rows * heads * parts.splits
                    assert len(parts.scores) >= wanted and len(parts.sums) >= wanted * shape.latent_dim
            assert parts_of(shape, arch, tiling, 1, memory).splits >= 16 and parts.splits == 1


for shape in SHAPES:
    check_decodes(shape)
    check_prefills(shape)
    for paired in (False, True):
        check_storage(shape, paired)
    print(shape.heads, flush=True)
for sizes in ((2, 12, 8, 20), (1, 128, 64, 128)):
    check_whole(*sizes)
check_shares()
"""


def test_kernels_compute_latent_attention() -> None:
    assert interpret(SCRIPT) == ["3", "18", "5"]
