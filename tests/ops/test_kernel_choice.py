"""The choice between kernels, made here without a GPU or a compiler: what a tuning and the refusals come to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.ops.cuda.arch import NAMES, Arch
from headrace.ops.cuda.attention.kernels import DEAL, DECODES, PREFILLS, EvenDecodes, FusedDecodes, TilePrefills
from headrace.ops.cuda.attention.registry import resolve_decode, resolve_prefill
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.codes.kinds import E2M1, E4M3, INT4, INT5, INT6, INT8, Kind
from headrace.ops.cuda.hazards import Chain, Hazard, Launch
from headrace.ops.cuda.products.coded import coded
from headrace.ops.cuda.products.fusion import Fusion
from headrace.ops.cuda.products.kernels import PRODUCTS, FewRowsProducts, dense
from headrace.ops.cuda.products.registry import FUSIONS, WeightShape, resolve
from headrace.ops.cuda.tuning.h200 import H200

HOPPER = Arch.named("sm_90")
MODELS = {
    "qwen3-0.6b": (1024, 16, 8, 3072, 151936),
    "qwen3-1.7b": (2048, 16, 8, 6144, 151936),
    "llama-3.1-8b": (4096, 32, 8, 14336, 128256),
    "odd": (1000, 9, 3, 1500, 5000),
}
"""Hidden size, query heads, key heads, feed-forward size and vocabulary; heads of 128."""
ROWS = (1, 2, 3, 16, 17, 33, 63, 64, 65, 256, 2047, 2048, 8192)


def weights(name: str, *, bias: bool) -> dict[str, WeightShape]:
    hidden, heads, keys, ffn, vocabulary = MODELS[name]
    return {
        "qkv": WeightShape((heads + 2 * keys) * 128, hidden, 128, bias),
        "o": WeightShape(hidden, heads * 128, 128, bias),
        "gate_up": WeightShape(2 * ffn, hidden, 128, bias),
        "down": WeightShape(hidden, ffn, 128, bias),
        "head": WeightShape(vocabulary, hidden, 128),
    }


def by_hand(fusion: Fusion, rows: int, weight: WeightShape) -> str | None:
    """The kernel that an H200 ran before kernels were declared, by the constants that were in the code then."""
    out, size_in, bias = weight.size_out, weight.size_in, weight.has_bias
    fits_even = 1 < rows <= 64 and out % 64 == 0 == size_in % 64 and out * size_in <= 128 << 20
    few = rows <= 64 and size_in % 64 == 0
    one_by_one = "vector" if rows == 1 else "few rows" if few else "cuBLAS"
    whole = 1 < rows <= 64 and size_in % 64 == 0 and out % 16 == 0  # squares come from even products of the same size
    tile = rows >= 2048 and out % 16 == 0 and size_in % 8 == 0
    gated = "even" if fits_even else "tile" if tile else "few rows gated" if few and out // 2 >= 8192 else None
    answers: dict[Fusion, Callable[[], str | None]] = {
        "plain": lambda: "even" if fits_even else one_by_one,
        "logits": lambda: one_by_one,
        "gated": lambda: None if bias else "vector" if rows == 1 else gated,
        "residual": lambda: "even" if fits_even and not bias else None,
        "norm plain": lambda: "vector" if rows == 1 and size_in <= 2048 else None,
        "norm gated": lambda: "vector" if rows == 1 and size_in <= 2048 and not bias else None,
        "factors plain": lambda: "even" if whole else None,
        "factors gated": lambda: "even" if whole and not bias else None,
        "heads": lambda: "even heads" if 1 < rows <= 64 and size_in % 64 == 0 and not bias else None,
    }
    return answers[fusion]()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_an_h200_multiplies_by_the_kernels_that_its_constants_chose(model: str, bias: bool) -> None:
    for what, weight in weights(model, bias=bias).items():
        chosen = resolve(PRODUCTS, HOPPER, weight).kernels
        for fusion in FUSIONS:
            if fusion == "heads" and what != "qkv":
                continue
            for rows in ROWS:
                found = chosen[fusion].at(rows)
                assert (found and found.name) == by_hand(fusion, rows, weight), (what, fusion, rows)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_decodes_attend_by_the_kernels_that_the_constants_chose(
    arch: str, kv_dtype: torch.dtype | None, head_dim: int
) -> None:
    gpu, fp8 = Arch.named(arch), kv_dtype is not None
    shape = HeadShape(heads=16, kv_heads=8, head_dim=head_dim, kv_dtype=kv_dtype)
    even = arch == "sm_90" and head_dim in ((128,) if fp8 else (64, 128))
    xqa = arch == "sm_90"

    def by_hand(rows: int, context: int) -> str:
        if head_dim == 96:
            return "split"
        if rows <= 4 and rows * context <= 4096:
            return "fused"
        if even and rows >= (8 if fp8 else 4):
            return "even"
        return "xqa" if xqa and (fp8 or rows < 4) else "fa2"

    choice = resolve_decode(DECODES, shape, gpu)
    for rows in (1, 2, 3, 4, 5, 7, 8, 64, 256):
        for context in (1, 1000, 1024, 1025, 2048, 2049, 4096, 4097, 100_000):
            assert choice.at(rows, context).name == by_hand(rows, context), (rows, context)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_many_query_heads_of_one_key_head_are_left_to_fa2(arch: str) -> None:
    """Falcon 7B has 71; the other kernels have a tile of 16 rows for them."""
    gpu = Arch.named(arch)
    choice = resolve_decode(DECODES, HeadShape(heads=71, kv_heads=1, head_dim=64), gpu)
    assert {choice.at(rows, context).name for rows in (1, 4, 64) for context in (1, 2048, 16384)} == {"fa2"}
    assert "71 query heads" in choice.refused["fused"] and set(choice.refused) == {"fused", "even", "xqa"}
    within = resolve_decode(DECODES, HeadShape(heads=128, kv_heads=8, head_dim=64), gpu)
    assert "fused" not in within.refused


def test_prefills_attend_by_tiles_where_they_can() -> None:
    usual = HeadShape(heads=16, kv_heads=8, head_dim=128)
    cases = [
        (usual, "sm_90", "tile"),
        (usual, "sm_80", "fa2"),
        (usual, "sm_100", "fa2"),
        (HeadShape(heads=16, kv_heads=8, head_dim=64), "sm_90", "fa3"),
        (HeadShape(heads=16, kv_heads=8, head_dim=128, window=100), "sm_90", "fa3"),
        (HeadShape(heads=16, kv_heads=8, head_dim=128, kv_dtype=torch.float8_e4m3fn), "sm_90", "fa2"),
        *((HeadShape(heads=16, kv_heads=8, head_dim=size), "sm_90", "grouped") for size in (80, 96, 512)),
    ]
    for shape, arch, wanted in cases:
        able, refused = resolve_prefill(PREFILLS, shape, Arch.named(arch))
        assert able[0].name == wanted
        assert {each.name for each in able} | set(refused) == {"tile", "fa3", "fa2", "grouped"}


SINKS = HeadShape(heads=64, kv_heads=8, head_dim=64, window=128, has_sinks=True)
BOUNDED = HeadShape(heads=16, kv_heads=8, head_dim=256, cap=50.0)


@pytest.mark.parametrize(
    ("shape", "arch", "decodes", "prefill"),
    [
        (SINKS, "sm_90", ["fused", "even", "even", "split"], "grouped"),
        (SINKS, "sm_100", ["fused", "even", "even", "split"], "grouped"),
        (SINKS, "sm_86", ["fused", "split", "split", "split"], "grouped"),
        (BOUNDED, "sm_90", ["fused", "fa2", "fa2", "fa2"], "fa3"),
        (BOUNDED, "sm_89", ["fused", "fa2", "fa2", "fa2"], "fa2"),
    ],
)
def test_sinks_and_bounds_are_left_to_kernels_that_compute_them(
    shape: HeadShape, arch: str, decodes: list[str], prefill: str
) -> None:
    """Batches of few tokens, of some rows, of many, and of one row with many tokens."""
    gpu = Arch.named(arch)
    choice, (able, refused) = resolve_decode(DECODES, shape, gpu), resolve_prefill(PREFILLS, shape, gpu)
    assert [choice.at(*batch).name for batch in ((1, 100), (16, 1000), (256, 1000), (1, 9000))] == decodes
    assert able[0].name == prefill
    why = "the kernel has no sinks" if shape.has_sinks else "the kernel does not bound scores"
    assert choice.refused["xqa"] == refused["tile"] == why
    assert ("fa2" in choice.refused) == ("fa3" in refused and "fa2" in refused) == shape.has_sinks


def test_sinks_in_8_bits_are_left_to_kernels_that_compute_them() -> None:
    shape = HeadShape(heads=64, kv_heads=8, head_dim=64, has_sinks=True, kv_dtype=torch.float8_e4m3fn)
    choice = resolve_decode(DECODES, shape, HOPPER)
    assert [choice.at(rows, 1000).name for rows in (1, 64)] == ["fused", "split"]


@pytest.mark.parametrize("arch", NAMES)
def test_every_gpu_has_a_kernel_for_everything_and_a_reason_against_each_other(arch: str) -> None:
    gpu = Arch.named(arch)
    for weight in weights("odd", bias=True).values():
        resolved = resolve(PRODUCTS, gpu, weight)
        for rows in ROWS:
            assert resolved.kernels["plain"][rows] and resolved.kernels["logits"][rows]
        for fusion in FUSIONS:
            used = {kernel.name for _, kernel in resolved.kernels[fusion].spans}
            assert used.isdisjoint(resolved.refused[fusion]) and all(resolved.refused[fusion].values())
    choice = resolve_decode(DECODES, HeadShape(heads=9, kv_heads=3, head_dim=80), gpu)
    assert choice.at(1, 1) and choice.at(300, 100_000)


class Tripled(FewRowsProducts):
    """A kernel of somebody else's for exactly three rows, which reads a weight in a layout of its own."""

    name = "tripled"
    fuses = frozenset(("plain",))
    layout = torch.Tensor.t  # type: ignore[assignment]

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        return range(3, 4)


