"""Experts on CUDA against `route` and loops in float64."""

from __future__ import annotations

import pytest
import torch
from emulated_experts import mixed
from stored_codes import FORMATS, RING, label, random_weight, whole

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from typing import Any

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.experts.coded.byte_tiles import takes_bytes
from headrace.ops.cuda.experts.kernels import EXPERTS, DenseExperts
from headrace.ops.cuda.experts.packed import CudaExperts, ExpertProducts
from headrace.ops.cuda.experts.registry import ExpertShape, Padding, resolve_experts
from headrace.ops.cuda.hazards import Chain
from headrace.ops.cuda.products.linear import LinearScratch
from headrace.ops.cuda.products.registry import ProductRoom
from headrace.ops.cuda.tuning.table import ANY
from headrace.ops.experts import Experts, route
from headrace.ops.formats import Stored
from headrace.ops.quantised import Float4Groups, Fp8
from headrace.ops.routing import Routing

GPU = torch.device("cuda")
ROWS = (1, 2, 4, 7, 16, 17, 63, 64, 65, 256, 600)
SIZES = {
    "odd": (Routing(6, 3, renormalise=True), 72, 40),
    "qwen3-30b-a3b": (Routing(128, 8, renormalise=True), 2048, 768),
    "mixtral, a quarter": (Routing(8, 2, "softmax_of_chosen"), 4096, 3584),
    "granite-3.1-1b-a400m": (Routing(32, 8, "softmax_of_chosen"), 1024, 512),
    "groups": (Routing(64, 6, "sigmoid", True, 2.5, 8, 4, "top2"), 512, 320),
}


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def products(*, pdl: bool | None = None, kernels: Any = EXPERTS) -> ExpertProducts:
    arch = Arch.of(GPU)
    overlaps = arch.has("dependent_launch") if pdl is None else pdl
    return ExpertProducts(arch, ProductRoom(LinearScratch(GPU, arch, floats=1), 1e-6, overlaps, Chain()), kernels)


def dense(count: int, outs: int, ins: int) -> tuple[Stored, ...]:
    weights = torch.randn(count, outs, ins, device=GPU).mul_(ins**-0.5).bfloat16()
    return tuple(Stored.from_dense(each) for each in weights)


def layer(routing: Routing, hidden: int, size: int, activation: Any = "silu") -> Experts:
    count = routing.experts
    is_biased, correction = activation != "silu", torch.randn(count, device=GPU) / 10
    return Experts(
        routing, torch.randn(count, hidden, device=GPU) * hidden**-0.5, dense(count, 2 * size, hidden),
        dense(count, hidden, size), activation,
        router_bias_X=torch.randn(count, device=GPU) if is_biased else None,
        correction_X=correction if routing.score == "sigmoid" else None,
        gate_up_bias_XF=torch.randn(count, 2 * size, device=GPU) if is_biased else None,
        down_bias_XE=torch.randn(count, hidden, device=GPU) if is_biased else None,
    )  # fmt: skip


def is_by_rows(packed: CudaExperts, rows: int) -> bool:
    """Whether csrc/ computes the experts of so many tokens, whose inputs then stay bfloat16."""
    shape = ExpertShape(packed.weights.routing, packed.weights.down.shape[0], packed.weights.down.shape[1],
                        gate_up=packed.weights.gate_up.kind, down=packed.weights.down.kind)  # fmt: skip
    return resolve_experts(EXPERTS, Arch.of(GPU), shape).kernels[rows].name == "rows"


