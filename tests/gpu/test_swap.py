"""Pages that go to pinned host memory and come back, while other steps write where they were."""

from __future__ import annotations

import anyio
import pytest
from gpu.checkpoints import exact_logits, kv_bytes
from gpu.choosing import choose
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, open_engine, together
from gpu.judge import Output

from headrace.engine import SamplingParams
from headrace.engine.scheduling.asked import Sampling

COUNT = 60


def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What the exact checkpoint gives: its logits follow from the last token alone, to the last bit."""
    table_VV = exact_logits().bfloat16()
    known = [list(prompt) for prompt in prompts]
    for _ in range(COUNT):
        rows = table_VV[[ids[-1] for ids in known]]
        chosen = choose("cpu", rows, [Sampling()] * len(known), [len(ids) for ids in known])
        for ids, token in zip(known, chosen, strict=True):
            ids.append(token)
    return [ids[-COUNT:] for ids in known]


@pytest.mark.parametrize("launch_ahead", [1, 2, 4])
def test_swapped_requests_go_on_as_they_were(zoo: Zoo, device: str, launch_ahead: int) -> None:
    prompts = [draw(length, length) for length in (60, 50, 40, 35, 30, 25, 20, 55, 90, 33, 47, 61)]
    page = kv_bytes(zoo.folder("exact"), 1)
    options = {"kv_memory": 40 * page, "swap_memory": 400 * page, "launch_ahead": launch_ahead, "prefix_cache": False}

    async def run() -> list[Output]:
        async with open_engine(zoo.folder("exact"), device, **options) as engine:
            assert engine._life.loop is not None
            host = engine._life.loop.scheduler.swaps.host
            print(f"a page of {page} bytes takes {1e6 * host.page_seconds:.1f} us one way")
            host.page_seconds = 1e-9  # the model is so small that computing again would be chosen
            params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
            outputs = await together(engine, prompts, params)
            stats = engine.stats()
            assert stats.swaps > 1 and stats.swaps == stats.preemptions and stats.swapped == 0
            await at_rest(engine)
        return outputs

    assert [list(output.tokens) for output in anyio.run(run)] == expected(prompts)
