"""The kernels of attention to latent vectors on the emulated GPU, in slow torch, by their names; no tests."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from emulated_kernels import LARGEST, demand, normed
from torch import Tensor

__all__ = ["LATENT_KERNELS"]


def rotated(x: Tensor, at: SimpleNamespace) -> Tensor:
    """Float32 [..., R]: the first elements of all pairs, then the second ones, turned by each token's angle."""
    x, half = x.float(), at.HALF
    first, second = (x[..., ::2], x[..., 1::2]) if at.PAIRED else x.chunk(2, -1)
    angles = at.cos_sin[at.positions.long()].view(len(x), *([1] * (x.dim() - 2)), 2 * half)
    cos, sin = angles.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def store_latents(at: SimpleNamespace) -> None:
    size = at.LATENT + 2 * at.HALF
    demand(at.out.stride() == (at.out_stride, at.out_head_stride, 1), "rotated queries elsewhere")
    demand(at.out.shape == at.given.shape == (len(at.given), at.HEADS, 2 * at.HALF), "queries of another shape")
    demand(at.given.stride()[:2] == (at.given_stride, at.head_stride) and at.given.stride(2) == 1, "parts elsewhere")
    demand(at.latents.stride() == (at.latent_stride, 1) and at.latents.shape[1] == size, "vectors elsewhere")
    demand(at.kv.shape[1:] == (at.PAGE, size) and at.kv[0].is_contiguous(), "pages of another shape")
    at.out.copy_(rotated(at.given, at))
    c = normed(at.latents[:, : at.LATENT].float(), at.norm, at.eps)
    line = torch.cat((c, rotated(at.latents[:, at.LATENT :], at)), 1)
    line = torch.where(line.abs() < LARGEST, line, 0.0).to(at.kv.dtype)
    if at.LINES:
        demand(at.lines.is_contiguous() and at.lines.shape == at.latents.shape, "vectors of another shape")
        at.lines.copy_(line)
    real = at.slots >= 0
    slots = at.slots[real]
    at.kv[slots // at.PAGE, slots % at.PAGE] = line[real]


def sums(q: Tensor, kv: Tensor, pages: Tensor, tokens: slice, limits: Tensor, at: SimpleNamespace) -> list[Tensor]:
    """[Sums of c of some lanes, base-2 logarithms of their weights' sums] over those tokens that each lane sees."""
    demand(tokens.start < tokens.stop <= len(pages) * at.PAGE, "tokens without a page")
    held = kv[pages.long()].reshape(-1, kv.shape[-1])[tokens].float()
    demand(held.isfinite().all(), "a vector that is not finite")
    unseen = torch.arange(tokens.start, tokens.stop) >= limits[:, None]
    scores = (q.float() @ held.T * at.scale).masked_fill(unseen, -torch.inf)
    weights = torch.exp2(scores - scores.max(1, keepdim=True).values)
    score = scores.max(1).values + torch.log2(weights.sum(1))
    return [weights @ held[:, : at.LATENT] / weights.sum(1, keepdim=True), score]


def shares_of(length: int, at: SimpleNamespace) -> list[slice]:
    """The tokens of each share of a row."""
    tiles = -(-length // at.TILE)
    each = max(-(-tiles // at.SPLITS), at.LEAST) * at.TILE
    return [slice(start, min(start + each, length)) for start in range(0, length, each)]


def latent_decode(at: SimpleNamespace) -> None:
    demand(at.q.is_contiguous() and at.out.is_contiguous() and len(at.q) == len(at.lengths), "rows of another batch")
    demand(at.columns == at.pages.shape[1] and at.pages.is_contiguous(), "pages of another shape")
    for row, length in enumerate(at.lengths.tolist()):
        shares = shares_of(length, at)
        demand(len(shares) <= at.SPLITS, "shares that nobody computes")
        for share, tokens in enumerate(shares):
            limits = torch.full((at.HEADS,), length)
            found, score = sums(at.q[row], at.kv, at.pages[row], tokens, limits, at)
            if len(shares) == 1:
                at.out[row] = found.to(at.out.dtype)
                continue
            part = (row * at.HEADS + torch.arange(at.HEADS)) * at.SPLITS + share
            demand(part[-1] < min(len(at.scores), len(at.sums) // at.LATENT), "parts without room")
            at.sums[: len(at.sums) // at.LATENT * at.LATENT].view(-1, at.LATENT)[part] = found
            at.scores[part] = score


def latent_merge(at: SimpleNamespace) -> None:
    for row, length in enumerate(at.lengths.tolist()):
        count = len(shares_of(length, at))
        if count > 1:
            here = slice(row * at.HEADS * at.SPLITS, (row + 1) * at.HEADS * at.SPLITS)
            scores = at.scores[here].view(at.HEADS, at.SPLITS)[:, :count]
            weights = torch.exp2(scores - scores.max(1, keepdim=True).values)
            parts = at.sums[here.start * at.LATENT : here.stop * at.LATENT].view(at.HEADS, at.SPLITS, at.LATENT)
            total = (parts[:, :count] * weights[:, :, None]).sum(1) / weights.sum(1, keepdim=True)
            at.out[row] = total.to(at.out.dtype)


def latent_prefill(at: SimpleNamespace) -> None:
    demand(at.q.is_contiguous() and at.out.is_contiguous(), "queries that lie apart")
    lanes_ND, out_NC = at.q.view(-1, at.LATENT + at.ROTATED), at.out.view(-1, at.LATENT)
    at.out.fill_(float("nan"))
    for first, count, offset, page in at.jobs.tolist():
        demand(1 <= count <= at.LANES and first + count <= len(lanes_ND), "a job without lanes")
        lanes = torch.arange(first, first + count)
        limits = lanes // at.HEADS + offset
        tokens = slice(0, int(limits.max()))
        mine = at.pages[page : page - (-tokens.stop // at.PAGE)]
        out_NC[lanes] = sums(lanes_ND[lanes], at.kv, mine, tokens, limits, at)[0].to(at.out.dtype)


def latent_expanded(at: SimpleNamespace) -> None:
    demand(at.out.is_contiguous() and at.rotated.is_contiguous(), "queries that lie apart")
    demand(at.plain.stride() == (at.plain_stride, at.plain_head_stride, 1), "queries elsewhere")
    demand(at.keys.stride() == (at.key_stride, 1) and at.up.stride() == (at.up_stride, 1), "keys elsewhere")
    at.out.fill_(float("nan"))
    for start, first, count in at.jobs.tolist():
        demand(1 <= count <= at.LANES and start <= first and first + count <= len(at.out), "a job without tokens")
        seen, own = slice(start, first + count), slice(first, first + count)
        up = at.up[seen].view(first + count - start, at.HEADS, -1).float()
        keys, values = up[:, :, : at.PLAIN], up[:, :, at.PLAIN :]
        scores = torch.einsum("nhp,shp->hns", at.plain[own].float(), keys)
        scores += torch.einsum("nhr,sr->hns", at.rotated[own].float(), at.keys[seen].float())
        unseen = torch.arange(start, first + count) > torch.arange(first, first + count)[:, None]
        weights = (scores * at.scale * math.log(2)).masked_fill(unseen, -torch.inf).softmax(-1)
        at.out[own] = torch.einsum("hns,shv->nhv", weights, values).to(at.out.dtype)


LATENT_KERNELS: dict[str, Any] = {
    "_store_latents_kernel": store_latents,
    "_latent_decode_kernel": latent_decode,
    "_latent_merge_kernel": latent_merge,
    "_latent_prefill_kernel": latent_prefill,
    "_latent_expanded_kernel": latent_expanded,
}
