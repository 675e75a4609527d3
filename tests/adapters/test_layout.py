"""Every matrix of a block has a place of its own, and the places fill the block."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.layout import EMBED, HEAD, MODULES, SITES, BlockLayout, ModelShape, module_row

SHAPE = ModelShape(num_layers=3, hidden_size=20, num_heads=4, num_kv_heads=2, head_dim=6, ffn_size=28, vocab_size=31)
PLACES = [(layer, module) for layer in range(3) for module in MODULES] + [(-1, "embed"), (-1, "head")]


@given(st.dictionaries(st.sampled_from(PLACES), st.integers(1, 256)))
def test_matrices_fill_the_block_in_order_without_overlap(ranks: dict[tuple[int, str], int]) -> None:
    layout = BlockLayout.of(SHAPE, ranks)
    assert {(layer, module) for layer, module, _ in layout.places()} == set(ranks)
    spans = []
    for layer, module, row in layout.places():
        rank = int(layout.ranks[row])
        assert rank % 8 == 0 and ranks[layer, module] <= rank < ranks[layer, module] + 8
        inputs, outputs = SHAPE.size(module)
        spans += [(int(layout.a[row]), rank * inputs), (int(layout.b[row]), rank * outputs)]
    spans.sort()
    end = 0
    for start, count in spans:
        assert start == end and start % 8 == 0
        end += count
    assert end == layout.elements


def test_a_site_is_one_matrix_and_layers_follow_each_other() -> None:
    ranks = dict.fromkeys(PLACES, 16)
    layout = BlockLayout.of(SHAPE, ranks)
    for layer in range(3):
        for modules in SITES.values():
            rows = [module_row(layer, module) for module in modules]
            inputs = SHAPE.size(modules[0])[0]
            assert np.diff(layout.a[rows]).tolist() == [16 * inputs] * (len(rows) - 1)
            assert layout.b[rows[0]] == layout.a[rows[-1]] + 16 * inputs
    assert np.all(np.diff(layout.a[[module_row(layer, "q") for layer in range(3)]]) == layout.a[len(MODULES)])
    assert layout.b[HEAD] + 16 * SHAPE.vocab_size == layout.elements
    assert layout.a[EMBED] + 16 * SHAPE.vocab_size == layout.b[EMBED]


def test_no_update_takes_no_room() -> None:
    layout = BlockLayout.of(SHAPE, {(1, "down"): 3})
    assert layout.elements == 8 * (28 + 20)
    assert layout.places() == [(1, "down", module_row(1, "down"))]
