"""Experts on the CPU: the choice against slow Python, results against float64, and the same bits in any company."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.experts import CpuExperts, grouped
from headrace.ops.cpu.native.block import NativeOps
from headrace.ops.cpu.native.library import Context, library
from headrace.ops.cpu.products import PRODUCTS
from headrace.ops.experts import Choice, Experts, route, sigmoid
from headrace.ops.formats import Stored
from headrace.ops.quantise import quantise
from headrace.ops.quantised import IntGroups
from headrace.ops.routing import Routing, Score

SOFTMAX = Routing(experts=12, top_k=4)
ROUTINGS = {
    "softmax": SOFTMAX,
    "softmax, renormalised": replace(SOFTMAX, renormalise=True),
    "softmax of the chosen": replace(SOFTMAX, score="softmax_of_chosen"),
    "sigmoid, scaled": replace(SOFTMAX, score="sigmoid", renormalise=True, scale=2.5),
    "groups by their best": replace(SOFTMAX, groups=4, top_groups=2),
    "groups by their two best": replace(SOFTMAX, score="sigmoid", groups=3, top_groups=2, group_score="top2"),
    "sparsemixer": replace(SOFTMAX, score="sparsemixer", margin=0.3),
    "sparsemixer, with all others": replace(SOFTMAX, score="sparsemixer", margin=1e3),
    "one expert": replace(SOFTMAX, top_k=1),
    "all experts": replace(SOFTMAX, top_k=12, renormalise=True),
}
HIDDEN, SIZE = 96, 64
native_only = pytest.mark.skipif(library() is None, reason="no compiled kernels")


def slow_choice(logits: list[float], routing: Routing, correction: list[float]) -> tuple[list[int], list[float]]:
    """The choice for one token, in Python's own numbers."""
    highest = max(logits)
    every = [math.exp(each - highest) for each in logits]
    scores = {
        "softmax": [each / sum(every) for each in every],
        "softmax_of_chosen": logits,
        "sparsemixer": logits,
        "sigmoid": [1 / (1 + math.exp(-each)) for each in logits],
    }[routing.score]
    ranked = [score + added for score, added in zip(scores, correction, strict=True)]
    width, order = routing.experts // routing.groups, range(routing.experts)
    members = [list(order)[group * width : (group + 1) * width] for group in range(routing.groups)]
    count = 2 if routing.group_score == "top2" else 1
    worth = [sum(sorted((ranked[each] for each in group), reverse=True)[:count]) for group in members]
    best = sorted(range(routing.groups), key=lambda group: (-worth[group], group))[: routing.top_groups]
    allowed = [each for group in best for each in members[group]]
    chosen = sorted(allowed, key=lambda each: (-ranked[each], each))[: routing.top_k]
    weights = [scores[each] for each in chosen]
    if routing.score == "softmax_of_chosen":
        weights = [math.exp(each - max(weights)) for each in weights]
        weights = [each / sum(weights) for each in weights]
    if routing.score == "sparsemixer":
        weights = []
        for place, best in enumerate(logits[expert] for expert in chosen):
            left = [logit for expert, logit in enumerate(logits) if expert not in chosen[:place]]
            near = [logit for logit in left if (best - logit) / max(abs(logit), best) <= routing.margin]
            weights.append(1 / sum(math.exp(logit - best) for logit in near))
    if routing.renormalise:
        weights = [each / sum(weights) for each in weights]
    return chosen, [each * routing.scale for each in weights]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_choice_is_that_of_slow_python(name: str, corrected: bool) -> None:
    routing, made = ROUTINGS[name], torch.Generator().manual_seed(1)
    logits_NX = torch.randn(200, routing.experts, generator=made) * 2
    corrected = corrected and routing.score != "sparsemixer"
    correction_X = torch.randn(routing.experts, generator=made) * 0.5 if corrected else None
    choice = route(logits_NX, routing, correction_X)
    assert choice.ids_NK.dtype == torch.int32 and choice.weights_NK.dtype == torch.float32
    added = [0.0] * routing.experts if correction_X is None else correction_X.tolist()
    for logits, ids, weights in zip(logits_NX.tolist(), *(each.tolist() for each in choice), strict=True):
        wanted_ids, wanted = slow_choice(logits, routing, added)
        assert ids == wanted_ids
        assert weights == pytest.approx(wanted, rel=1e-5)