def check(packed: CudaExperts, x: torch.Tensor, most: float = 2**-7) -> None:
    """A token's largest error is small, beside its largest number; tokens whose choice is close are left out.

    Inputs of many tokens become 8-bit floats where codes are. Where one lies between two of them, the last bit of a sum
    decides, which is felt: half of the tokens must be as exact as others.
    """
    weights = packed.weights
    logits = x.double() @ weights.router_XE.double().T
    if weights.router_bias_X is not None:
        logits += weights.router_bias_X
    ids, shares = route(logits.float(), weights.routing, weights.correction_X)
    clear = torch.ones(len(x), dtype=torch.bool, device=GPU)
    for noise in (1e-5, -1e-5):
        shaken = logits * (1 + noise * torch.randn_like(logits))
        clear &= (route(shaken.float(), weights.routing, weights.correction_X).ids_NK == ids).all(1)
    assert clear.sum() >= 0.9 * len(x)
    kinds = weights.gate_up.kind, weights.down.kind
    coded = (
        len(x) > 64
        and not is_by_rows(packed, len(x))
        and all(takes_bytes(kind, (1, 128), Arch.of(GPU)) and kind.codes == "fp8" for kind in kinds)
    )
    truth, out = mixed(x.double(), ids, shares.double(), weights, coded=coded), packed(x)
    errors = ((out - truth).abs().amax(1) / truth.abs().amax(1))[clear]
    assert errors.max() < (2**-3 if coded else most), (len(x), errors.max())
    assert errors.median() < most, (len(x), errors.median())
    assert torch.equal(packed(x), out), "a second run differs"


@pytest.mark.parametrize("name", list(SIZES))
def test_experts_are_right_and_repeat_themselves(name: str) -> None:
    routing, hidden, size = SIZES[name]
    packed = products().pack(layer(routing, hidden, size), torch.bfloat16)
    for rows in ROWS:
        check(packed, torch.randn(rows, hidden, device=GPU).bfloat16())


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
def test_activations_with_biases(activation: str) -> None:
    packed = products().pack(layer(Routing(8, 2), 256, 192, activation), torch.bfloat16)
    for rows in (1, 7, 65):
        check(packed, torch.randn(rows, 256, device=GPU).bfloat16())


def test_a_token_alone_and_with_others_and_without_overlaps() -> None:
    routing, hidden, size = SIZES["qwen3-30b-a3b"]
    experts = layer(routing, hidden, size)
    packed, alone = (products(pdl=pdl).pack(experts, torch.bfloat16) for pdl in (None, False))
    x = torch.randn(512, hidden, device=GPU).bfloat16()
    for few, rows in ((1, 4), (5, 64), (16, 64), (65, 255), (256, 512)):
        assert torch.equal(packed(x[:few]), packed(x[:rows])[:few]), f"{few} rows alone and among {rows}"
        assert torch.equal(packed(x[:rows]), alone(x[:rows])), f"{rows} rows with dependent launches and without"


@pytest.mark.parametrize("rows", [3, 16, 64, 300])
def test_skewed_choices_and_padding(rows: int) -> None:
    made = products()
    experts = layer(Routing(128, 8), 256, 128)
    experts.router_XE.zero_()  # all choose the first eight
    packed, x = made.pack(experts, torch.bfloat16), torch.randn(rows, 256, device=GPU).bfloat16()
    check(packed, x)
    numbers = torch.arange(rows, device=GPU, dtype=torch.int32)
    with made.padded(Padding(torch.where(numbers % 3 == 1, rows, numbers), rows)):
        out = packed(x)
    real = numbers % 3 != 1
    assert torch.equal(out[real], packed(x)[real]) and not out[~real].any()


def test_a_graph_replays_for_other_choices() -> None:
    packed = products().pack(layer(Routing(32, 4), 256, 128), torch.bfloat16)
    x = torch.randn(24, 256, device=GPU).bfloat16()
    packed(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, packed(x))


