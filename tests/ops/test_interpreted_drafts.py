"""The kernels of steps with drafts, run by Triton's interpreter on a CPU, against slow code; and that they compile."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from compiled_kernels import compiling_for
from interpreting import interpret

pytest.importorskip("triton")

SCRIPT = """
from types import SimpleNamespace

import numpy as np
import torch
from emulated_drafts import accept as slow_accept
from emulated_drafts import ngram as slow_ngram
from emulated_drafts import prepare_lines as slow_lines
from emulated_drafts import turn as slow_turn
from interpreted_bfloat16 import teach

from headrace.ops.cuda.drafts import accept as kernels
from headrace.ops.cuda.drafts.lines import prepare_lines
from headrace.ops.cuda.drafts.ngram import guess_by_ngrams
from headrace.ops.cuda.fused import DecodeInputs

teach()
draw = np.random.default_rng(0)
PAGE, COLUMNS, ROWS = 16, 150, 6
CONTEXT = PAGE * COLUMNS


def words(*shape, high=9):
    return torch.from_numpy(draw.integers(0, high, shape)).int()


def inputs(lines):
    tokens, positions, lengths, tails = torch.zeros(4, lines, dtype=torch.int32)
    slots = torch.zeros(lines, dtype=torch.int64)
    return DecodeInputs(tokens, positions, slots, lengths, torch.zeros(lines, COLUMNS, dtype=torch.int32), tails)


def same(ours, theirs, what):
    for name in what:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), (name, ours, theirs)


guessed = 0
for trial, (depth, size) in enumerate([(1, 3), (4, 9), (3, 2), (4, 60), (2, 4), (16, 3), (5, 2)] * 2):
    lines = depth + 1
    pool, table = words(ROWS, CONTEXT, high=size), words(ROWS, COLUMNS)
    lengths = words(ROWS, high=[20, 2300][trial % 2])
    lengths[1], lengths[-1] = CONTEXT - 1 - trial % 3, 0
    most, rows = words(ROWS, high=depth + 2), torch.tensor([3, ROWS - 1, 1, 0, 4, ROWS - 1, 2], dtype=torch.int32)
    counts = torch.full((len(rows),), 77, dtype=torch.int32)
    ours = SimpleNamespace(pool=pool.clone(), counts=counts.clone())
    guess_by_ngrams(rows, ours.pool, lengths, ours.counts, depth=depth, longest=2 + trial % 4)
    slow = SimpleNamespace(
        rows=rows, pool=pool.clone(), lengths=lengths, counts=counts.clone(), LONGEST=2 + trial % 4, DEPTH=depth,
        context=CONTEXT, padding_row=ROWS - 1,
    )
    slow_ngram(slow)
    same(ours, slow, ("pool", "counts"))
    guessed += int((ours.counts > 0).sum())

    pool = ours.pool
    made, other = inputs(len(rows) * lines), inputs(len(rows) * lines)
    line_rows, slow_rows = torch.zeros(2, len(rows) * lines, dtype=torch.int32)
    prepare_lines(rows, ours.counts, most, pool, lengths, table, line_rows, made, depth=depth, page_size=PAGE)
    slow_lines(SimpleNamespace(
        rows=rows, counts=ours.counts, most=most, pool=pool, lengths=lengths, table=table, line_rows=slow_rows,
        tokens=other.tokens_B, positions=other.positions_B, slots=other.slots_B, seq_lens=other.seq_lens_B,
        pages=other.pages_BP, tails=other.tails_B, columns=COLUMNS, context=CONTEXT, padding_row=ROWS - 1, LINES=lines,
        PAGE=PAGE,
    ))
    assert torch.equal(line_rows, slow_rows)
    same(made, other, ("tokens_B", "positions_B", "slots_B", "seq_lens_B", "pages_BP", "tails_B"))

    parts = 3
    ids = words(len(line_rows), parts, high=size)
    places = torch.arange(len(line_rows)).view(-1, lines)
    for at in range(depth):  # make most drafts right
        right = torch.from_numpy(draw.random(len(rows)) < 0.8)
        ids[places[right, at]] = made.tokens_B[places[right, at + 1], None]
    scores = torch.from_numpy(draw.standard_normal((len(line_rows), parts))).float()
    scores[torch.from_numpy(draw.random(len(line_rows)) < 0.1), 1] = float("inf")
    stops = torch.full((ROWS, 32), -1, dtype=torch.int32)
    stops[::2, 0] = 1
    seeds, certain = torch.zeros(ROWS, dtype=torch.int64), torch.from_numpy(draw.random(depth) < 0.7).float()
    states = []
    for run, rates in enumerate((None, None, certain, certain)):
        state = SimpleNamespace(
            pool=pool.clone(), lengths=lengths.clone(), stopped=torch.zeros(ROWS, dtype=torch.int32),
            runs=torch.full((len(rows), lines + 2), -9, dtype=torch.int32),
        )
        launched = SimpleNamespace(
            scores=scores, ids=ids, rows=rows, line_rows=line_rows, tokens=made.tokens_B, positions=made.positions_B,
            stops=stops, seeds=seeds, rates=rates, context=CONTEXT, padding_row=ROWS - 1, LINES=lines, HEAD=2,
            RATES=rates is not None, **vars(state),
        )
        if run % 2:
            slow_accept(launched)
        else:
            kernels._accept_kernel[(len(rows),)](
                scores, ids, rows, line_rows, made.tokens_B, made.positions_B, state.pool, state.lengths, stops,
                state.stopped, state.runs, seeds, rates, CONTEXT, parts, ROWS - 1, CONTEXT,
                LINES=lines, PARTS=4, STOPS=32, HEAD=2, RATES=rates is not None,
            )
        states.append(state)
    for pair in (states[:2], states[2:]):
        same(*pair, ("pool", "lengths", "stopped", "runs"))

    going, at = torch.zeros(2, len(rows), dtype=torch.int32)
    mine = SimpleNamespace(going=going, places=at, runs=torch.full((len(rows), lines + 2), -9, dtype=torch.int32))
    slow = SimpleNamespace(going=going.clone(), places=at.clone(), runs=mine.runs.clone())
    chosen = words(len(rows), high=size)
    for ahead in range(depth + 2):
        stopped = (words(ROWS, high=8) == 0).int()
        kernels.accept(
            ahead, rows, line_rows, made, chosen, mine.going, mine.places, stopped, mine.runs
        )
        slow_turn(SimpleNamespace(
            rows=rows, line_rows=line_rows, tokens=made.tokens_B, positions=made.positions_B, ids=chosen,
            stopped=stopped, padding_row=ROWS - 1, AHEAD=ahead, LINES=lines, HEAD=2, **vars(slow),
        ))
        same(mine, slow, ("going", "places", "runs"))
        if ahead <= depth:
            chosen = torch.where(
                torch.from_numpy(draw.random(len(rows)) < 0.8) & (ahead < depth),
                made.tokens_B[torch.arange(len(rows)) * lines + min(ahead + 1, depth)],
                words(len(rows), high=size),
            )
