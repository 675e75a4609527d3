"""`Callers`: what applications do with an engine, each way of asking, reading and leaving as one coroutine.

They judge what they are told and never look into a scheduler; engine_world.py sends them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import numpy as np
from anyio.lowlevel import checkpoint
from scripted import acting_at
from simulation.engine_device import FIRST, LETTERS
from simulation.grammar import FORMATS
from simulation.machine import Machine
from simulation.told import Told, values_of

from headrace.engine.delivery.generation import Generation
from headrace.engine.engine import Engine
from headrace.engine.errors import EngineStopped, HeadraceError, HookFailed
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.scheduling.request import State
from headrace.engine.stream import TokenStream
from headrace.engine.testing import scripted_vector

__all__ = ["Callers", "House", "Settings"]


@dataclass
class Settings:
    """What the callers of one engine are like."""

    prompts: list[list[int]]
    """Beginnings that they share."""
    longest: int
    stalls: float
    leaves: float
    """Probability that one leaves early, in one way or another."""
    deadlines: float
    hooks: float
    formats: float
    """Probability that a completion is to keep to a grammar."""
    tenants: list[str | None]
    adapters: list[str]


class House(Protocol):
    """What the callers know of the world they live in."""

    machine: Machine
    capacity: Capacity
    """The largest that the device ever has."""
    may_give_up: bool
    """Whether requests end before a deadline that they cannot meet."""
    least_pool: Callable[[], int] | None
    """Tokens that the pool had room for at least, where its size changes."""
    closing: bool
    """Whether whatever runs may be cancelled because somebody closes the engine."""

    @property
    def engine(self) -> Engine:
        """The engine, open or not."""
        ...

    def note(self, say: Callable[..., str], *values: object) -> None:
        """Tell what happens, for the trace."""
        ...

    def count(self, what: str) -> None:
        """Tell what was reached."""
        ...

    def meet(self, told: Told, generation: Generation) -> None:
        """A generation that somebody reads."""
        ...

    def mark(self) -> int:
        """Now, for `worn_since`."""
        ...

    def worn_since(self, name: str | None, since: int) -> list[int]:
        """The numbers of the adapters that stood under `name` at some time after the mark `since`; 0 is none."""
        ...

    def expects(self, error: HeadraceError) -> bool:
        """Whether the faults of this world account for `error`."""
        ...


class Callers:
    """Makes callers of one world."""

    def __init__(self, house: House, settings: Settings) -> None:
        self._house = house
        self._settings = settings
        self._loop = house.machine.loop

    async def call(self, name: str, chance: random.Random) -> None:
        """One caller, from a request to the last look at it."""
        ways = [self._stream] * 8 + [self._generate, self._embed, self._talk, self._talk, self._search, self._many]
        try:
            await chance.choice(ways)(name, chance)
        except HeadraceError as error:
            self._house.note(lambda who, what: f"{who:10} {what}", name, type(error).__name__)
            self._house.count(type(error).__name__)
            if not self._house.expects(error):
                raise AssertionError(f"{name}: an error that nothing accounts for: {error!r}") from error

    # -- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, name: str, chance: random.Random, n: int = 1) -> tuple[Told, dict[str, Any]]:
        settings = self._settings
        start = chance.choice(settings.prompts)
        cut = chance.choice([len(start), chance.randrange(len(start) + 1)])
        ids = start[:cut] + [FIRST + chance.randrange(LETTERS) for _ in range(chance.randrange(1, 9))]
        more: dict[str, Any] = chance.choice([{}, {}, {"stop_token_ids": (100, 101)}, {"stop": ("f", "gh")}])
        if chance.random() < settings.formats:
            more |= {"response_format": chance.choice(FORMATS)}
            self._house.count("formats")
        if chance.random() < 0.1:
            more |= {"logprobs": chance.randrange(4)}
        most, seed, alone = chance.randint(1, settings.longest), chance.randrange(99), sum(ids) % 8 == 0
        params = SamplingParams(temperature=0, max_tokens=most, n=n, seed=seed, deterministic=alone, **more)
        told = Told(name, params, ids, self._house.machine.clock)
        told.least_pool = self._house.least_pool
        if chance.random() < 0.5:
            told.prompt = bytes(ids).decode()
        asked: dict[str, Any] = {
            "tenant": chance.choice(settings.tenants),
            "priority": chance.choice([0, 0, 1]),
            "adapter": chance.choice(settings.adapters) if settings.adapters and chance.random() < 0.6 else None,
        }
        if chance.random() < settings.deadlines:
            asked["deadline"] = chance.choice([0.05, 1.0, 10.0]) * chance.random() + 1e-3
            told.deadline = self._house.machine.clock() + asked["deadline"]
            told.may_give_up = self._house.may_give_up
        return told, asked

    def _hooks(self, told: Told, chance: random.Random) -> dict[str, Any]:
        if chance.random() > self._settings.hooks:
            return {}
        if chance.random() < 0.5:
            told.stops_at = FIRST + chance.randrange(LETTERS)
            return {"stop_when": lambda token: token.id == told.stops_at}
        fails = chance.random() < 0.2

        def processor(tokens: list[int], logits: object) -> None:
            if fails and chance.random() < 0.3:
                raise HookFailed("scripted")

        return {"logits_processor": processor}

    def _open(self, told: Told, asked: dict[str, Any]) -> TokenStream:
        stream = self._house.engine.stream(told.prompt, told.params, **asked)
        self._house.meet(told, stream._generation)
        return stream

    async def _begin(self, told: Told, stream: TokenStream, name: str | None, since: int) -> None:
        """Wait until the request is taken in, and see what it wears."""
        try:
            await stream.admitted()
        except EngineStopped:
            assert self._house.closing, f"{told.name} was there before the engine was drained, and was not taken in"
            raise
        if stream._generation.requests:
            self._taken_in(told, stream, name, since)

    def _taken_in(self, told: Told, stream: TokenStream, name: str | None, since: int, branch: bool = False) -> None:
        requests = stream._generation.requests
        worn = requests[0].asked.version
        number = 0 if worn is None else int(worn.digest.split()[1])
        assert number in self._house.worn_since(name, since), f"{told.name} wears adapter {number}"
        assert stream.prompt_token_ids == told.ids, f"{told.name}: another prompt was taken in"
        seeds = [request.asked.sampling.seed for request in requests] if branch else None
        told.begin(number, self._house.capacity, seeds)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read(self, told: Told, stream: TokenStream, chance: random.Random, most: int | None = None) -> None:
        """Read to the end, or `most` tokens; slow readers sleep now and then."""
        stalls = self._settings.stalls
        if chance.random() < 0.3:
            while (chunk := await stream.next_chunk()) is not None:
                for token in chunk.tokens:
                    told.take(token)
                if chance.random() < stalls:
                    await anyio.sleep(chance.choice([0.0, 0.1, 2.0]))
                if most is not None and len(told.tokens[0]) >= most:
                    return
        else:
            async for token in stream:
                told.take(token)
                if chance.random() < stalls:
                    await anyio.sleep(chance.choice([0.0, 0.1, 2.0]))
                if most is not None and len(told.tokens[0]) >= most:
                    return
        told.check_whole()
        assert stream.finish_reasons == told.ends

    def _cancel(self, told: Told, stream: TokenStream) -> None:
        """Cancel, from anywhere: nothing of it may run any more."""
        told.cancelled = True
        generation = stream._generation
        self._house.note(lambda who: f"{who:10} cancels", told.name)
        stream.cancel()
        self._check_stopped(told, generation)

    @staticmethod
    def _check_stopped(told: Told, generation: Generation) -> None:
        """Nothing of it is computed any more; an end that was committed before may still be on its way."""
        assert generation.finished or generation.requests, f"{told.name} goes on after it was cancelled"
        for request in generation.requests:
            over = request.state is State.FINISHED or generation.error is not None
            assert over, f"{told.name}: r{request.id} goes on after it was cancelled"

    async def _stream(self, name: str, chance: random.Random) -> None:
        told, asked = self._ask(name, chance, n=chance.choice([1, 1, 1, 2, 3]))
        asked |= self._hooks(told, chance)
        ways = [self._cancels_by_timer, self._gives_up, self._task_is_cancelled, self._cancels_at_an_await]
        ways += [self._breaks_off, self._drops, self._never_reads]
        way = chance.choice(ways) if chance.random() < self._settings.leaves else self._reads
        self._house.count(way.__name__)
        await way(told, asked, chance)

    async def _reads(self, told: Told, asked: dict[str, Any], chance: random.Random) -> None:
        since = self._house.mark()
        stream = self._open(told, asked)
        await self._begin(told, stream, asked["adapter"], since)
        await self._read(told, stream, chance)

    async def _cancels_by_timer(self, told: Told, asked: dict[str, Any], chance: random.Random) -> None:
        since = self._house.mark()
        stream = self._open(told, asked)
        timer = self._loop.call_later(self._soon(chance), self._cancel, told, stream)
        try:
            await self._begin(told, stream, asked["adapter"], since)
            if stream._generation.requests:
                await self._read(told, stream, chance)
        finally:
            timer.cancel()

    async def _cancels_at_an_await(self, told: Told, asked: dict[str, Any], chance: random.Random) -> None:
        since = self._house.mark()
        stream = self._open(told, asked)

        async def reads() -> None:
            await self._begin(told, stream, asked["adapter"], since)
            if stream._generation.requests:
                await self._read(told, stream, chance)

        await acting_at(chance.randrange(12), reads(), lambda: self._cancel(told, stream), [])

    async def _gives_up(self, told: Told, asked: dict[str, Any], chance: random.Random) -> None:
        with anyio.move_on_after(self._soon(chance)):
            await self._reads(told, asked, chance)
        told.cancelled = True

    async def _task_is_cancelled(self, told: Told, asked: dict[str, Any], chance: random.Random) -> None:
        task = asyncio.ensure_future(self._reads(told, asked, chance))
        timer = self._loop.call_later(self._soon(chance), task.cancel)
        await asyncio.wait([task])
        timer.cancel()
        told.cancelled = True
        with suppress(asyncio.CancelledError):
            task.result()

    async def _breaks_off(self, told: Told, asked: dict[str, Any], chance: random.Random) -> None:
        since = self._house.mark()
        async with self._open(told, asked) as stream:
            await self._begin(told, stream, asked["adapter"], since)
            await self._read(told, stream, chance, most=chance.randrange(6))
        told.cancelled = True
        self._check_stopped(told, stream._generation)

    async def _drops(self, told: Told, asked: dict[str, Any], chance: random.Random) -> None:
        since = self._house.mark()
        stream = self._open(told, asked)
        await self._begin(told, stream, asked["adapter"], since)
        await self._read(told, stream, chance, most=chance.randrange(6))
        told.cancelled = True
        generation = stream._generation
        del stream
        await checkpoint()
        await checkpoint()
        assert generation.finished, f"{told.name} goes on though nobody has it any more"

    async def _never_reads(self, told: Told, asked: dict[str, Any], chance: random.Random) -> None:
        stream = self._open(told, asked)
        await anyio.sleep(self._soon(chance))
        self._cancel(told, stream)

    @staticmethod
    def _soon(chance: random.Random) -> float:
        return chance.choice([0.0, 0.01, 0.3, 3.0]) * chance.random()

    # -- other ways to ask --------------------------------------------------------------------------------------------

    async def _generate(self, name: str, chance: random.Random) -> None:
        told, asked = self._ask(name, chance, n=chance.choice([1, 2]))
        since = self._house.mark()
        completion = await self._house.engine.generate(told.prompt, told.params, **asked)
        told.cancelled = self._house.closing
        told.check_completion(completion, self._house.worn_since(asked["adapter"], since), self._house.capacity)

    async def _search(self, name: str, chance: random.Random) -> None:
        """A beam search, which may be left."""
        told, asked = self._ask(name, chance)
        asked.pop("deadline", None)
        width = chance.randint(1, 4)
        told.params = SamplingParams(
            beam_width=width,
            n=chance.randint(1, width),
            max_tokens=told.params.max_tokens,
            stop_token_ids=told.params.stop_token_ids,
            length_penalty=chance.choice([1.0, 0.0, 2.0]),
            early_stopping=chance.choice([True, False]),
        )
        since = self._house.mark()
        leaves = chance.random() < self._settings.leaves
        self._house.count("searches")
        with anyio.move_on_after(self._soon(chance) if leaves else None):
            completion = await self._house.engine.generate(told.prompt, told.params, **asked)
            told.cancelled = self._house.closing
            told.check_search(completion, self._house.worn_since(asked["adapter"], since), self._house.capacity)

    async def _many(self, name: str, chance: random.Random) -> None:
        """Several prompts at once, whose answers come in their order."""
        all_told = [self._ask(f"{name}/{place}", chance) for place in range(chance.randint(1, 6))]
        asked = all_told[0][1]
        one = chance.random() < 0.5
        for told, _ in all_told:
            told.params = all_told[0][0].params if one else told.params
            if "deadline" in asked:
                told.deadline, told.may_give_up = (
                    self._house.machine.clock() + asked["deadline"],
                    self._house.may_give_up,
                )
            else:
                told.deadline = None
        prompts = [told.prompt for told, _ in all_told]
        params = all_told[0][0].params if one else [told.params for told, _ in all_told]
        since = self._house.mark()
        self._house.count("many at once")
        keeps = chance.random() < 0.7
        answers = await self._house.engine.generate_many(
            self._one_by_one(prompts, chance) if chance.random() < 0.5 else prompts,
            params,
            return_errors=keeps,
            **asked,
        )
        assert len(answers) == len(prompts), f"{name}: {len(answers)} answers"
        for (told, _), answer in zip(all_told, answers, strict=True):
            if isinstance(answer, HeadraceError):
                assert keeps and self._house.expects(answer), f"{told.name}: {answer!r}"
            else:
                told.cancelled = self._house.closing
                told.check_completion(answer, self._house.worn_since(asked["adapter"], since), self._house.capacity)

    @staticmethod
    async def _one_by_one(prompts: list[Any], chance: random.Random) -> AsyncIterator[Any]:
        for prompt in prompts:
            await anyio.sleep(chance.choice([0.0, 0.1]) * chance.random())
            yield prompt

    async def _embed(self, name: str, chance: random.Random) -> None:
        told, asked = self._ask(name, chance)
        asked.pop("deadline", None)
        since = self._house.mark()
        found = await self._house.engine.embed([told.prompt], normalize=False, **asked)
        worn = self._house.worn_since(asked["adapter"], since)
        wants = [scripted_vector(values_of(told.ids, number)) for number in worn]
        assert any(np.allclose(found.vectors[0], want) for want in wants), f"{name}: a wrong vector"

    async def _talk(self, name: str, chance: random.Random) -> None:
        """A conversation: what is sent after an answer, and branches of it."""
        told, asked = self._ask(name, chance)
        since = self._house.mark()
        stream = self._open(told, asked)
        await self._begin(told, stream, asked["adapter"], since)
        for turn in range(chance.randint(1, 3)):
            await self._read(told, stream, chance, most=chance.choice([None, 3]))
            if told.tokens[0] and chance.random() < 0.5:
                await self._branch(f"{name}/{turn}", told, stream, asked, since, chance)
            await self._read(told, stream, chance)
            if told.ends[0] not in ("stop", "length"):
                return
            told, since = await self._send(told, stream, asked, chance)
        self._cancel(told, stream)

    async def _send(
        self, told: Told, stream: TokenStream, asked: dict[str, Any], chance: random.Random
    ) -> tuple[Told, int]:
        more = [FIRST + chance.randrange(LETTERS) for _ in range(chance.randint(1, 5))]
        since, house = self._house.mark(), self._house
        following = Told(told.name, told.params, [*told.ids, *told.tokens[0], *more], house.machine.clock)
        following.may_give_up, following.least_pool = told.may_give_up, told.least_pool
        if told.deadline is not None:
            following.deadline = house.machine.clock() + asked["deadline"]
        await stream.send(bytes(more).decode() if chance.random() < 0.5 else more)
        house.count("sends")
        house.meet(following, stream._generation)
        self._taken_in(following, stream, asked["adapter"], since)
        return following, since

    async def _branch(
        self, name: str, told: Told, stream: TokenStream, asked: dict[str, Any], since: int, chance: random.Random
    ) -> None:
        branch = stream.fork(seed=chance.randrange(99))
        self._house.count("branches")
        other = Told(name, told.params, [*told.ids, *told.tokens[0]], self._house.machine.clock)
        other.before = [*told.before, *told.tokens[0]]
        other.deadline, other.may_give_up, other.least_pool = told.deadline, told.may_give_up, told.least_pool
        if branch._generation is stream._generation:  # all was read: it waits for what is sent
            if told.ends[0] in ("stop", "length"):
                sent, _ = await self._send(told, branch, asked, chance)
                await self._read(sent, branch, chance)
            branch.cancel()
            return
        self._house.meet(other, branch._generation)
        self._taken_in(other, branch, asked["adapter"], since, branch=True)
        await self._read(other, branch, chance)
