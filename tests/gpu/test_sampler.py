"""What a seed samples depends on its own request alone, and the frequencies are those of the filtered softmax.

The engine's tests use a checkpoint whose logits are exact in bfloat16 in any order of addition, so a batch of another
shape cannot change their last bits: tokens must be equal, not nearly so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import anyio
import pytest
import torch
from gpu.checkpoints import exact_logits, kv_bytes
from gpu.choosing import chi_square_limit, choose, probabilities, random_sampling
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, open_engine, together
from gpu.judge import Output
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import SamplingParams
from headrace.engine.scheduling.asked import Sampling
from headrace.ops.cpu.noise import gumbel, words

MANY = {"cpu": 3000, "cuda": 20000}


# -- the sampler on given logits ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    neighbours=st.integers(1, 40),
    vocabulary=st.sampled_from([97, 512, 5000, 32000]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    spread=st.sampled_from([0.5, 2.0, 6.0]),
)
def test_a_row_is_sampled_alike_whatever_its_neighbours(
    device: str, seed: int, neighbours: int, vocabulary: int, dtype: torch.dtype, spread: float
) -> None:
    generator = random.Random(seed)
    rows = neighbours + 1
    logits_NV = (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)
    samplings = [random_sampling(generator) for _ in range(rows)]
    positions = [generator.randrange(1, 3000) for _ in range(rows)]
    batched = choose(device, logits_NV, samplings, positions)
    order = generator.sample(range(rows), rows)
    shuffled = choose(device, logits_NV[order], [samplings[at] for at in order], [positions[at] for at in order])
    assert shuffled == [batched[at] for at in order]
    for at in generator.sample(range(rows), 2):
        alone = choose(device, logits_NV[at : at + 1], samplings[at : at + 1], positions[at : at + 1])
        assert alone == [batched[at]], (samplings[at], positions[at])


KINDS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.8, top_k=7),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.3, min_p=0.05),
    Sampling(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01),
]


def check_frequencies(chosen: Sequence[int], expected_V: torch.Tensor) -> None:
    """Chi-square, with rare ids taken together; nothing of probability 0 may occur."""
    counts_V = torch.bincount(torch.tensor(chosen), minlength=len(expected_V)).double()
    assert not counts_V[expected_V == 0].any(), "a token that the filters drop was chosen"
    wanted_V = expected_V * len(chosen)
    rare_V = wanted_V < 10
    observed = torch.cat([counts_V[~rare_V], counts_V[rare_V].sum()[None]])
    wanted = torch.cat([wanted_V[~rare_V], wanted_V[rare_V].sum()[None]])
    observed, wanted = observed[wanted >= 5], wanted[wanted >= 5]
    if len(wanted) > 1:
        statistic = float(((observed - wanted) ** 2 / wanted).sum())
        assert statistic < chi_square_limit(len(wanted) - 1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frequencies_follow_the_filtered_softmax(device: str, kind: Sampling, dtype: torch.dtype) -> None:
    rows, generator = MANY[device], random.Random(4)
    line_V = (torch.randn(80, generator=torch.Generator().manual_seed(6)) * 1.5).to(dtype)
    fields = {name: getattr(kind, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    samplings = [Sampling(**fields, seed=generator.getrandbits(64)) for _ in range(rows)]
    chosen = choose(device, line_V.expand(rows, -1).contiguous(), samplings, [generator.randrange(1, 64)] * rows)
    check_frequencies(chosen, probabilities(line_V, kind))


def test_one_seed_at_many_positions_is_as_random_as_many_seeds(device: str) -> None:
    rows = MANY[device]
    line_V = torch.randn(80, generator=torch.Generator().manual_seed(7)) * 1.5
    sampling = Sampling(temperature=1.0, seed=12345)
    chosen = choose(device, line_V.expand(rows, -1).contiguous(), [sampling] * rows, range(1, rows + 1))
    check_frequencies(chosen, probabilities(line_V, sampling))
    pairs = [first * 80 + second for first, second in zip(chosen[::2], chosen[1::2], strict=True)]
    once_V = probabilities(line_V, sampling)
    check_frequencies(pairs, torch.outer(once_V, once_V).flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_seed_chooses_on_the_device_what_it_chooses_on_a_cpu(device: str, dtype: torch.dtype) -> None:
    """But for ties: of the best two with their noise, or of a token and the bound of a filter."""
    generator = random.Random(8)
    for vocabulary in (97, 5000, 49152):
        logits_NV = (torch.randn(120, vocabulary, generator=torch.Generator().manual_seed(8)) * 2).to(dtype)
        samplings = [random_sampling(generator) for _ in range(120)]
        positions = [generator.randrange(1, 100_000) for _ in range(120)]
        found, wanted = (choose(on, logits_NV, samplings, positions) for on in (device, "cpu"))
        assert sum(one != other for one, other in zip(found, wanted, strict=True)) <= 1
        for at, sampling in enumerate(samplings):
            if sampling.temperature and (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0):
                noise_V = torch.from_numpy(gumbel(words(sampling.seed, positions[at], vocabulary))).double()
                scores_V = logits_NV[at].double() / sampling.temperature + noise_V
                assert scores_V[found[at]] >= scores_V.max() - 1e-4


# -- the engine -----------------------------------------------------------------------------------------------------

TARGET = draw(21, 1)
COUNT = 20


def params_of(sampling: Sampling) -> SamplingParams:
    fields = {name: getattr(sampling, name) for name in Sampling.__slots__}
    return SamplingParams(**fields, max_tokens=COUNT)


def predict(device: str, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
    """The exact checkpoint's outputs, from its table of logits and the sampler alone."""
    table_VV = exact_logits().bfloat16()
    known = [list(prompt) for prompt in prompts]
    for _ in range(COUNT):
        chosen = choose(device, table_VV[[ids[-1] for ids in known]], samplings, [len(ids) for ids in known])
        for ids, token in zip(known, chosen, strict=True):
            ids.append(token)
    return [ids[-COUNT:] for ids in known]


