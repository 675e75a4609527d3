"""Scattered words on CUDA: every pair arrives, nothing else changes, and a graph's own count is taken only once."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("triton")

from headrace.ops.cuda_scatter import apply_words, scatter_words

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