def test_a_new_kernel_is_named_in_one_tuple() -> None:
    weight = weights("qwen3-0.6b", bias=False)["o"]
    table = resolve((Tripled(), *PRODUCTS), HOPPER, weight).kernels["plain"]
    assert [table[rows].name for rows in (2, 3, 4)] == ["even", "tripled", "even"]
    assert resolve(PRODUCTS, HOPPER, weight).kernels["plain"][3].name == "even"
    assert {kernel.layout for kernel in PRODUCTS} == {dense}


def test_what_kernels_refuse_is_said_in_words() -> None:
    even = next(kernel for kernel in PRODUCTS if kernel.name == "even")
    usual = WeightShape(64, 64, 128)
    assert even.refuses(HOPPER, usual, "plain") is None
    assert "multiples of 64" in str(even.refuses(HOPPER, usual._replace(size_out=65), "plain"))
    assert "multiples of 64" in str(even.refuses(HOPPER, usual._replace(size_in=96), "plain"))
    assert "bfloat16" in str(even.refuses(HOPPER, usual._replace(dtype=torch.float16), "plain"))
    assert "bias" in str(even.refuses(HOPPER, usual._replace(has_bias=True), "gated"))
    assert "sm_89 lacks warpgroup" in str(even.refuses(Arch.named("sm_89"), usual, "plain"))
    assert not even.rows(HOPPER, WeightShape(151936, 1024, 128), "plain")
    window = HeadShape(heads=8, kv_heads=8, head_dim=128, window=4)
    assert TilePrefills().refuses(window, HOPPER) == "the kernel has no sliding window"
    wide = HeadShape(heads=8, kv_heads=1, head_dim=128)
    assert "wants 131" in str(EvenDecodes().refuses(wide, Arch.named("sm_120")))


