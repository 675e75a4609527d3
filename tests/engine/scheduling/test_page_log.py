"""The log of pages says at every moment what the device and the host would give to others, and under which names."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from simulation.rig import Rig, capacity

from headrace.engine.errors import PromptTooLong
from headrace.engine.scheduling.memory.page_log import PageRemoved, PageStored


@pytest.mark.parametrize("places", [0, 6, 40])
def test_the_log_tells_what_can_be_found_and_no_more(places: int) -> None:
    """Whoever follows it knows at every moment what the device and the host would give to others."""
    chance = random.Random(places)
    rig = Rig(capacity(pages=14, rows=4), depth=2, places=places)
    rig.scheduler.pace.observe(0, 0.01)
    rig.scheduler.pace.observe(100, 1.01)
    pool, host = rig.scheduler.pool, rig.scheduler.swaps.host
    known: dict[str, dict[str, PageStored]] = {"device": {}, "host": {}}
    told = 0

    def follow(event: PageStored | PageRemoved) -> None:
        nonlocal told
        told += 1
        if isinstance(event, PageStored):
            assert event.key not in known[event.medium]
            known[event.medium][event.key] = event
        else:
            del known[event.medium][event.key]

    pool.log.start(follow)
    for _ in range(400):
        if chance.random() < 0.2:
            prompt = [chance.randrange(2)] * chance.randint(1, 20)
            with suppress(PromptTooLong):
                rig.submit(prompt, chance.randint(1, 20), root=chance.choice([b"a", b"b"]), streams=1)
        if chance.random() < 0.05:
            rig.resize(chance.choice([6, 10, 14]))
        rig.launch(chance.choice(["step", "memory"]) if chance.random() < 0.03 else "")
        if len(rig.flights) == 2:
            rig.complete()
        held = {key.hex() for page, key in pool._key_of.items() if page not in pool._partly}
        assert known["device"].keys() == held
        assert known["host"].keys() == {key.hex() for key in host._cached}
        assert len(pool.log.present()) == len(held) + len(host._cached)
    assert told > 200 and len({page.scope for page in known["device"].values()}) == 2


def test_pages_of_the_log_chain_to_the_prompt_they_are_of() -> None:
    rig = Rig(capacity(pages=30), depth=1)
    pages: dict[tuple[str, str | None, tuple[int, ...]], PageStored] = {}

    def follow(event: PageStored | PageRemoved) -> None:
        if isinstance(event, PageStored):
            pages[event.scope, event.parent, event.tokens] = event

    log = rig.scheduler.pool.log
    log.start(follow)
    prompt = [*range(20), 1]
    rig.submit(prompt, 3, root=b"mine")
    rig.submit(prompt, 3, root=b"yours")
    rig.run()
    keys = {}
    for root in (b"mine", b"yours"):
        parent = None
        for start in range(0, 20, 4):
            page = pages[log.scope(root), parent, tuple(prompt[start : start + 4])]
            parent = page.key
        keys[root] = parent
    assert log.scope(b"mine") != log.scope(b"yours") and keys[b"mine"] != keys[b"yours"]
    assert len(pages) == 10
