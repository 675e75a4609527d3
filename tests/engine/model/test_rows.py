"""The row table gives each step the tokens, places and noise that its plan means, in any mixture of rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from model_driver import capacity, request

from headrace.engine.model.cpu.rows import CpuRows, StepBatch
from headrace.engine.scheduling.asked import Sampling
from headrace.engine.scheduling.plan import NewRow, PageEntry, StepPlan, Work
from headrace.ops.cpu.sample import Choosing

SIZE = 4
CAPACITY = capacity(1000, num_pages=400, page_size=SIZE, max_context=100)


def page_of(row: int, place: int) -> int:
    return (row * 31 + place * 7 + 3) % 400


def filled(lengths: dict[int, int]) -> CpuRows:
    """Row r holds ids 100 * r + position, in scattered pages, and samples by seed r."""
    rows = CpuRows(CAPACITY)
    plan = StepPlan(0)
    for row, length in lengths.items():
        ids = [100 * row + position for position in range(length)]
        plan.new_rows.append(NewRow(row, 0, ids, Sampling(temperature=0.5, top_k=row, seed=row)))
        plan.entries.extend(PageEntry(row, place, page_of(row, place)) for place in range(-(-length // SIZE)))
    rows.update(plan)
    return rows


def work(row: int, start: int, count: int, samples: bool = True) -> Work:
    return Work(request([0], 1), row, start, count, samples)


@st.composite
def steps(draw: st.DrawFn) -> list[Work]:
    rows = draw(st.permutations(range(8)).flatmap(lambda order: st.integers(1, 8).map(lambda count: order[:count])))
    works = []
    for row in rows:
        start = draw(st.integers(0, 80))
        count = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 5, 17]))
        works.append(work(row, start, count, draw(st.booleans())))
    return works


def tokens_of(batch: StepBatch, works: list[Work]) -> list[tuple[int, int]]:
    """(row, position) of each token, read from the ids that `filled` gives."""
    ids = batch.tokens_N.tolist()
    assert [token % 100 for token in ids] == batch.paged.positions_N.tolist()
    return [(token // 100, token % 100) for token in ids]


@given(steps())
def test_every_token_of_a_step_is_there_once_with_its_own_pages(works: list[Work]) -> None:
    batch = filled(dict.fromkeys(range(8), 98)).batch(works)
    found = tokens_of(batch, works)
    assert sorted(found) == sorted((w.row, w.start + at) for w in works for at in range(w.num_tokens))
    slots = [page_of(row, position // SIZE) * SIZE + position % SIZE for row, position in found]
    assert batch.paged.slots_N.tolist() == slots
    by_row = {w.row: w for w in works}
    covered: list[int] = []
    for group in batch.paged.decodes:
        assert group.pages_RP.shape[0] == len(group.lengths_R)
        for place, (length, pages) in enumerate(
            zip(group.lengths_R.tolist(), group.pages_RP.tolist(), strict=True), start=group.start
        ):
            row, position = found[place]
            used = -(-length // SIZE)
            assert by_row[row].num_tokens == 1 and length == position + 1 and used <= len(pages)
            assert pages[:used] == [page_of(row, at) for at in range(used)] and not any(pages[used:])
            covered.append(place)
    for prefill in batch.paged.prefills:
        row, position = found[prefill.start]
        assert prefill.count == by_row[row].num_tokens > 1 and prefill.length == position + prefill.count
        assert prefill.pages_P.tolist() == [page_of(row, at) for at in range(-(-prefill.length // SIZE))]
        covered.extend(range(prefill.start, prefill.start + prefill.count))
    assert sorted(covered) == list(range(len(found)))


@given(steps())
def test_samplers_point_at_the_last_token_of_their_own_work(works: list[Work]) -> None:
    batch = filled(dict.fromkeys(range(8), 98)).batch(works)
    found = tokens_of(batch, works)
    assert sorted(batch.samplers) == [index for index, w in enumerate(works) if w.samples]
    assert batch.last_S.dtype == torch.int64
    for index, last, choosing in zip(batch.samplers, batch.last_S.tolist(), batch.choosing, strict=True):
        w = works[index]
        end = w.start + w.num_tokens
        assert found[last] == (w.row, end - 1)
        assert choosing == Choosing(0.5, w.row, 1.0, 0.0, w.row, end)


@given(st.lists(st.integers(0, 96), min_size=1, max_size=8))
def test_a_group_of_decodes_wastes_little_on_padding(starts: list[int]) -> None:
    batch = filled(dict.fromkeys(range(8), 98)).batch([work(row, start, 1) for row, start in enumerate(starts)])
    for group in batch.paged.decodes:
        width = group.pages_RP.shape[1]
        assert all(width <= 2 * -(-length // SIZE) + 2 for length in group.lengths_R.tolist())


def test_sampled_tokens_feed_the_next_step_in_their_own_rows() -> None:
    rows = filled({2: 5, 6: 9})
    works = [work(6, 8, 1), work(2, 0, 4, samples=False), work(2, 4, 1)]
    rows.append([works[2], works[0]], [777, 888])
    batch = rows.batch([work(2, 5, 1), work(6, 9, 1)])
    assert sorted(batch.tokens_N.tolist()) == [777, 888]
    assert dict(zip(batch.tokens_N.tolist(), batch.paged.positions_N.tolist(), strict=True)) == {777: 5, 888: 9}


def test_a_broken_row_feeds_an_id_that_the_embedding_has() -> None:
    rows = filled({0: 3})
    rows.append([work(0, 2, 1)], [-1])
    assert rows.batch([work(0, 3, 1)]).tokens_N.tolist() == [0]


def test_a_row_taken_again_forgets_its_last_request() -> None:
    rows = filled({1: 40})
    plan = StepPlan(1)
    plan.new_rows.append(NewRow(1, 8, [5, 6, 7], Sampling(seed=9)))  # eight tokens came from the prefix cache
    plan.entries.extend([PageEntry(1, 0, 50), PageEntry(1, 1, 51), PageEntry(1, 2, 52)])
    rows.update(plan)
    batch = rows.batch([work(1, 8, 3)])
    assert batch.tokens_N.tolist() == [5, 6, 7]
    assert batch.paged.slots_N.tolist() == [208, 209, 210]
    assert batch.paged.prefills[0].pages_P.tolist() == [50, 51, 52]
    assert batch.choosing == [Choosing(0.0, 0, 1.0, 0.0, 9, 11)]


def test_the_last_token_of_the_longest_context_has_a_place() -> None:
    rows = CpuRows(CAPACITY)
    plan = StepPlan(0)
    plan.new_rows.append(NewRow(0, 0, list(range(100)), Sampling()))
    plan.entries.extend(PageEntry(0, place, place) for place in range(25))
    rows.update(plan)
    rows.append([work(0, 99, 1)], [42])
    assert rows.batch([work(0, 99, 1)]).tokens_N.tolist() == [99]


def test_a_row_that_sampled_a_stop_id_is_left_out_until_it_is_given_away() -> None:
    rows = filled({0: 3, 1: 3})
    plan = StepPlan(1)
    plan.new_rows.append(NewRow(2, 0, [7, 7, 7], Sampling(), stop_ids=frozenset((7, 9))))
    plan.entries.append(PageEntry(2, 0, 60))
    rows.update(plan)
    step = [work(1, 3, 1), work(2, 3, 1), work(0, 3, 1)]
    rows.append([work(2, 2, 1)], [8])
    assert rows.batch(step).samplers == [0, 1, 2]
    rows.append(step, [9, 9, 9])
    later = [work(1, 4, 1), work(2, 4, 1), work(0, 4, 1)]
    assert rows.batch(later).samplers == [0, 2] and rows.batch(later).tokens_N.tolist() == [9, 9]
    assert rows.all_stopped(later[1:2]) and not rows.all_stopped(later)
    rows.update(plan)
    assert rows.batch(later[1:2]).samplers == [0]