CODED = WeightShape(4096, 4096, 128, kind=Kind(INT4, 128, True))


@pytest.mark.parametrize(
    ("kind", "arch", "has_ring"),
    [
        (Kind(INT4, 128, True), "sm_90", True),
        (Kind(INT4, 128, True), "sm_89", False),
        (Kind(E4M3), "sm_100", False),
        (Kind(INT6, 16, scales="factors"), "sm_90", False),
        (Kind(E2M1, 16, scales="e4m3 over"), "sm_80", False),
        (Kind(INT4, 32, ordered=True), "sm_90", True),
        (Kind(INT8, 16, ordered=True), "sm_90", False),
    ],
)
def test_codes_are_multiplied_by_the_ring_where_it_takes_them_and_by_tiles_elsewhere(
    kind: Kind, arch: str, has_ring: bool
) -> None:
    resolved = resolve(coded(kind), Arch.named(arch), CODED._replace(kind=kind))
    elsewhere = ["vector", "tiles", "tiles", "unpacked", "unpacked", "unpacked"]
    ring = ["even", "even", "even", "even in passes", "many rows", "unpacked"]
    cases: tuple[tuple[Fusion, list[str]], ...] = (("plain", ring if has_ring else elsewhere), ("logits", elsewhere))
    for fusion, wanted in cases:
        table = resolved.kernels[fusion]
        assert [table[rows].name.removesuffix(f", {kind.name}") for rows in (1, 5, 64, 70, 200, 8192)] == wanted
        assert set(resolved.refused[fusion]).isdisjoint(kernel.name for _, kernel in table.spans)
    assert resolved.kernels["gated"].at(64) is not None and resolved.kernels["gated"].at(8192) is None