def test_the_exact_checkpoint_is_exact(zoo: Zoo) -> None:
    """What the tests below rest on, seen by transformers."""
    judge = zoo.judge("exact")
    assert torch.equal(exact_logits(), exact_logits().bfloat16().float())
    ids = draw(60, 5)
    torch.testing.assert_close(
        judge.logits(Output(ids[:1], ids[1:])).cpu(), exact_logits()[ids[:-1]], atol=1e-3, rtol=0
    )
    spread = probabilities(exact_logits()[9], Sampling(temperature=1.0))
    assert 0.02 < float(spread.max()) < 0.98


def test_a_seeded_request_gives_the_same_tokens_alone_and_beside_any_neighbours(zoo: Zoo, device: str) -> None:
    generator = random.Random(8)
    targets = [*KINDS, Sampling(), Sampling(temperature=1.0, top_k=20, seed=2**63 - 1)]

    async def run() -> None:
        async with open_engine(zoo.folder("exact"), device, max_rows=41, max_context=128) as engine:
            for number, kind in enumerate(targets):
                target = params_of(kind)
                (alone,) = await together(engine, [TARGET], target)
                for neighbours in (1, 7, 40):
                    prompts = [draw(generator.randrange(1, 90), generator.random()) for _ in range(neighbours)]
                    params = [params_of(random_sampling(generator)) for _ in range(neighbours)]
                    place = generator.randrange(neighbours + 1)
                    prompts.insert(place, TARGET)
                    params.insert(place, target)
                    found = await together(engine, prompts, params)
                    assert found[place].tokens == alone.tokens, f"kind {number} beside {neighbours}"
            await at_rest(engine)

    anyio.run(run)


@pytest.mark.parametrize("cramped", [False, True], ids=["room for all", "chunked and preempted"])
def test_every_token_is_the_sampler_s_for_its_seed_and_position(zoo: Zoo, device: str, cramped: bool) -> None:
    generator = random.Random(9)
    prompts = [draw(generator.randrange(1, 90), generator.random()) for _ in range(40)]
    samplings = [random_sampling(generator) for _ in prompts]
    pages = kv_bytes(zoo.folder("exact"), 18 if cramped else 400)
    options = {"max_rows": 12, "max_batched_tokens": 20} if cramped else {"max_rows": 40}

    async def run() -> list[Output]:
        async with open_engine(zoo.folder("exact"), device, max_context=128, kv_memory=pages, **options) as engine:
            outputs = await together(engine, prompts, [params_of(each) for each in samplings])
            assert bool(engine.stats().preemptions) is cramped
            await at_rest(engine)
        return outputs

    found = [list(output.tokens) for output in anyio.run(run)]
    assert found == predict(device, prompts, samplings)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids=str)
def test_choices_of_one_prompt_follow_the_filtered_softmax(zoo: Zoo, device: str, kind: Sampling) -> None:
    """The first token of many choices, whose seeds derive from one."""
    fields = {name: getattr(kind, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    params = [SamplingParams(**fields, seed=seed, n=64, max_tokens=1) for seed in range(24)]
    chosen: list[int] = []

    async def run() -> None:
        async with open_engine(zoo.folder("exact"), device, max_rows=64, max_context=64) as engine:
            for each in params:
                completion = await engine.generate(TARGET, each)
                chosen.extend(choice.token_ids[0] for choice in completion.choices)

    anyio.run(run)
    check_frequencies(chosen, probabilities(exact_logits()[TARGET[-1]], kind))
