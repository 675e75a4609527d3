"""A row that has sampled a stop token is left alone: steps launched ahead neither write for it nor move it."""

from __future__ import annotations

from typing import Any

import torch
from gpu.conftest import Zoo
from gpu.driving import draw
from gpu.test_resize import opened_on

from headrace.engine.life.opened import Opened
from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.scheduler import Scheduler

COUNT = 12
PROMPTS = [draw(length, length) for length in (5, 3, 40)]
AHEAD = 5


def ask(prompt: list[int], stop_ids: frozenset[int]) -> Request:
    limit = len(prompt) + COUNT
    return Request(Asked(limit=limit, stop_ids=stop_ids), list(prompt))


def written(runner: Any, page: int) -> list[bool]:
    """For each token of a page whether anything was ever written for it, in a page that was new."""
    if hasattr(runner, "_kv"):
        kv = runner._kv.pools[0][:, :, 1:].transpose(3, 4)  # values; keys lie otherwise in the kernels in C
    else:
        kv = runner._memory.pools[0]
    return (kv[:, page].float().abs().sum((0, 1, 3, 4)) != 0).tolist()


def outcome(opened: Opened, stops: list[frozenset[int]]) -> tuple[list[list[int]], list[int]]:
    """Tokens of all prompts at once with so many steps ahead, and how many tokens each wrote in its first page."""
    scheduler = Scheduler(opened.capacity, secret=b"s", prefix_cache=False)
    requests = [ask(prompt, ids) for prompt, ids in zip(PROMPTS, stops, strict=True)]
    for each in requests:
        scheduler.submit(each)
    pages: list[int] = []
    launched: list[Any] = []
    while scheduler.roster.requests:
        plan = scheduler.plan()
        if plan is not None:
            pages = pages or [each.place.pages[0] for each in requests]
            launched.append((plan, opened.runner.launch(plan)))
        if launched and (plan is None or len(launched) == AHEAD):
            oldest, step = launched.pop(0)
            scheduler.commit(oldest, step.wait())
    counts = []
    for page in pages:
        marks = written(opened.runner, page)
        assert marks == sorted(marks, reverse=True), "a gap"
        counts.append(sum(marks))
    return [each.tokens[each.prompt_len :] for each in requests], counts


def check_stops(zoo: Zoo, device: str, **options: Any) -> None:
    """Assert that rows end at their stop tokens with nothing written after them, and disturb nobody."""
    nothing = frozenset[int]()

    def run(stops: list[frozenset[int]]) -> tuple[list[list[int]], list[int]]:
        opened = opened_on(zoo, device, "exact", **options)  # whose tokens no rounding changes
        try:
            return outcome(opened, stops)
        finally:
            opened.runner.close()

    free, counts = run([nothing] * 3)
    assert [len(tokens) for tokens in free] == [COUNT] * 3
    assert counts == [16, 3 + COUNT - 1, 16]  # a last token is never written
    ends = [free[0].index(free[0][4]), free[1].index(free[1][0])]
    stops = [frozenset((free[0][4], 509)), frozenset((free[1][0],)), nothing]
    found, counts = run(stops)
    assert found == [free[0][: ends[0] + 1], free[1][: ends[1] + 1], free[2]]
    assert counts == [5 + ends[0], 3 + ends[1], 16]
    assert run([nothing, nothing, frozenset(range(0, 512, 3))])[0][:2] == free[:2]  # more than a device may keep


@torch.inference_mode()
def test_steps_ahead_leave_a_row_that_has_stopped_alone(zoo: Zoo, device: str) -> None:
    check_stops(zoo, device)
