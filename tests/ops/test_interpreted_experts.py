"""Triton's kernels for experts, run by its interpreter on a CPU, against `route` and loops in float64."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commit import chosen, head
from interpreting import interpret
from stored_codes import FORMATS, label

pytest.importorskip("triton")

SCRIPT = """
import sys

import torch
from emulated_experts import mixed
from interpreted_bfloat16 import teach
from stored_codes import FORMATS, label, random_weight, whole

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.experts.arena import arena_of, kind_of_experts
from headrace.ops.cuda.experts.choose import allocate_choices, allocate_lists, choose, most_tiles
from headrace.ops.cuda.experts import gather
from headrace.ops.cuda.experts.coded import coded_vector
from headrace.ops.cuda.experts.gather import gathered_rows
from headrace.ops.cuda.experts.logits import allocate_logits, router_logits
from headrace.ops.cuda.experts.registry import ExpertWeights, Padding, split_router
from headrace.ops.cuda.experts.running import TileExpertsRun, VectorExpertsRun
from headrace.ops.cuda.hazards import Chain
from headrace.ops.cuda.products.linear import LinearScratch
from headrace.ops.cuda.products.registry import ProductRoom
from headrace.ops.experts import route
from headrace.ops.formats import Stored
from headrace.ops.routing import Routing

teach()
torch.manual_seed(0)
ROUTINGS = (
    Routing(10, 3, "softmax", renormalise=True),
    Routing(8, 2, "softmax_of_chosen"),
    Routing(12, 3, "sigmoid", renormalise=True, scale=2.5, groups=4, top_groups=2, group_score="top2"),
    Routing(20, 4, "softmax", groups=5, top_groups=3),
    Routing(16, 2, "sparsemixer", margin=0.4),
    Routing(160, 6, "softmax", scale=16.0, groups=8, top_groups=3),
    Routing(256, 8, "sigmoid", renormalise=True, scale=2.5, groups=8, top_groups=4, group_score="top2"),
)
RUNS = {}
for name in ("sm_90", "sm_80"):
    room = ProductRoom(LinearScratch("cpu", Arch.named(name)), 1e-6, False, Chain())
    RUNS[name] = {True: VectorExpertsRun(room), False: TileExpertsRun(room)}
CPU = torch.device("cpu")