@pytest.mark.parametrize("format", FORMATS, ids=label)
def test_experts_in_codes(format: Any) -> None:
    count, size = 5, whole(format, 384 if whole(format, 384) == 384 else 512)
    ups, downs = (
        tuple(in_codes(random_weight(format, *shape, seed=seed).to(GPU), torch.bfloat16) for seed in range(count))
        for shape in ((2 * size, size), (size, size))
    )
    experts = Experts(Routing(count, 2), torch.randn(count, size, device=GPU) * size**-0.5, ups, downs)
    packed = products().pack(experts, torch.bfloat16)
    assert (packed.weights.gate_up.kind is None) == ("ordered" in label(format))
    for rows in (1, 4, 7, 64, 200, 1000):
        check(packed, torch.randn(rows, size, device=GPU).bfloat16(), 3 * 2**-7)  # codes are rounded to bfloat16, too


ROW_SIZES = {"fp4": (2880, 1472), "fp8": (1088, 320), "other": (640, 384)}
"""Inputs that leave parts of a chunk, and outputs that leave parts of a tile."""


@pytest.mark.parametrize("format", (*RING, Float4Groups("e8m0")), ids=label)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_rows_of_experts_in_codes(format: Any, activation: Any) -> None:
    """The kernel of csrc/ with partial tiles, biases, padding, large scales, and rows alone and among others."""
    if not Arch.of(GPU).has("wgmma"):
        pytest.skip("needs Hopper")
    count = 6
    name = "fp4" if isinstance(format, Float4Groups) else "fp8" if format == Fp8() else "other"
    hidden, size = ROW_SIZES[name]
    ups, downs = (
        tuple(in_codes(random_weight(format, *shape, seed=seed).to(GPU), torch.bfloat16) for seed in range(count))
        for shape in ((2 * size, hidden), (hidden, size))
    )
    if name == "fp4":  # an output of large numbers, which is left out below
        downs[0].parts["scales"][:, 7] = 240
    biases = [torch.randn(count, wide, device=GPU) if activation != "silu" else None for wide in (2 * size, hidden)]
    experts = Experts(
        Routing(count, 3), torch.randn(count, hidden, device=GPU) * hidden**-0.5, ups, downs, activation,
        gate_up_bias_XF=biases[0], down_bias_XE=biases[1],
    )  # fmt: skip
    made = products()
    packed = made.pack(experts, torch.bfloat16)
    for rows in (5, 16, 33, 64, 65, 180):
        x = torch.randn(rows, hidden, device=GPU).bfloat16()
        if not is_by_rows(packed, rows):
            assert format in (Fp8(), Fp8((128, 128))) and rows > 64
            continue
        ids, shares = route((x.double() @ packed.weights.router_XE.double().T).float(), packed.weights.routing)
        truth, out = mixed(x.double(), ids, shares.double(), packed.weights), packed(x)
        if name == "fp4":
            hit = (ids == 0).any(1)
            assert (out[hit, 7].abs() > 2.0**90).all(), "a scale of 2^113"
            truth, out = (torch.cat((each[:, :7], each[:, 8:]), 1) for each in (truth, out))
        errors = (out - truth).abs().amax(1) / truth.abs().amax(1)
        assert errors.median() < 2**-7, (rows, errors.median())
        assert errors.quantile(0.9) < 2**-6, (rows, errors.max())
        few = 5 if rows <= 64 else 65
        assert torch.equal(packed(x[:few]), packed(x)[:few]), f"{few} rows alone and among {rows}"
        numbers = torch.arange(rows, device=GPU, dtype=torch.int32)
        with made.padded(Padding(torch.where(numbers % 3 == 1, rows, numbers), rows)):
            padded = packed(x)
        assert torch.equal(padded[numbers % 3 != 1], packed(x)[numbers % 3 != 1])
        assert not padded[numbers % 3 == 1].any()


class AnyRows(DenseExperts):
    """The kernel of csrc/ for dense weights, wherever it pays."""

    def rows(self, arch: Arch, shape: ExpertShape) -> range:
        return ANY


def dense_alone(*, pdl: bool | None = None) -> ExpertProducts:
    if not Arch.of(GPU).has("wgmma"):
        pytest.skip("needs Hopper")
    return products(pdl=pdl, kernels=(AnyRows(),))


