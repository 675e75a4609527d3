"""Scattered words on CUDA: every pair arrives, nothing else changes, and replays go from line to line."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("triton")

from headrace.ops.cuda.memory.scatter import Batch, ExchangeLines, apply_words, leave_ids, scatter_words

GPU = torch.device("cuda")


def pairs(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct places, words, and both as they are staged."""
    places = torch.randperm(size, device=GPU)[:count].int()
    words = torch.randint(-(2**31), 2**31 - 1, (count,), device=GPU).int()
    staged = torch.full((1 + 2 * count + 5,), 7, dtype=torch.int32, device=GPU)
    staged[0] = count
    staged[1 : 1 + 2 * count] = torch.stack((places, words), 1).flatten()
    return places, words, staged


def lines(*staged: torch.Tensor, at: int = 0) -> ExchangeLines:
    """Lines of pinned memory that hold these words from line `at` on, and a last one that is never reached."""
    words_TW = torch.full((len(staged) + 1, max(map(len, staged))), 3, dtype=torch.int32, pin_memory=True)
    ids_TB = torch.full((len(staged) + 1, 8), -1, dtype=torch.int32, pin_memory=True)
    for index, each in enumerate(staged):
        words_TW[(at + index) % len(staged), : len(each)] = each.cpu()
    return ExchangeLines(torch.tensor([at, -1], dtype=torch.int32, device=GPU), words_TW, ids_TB)


@pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("by_graph", [True, False])
def test_each_word_lands_in_its_place_and_nowhere_else(count: int, by_graph: bool) -> None:
    target = torch.randint(0, 1000, (70000,), device=GPU).int()
    places, words, staged = pairs(count, len(target))
    wanted = target.clone()
    wanted[places.long()] = words
    if by_graph:
        apply_words(target, lines(staged))
    else:
        scatter_words(target, staged, count)
    assert torch.equal(target, wanted)


def test_each_replay_takes_the_next_line_and_answers_there() -> None:
    nothing = torch.zeros(1, dtype=torch.int32)
    sent = [pairs(10, 1000), pairs(3, 1000)]
    turns = lines(sent[0][2], nothing, sent[1][2], at=1)
    target = torch.zeros(1000, dtype=torch.int32, device=GPU)

    def step() -> None:
        apply_words(target, turns)
        leave_ids(target[:7], turns, pdl=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for wanted, turn in (((), [0, 2]), (sent[1], [1, 0]), (sent[0], [2, 1]), ((), [0, 2])):
        target.zero_()
        turns.ids_TB.fill_(-1)
        graph.replay()
        found = torch.zeros_like(target)
        if wanted:
            found[wanted[0].long()] = wanted[1]
        assert torch.equal(target, found)
        assert turns.turn_2.tolist() == turn
        answers = torch.full_like(turns.ids_TB, -1)
        answers[turn[1], :7] = found[:7].cpu()
        assert torch.equal(turns.ids_TB, answers)


@pytest.mark.parametrize("rows", [1, 7, 8, 256, 300])
def test_rows_that_stopped_give_way_to_padding_and_words_come_first(rows: int) -> None:
    """A row whose stop is taken back by the same words is active again."""
    state = torch.randint(0, 2, (2 * rows + 1,), device=GPU).int()
    stopped = state[rows:]
    batch = torch.randint(0, rows + 1, (rows,), device=GPU).int()
    active = torch.full_like(batch, -9)
    places = torch.randperm(len(state), device=GPU)[: rows // 2].int()
    words = torch.randint(0, 2, (rows // 2,), device=GPU).int()
    pairs_of = torch.stack((places, words), 1).flatten()
    staged = torch.cat((torch.tensor([len(places)], dtype=torch.int32, device=GPU), pairs_of))
    wanted = state.clone()
    wanted[places.long()] = words
    apply_words(state, lines(staged), Batch(batch, stopped, active, rows))
    assert torch.equal(state, wanted)
    assert torch.equal(active, torch.where(wanted[rows:][batch.long()] != 0, rows, batch))
