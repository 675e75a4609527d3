"""The pipelined step loop against one that waits for every step: the same tokens, in the same order, for everybody."""

from __future__ import annotations

import anyio
import pytest
from simulation.rig import capacity, reference

from headrace.engine.engine import Engine
from headrace.engine.errors import RequestFailed
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.plan import Capacity, StepPlan
from headrace.engine.testing import ScriptedEngine, ScriptedRunner, ScriptedStep

VOCAB = 257
SYSTEM = [position * 3 % 250 for position in range(40)]

Tokens = dict[tuple[int, int], list[tuple[int | None, str | None]]]
"""(request, choice) -> its items in the order of arrival: id and finish reason."""


def prompts() -> list[list[int]]:
    return [[*SYSTEM[: (name % 3) * 20], *[name] * (1 + name % 7)] for name in range(12)]


async def read(engine: Engine, name: int, prompt: list[int], found: Tokens) -> None:
    params = SamplingParams(
        max_tokens=5 + name * 3, n=1 + (name % 4 == 3), temperature=0, stop_token_ids=[9] if name % 2 else []
    )
    positions: dict[int, int] = {}
    async with engine.stream(prompt, params, priority=name % 2) as stream:
        async for token in stream:
            found.setdefault((name, token.index), []).append((token.id, token.finish_reason))
            if token.id is not None:
                assert token.position == positions.get(token.index, 0)
                positions[token.index] = token.position + 1


async def tokens_of(launch_ahead: int, pages: int, unread: int) -> Tokens:
    """Everything that twelve streams yield, some of them started while others run."""
    shape = capacity(pages=pages, size=4, rows=5, budget=24, context=200, vocab=VOCAB)
    found: Tokens = {}
    async with ScriptedEngine(shape, launch_ahead=launch_ahead, max_unread_tokens=unread) as engine:
        async with anyio.create_task_group() as tasks:
            for name, prompt in enumerate(prompts()):
                tasks.start_soon(read, engine, name, prompt, found)
                if name % 5 == 4:
                    await anyio.sleep(0.005)
        for _ in range(5000):
            if not engine.stats().pages_held:
                break
            await anyio.sleep(0.001)  # the last steps launched ahead still hold theirs
        assert engine.stats().pages_held == 0
    return found


@pytest.mark.anyio
@pytest.mark.parametrize("pages", [30, 200])
@pytest.mark.parametrize("unread", [2, 512])
async def test_launching_ahead_changes_no_token_and_no_order(pages: int, unread: int) -> None:
    alone = await tokens_of(1, pages, unread)
    assert len(alone) == 12 + 3
    for (name, choice), items in alone.items():
        ids = [token for token, _ in items if token is not None]
        assert ids == reference(prompts()[name], len(ids), VOCAB)
        assert [reason for _, reason in items[:-1]] == [None] * (len(items) - 1)
        assert items[-1][1] in ("length", "stop"), f"choice {choice} of request {name} has no end"
    for launch_ahead in (2, 3):
        assert await tokens_of(launch_ahead, pages, unread) == alone


class RefusingRunner(ScriptedRunner):
    """Refuses to launch one step, and so never learns of that step's rows and pages."""

    def __init__(self, capacity: Capacity, refused: int) -> None:
        super().__init__(capacity)
        self.refused = refused
        self.lost: set[int] = set()

    def launch(self, plan: StepPlan) -> ScriptedStep:
        if plan.step == self.refused:
            self.lost = {work.request.id for work in plan.works}
            raise RuntimeError("refused")
        return super().launch(plan)


@pytest.mark.anyio
@pytest.mark.parametrize("refused", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("launch_ahead", [1, 2, 3])
async def test_a_step_that_cannot_be_launched_ends_its_own_requests_and_spoils_no_page_of_others(
    launch_ahead: int, refused: int
) -> None:
    shape = capacity(pages=24, size=4, rows=5, budget=24, context=200, vocab=VOCAB)
    runner = RefusingRunner(shape, refused)
    ended: dict[int, list[int]] = {}
    async with ScriptedEngine(shape, lambda: runner, launch_ahead=launch_ahead) as engine:

        async def read(name: int, prompt: list[int]) -> None:
            try:
                result = await engine.generate(
                    prompt, SamplingParams(max_tokens=6 + name, temperature=0, ignore_eos=True)
                )
            except RequestFailed:
                return
            ended[name] = result.choices[0].token_ids

        async with anyio.create_task_group() as tasks:
            for name, prompt in enumerate(prompts()):
                tasks.start_soon(read, name, prompt)
    assert runner.lost
    assert len(ended) == len(prompts()) - len(runner.lost)
    for name, ids in ended.items():
        assert ids == reference(prompts()[name], 6 + name, VOCAB)
