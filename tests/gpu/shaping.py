"""Rows of random options on the device under test, step after step beside the CPU's `Shaper`; holds no tests."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from gpu.choosing import choose, random_sampling

from headrace.engine.scheduling.asked import Sampling
from headrace.engine.scheduling.plan import Capacity, GivenTokens, NewRow, RowOptions, StepPlan, Work
from headrace.engine.scheduling.shaping import GrammarState, Shaping
from headrace.ops.cpu.shape import Shaper

__all__ = ["SideBySide", "random_shaping"]

CONTEXT = 96


def random_shaping(generator: random.Random, vocabulary: int) -> Shaping:
    """Any options, from none to all; often masks that leave little, and words of the few tokens that are likely."""

    def some(most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(generator.sample(range(vocabulary), generator.randint(least, min(most, vocabulary))))

    def maybe(value: Any, other: Any) -> Any:
        return value if generator.random() < 0.4 else other

    words = tuple(
        tuple(generator.choices(range(min(vocabulary, 4)), k=generator.randint(2, 5)))
        for _ in range(generator.choice([0, 0, 3, 200]))
    )
    bias = tuple((token, generator.choice([-100.0, -1.5, 0.1, 3.0, 100.0])) for token in some(6))
    return Shaping(
        bias=maybe(bias, ()),
        repetition_penalty=maybe(generator.choice([0.01, 0.7, 1.3, 100.0]), 1.0),
        frequency_penalty=maybe(generator.choice([-2.0, 0.3, 2.0]), 0.0),
        presence_penalty=maybe(generator.choice([-2.0, 0.7, 2.0]), 0.0),
        allowed=maybe(some(6, 1), None),
        forbidden=maybe(some(vocabulary // 2), ()),
        min_length=maybe(generator.randint(0, 40), 0),
        stops=maybe(some(5), ()),
        bad_words=words,
    )


class RandomGrammar:
    """Allows what follows from the tokens so far, at random: its own state, and any number of others."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.seed, self._vocabulary = seed, vocabulary

    def begin(self, tokens: Sequence[int]) -> RandomGrammar:
        state = RandomGrammar(self.seed, self._vocabulary)
        for token in tokens:
            state.advance(token)
        return state

    def advance(self, token: int) -> None:
        self.seed = hash((self.seed, token))

    def rollback(self, count: int) -> None:
        assert not count, "nothing drafts here"

    def forced(self) -> Sequence[int]:
        return ()

    def allowed(self) -> bytes:
        generator = np.random.default_rng(abs(self.seed))
        many = generator.choice([0, 1, 3, self._vocabulary, self._vocabulary])
        bits = np.zeros(-(-self._vocabulary // 32) * 32, np.bool_)
        bits[generator.integers(0, self._vocabulary, many)] = True
        return np.packbits(bits, bitorder="little").tobytes()

    def fill(self, states: Sequence[tuple[GrammarState, Sequence[int], int]], masks: memoryview) -> None:
        for state, tokens, row in states:
            for token in tokens:
                state.advance(token)
            np.asarray(masks)[row] = np.frombuffer(state.allowed(), np.int32)


class SideBySide:
    """Rows on the device, and what the CPU says of them."""

    def __init__(self, generator: random.Random, device: str, vocabulary: int, rows: int) -> None:
        """Start with `rows` rows that nobody has."""
        self._generator, self._vocabulary, self._count = generator, vocabulary, rows
        capacity = Capacity(
            num_pages=1, page_size=16, max_rows=rows, max_batched_tokens=rows, max_context=CONTEXT,
            vocab_size=vocabulary,
        )  # fmt: skip
        where = torch.device(device)
        sampling = importlib.import_module("headrace.engine.model.cuda.sampling")
        self._rows = importlib.import_module("headrace.engine.model.cuda.rows").DeviceRows(
            capacity, capacity.num_pages, where
        )
        self._sampler = sampling.RowSampler(self._rows, capacity, where)
        self._device = where
        self._known: dict[int, list[int]] = {}
        self._shapers: dict[int, Shaper | None] = {}
        self._samplings: dict[int, Sampling] = {}
        self._grammars: dict[int, RandomGrammar | None] = {}

    def give(self, row: int) -> None:
        """Give a row to a new request, or to one that was preempted and comes again on cached pages."""
        generator, vocabulary = self._generator, self._vocabulary
        tokens = generator.choices(range(min(vocabulary, 40)), k=generator.randint(1, 30))
        prompt_len = generator.randint(1, len(tokens))
        shaping = random_shaping(generator, vocabulary) if generator.random() < 0.8 else None
        plan = StepPlan(0)
        start = generator.randrange(len(tokens))
        self._samplings[row] = random_sampling(generator) if generator.random() < 0.5 else Sampling()
        plan.new_rows.append(NewRow(row, start, tokens[start:], self._samplings[row]))
        self._known[row], self._shapers[row] = tokens, None
        grammar = RandomGrammar(generator.getrandbits(30), vocabulary) if generator.random() < 0.3 else None
        self._grammars[row] = grammar.begin(tokens[prompt_len:]) if grammar is not None else None
        if shaping is not None or grammar is not None:
            plan.options.append(RowOptions(row, list(tokens), prompt_len, shaping, None, grammar))
        if shaping is not None:
            fields = asdict(shaping)
            self._shapers[row] = Shaper(tokens=tokens, prompt_len=prompt_len, vocab_size=vocabulary, **fields)
        self._rows.add(plan.new_rows, plan.entries, plan.options)
        self._sampler.take(plan)
        self._rows.flush()

    def step(self) -> None:
        """One token for some rows in any order, some of whose logits are not finite; everything is equal."""
        generator = self._generator
        batch = generator.sample(sorted(self._known), generator.randint(1, min(len(self._known), self._count - 1)))
        logits_BV = torch.randn(len(batch) + 1, self._vocabulary, generator=torch.Generator().manual_seed(
            generator.getrandbits(40))).mul_(3.0).bfloat16().float()  # fmt: skip
        for line_V in logits_BV:
            kind = generator.randrange(20)
            if kind < 3:
                line_V[generator.randrange(self._vocabulary)] = [math.nan, math.inf, -math.inf][kind]
            elif kind == 3:
                line_V.fill_(-math.inf)
        padded = torch.tensor([*batch, self._count], dtype=torch.int32)
        positions = torch.tensor([*(len(self._known[row]) - 1 for row in batch), 0], dtype=torch.int32)
        ids = torch.full((len(padded),), -9, dtype=torch.int32, device=self._device)
        variant = self._sampler.variant(np.array(batch))._replace(shaped=True)
        late: list[int] = []
        if variant.masked:
            found, _ = self._sampler.act_between(logits_BV, np.array(batch))
            late = found.tolist()
            padded[late] = self._count
        self._sampler.choose(*(each.to(self._device) for each in (logits_BV, padded, positions)), ids, variant)
        tokens = ids.tolist()
        self._sampler.grammars.sampled(
            lambda work: tokens[work : work + 1], [Work(None, row, 0, 1, True) for row in batch]
        )  # type: ignore[arg-type]
        found_BV = self._sampler._shaped.arrays().out_BV.cpu().numpy()
        again = StepPlan(0, given=[GivenTokens(batch[place], len(self._known[batch[place]]), []) for place in late])
        self._rows.give(self._sampler.take(again))
        self._rows.flush()
        for place, row in enumerate(batch):
            if place in late:
                continue
            wanted = self._on_cpu(row, logits_BV[place], found_BV[place])
            assert int(ids[place]) == wanted, (row, self._shapers[row])
            self._known[row].append(max(wanted, 0))
            if len(self._known[row]) == CONTEXT:
                self.give(row)

    def _on_cpu(self, row: int, logits_V: torch.Tensor, found_V: np.ndarray[Any, np.dtype[np.float32]]) -> int:
        shaper, known, grammar = self._shapers[row], self._known[row], self._grammars[row]
        line_V = logits_V.float()
        finite = math.isfinite(line_V.max())
        if shaper is not None and not shaper.shape(line_V.numpy(), np.array(known)):
            return -2
        if grammar is not None and math.isfinite(line_V.max()):
            bits = np.unpackbits(np.frombuffer(grammar.allowed(), np.uint8), bitorder="little")
            line_V[torch.from_numpy(bits[: self._vocabulary] == 0)] = -math.inf
            if line_V.max() == -math.inf:
                return -2
        if finite:
            assert np.array_equal(line_V.numpy(), found_V), (row, np.flatnonzero(line_V.numpy() != found_V))
        (token,) = choose(self._device.type, line_V[None], [self._samplings[row]], [len(known)])
        if shaper is not None and token >= 0:
            shaper.append(token)
        if grammar is not None and token >= 0:
            grammar.advance(token)
        return token
