"""`World`: one seeded run of all that can happen to a scheduler, on a `Rig`; never leaves anything to but the seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from simulation.rig import Rig, capacity

from headrace.engine.errors import Overloaded, PromptTooLong
from headrace.engine.scheduling.policies import POLICIES, policy_of
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import NoToken

__all__ = ["NARROW", "Broken", "World", "play"]

_VOCAB = 50
_REQUESTS = 30
_BUSY_TICKS = 120
_TICKS = 20_000
_FORKS = 60
_SHARES = {"burst": 8.0, "weights": {"a": 3.0}, "adapter_weights": {"x": 2.0}}
NARROW: dict[str, dict[str, Any]] = {
    "ageing": {"seconds": 1.0, "most": 3.0},
    "size_classes": {"short": 8, "long": 20, "most_wait": 1.0},
    "fair_share": _SHARES,
    "deadlines": _SHARES,
}
"""Settings by policy for which a short run of small requests is a long one of large ones: shares change hands, say."""


class Broken(AssertionError):
    """A seed broke something; says which seed, what, and what happened last."""


def play(seed: int, tamper: Callable[[Rig], None] | None = None) -> World:
    """Run the world of `seed` to its end and check that nothing is left.

    Args:
        seed: Decides everything: sizes, requests, faults and the order of events.
        tamper: Called with the new rig, for tests of the simulation: breaks something there.

    Raises:
        Broken: Something did not hold.
    """
    world = World(seed)
    rig = world.rig
    if tamper is not None:
        tamper(rig)
    try:
        while world.busy:
            world.tick()
        rig.check_empty()
    except Exception as error:
        what = f"seed {seed}, tick {world.ticks}: {type(error).__name__}: {error}"
        where = f"{rig.capacity}, depth {rig.depth}"
        raise Broken(
            f"{what}\n{where}\nlast events:\n{rig.trace()}\nreplay: HEADRACE_SEEDS={seed}:{seed + 1}"
        ) from error
    return world


class World:
    """A rig of random size, and how often each thing happens to it."""

    def __init__(self, seed: int) -> None:
        self._chance = chance = random.Random(seed)
        rows = chance.choice([1, 2, 4, 8])
        crowd = chance.random() < 0.3  # many of one prefix at once on a roomy device: much is shared while in flight
        shape = capacity(
            pages=60 if crowd else chance.choice([5, 6, 8, 12, 40]),
            size=chance.choice([1, 2, 4, 16]),
            rows=8 if crowd else rows,
            budget=80 if crowd else chance.choice([rows, rows + 3, rows + 64]),
            context=chance.choice([20, 60, 200]),
            vocab=_VOCAB,
        )
        sliding = random.Random(f"{seed} windows")
        if sliding.random() < 0.3:
            shape = replace(shape, window=sliding.choice([1, 3, 8, 20]))
        depth = chance.choice([2, 3] if crowd else [1, 2, 2, 3])
        self._servings = random.Random(f"servings {seed}")
        """As with searches: worlds without tenants and deadlines are what they would be if there were none anywhere."""
        policy = self._servings.choice([None, *POLICIES, "deadlines"])
        settings: dict[str, Any] = {"answer": 1} if policy == "deadlines" and self._servings.random() < 0.5 else {}
        settings |= NARROW.get(policy or "", {}) if seed % 2 else {}
        if policy in ("fair_share", "deadlines") and seed % 5 == 0:
            settings["background_last"] = True
        self._guesses = random.Random(f"{seed} drafts")
        """Of its own, too: how deep steps speculate, and which drafts are right."""
        drafts = self._guesses.choice([0, 0, 1, 2, 4])
        self._served_apart = policy is not None
        self._deadlines = self._servings.choice([0.0, 0.2, 0.8]) if self._served_apart else 0.0
        self.rig = Rig(
            shape,
            depth=depth,
            prefix_cache=crowd or chance.random() < 0.8,
            policy=policy_of({"name": policy, **settings}) if policy else None,
            places=self._servings.choice([0, 3, 20, 100]) if self._served_apart else 0,
            drafts=drafts,
            choose=lambda rows, context: self._guesses.randint(0, drafts),
        )
        self.rig.runner.rate = self._guesses.choice([0.0, 0.5, 0.8, 1.0])
        self._speculating = self._guesses.choice([0.5, 1.0]) if drafts else 0.0
        self.ticks = 0
        self._shared = [[chance.randrange(_VOCAB) for _ in range(chance.randrange(48))] for _ in range(2)]
        self._roots = chance.choice([[b""], [b"", b"tenant"]])
        self._submits = chance.choice([0.1, 0.3, 0.9])
        self._bursts = [4] if crowd else [1]
        self._finishes = chance.choice([0.0, 0.02, 0.1])
        self._pauses = chance.choice([0.0, 0.05, 0.15])
        self._faults = chance.choice([0.1, 0.3] if crowd else [0.0, 0.0, 0.03, 0.1])
        self._fault = chance.choice([["step"], ["step", "launch"]])
        self._bad_rows = chance.choice([0.0, 0.0, 0.05])
        self._longest = 4 if crowd else chance.choice([4, 30, 60])
        self._choices = chance.choice([[1, 2, 3], [1, 1, 2]] if crowd else [[1], [1, 1, 2, 3], [1, 4]])
        self._stop_ids = chance.choice([frozenset[int](), frozenset({3, 4})])
        self._searches = random.Random(~seed)
        """Of its own, so that worlds without searches are what they would be if there were none anywhere."""
        self._searching = 0.3 if self._searches.random() < 0.25 else 0.0
        self._forks = _FORKS
        self._talks = random.Random(f"{seed} talks")
        """Of its own, too: conversations."""
        self._talking = self._talks.choice([0.0, 0.0, 0.3])
        self._hooks = random.Random(f"{seed} hooks")
        self._hooking = self._hooks.choice([0.0, 0.0, 0.4])
        self._solo = random.Random(f"{seed} alone")
        self._deterministic = self._solo.choice([0.0, 0.0, 0.4])
        self.talks: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        """Something is still to come or to be done."""
        return self.ticks < _BUSY_TICKS or bool(self.rig.flights or self.rig.scheduler.roster.requests)

    def tick(self) -> None:
        """Let the outside do something, then the step loop; once the busy time is over, only the step loop."""
        self.ticks += 1
        assert self.ticks < _TICKS, "the world does not come to rest"
        chance, rig = self._chance, self.rig
        if self._served_apart:
            rig.now += self._servings.choice([0.0, 0.1, 0.1, 1.0])
            rig.scheduler.pace.observe(self._servings.choice([0, 50]), 0.01 + self._servings.random() / 10)
        if self.ticks < _BUSY_TICKS:
            self._outside()
        else:
            for request in rig.live(State.PAUSED):
                if not self._at_its_hold(request):
                    rig.resume(request)
        self._search()
        if self._talking and self.ticks < _BUSY_TICKS:
            self._talk()
        while rig.awaited and (self._hooks.random() < 0.4 or not (rig.flights or self.ticks < _BUSY_TICKS)):
            rig.supply(self._hooks.randrange(len(rig.awaited)), fails=self._hooks.random() < 0.02)
        fault = chance.choice(self._fault) if chance.random() < self._faults else ""
        plan = rig.launch(fault)
        if rig.flights and (plan is None or len(rig.flights) >= rig.depth or chance.random() < 0.2):
            bad = None
            if chance.random() < self._bad_rows:
                bad = chance.randrange(8), chance.choice([NoToken.NON_FINITE, _VOCAB])
            rig.complete(bad)

    def _outside(self) -> None:
        chance, rig = self._chance, self.rig
        if len(rig.requests) < _REQUESTS and chance.random() < self._submits:
            for _ in range(chance.choice(self._bursts)):
                self._submit()
        live = rig.live()
        if not live:
            return
        if chance.random() < self._finishes:
            rig.finish(chance.choice(live))
        if chance.random() < self._finishes:
            rig.finish(chance.choice(rig.requests))
        if chance.random() < self._pauses:
            rig.pause(chance.choice(live))
        if chance.random() < 0.2:
            request = chance.choice(live)
            if not self._at_its_hold(request):
                rig.resume(request)

    @staticmethod
    def _at_its_hold(request: Request) -> bool:
        return request.asked.holds and len(request.tokens) == request.limit

    def _search(self) -> None:
        """What a beam search does: fork what is held, and end it, at times before its forks have run."""
        chance, rig = self._searches, self.rig
        for request in rig.live(State.PAUSED):
            if not self._at_its_hold(request) or chance.random() < 0.3:
                continue
            for _ in range(chance.randint(0, 3)):
                if self._forks:
                    self._forks -= 1
                    with suppress(PromptTooLong):
                        rig.go_on(request, chance.randrange(_VOCAB))
            if not self._forks or chance.random() < 0.5:
                rig.finish(request)

    def _asked(self) -> dict[str, Any]:
        """Who asks, and by when it must be done."""
        chance = self._servings
        if not self._served_apart:
            return {}
        return {
            "tenant": chance.choice([None, "a", "a", "a", "b"]),
            "adapter": chance.choice([None, None, "x", "y"]),
            "deadline": chance.uniform(0.1, 10.0) if chance.random() < self._deadlines else None,
        }

    def _talk(self) -> None:
        """What callers do with their streams: send more after an end, branch what runs or has run, and close."""
        chance, rig = self._talks, self.rig
        kept = [request for request in rig.requests if request.streams]
        if not kept or chance.random() > self._talking or len(rig.requests) > 3 * _REQUESTS:
            return
        request = chance.choice(kept)
        if request.id not in rig.ends:
            least = max(request.prompt_len, 1)
            if request.tokens[least:] and len(request.tokens) < request.limit:
                rig.branch(request, chance.randint(least, len(request.tokens)))
                self.talks["branches"] += 1
        elif chance.random() < 0.2:
            rig.let_go(request)
        else:
            with suppress(PromptTooLong):
                more = [chance.randrange(_VOCAB) for _ in range(chance.randint(0, 6))]
                rig.send(request, more, chance.randint(1, self._longest))
                self.talks["sends"] += 1

    def _submit(self) -> None:
        chance = self._chance
        start = chance.choice(self._shared)
        cut = chance.choice([len(start), chance.randrange(len(start) + 1)])
        prompt = start[:cut] + [chance.randrange(_VOCAB) for _ in range(chance.randrange(10))]
        most, choices = chance.randint(1, self._longest), chance.choice(self._choices)
        holds = self._searches.random() < self._searching
        try:
            self.rig.submit(
                prompt or [1],
                1 if holds else most,
                n=1 if holds else choices,
                priority=chance.choice([0, 0, 1]),
                root=chance.choice(self._roots),
                stop_ids=frozenset() if holds else self._stop_ids,
                holds=holds,
                **self._asked(),
                streams=1 if self._talking and choices == 1 and not holds else 0,
                hooked=not holds and self._hooks.random() < self._hooking,
                jumps=not holds and self._hooks.random() < self._hooking,
                masked=not holds and self._hooks.random() < self._hooking,
                alone=not holds and self._solo.random() < self._deterministic,
                speculates=self._guesses.random() < self._speculating,
            )
        except Overloaded:
            assert self._deadlines
        except PromptTooLong:
            assert len(prompt) >= min(
                self.rig.capacity.max_context, self.rig.capacity.num_pages * self.rig.capacity.page_size + 1
            )