@pytest.mark.parametrize(
    ("kind", "arch", "plain", "gated"),
    [
        (Kind(E4M3, 128, blocks=True), "sm_90", "scaled blocks", None),
        (Kind(E4M3, 128, blocks=True), "sm_89", "scaled tiles", None),
        (Kind(E4M3, 128), "sm_89", "scaled tiles", None),
        (Kind(E4M3, 128), "sm_120", "scaled tiles", None),
        (Kind(E4M3, 128), "sm_86", "unpacked", None),
        (Kind(E4M3), "sm_90", "scaled", None),
        (Kind(E4M3), "sm_89", "unpacked", None),
        (Kind(E4M3, 64), "sm_89", "unpacked", None),
    ],
)
def test_floats_are_multiplied_as_floats_of_8_bits_where_the_gpu_can(
    kind: Kind, arch: str, plain: str, gated: str | None
) -> None:
    """Of more than 64 rows, whatever their number; logits stay with the weight's numbers."""
    shape = WeightShape(4096, 4096, 128, kind=kind)
    chosen = resolve(coded(kind), Arch.named(arch), shape).kernels
    for rows in (65, 128, 200, 2048, 8192):
        assert chosen["plain"][rows].name == f"{plain}, {kind.name}"
        found = chosen["gated"].at(rows)
        assert (found and found.name) == (gated and f"{gated}, {kind.name}")
        assert "scaled" not in chosen["logits"][rows].name
    assert "scaled" not in chosen["plain"][64].name


@pytest.mark.parametrize(
    ("kind", "size_in"), [(Kind(E4M3, 128), 4096), (Kind(E4M3, 128, blocks=True), 768), (Kind(E4M3, 64), 4096)]
)
def test_blocks_that_cublas_refuses_stay_with_numbers_of_16_bits_on_hopper(kind: Kind, size_in: int) -> None:
    """Triton's products of 8-bit floats are slower there."""
    chosen = resolve(coded(kind), Arch.named("sm_90"), WeightShape(4096, size_in, 128, kind=kind)).kernels
    for rows, way in ((70, "even in passes"), (256, "many rows"), (8192, "unpacked")):
        assert chosen["plain"][rows].name == f"{way}, {kind.name}"
    assert chosen["gated"].at(256) is not None