assert guessed > 20, guessed

# For benchmarks, a share of drafts is right whatever is chosen.
rows, lines = torch.arange(150).int(), 3
made = inputs(150 * lines)
made.positions_B.copy_(torch.arange(150).repeat_interleave(lines) + torch.arange(lines).repeat(150))
state = SimpleNamespace(
    pool=torch.zeros(151, 500, dtype=torch.int32), lengths=torch.arange(151).int(), stopped=torch.zeros(151).int(),
    runs=torch.zeros(150, lines + 2, dtype=torch.int32), seeds=torch.from_numpy(draw.integers(0, 1 << 60, 151)),
)
kernels._accept_kernel[(150,)](
    torch.zeros(150 * lines, 1), words(150 * lines, 1), rows, rows.repeat_interleave(lines), made.tokens_B,
    made.positions_B, state.pool, state.lengths, torch.full((151, 32), -1, dtype=torch.int32), state.stopped,
    state.runs, state.seeds, torch.tensor([0.7, 0.5]), 500, 1, 150, 500,
    LINES=lines, PARTS=1, STOPS=32, HEAD=2, RATES=True,
)
gained = state.runs[:, 1]
assert abs((gained > 1).float().mean() - 0.7) < 0.1 and abs((gained > 2).float().mean() - 0.35) < 0.1, gained
"""

CHOICE = """
import numpy as np
import torch

from headrace.ops.cpu.sample import Choosing, sample_drafts
from headrace.ops.cuda.drafts.choose import choose_drafts
from headrace.ops.cuda.sampling.sample import Asks, SampleScratch

draw = np.random.default_rng(0)
ROWS, CONTEXT, WHOLE = 6, 40, 20000
heat = torch.tensor([0.8, 0.0, 1.0, 30.0, 1.3, 0.0])
seeds = torch.from_numpy(draw.integers(-(1 << 62), 1 << 62, ROWS))
zero, one = torch.zeros(ROWS), torch.ones(ROWS)
asks = Asks(heat, zero.int(), one, zero, seeds)
unlike = 0
for trial, size in enumerate((3, 900, 5000, 13000)):
    ids = None if trial % 2 else torch.from_numpy(np.sort(draw.choice(WHOLE, size, replace=False)))
    rows = torch.tensor([3, 5, 1, 0, 4, 5, 2], dtype=torch.int32)
    known = torch.from_numpy(draw.integers(0, 30, len(rows))).int()
    known[3] = CONTEXT - 2
    counts = torch.tensor([3, 0, 3, 3, 0, 0, 3], dtype=torch.int32)
    pool = torch.from_numpy(draw.integers(0, 99, (ROWS, CONTEXT))).int()
    expected, places, drafts = pool.clone(), known.clone(), torch.full_like(rows, -9)
    scratch = SampleScratch(len(rows), size, "cpu", dtype=torch.float32, filters=False)
    for place in range(3):
        logits = torch.from_numpy(draw.standard_normal((len(rows), size + 5))).float()[:, :size] * 2
        choose_drafts(logits, rows, places, counts, asks, pool, drafts, scratch, ids_D=ids)
        asked = [
            Choosing(float(heat[row]), 0, 1.0, 0.0, int(seeds[row]), int(known[at]) + 1 + place)
            for at, row in enumerate(rows)
        ]
        wanted = sample_drafts(logits, asked, ids)
        assert drafts.tolist() == wanted, (trial, place, drafts, wanted)
        assert torch.equal(places, known + place + 1)
        for at, row in enumerate(rows.tolist()):
            if counts[at] and places[at] < CONTEXT:
                expected[row, places[at]] = wanted[at]
        likeliest = logits.argmax(1) if ids is None else ids[logits.argmax(1)]
        unlike += int((likeliest != drafts).sum())
    assert torch.equal(pool, expected)
