"""Conversations on the device: what is sent and what branches off gives the tokens that it gives on the CPU."""

from __future__ import annotations

import anyio
import pytest
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, open_engine

from headrace.engine import Engine, SamplingParams, TokenStream

STOPS = tuple(range(8, 24))


@pytest.mark.parametrize("pages", [400, 60], ids=["room", "cramped"])
def test_turns_and_branches_are_those_of_the_cpu(zoo: Zoo, device: str, pages: int) -> None:
    """Eight conversations at once, of turns and branches of many lengths, so that pages end anywhere."""

    async def ids_of(stream: TokenStream) -> list[int]:
        return [token.id async for token in stream if token.id is not None]

    async def talk(engine: Engine, name: int, found: dict[int, list[list[int]]]) -> None:
        params = SamplingParams(max_tokens=5 + 3 * name, temperature=0.0, frequency_penalty=0.75, ignore_eos=True)
        heard = found[name] = []
        async with engine.stream(draw(20 + 7 * name, name), params) as stream:
            begun = [(await anext(stream)).id or 0 for _ in range(2 + name % 4)]
            async with stream.fork(seed=100 + name) as branch:
                heard += [begun, await ids_of(stream), await ids_of(branch)]
                async with branch.fork() as other:
                    for turn, each in enumerate((stream, branch, other, stream, other)):
                        again = params.model_copy(update={"seed": turn, "stop_token_ids": STOPS})
                        await each.send(draw(3 + 5 * turn + name, turn), again)
                        heard.append(await ids_of(each))

    async def run(device: str) -> tuple[dict[int, list[list[int]]], int]:
        found: dict[int, list[list[int]]] = {}
        memory = kv_bytes(zoo.folder("speaking"), pages)
        async with open_engine(
            zoo.folder("speaking"), device, max_rows=16, max_context=512, kv_memory=memory
        ) as engine:
            async with anyio.create_task_group() as tasks:
                for name in range(8):
                    tasks.start_soon(talk, engine, name, found)
            await at_rest(engine)
            return found, engine.stats().cached_tokens

    (mine, cached), (wanted, _) = anyio.run(run, device), anyio.run(run, "cpu")
    assert mine == wanted
    assert cached > 1000