def test_what_kernels_for_codes_refuse_is_said_in_words() -> None:
    def refusals(kind: Kind, fusion: Fusion = "gated", **changed: Any) -> dict[str, str]:
        weight = CODED._replace(kind=kind, **changed)
        return {each.name.split(",")[0]: str(each.refuses(HOPPER, weight, fusion)) for each in coded(kind)}

    def refused(kind: Kind, **changed: Any) -> dict[str, str]:
        return refusals(kind, "plain", **changed)

    minima = Kind(INT5, 32, minima=True)
    assert refusals(minima)["even"].endswith("for 32, 64 or 128 inputs, not int5-g32-minima")
    assert refusals(minima)["tiles"] == refusals(minima)["vector"] == "None"
    assert "bias" in refusals(minima, has_bias=True)["tiles"]
    assert "bfloat16" in refusals(minima, dtype=torch.float16)["tiles"]
    zeros = Kind(INT4, 32, True)
    assert "multiples of 128" in refusals(zeros, size_out=2 * 1000)["many rows"]  # zero points of ups at byte 1,000
    assert refusals(zeros, size_out=2 * 960)["many rows"] == "None"
    assert "96 inputs" in refusals(zeros, size_in=96)["many rows"]
    assert refused(zeros)["scaled tiles"] == "multiplies by fp8-g128-blocks and fp8-g128, not int4-g32-zeros"
    assert refused(Kind(E4M3, 128))["scaled blocks"] == "multiplies by fp8-g128-blocks, not fp8-g128"
    assert "multiples of 512" in refused(Kind(E4M3, 128, blocks=True), size_in=768)["scaled blocks"]
    ordered = Kind(INT4, 32, ordered=True)
    (even,) = (each for each in coded(ordered) if each.name.startswith("even, "))
    assert even.name == "even, int4-g32-ordered" and not even.has_updates
    assert even.refuses(HOPPER, CODED, "plain") == "multiplies by int4-g32-ordered, not int4-g128-zeros"
    assert "multiples of 64" in str(even.refuses(HOPPER, CODED._replace(kind=ordered, size_out=8), "plain"))
    assert even.builds(updates=False) and not even.builds(updates=True)


def test_a_tuning_cannot_ask_a_kernel_for_more_rows_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = range(1, 1 << 20)
    asked = replace(H200, vector_rows=everything, even_rows=everything, few_rows=everything)
    monkeypatch.setattr(Arch, "tuning", asked)
    chosen = resolve(PRODUCTS, HOPPER, weights("qwen3-0.6b", bias=False)["o"]).kernels
    assert [chosen["plain"][rows].name for rows in (8, 9, 64, 65)] == ["vector", "even", "even", "cuBLAS"]
    assert chosen["residual"].at(64) and not chosen["residual"].at(65)


def test_numbers_of_an_h200_are_not_taken_for_measured_elsewhere() -> None:
    assert HOPPER.tuning is H200
    assert HOPPER.tuning.is_measured and not Arch.named("sm_89").tuning.is_measured


def test_declarations_import_no_compiler() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = sys.modules['flashinfer'] = None\n"
        "import headrace.ops.cuda.kernels, headrace.engine.model.cuda.listed\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- hazards of dependent launch ------------------------------------------------------------------------------------

PLAIN = Launch("something", overlaps=False)
PREPARATION = Launch("the preparation", overlaps=False, writes=frozenset(("pages", "lengths")))
ROTATION = Launch("the rotation", overlaps=True, writes=frozenset(("new keys", "activations")))
PRODUCT = next(kernel for kernel in PRODUCTS if kernel.name == "vector").launch("plain")
UNPACKING = Launch("a copy of weights", overlaps=True, writes=frozenset(("weights",)))


def run(*launches: Launch) -> None:
    chain = Chain()
    with chain.watched():
        for launch in launches:
            chain.note(launch)


def test_kernels_that_read_early_what_nobody_writes_may_follow_each_other() -> None:
    fused, even = FusedDecodes.launch(pdl=True), EvenDecodes.launch(pdl=True)
    run(PREPARATION, PLAIN, PRODUCT, fused, PRODUCT, PRODUCT, fused)
    run(PREPARATION, DEAL, PLAIN, PRODUCT, ROTATION, even, PRODUCT, ROTATION, even)
    run(PREPARATION, FusedDecodes.launch(pdl=False))
    Chain().note(UNPACKING)  # nobody watches


@pytest.mark.parametrize(
    "launches",
    [
        (PREPARATION, FusedDecodes.launch(pdl=True)),
        (PREPARATION, PRODUCT, ROTATION, FusedDecodes.launch(pdl=True)),
        (PREPARATION, DEAL, PRODUCT, EvenDecodes.launch(pdl=True)),
        (PLAIN, UNPACKING, PRODUCT),
        (PLAIN, UNPACKING, ROTATION, PRODUCT),
        (Launch("a copy of weights", overlaps=False, writes=frozenset(("weights",))), ROTATION, PRODUCT),
    ],
)
def test_a_kernel_that_may_read_what_is_still_written_is_found(launches: tuple[Launch, ...]) -> None:
    with pytest.raises(Hazard, match=r"before it waits, and .* may still be writing"):
        run(*launches)
    run(*launches[:-1], PLAIN, launches[-1])
