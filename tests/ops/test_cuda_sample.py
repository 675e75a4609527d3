"""The CUDA sampler: against a truth in float64, its independence of the batch, and what it does with bad rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from headrace.ops.cuda.sampling.sample import SampleScratch, sample

GPU = torch.device("cuda")


class State:
    """Sampling state of some rows and a dummy row, as a runner keeps it."""

    def __init__(self, rows: int, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, context=64) -> None:
        def full(value, dtype):
            return torch.as_tensor(value, dtype=dtype, device=GPU).expand(rows + 1).contiguous()

        self.temperature = full(temperature, torch.float32)
        self.top_k, self.top_p = full(top_k, torch.int32), full(top_p, torch.float32)
        self.min_p = full(min_p, torch.float32)
        seeds = torch.arange(rows + 1) if seeds is None else seeds
        self.seeds = torch.as_tensor(seeds, dtype=torch.int64, device=GPU)
        self.pool = torch.full((rows + 1, context), -5, dtype=torch.int32, device=GPU)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int32, device=GPU)

    def run(self, logits, rows, positions, *, filtered=True) -> list[int]:
        rows = torch.as_tensor(rows, dtype=torch.int32, device=GPU)
        positions = torch.as_tensor(positions, dtype=torch.int64, device=GPU)
        out = torch.full((len(rows),), -9, dtype=torch.int32, device=GPU)
        scratch = SampleScratch(len(rows), logits.shape[1], GPU, dtype=logits.dtype, filters=filtered)
        scratch.least_B.fill_(float("nan"))
        self.least = scratch.least_B
        sample(
            logits,
            rows,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seeds,
            positions,
            self.pool,
            self.lengths,
            out,
            scratch,
            filtered=filtered,
        )
        return out.tolist()


def philox(seed: int, position: int, vocabulary: int) -> np.ndarray:
    """The sampler's random bits of every token id: Philox 4x32-7 written out."""
    lanes = np.arange(-(-vocabulary // 4096) * 1024, dtype=np.uint64)
    c = [lanes, np.full_like(lanes, position), np.zeros_like(lanes), np.zeros_like(lanes)]
    low, k0, k1 = np.uint64(0xFFFFFFFF), seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), b & low, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c).reshape(4, -1, 1024).transpose(1, 0, 2).reshape(-1)[:vocabulary]


def allowed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Token ids that top-k, then top-p, and min-p let through; equal logits stay together."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    ordered = probs.sort(descending=True).values
    if 0 < top_k < len(probs):
        ordered = ordered[:top_k]
    least = float(ordered[-1])
    if top_p < 1.0:
        kept = probs[probs >= least].sort(descending=True).values
        cut = int(torch.searchsorted(kept.cumsum(0), top_p * float(kept.sum())))
        least = float(kept[min(cut, len(kept) - 1)])
    least = max(least, min_p * float(probs.max()))
    return (probs >= least * (1 - 1e-9)).nonzero()[:, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1000, 49152, 151936])
def test_greedy_takes_the_first_largest(vocabulary: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(70, vocabulary, device=GPU) * 2).to(dtype)
    state = State(70)
    ids = state.run(logits, list(range(70)), list(range(70)), filtered=False)
    first = [int((line == line.max()).nonzero()[0]) for line in logits.float()]
    assert ids == first
    assert state.lengths.tolist() == [*range(1, 71), 0]
    for row, token in enumerate(ids):
        want = [-5] * 64
        if row + 1 < 64:
            want[row + 1] = token
        assert state.pool[row].tolist() == want


@pytest.mark.parametrize("seed", [0, 3, -1, 2**62 + 12345])
def test_noise_is_the_one_of_seed_position_and_id(seed: int) -> None:
    vocabulary, position = 20000, 17
    logits = torch.randn(1, vocabulary, device=GPU)
    state = State(1, temperature=0.7, seeds=[seed, 0])
    (token,) = state.run(logits, [0], [position - 1], filtered=False)
    part = (philox(seed % 2**64, position, vocabulary).astype(np.float64) + 0.5) / 2**32
    score = logits[0].double().cpu().numpy() / 0.7 - np.log(-np.log1p(-part))
    assert score[token] >= score.max() - 1e-4


def test_a_token_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(256, 32000, device=GPU, dtype=torch.bfloat16) * 3
    state = State(256, temperature=0.8, top_k=50, top_p=0.9)
    positions = torch.randint(0, 60, (256,)).tolist()
    together = state.run(logits, list(range(256)), positions)
    for row in range(0, 256, 37):
        assert state.run(logits[row : row + 1], [row], [positions[row]]) == [together[row]]
    back = state.run(logits.flip(0), list(range(255, -1, -1)), positions[::-1])
    assert back[::-1] == together


