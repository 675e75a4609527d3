"""Scattered words on CUDA: every pair arrives, nothing else changes, and a graph's own count is taken only once."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("triton")

from headrace.ops.cuda_scatter import Batch, apply_words, scatter_words

GPU = torch.device("cuda")


def pairs(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct places, words, and both as they are staged."""
    places = torch.randperm(size, device=GPU)[:count].int()
    words = torch.randint(-(2**31), 2**31 - 1, (count,), device=GPU).int()
    staged = torch.full((1 + 2 * count + 5,), 7, dtype=torch.int32, device=GPU)
    staged[0] = count
    staged[1 : 1 + 2 * count] = torch.stack((places, words), 1).flatten()
    return places, words, staged


@pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("by_graph", [True, False])
def test_each_word_lands_in_its_place_and_nowhere_else(count: int, by_graph: bool) -> None:
    target = torch.randint(0, 1000, (70000,), device=GPU).int()
    places, words, staged = pairs(count, len(target))
    wanted = target.clone()
    wanted[places.long()] = words
    if by_graph:
        apply_words(target, staged)
        assert int(staged[0]) == 0
    else:
        scatter_words(target, staged, count)
    assert torch.equal(target, wanted)


def test_a_graph_that_replays_without_new_words_changes_nothing() -> None:
    target = torch.zeros(1000, dtype=torch.int32, device=GPU)
    places, words, staged = pairs(10, len(target))
    apply_words(target, staged)
    target.zero_()
    apply_words(target, staged)
    assert not target.any()


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
    apply_words(state, staged, Batch(batch, stopped, active, rows))
    assert torch.equal(state, wanted)
    assert torch.equal(active, torch.where(wanted[rows:][batch.long()] != 0, rows, batch))