def test_of_equal_experts_those_of_lower_numbers_are_chosen() -> None:
    logits_NX = torch.tensor([[0.0] * 64, [*[1.0] * 3, *[5.0] * 30, *[2.0] * 31]])
    for routing in (Routing(64, 5), Routing(64, 5, "sigmoid"), Routing(64, 5, "softmax_of_chosen")):
        assert route(logits_NX, routing).ids_NK.tolist() == [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]]


def test_scores_of_zero_have_weights_of_zero() -> None:
    choice = route(torch.full((1, 4), -2000.0), Routing(4, 2, "sigmoid", renormalise=True))
    assert choice.weights_NK.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"top_k": 13}, "top_k is 13, of 12"),
        ({"top_k": 0}, "top_k is 0"),
        ({"groups": 5}, "5 groups of one size"),
        ({"groups": 4, "top_groups": 5}, "top_groups is 5"),
        ({"groups": 4, "top_groups": 1}, "top_k is 4, of 3 experts"),
        ({"groups": 12, "top_groups": 12, "group_score": "top2"}, "no two best"),
        ({"score": "sparsemixer", "renormalise": True}, "sparsemixer"),
        ({"score": "sparsemixer", "groups": 4, "top_groups": 2}, "sparsemixer"),
    ],
)
def test_an_impossible_routing_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(SOFTMAX, **changes)


def made(routing: Routing, *, biased: bool = False, corrected: bool = False, **changes: Any) -> Experts:
    drawn = torch.Generator().manual_seed(3)

    def normal(*shape: int, spread: float) -> Tensor:
        return torch.randn(*shape, generator=drawn) * spread

    every = range(routing.experts)
    return Experts(
        routing,
        normal(routing.experts, HIDDEN, spread=0.2),
        tuple(Stored.from_dense(normal(2 * SIZE, HIDDEN, spread=0.1)) for _ in every),
        tuple(Stored.from_dense(normal(HIDDEN, SIZE, spread=0.1)) for _ in every),
        router_bias_X=normal(routing.experts, spread=0.5) if biased else None,
        correction_X=normal(routing.experts, spread=0.3) if corrected else None,
        gate_up_bias_XF=normal(routing.experts, 2 * SIZE, spread=0.5) if biased else None,
        down_bias_XE=normal(routing.experts, HIDDEN, spread=0.5) if biased else None,
        **changes,
    )