def check_lists(ids, lists, experts):
    # Each expert's pairs in order, and tiles that cover them: as few as can be, alike in multiples of 32 rows.
    rows, ranks = ids.shape
    pairs, tiles = [], []
    for expert in range(experts):
        own = [row * ranks + rank for row in range(rows) for rank in range(ranks) if ids[row, rank] == expert]
        count = -(-len(own) // lists.rows)
        each = min(lists.rows, -(-len(own) // (max(count, 1) * 32)) * 32)
        starts = range(0, len(own), max(each, 1))
        assert len(starts) == count
        tiles += [[expert, len(pairs) + start, min(each, len(own) - start)] for start in starts]
        pairs += own
    assert lists.pairs_P[: len(pairs)].tolist() == pairs
    assert lists.ends_2.tolist() == [len(tiles), 0]
    assert lists.tiles_T3[: len(tiles)].tolist() == tiles and len(tiles) <= len(lists.tiles_T3)


def check_choices():
    for routing in ROUTINGS:
        experts = routing.experts
        # Of many experts a few batches do: the interpreter runs a program for each.
        for rows in (3, 17, 65) if experts > 100 else (1, 3, 4, 7, 16, 17, 65, *((700,) if experts == 10 else ())):
            x, router = torch.randn(rows, 200).bfloat16(), torch.randn(experts, 200)
            bias = torch.randn(experts) if experts == 8 else None
            correction = torch.randn(experts) / 10 if routing.score == "sigmoid" else None
            parts = allocate_logits(rows, experts, CPU).fill_(torch.nan)
            router_logits(x, split_router(router), bias, parts)
            logits = parts.sum(0)
            truth = x.double() @ router.double().T + (0 if bias is None else bias)
            assert (logits - truth).abs().max() < 5e-5
            if rows == 16:
                logits = logits.round()  # equal ones: the lower number comes first
            scales = torch.rand(experts) + 0.5 if rows in (3, 17) else None
            want, chosen = route(logits, routing, correction, scales), allocate_choices(rows, routing, CPU)
            tile_rows = 96 if rows == 700 else 16
            gather._FEW = 0 if rows == 700 else 4096  # several places of a program
            lists = None if rows <= 4 else allocate_lists(rows, routing, tile_rows, torch.zeros(2, dtype=torch.int32))
            numbers = torch.arange(rows, dtype=torch.int32)
            padding = Padding(torch.where(numbers % 5 == 1, 99, numbers), 99) if rows in (3, 17, 65) else None
            choose(logits[None], routing, correction, chosen, lists, scales_X=scales, padding=padding)
            real = numbers >= 0 if padding is None else padding.rows_N != 99
            assert torch.equal(chosen.ids_NK[real], want.ids_NK[real]) and (chosen.ids_NK[~real] == -1).all()
            assert (chosen.weights_NK - want.weights_NK)[real].abs().max() < 2e-6 * routing.scale
            if lists is not None:
                check_lists(chosen.ids_NK, lists, experts)
                if rows in (17, 700):
                    taken = lists.pairs_P[: int((chosen.ids_NK >= 0).sum())] // routing.top_k
                    assert torch.equal(gathered_rows(x, chosen, lists)[: len(taken)], x[taken])
        print(routing.score)
    routing, chosen = Routing(6, 3), allocate_choices(2, Routing(6, 3), CPU)
    choose(torch.full((1, 2, 6), torch.nan), routing, None, chosen)
    assert chosen.ids_NK.tolist() == [[0, 1, 2]] * 2, "logits that are no numbers choose experts all the same"
    assert most_tiles(128, 128, 16) == 128 and most_tiles(2048, 8, 64) == 39


def spread(rows, experts, how, hidden=72):
    # Inputs and a router of which the choice is known: all tokens to the first experts, or one to each.
    x, router = torch.randn(rows, hidden).bfloat16(), torch.randn(experts, hidden)
    if how == "one":
        router = torch.zeros(experts, hidden)
    elif how == "each":
        x[:, :experts] = torch.eye(experts)[torch.arange(rows) % experts]
        router = 8 * torch.eye(experts, hidden)
    return x, router


def run(x, weights, padding=None, arch="sm_90", routed=None):
    out = torch.full((len(x), weights.down.shape[0]), torch.nan, dtype=torch.bfloat16)
    RUNS[arch][len(x) <= 4].run(x, x if routed is None else routed, weights, out, padding)
    return out


def check_routed(ups, downs):
    # A router with an input of its own, and factors of experts.
    for rows in (2, 9):
        x, router = torch.randn(rows, 72).bfloat16(), split_router(torch.randn(6, 72))
        routed, scales = torch.randn(rows, 72).bfloat16(), torch.rand(6) + 0.5
        routing = Routing(6, 3, renormalise=True)
        weights = ExpertWeights(routing, router, None, None, ups, downs, "gelu_tanh", None, None, scales)
        logits = (routed.double() @ weights.router_XE.double().T).float()
        ids, shares = route(logits, routing, scales_X=scales)
        truth = mixed(x.double(), ids, shares.double(), weights)
        out = run(x, weights, routed=routed)
        assert ((out - truth).abs().amax(1) / truth.abs().amax(1)).max() < 2**-7


def check_sums(x, weights, most, arch="sm_90", coded=False):
    rows = len(x)
    padding = None
    if rows in (3, 7, 65):
        padding = Padding((torch.arange(rows) % 4).int(), 2)
    out = run(x, weights, padding, arch)
    ids, shares = route((x.double() @ weights.router_XE.double().T).float(), weights.routing)
    if padding is not None:
        shares[padding.rows_N == 2] = 0
        assert (out[padding.rows_N == 2] == 0).all()
    truth = mixed(x.double(), ids, shares.double(), weights, coded=coded)
    errors = (out - truth).abs().amax(1) / truth.abs().amax(1).clamp(min=1e-9)
    worst = errors.max()
    if coded:  # where a number lies between two 8-bit floats, the last bit of a sum decides, which is felt
        assert worst < 2**-3, worst
        worst = errors.median()
    assert worst < most, (rows, weights.activation, worst)
    few = rows - rows // 8
    if 4 < few < rows <= 64:  # in tiles of as many rows: unlike a GPU's, numpy's sums depend on the shape of a tile
        alone = run(x[:few], weights, None, arch)
        assert torch.equal(alone, run(x, weights, None, arch)[:few]), "a token's bits depend on the others"


def dense(experts, outs, ins):
    return [Stored.from_dense(each) for each in (torch.randn(experts, outs, ins) * ins**-0.5).bfloat16()]


def check_dense():
    experts, hidden, size = 6, 72, 40
    ups, downs = arena_of(dense(experts, 2 * size, hidden), torch.bfloat16), dense(experts, hidden, size)
    places = {each.parts["values"].data_ptr() for each in downs}
    downs = arena_of(downs, torch.bfloat16)
    assert downs.first.data_ptr() in places, "weights that are equally far apart stay where they are"
    check_routed(ups, downs)
    biases = torch.randn(experts, 2 * size), torch.randn(experts, hidden)
    ways = [("silu", "any"), ("gelu_tanh", "one"), ("clamped_swiglu", "each")]
    for number, rows in enumerate((1, 2, 3, 7, 16, 64, 65)):
        for activation, how in ways if rows in (3, 16) else ways[number % 3 :][:1]:
            x, router = spread(rows, experts, how)
            given = (None, None) if activation == "silu" else biases
            routing = Routing(experts, 3 if how == "any" else 2, renormalise=True)
            router = split_router(router)
            check_sums(x, ExpertWeights(routing, router, None, None, ups, downs, activation, *given), 2**-7)
        print(rows)


def check_codes(names):
    experts = 3
    for number, format in enumerate(format for format in FORMATS if label(format) in names):
        hidden = size = whole(format, 128)  # small: nested functions take the interpreter long
        ups, downs = (
            [in_codes(random_weight(format, *shape), torch.bfloat16) for _ in range(experts)]
            for shape in ((2 * size, hidden), (hidden, size))
        )
        up, down = arena_of(ups, torch.bfloat16), arena_of(downs, torch.bfloat16)
        assert up.kind == kind_of_experts(ups)
        is_ordered = up.kind is None and ups[0].format.name.endswith("ordered")
        if up.kind is None and not is_ordered:
            continue
        in_bytes = up.kind is not None and up.kind.codes == "fp8"
        every = (*((1, 7) if number % 2 else (2, 17)), *((66,) if in_bytes else ()))
        for rows, how in zip(every, ("each", "one", "any") if number % 3 else ("any", "each", "one")):
            x, router = spread(rows, experts, how, hidden)
            routing = Routing(experts, 1 if how == "each" else 2)
            weights = ExpertWeights(routing, split_router(router), None, None, up, down, "silu", None, None)
            check_sums(x, weights, 2**-6, coded=rows > 64)
            if in_bytes and rows <= 64:  # whose bytes older GPUs cannot convert
                check_sums(x, weights, 2**-6, "sm_80")
        print(label(format), flush=True)


part, tilings, *names = sys.argv[1:]
if tilings == "wide":  # more outputs a program than a GPU likes: the interpreter takes as long for one of few
    coded_vector.TILINGS = {bits: how._replace(lines=32) for bits, how in coded_vector.TILINGS.items()}
check_choices() if part == "choices" else check_dense() if part == "dense" else check_codes(names)
"""
COMMIT = head(Path(__file__).parent)
EVERYTHING = os.environ.get("HEADRACE_MATRIX") == "all"


def some_formats() -> list[str]:
    """Names of formats, of which the commit chooses a few: the interpreter takes seconds for each."""
    names = [label(format) for format in FORMATS]
    return names if EVERYTHING else chosen(names, 2, COMMIT)


@pytest.mark.rotated(3)
@pytest.mark.parametrize(("part", "lines"), [("choices", 7), ("dense", 7), ("codes", 2)])
def test_kernels_of_experts_compute_what_route_and_loops_do(part: str, lines: int) -> None:
    """Choices and their lists, dense experts, and experts in codes, in a process each."""
    found = interpret(SCRIPT, part, "usual" if EVERYTHING else "wide", *some_formats())
    assert len(found) >= lines
