"""Pages come and go under a runner that has captured its graphs: old ones stay, new ones serve, memory returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.driving import draw
from gpu.test_memory import SLACK, used
from model_driver import request

from headrace.engine.config import EngineConfig
from headrace.engine.life.build import open_engine
from headrace.engine.life.opened import Opened
from headrace.engine.scheduling.scheduler import Scheduler

FEW, PAGES, MANY = 24, 40, 300
PROMPTS = [draw(length, length) for length in (40, 3, 70, 16, 90)]


def opened_on(zoo: Zoo, device: str, name: str = "qwen3", **options: Any) -> Opened:
    """Open the checkpoint of that name in a runner with `PAGES` pages."""
    folder = zoo.folder(name)
    options = {"dtype": "bfloat16", "kv_memory": kv_bytes(folder, PAGES), "max_rows": 4, "max_context": 256} | options
    return open_engine(EngineConfig(model=folder, device=device, **options))


@pytest.fixture
def opened(zoo: Zoo, device: str) -> Iterator[Opened]:
    made = opened_on(zoo, device)
    yield made
    made.runner.close()


def tokens_of(opened: Opened, pages: int, sizes: dict[int, int], taken: int = 0) -> list[list[int]]:
    """Twelve tokens after every prompt in so many pages, of which the first are `taken`; resized before some steps."""
    capacity = opened.capacity
    limits = {name: getattr(capacity, name) for name in capacity.__slots__} | {"num_pages": pages}
    scheduler = Scheduler(type(capacity)(**limits), secret=b"s")
    assert [scheduler.pool.allocate() for _ in range(taken)] == list(range(taken))
    requests = [request(ids, 12) for ids in PROMPTS]
    for each in requests:
        scheduler.submit(each)
    runner: Any = opened.runner
    step = 0
    while scheduler.roster.requests:
        if step in sizes:
            runner.resize(sizes[step])
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, runner.launch(plan).wait())
        step += 1
    assert step > max(sizes, default=0)
    return [each.tokens[each.prompt_len :] for each in requests]


def check_resizing(opened: Opened) -> None:
    """Assert that tokens are those of a runner of one size: shrunk and grown between steps, and in new pages alone."""
    runner: Any = opened.runner
    alone = tokens_of(opened, FEW, {})
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    assert tokens_of(opened, FEW, {2: FEW, 5: MANY, 9: FEW, 12: PAGES, 15: FEW}) == alone
    runner.resize(MANY)
    assert tokens_of(opened, MANY, {}, taken=MANY - FEW) == alone
    assert tokens_of(opened, MANY, {3: MANY, 5: 2 * MANY, 7: MANY}, taken=MANY - FEW) == alone
    runner.resize(1)
    runner.resize(PAGES)
    assert tokens_of(opened, PAGES, {}) == alone
    assert runner.most_pages >= PAGES


def test_tokens_do_not_depend_on_how_pages_come_and_go(opened: Opened) -> None:
    check_resizing(opened)


def test_memory_of_pages_comes_back_and_what_is_not_there_is_refused(zoo: Zoo, cuda: str) -> None:
    """A refused size changes nothing, and closing gives all back."""
    opened_on(zoo, cuda).runner.close()
    before = used()
    opened = opened_on(zoo, cuda)
    runner: Any = opened.runner
    try:
        small, page = used(), kv_bytes(zoo.folder("qwen3"), 1)
        gigabytes = (4 << 30) // page
        runner.resize(gigabytes)
        assert abs(used() - small - (4 << 30)) <= SLACK
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                runner.resize(runner.most_pages)
            assert abs(used() - small - (4 << 30)) <= SLACK
        runner.resize(gigabytes // 2)
        assert abs(used() - small - (2 << 30)) <= SLACK
        assert tokens_of(opened, gigabytes // 2, {}, taken=gigabytes // 2 - FEW) == tokens_of(opened, FEW, {})
        runner.resize(PAGES)
        assert abs(used() - small) <= SLACK
    finally:
        runner.close()
    assert abs(used() - before) <= SLACK