DENSE_SIZES = {
    "partial": (Routing(6, 3, renormalise=True), 576, 320),
    "qwen3-30b-a3b": SIZES["qwen3-30b-a3b"],
    "mixtral, a quarter": SIZES["mixtral, a quarter"],
    "gpt-oss-20b": (Routing(32, 4, "softmax_of_chosen"), 2880, 2880),
    "glm-4.5-air, an eighth": (Routing(16, 8, "sigmoid", renormalise=True), 4096, 1408),
    "deepseek-v2-lite": (Routing(64, 6), 2048, 1408),
}
DENSE_ROWS = (1, 5, 16, 40, 64, 65, 256, 700, 2900)
"""Tiles of every size, by the experts that they are divided among."""


@pytest.mark.parametrize("name", list(DENSE_SIZES))
def test_dense_experts_in_whole_tiles(name: str) -> None:
    routing, hidden, size = DENSE_SIZES[name]
    activation = "clamped_swiglu" if "gpt-oss" in name else "silu"
    packed = dense_alone().pack(layer(routing, hidden, size, activation), torch.bfloat16)
    x = torch.randn(DENSE_ROWS[-1], hidden, device=GPU).bfloat16()
    for rows in DENSE_ROWS:
        check(packed, x[:rows])
    # Of more than 512 tokens, programs that choose have more of them, and may add up a token's scores in another order.
    for few, rows in ((5, 16), (16, 64), (65, 256), (256, 512), (700, 2900)):
        assert torch.equal(packed(x[:few]), packed(x[:rows])[:few]), f"{few} rows alone and among {rows}"


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
def test_activations_with_biases_of_dense_experts(activation: str) -> None:
    packed = dense_alone().pack(layer(Routing(6, 3), 576, 320, activation), torch.bfloat16)
    for rows in (5, 17, 64, 130, 600):
        check(packed, torch.randn(rows, 576, device=GPU).bfloat16())


@pytest.mark.parametrize("rows", [16, 64, 130, 1000, 1100])
def test_dense_experts_of_skewed_choices_and_padding(rows: int) -> None:
    made = dense_alone()
    experts = layer(Routing(128, 8), 576, 192)
    experts.router_XE.zero_()  # all choose the first eight
    packed, x = made.pack(experts, torch.bfloat16), torch.randn(rows, 576, device=GPU).bfloat16()
    check(packed, x)
    numbers = torch.arange(rows, device=GPU, dtype=torch.int32)
    with made.padded(Padding(torch.where(numbers % 3 == 1, rows, numbers), rows)):
        out = packed(x)
    real = numbers % 3 != 1
    assert torch.equal(out[real], packed(x)[real]) and not out[~real].any()
    with made.padded(Padding(torch.full_like(numbers, rows), rows)):
        assert not packed(x).any(), "all rows are padding"


def test_one_row_for_each_dense_expert() -> None:
    experts = layer(Routing(128, 1), 576, 192)
    x = torch.randn(128, 576, device=GPU).bfloat16()
    experts.router_XE.copy_(x.flip(0).float())  # the first row goes to the last expert, and so on
    packed = dense_alone().pack(experts, torch.bfloat16)
    assert (route(x.float() @ packed.weights.router_XE.T, experts.routing).ids_NK[:, 0].flip(0).cpu()
            == torch.arange(128)).all()  # fmt: skip
    check(packed, x)


def test_dense_experts_without_overlaps_and_in_a_graph() -> None:
    routing, hidden, size = SIZES["qwen3-30b-a3b"]
    experts = layer(routing, hidden, size)
    packed, alone = (dense_alone(pdl=pdl).pack(experts, torch.bfloat16) for pdl in (True, False))
    for rows in (16, 64, 256, 4096):
        x = torch.randn(rows, hidden, device=GPU).bfloat16()
        packed(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = packed(packed(x))
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert torch.equal(out, alone(alone(x))), rows