assert unlike > 20, unlike
logits[0, 7] = float("nan")
choose_drafts(logits, rows, places, counts, asks, pool, drafts, scratch)
assert 0 <= int(drafts.min()) and int(drafts.max()) < size
"""

KEEP = """
import torch

from headrace.ops.cuda.drafts.keep import keep_states

torch.manual_seed(0)
for width, lag in ((40, 16), (4096, 16), (9000, 3)):
    ring, states = torch.zeros(6, lag, width), torch.randn(4, 2 * width)[:, :width]
    rows, positions = torch.tensor([3, 0, 5, 2]).int(), torch.tensor([0, lag - 1, 7 * lag + 1, lag]).int()
    keep_states(states, rows, positions, ring)
    expected = torch.zeros_like(ring)
    for row, place, state in zip((3, 0, 5, 2), (0, lag - 1, 1, 0), states):
        expected[row, place] = state
    assert torch.equal(ring, expected), (width, lag)
"""


@pytest.mark.rotated(3)
@pytest.mark.parametrize("script", [SCRIPT, CHOICE, KEEP], ids=["drafts", "choice", "keep"])
def test_kernels_do_what_slow_code_does(script: str) -> None:
    interpret(script)


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    with compiling_for("sm_90", tmp_path) as launches:
        accept = importlib.import_module("headrace.ops.cuda.drafts.accept")
        choose = importlib.import_module("headrace.ops.cuda.drafts.choose")
        keep = importlib.import_module("headrace.ops.cuda.drafts.keep")
        lines = importlib.import_module("headrace.ops.cuda.drafts.lines")
        ngram = importlib.import_module("headrace.ops.cuda.drafts.ngram")
        sampling = importlib.import_module("headrace.ops.cuda.sampling.sample")
        inputs = importlib.import_module("headrace.ops.cuda.fused").DecodeInputs

        def words(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        many, rows, depth, numbers = 3, 9, 4, torch.float32
        count = many * (depth + 1)
        step = inputs(
            words(count), words(count), words(count, dtype=torch.int64), words(count), words(count, 64), words(count)
        )
        pool, lengths, table = words(rows, 1024), words(rows), words(rows, 64)
        ngram.guess_by_ngrams(words(many), pool, lengths, words(many), depth=depth, longest=4)
        lines.prepare_lines(
            words(many), words(many), words(rows), pool, lengths, table, words(count), step, depth=depth, page_size=16
        )
        asks = sampling.Asks(
            words(rows, dtype=numbers), words(rows), words(rows, dtype=numbers), words(rows, dtype=numbers),
            words(rows, dtype=torch.int64),
        )  # fmt: skip
        appended = accept.Appended(pool, lengths, words(rows, 32), words(rows))
        logits = words(count, 50000, dtype=numbers)
        scratch = sampling.SampleScratch(count, 50000, "meta", dtype=numbers, filters=False)
        runs = words(many, depth + 3)
        for rates in (None, words(depth, dtype=numbers)):
            accept.choose_and_accept(
                logits, words(many), words(count), step, asks, appended, runs, scratch, filtered=False, rates_K=rates
            )
        for ahead in (0, 1, depth + 1):
            accept.accept(
                ahead, words(many), words(count), step, words(many), words(many), words(many), words(rows), runs
            )
        half = torch.bfloat16
        keep.keep_states(words(many, 4096, dtype=half), words(many), words(many), words(rows, 16, 4096, dtype=half))
        for ids in (None, words(50000, dtype=torch.int64)):
            choose.choose_drafts(
                words(many, 50000, dtype=numbers), words(many), words(many), words(many), asks, pool, words(many),
                scratch, ids_D=ids,
            )  # fmt: skip
    wanted = {
        "_ngram_kernel",
        "_prepare_lines_kernel",
        "_accept_kernel",
        "_turn_kernel",
        "_draft_kernel",
        "_keep_kernel",
    }
    assert wanted <= launches.kernels
