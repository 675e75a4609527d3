"""The order of decodes, against sorting them anew each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.model.cuda.decodes import Ordering


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), st.integers(0, 2)), max_size=12
    ),
)
def test_decodes_stand_by_length_and_go_on_where_all_are_one_token_further(steps: list[tuple[list[int], int]]) -> None:
    """A step has other rows, or those of the last one: one token further, or where some are further than that."""
    ordering, rows, starts = Ordering(), [0], [5]
    latest = ordering.of(rows, starts)
    for others, kind in steps:
        if kind == 0:
            rows, starts = others, [7 * row % 5 for row in others]
        else:
            rows, starts = list(rows), [start + 1 for start in starts]
            starts[0] += kind - 1
        found = ordering.of(rows, starts)
        assert found.goes_on == (kind == 1)
        assert found.goes_on <= (found.rows is latest.rows)
        assert found.rows[found.back].tolist() == rows and found.starts[found.back].tolist() == starts
        if found.rows is not latest.rows:
            assert found.starts.tolist() == sorted(starts, reverse=True)
        assert found.mean_context == sum(starts) // len(starts) + 1
        latest = found
