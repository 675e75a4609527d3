"""Calls the sampler of the device under test on given logits, and says in float64 what it may choose; no tests."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.scheduling.asked import Sampling

__all__ = ["chi_square_limit", "choose", "probabilities", "random_sampling"]

_MASK = 2**64 - 1


def choose(device: str, logits_NV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """The sampler's choice for each row.

    Args:
        device: "cpu" or "cuda".
        logits_NV: Any float dtype.
        samplings: One a row.
        positions: Place of each new token in its sequence.
    """
    if device == "cpu":
        from headrace.ops.cpu.sample import Choosing, sample

        rows = [
            Choosing(each.temperature, each.top_k, each.top_p, each.min_p, each.seed, position)
            for each, position in zip(samplings, positions, strict=True)
        ]
        return sample(logits_NV.cpu(), rows)
    return _choose_on_cuda(logits_NV.cuda(), samplings, positions)


def _choose_on_cuda(logits_NV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    from headrace.ops.cuda.sampling.sample import SampleScratch, sample

    rows, vocabulary = logits_NV.shape
    generator = torch.Generator().manual_seed(rows)
    row_of = torch.randperm(rows, generator=generator)  # rows lie in no order, and the last one is padding
    padded = [Sampling()] * (rows + 1)
    for at, row in enumerate(row_of.tolist()):
        padded[row] = samplings[at]

    def of_rows(field: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(each, field) for each in padded], dtype=dtype, device="cuda")

    seeds = [(each.seed & _MASK) - (2**64 if each.seed & _MASK >= 2**63 else 0) for each in padded]
    filtered = any(each.top_k or each.top_p < 1.0 or each.min_p for each in samplings)
    out_ids = torch.full((rows,), -9, dtype=torch.int32, device="cuda")
    sample(
        logits_NV,
        row_of.int().cuda(),
        of_rows("temperature", torch.float32),
        of_rows("top_k", torch.int32),
        of_rows("top_p", torch.float32),
        of_rows("min_p", torch.float32),
        torch.tensor(seeds, dtype=torch.int64, device="cuda"),
        torch.tensor(positions, dtype=torch.int64, device="cuda") - 1,  # it wants the input token's place
        torch.zeros(rows + 1, max(positions) + 2, dtype=torch.int32, device="cuda"),
        torch.zeros(rows + 1, dtype=torch.int32, device="cuda"),
        out_ids,
        SampleScratch(rows, vocabulary, "cuda", dtype=logits_NV.dtype, filters=filtered),
        filtered=filtered,
    )
    chosen: list[int] = out_ids.tolist()
    return chosen


def random_sampling(generator: random.Random) -> Sampling:
    """Any kind of row: greedy, plain, or with any of the filters."""
    kind = generator.randrange(6)
    return Sampling(
        temperature=0.0 if kind == 0 else generator.choice([0.3, 0.7, 1.0, 1.5]),
        top_k=generator.choice([1, 5, 40]) if kind in (2, 5) else 0,
        top_p=generator.choice([0.3, 0.9, 0.99]) if kind in (3, 5) else 1.0,
        min_p=generator.choice([0.01, 0.2]) if kind in (4, 5) else 0.0,
        seed=generator.getrandbits(63),
    )


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """float64 [V]: top-k, then top-p of what is left, and min-p; equal logits stay together."""
    probs = torch.softmax(logits_V.double().cpu() / sampling.temperature, dim=-1)
    least = sampling.min_p * float(probs.max())
    if sampling.top_k:
        least = max(least, float(probs.topk(min(sampling.top_k, len(probs))).values[-1]))
    if sampling.top_p < 1.0:
        ranked = torch.where(probs >= float(probs.topk(sampling.top_k or len(probs)).values[-1]), probs, 0.0)
        ranked = (ranked / ranked.sum()).sort(descending=True)
        last = int(torch.searchsorted(ranked.values.cumsum(0), sampling.top_p))
        least = max(least, float(probs[ranked.indices[min(last, len(probs) - 1)]]))
    kept = torch.where(probs >= least * (1 - 1e-12), probs, 0.0)
    return kept / kept.sum()


def chi_square_limit(degrees: int) -> float:
    """What chi-square with so many degrees of freedom exceeds once in a million (Wilson and Hilferty, 1931)."""
    part = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - part + 4.753 * math.sqrt(part)) ** 3