def activated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def slow_experts(x_NE: Tensor, experts: Experts, choice: Choice) -> Tensor:
    """Results in float64, token by token and expert by expert."""
    y_NE = torch.zeros(x_NE.shape, dtype=torch.float64)
    for row, (ids, weights) in enumerate(zip(*(each.tolist() for each in choice), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate_up = experts.gate_up[expert].dense(torch.float64) @ x_NE[row].double()
            if experts.gate_up_bias_XF is not None:
                gate_up = gate_up + experts.gate_up_bias_XF[expert]
            y_E = experts.down[expert].dense(torch.float64) @ activated(gate_up, experts.activation)
            y_NE[row] += weight * (y_E if experts.down_bias_XE is None else y_E + experts.down_bias_XE[expert])
    return y_NE


def slow_route(x_NE: Tensor, experts: Experts) -> Choice:
    logits_NX = x_NE.double() @ experts.router_XE.double().T
    if experts.router_bias_X is not None:
        logits_NX = logits_NX + experts.router_bias_X
    return route(logits_NX.float(), experts.routing, experts.correction_X)


def cpu_ops(kind: str) -> CpuOps:
    sizes: dict[str, Any] = {"heads": 1, "kv_heads": 1, "head_dim": 8, "page_size": 4, "eps": 1e-5}
    tables = {"cos": torch.ones(4, 4), "sin": torch.zeros(4, 4)}
    if kind == "torch":
        return CpuOps(**sizes, **tables, dtype=torch.float32)
    threads = 2 if kind == "native, two threads" else 1
    dtype = torch.bfloat16 if kind == "native bfloat16" else torch.float32
    return NativeOps(Context(threads), **sizes, **tables, dtype=dtype)


KINDS = [
    "torch",
    *(pytest.param(kind, marks=native_only) for kind in ("native", "native, two threads", "native bfloat16")),
]
CASES: dict[str, Callable[[], Experts]] = {
    **{name: (lambda routing=routing: made(routing)) for name, routing in ROUTINGS.items()},
    "corrected": lambda: made(ROUTINGS["sigmoid, scaled"], corrected=True),
    "gelu": lambda: made(SOFTMAX, activation="gelu_tanh"),
    "gpt-oss": lambda: made(ROUTINGS["softmax of the chosen"], biased=True, activation="clamped_swiglu"),
}


def inputs(rows: int, seed: int = 5) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_a_loop_in_float64(case: str, kind: str) -> None:
    experts, ops = CASES[case](), cpu_ops(kind)
    packed = ops.pack_experts(experts)
    for rows in (1, 2, 33):
        x_NE = inputs(rows, seed=rows)
        wanted = slow_experts(x_NE, experts, slow_route(x_NE, experts))
        tolerance = 0.03 if kind == "native bfloat16" else 5e-6
        assert (packed(x_NE).double() - wanted).abs().max() < tolerance * wanted.abs().max()
    ops.close()


def in_an_order(weight: Stored, seed: int) -> Stored:
    """A matrix of 4-bit integers whose columns belong to other inputs, in half of the experts."""
    assert isinstance(weight.format, IntGroups)
    if seed % 2:
        return weight
    order_I = torch.randperm(weight.shape[-1], dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    return Stored(replace(weight.format, ordered=True), weight.shape, {**weight.parts, "order": order_I})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantised", [None, "int8", "int4", "int4 in orders", "fp8"])
def test_a_token_has_the_same_bits_in_any_company(quantised: Any, kind: str) -> None:
    experts, ops = made(ROUTINGS["softmax, renormalised"]), cpu_ops(kind)
    if quantised is not None:
        method = quantised.partition(" ")[0]
        gate_up, down = (
            tuple(quantise(weight, method) for weight in weights) for weights in (experts.gate_up, experts.down)
        )
        if method != quantised:
            gate_up, down = (
                tuple(in_an_order(weight, seed) for seed, weight in enumerate(weights)) for weights in (gate_up, down)
            )
        experts = replace(experts, gate_up=gate_up, down=down)
    packed, x_NE = ops.pack_experts(experts), inputs(64)
    together = packed(x_NE)
    wanted = slow_experts(x_NE, experts, slow_route(x_NE, experts))
    assert (together.double() - wanted).abs().max() < 0.03 * wanted.abs().max()
    for row in (0, 1, 31, 63):
        assert torch.equal(packed(x_NE[row : row + 1])[0], together[row])
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(9))
    assert torch.equal(packed(x_NE[shuffled]), together[shuffled])
    alike = packed(x_NE[:1].expand(64, -1).contiguous())
    assert torch.equal(alike, together[:1].expand(64, -1)), "all tokens of the same experts"
    ops.close()


@pytest.mark.parametrize(
    ("dtype", "rows", "least"), [(torch.bfloat16, 100, 40), (torch.bfloat16, 39, 1), (None, 99, 1)]
)
def test_products_of_a_prompt_in_bfloat16_have_the_rows_that_sum_alike(
    dtype: torch.dtype | None, rows: int, least: int
) -> None:
    """A runner pads the end of a prompt to 40 tokens; those that share an expert may still be few."""
    seen = []

    def pack(weight: Stored, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
        def multiply(x_NI: Tensor) -> Tensor:
            seen.append(len(x_NI))
            return torch.nn.functional.linear(x_NI, weight.dense(x_NI.dtype), bias_O)

        return multiply

    experts = CpuExperts(made(SOFTMAX), pack, PRODUCTS)
    found = experts(inputs(rows).to(dtype or torch.float32))
    assert found.shape == (rows, HIDDEN) and min(seen) >= least and (least == 40 or min(seen) < 40)
    assert sum(seen) == 2 * rows * SOFTMAX.top_k or least == 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantised", [None, "int8", "fp8"])
def test_skewed_choices(quantised: Any, kind: str) -> None:
    """All rows choose one expert, or the same few, or each row has an expert of its own."""
    one, same, each = made(ROUTINGS["one expert"]), made(SOFTMAX), made(ROUTINGS["one expert"])
    one.router_XE.zero_()
    same.router_XE.zero_()
    each.router_XE.copy_(torch.eye(SOFTMAX.experts, HIDDEN) * 8)
    apart = inputs(SOFTMAX.experts)
    apart[:, : SOFTMAX.experts] = torch.eye(SOFTMAX.experts).flip(0)
    ops = cpu_ops(kind)
    for experts, x_NE, hit in ((one, inputs(64), 1), (same, inputs(64), SOFTMAX.top_k), (each, apart, SOFTMAX.experts)):
        if quantised is not None:
            codes = (tuple(quantise(weight, quantised) for weight in each) for each in (experts.gate_up, experts.down))
            experts = replace(experts, **dict(zip(("gate_up", "down"), codes, strict=True)))
        choice = slow_route(x_NE, experts)
        assert len(choice.ids_NK.unique()) == hit
        wanted = slow_experts(x_NE, experts, choice)
        tolerance = 5e-6 if quantised is None and kind != "native bfloat16" else 0.03
        assert (ops.pack_experts(experts)(x_NE).double() - wanted).abs().max() < tolerance * wanted.abs().max()
    ops.close()


@pytest.mark.parametrize("kind", KINDS)
def test_only_experts_that_are_hit_are_read(kind: str) -> None:
    """The others' weights are NaN, which any product with them would spread."""
    experts, ops, x_NE = made(SOFTMAX), cpu_ops(kind), inputs(2)
    hit = set(slow_route(x_NE, experts).ids_NK.flatten().tolist())
    assert len(hit) < SOFTMAX.experts

    def poisoned(weights: tuple[Stored, ...]) -> tuple[Stored, ...]:
        nothing = Stored.from_dense(torch.full(weights[0].shape, torch.nan))
        return tuple(weight if expert in hit else nothing for expert, weight in enumerate(weights))

    found = ops.pack_experts(replace(experts, gate_up=poisoned(experts.gate_up), down=poisoned(experts.down)))(x_NE)
    assert torch.equal(found, ops.pack_experts(experts)(x_NE)) and bool(found.isfinite().all())
    ops.close()


def test_pairs_are_in_the_order_of_experts_then_of_tokens() -> None:
    drawn = np.random.default_rng(4)
    for experts, tokens, count in ((1, 3, 1), (7, 20, 3), (64, 1, 8)):
        ids_NK = np.stack([drawn.permutation(experts)[:count] for _ in range(tokens)]).astype(np.int32)
        groups = grouped(torch.from_numpy(ids_NK), experts)
        pairs = sorted((int(each), token, rank) for token, row in enumerate(ids_NK) for rank, each in enumerate(row))
        assert groups.tokens_P.tolist() == [token for _, token, _ in pairs]
        assert groups.starts_X1.tolist() == [
            sum(each < expert for each, _, _ in pairs) for expert in range(experts + 1)
        ]
        for place, (_, token, rank) in enumerate(pairs):
            assert groups.places_NK[token, rank] == place


@pytest.mark.parametrize("score", get_args(Score))
def test_a_tokens_choice_has_the_same_bits_whatever_tokens_are_routed_with_it(score: Score) -> None:
    """Torch computes the last few of all elements by other code than those before, if it takes them as one row."""
    logits_NX = torch.randn(50, 12, generator=torch.Generator().manual_seed(3))
    routing = Routing(12, 4, score=score)
    together = route(logits_NX, routing)
    for token in range(len(logits_NX)):
        alone = route(logits_NX[token : token + 1], routing)
        assert torch.equal(alone.ids_NK[0], together.ids_NK[token])
        assert torch.equal(alone.weights_NK[0], together.weights_NK[token])


def test_a_sigmoid_has_the_same_bits_among_any_number_of_others() -> None:
    x_N1 = torch.randn(83, 1, generator=torch.Generator().manual_seed(3)) * 6
    together = sigmoid(x_N1)
    assert all(torch.equal(sigmoid(x_N1[token : token + 1])[0], together[token]) for token in range(83))
    torch.testing.assert_close(together, torch.sigmoid(x_N1.double()).float())
    assert torch.equal(sigmoid(torch.tensor([-1e4, 1e4, 0.0])), torch.tensor([0.0, 1.0, 0.5]))