def test_frequencies_follow_the_softmax() -> None:
    rows, vocabulary = 20000, 50
    line = torch.randn(vocabulary, device=GPU) * 1.5
    state = State(rows, temperature=1.3, seeds=torch.randint(-(2**60), 2**60, (rows + 1,)))
    ids = state.run(line.expand(rows, vocabulary), list(range(rows)), [5] * rows, filtered=False)
    counts = torch.bincount(torch.tensor(ids), minlength=vocabulary).double()
    want = torch.softmax(line.double().cpu() / 1.3, 0) * rows
    assert float(((counts - want) ** 2 / want).sum()) < 105  # chi-square, 49 degrees of freedom: p about 1e-5


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.5, 0.0), (20, 0.8, 0.0), (0, 1.0, 0.2), (40, 0.95, 0.05), (0, 0.0, 0.0)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_filters_let_through_their_set_and_all_of_it(
    top_k: int, top_p: float, min_p: float, dtype: torch.dtype
) -> None:
    rows, vocabulary = 4000, 3000
    line = (torch.randn(vocabulary, device=GPU) * 2.5).to(dtype)
    state = State(rows, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    ids = state.run(line.expand(rows, vocabulary), list(range(rows)), [3] * rows)
    may = set(allowed(line.float().cpu(), 0.9, top_k, top_p, min_p).tolist())
    assert set(ids) <= may
    probs = torch.softmax(line.double().cpu() / 0.9, 0)
    total = float(probs[sorted(may)].sum())
    likely = {token for token in may if float(probs[token]) / total > 0.01}
    assert likely <= set(ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spread", [0.01, 2.0, 6.0])
@pytest.mark.parametrize("vocabulary", [700, 151936])
def test_the_least_logit_is_the_one_that_the_filters_mean(vocabulary: int, spread: float, dtype: torch.dtype) -> None:
    cases = [
        (1, 1.0, 0.0),
        (50, 1.0, 0.0),
        (290, 1.0, 0.0),
        (600, 1.0, 0.0),
        (0, 0.3, 0.0),
        (0, 0.97, 0.0),
        (20, 0.8, 0.0),
        (650, 0.5, 0.0),
        (0, 1.0, 0.1),
        (30, 0.9, 0.02),
        (0, 0.0, 0.0),
        (vocabulary + 5, 0.99999, 0.0),
    ]
    logits = (torch.randn(len(cases), vocabulary, device=GPU) * spread).to(dtype)
    logits[:, 100:110] = float("-inf")
    state = State(len(cases), temperature=0.8)
    for row, (top_k, top_p, min_p) in enumerate(cases):
        state.top_k[row], state.top_p[row], state.min_p[row] = top_k, top_p, min_p
    state.run(logits, list(range(len(cases))), [1] * len(cases))
    for row, case in enumerate(cases):
        line = logits[row].double()
        probs = torch.softmax(line / 0.8, 0)
        may = allowed(line, 0.8, *case)
        got = probs[line >= float(state.least[row])]
        # A share that ends between two logits within rounding of each other may take one more or one less.
        slack = 2e-5 + (2 * float(probs[may].min()) if case[1] < 1.0 else 0.0)
        assert abs(float(got.sum() - probs[may].sum())) <= slack, case
        if case[1] == 1.0 and case[2] == 0.0:
            assert len(got) == len(may), case


def test_bad_rows_are_reported_and_neighbours_are_not_touched() -> None:
    logits = torch.randn(6, 9000, device=GPU)
    logits[1, 8999] = float("nan")
    logits[2, 5] = float("inf")
    logits[3] = float("-inf")
    logits[4, 1:] = float("-inf")
    for temperature in (0.0, 0.7):
        for filtered in (False, True):
            state = State(6, temperature=temperature, top_p=0.9 if filtered else 1.0)
            ids = state.run(logits, list(range(6)), [2] * 6, filtered=filtered)
            assert ids[1:5] == [-1, -1, -1, 0]
            assert 0 <= ids[0] < 9000 and 0 <= ids[5] < 9000
            assert state.pool[1, 3] == 0 and state.lengths[1] == 3


def test_the_padding_row_changes_nothing() -> None:
    logits = torch.randn(3, 500, device=GPU)
    state = State(4)
    state.run(logits, [1, 4, 4], [7, 0, 0])
    assert state.lengths.tolist() == [0, 8, 0, 0, 0]
    assert bool((state.pool[4] == -5).all())
