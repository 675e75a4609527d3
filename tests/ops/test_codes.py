"""Weights in codes stand for the numbers of the weights that they were made of, and say which they cannot hold."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Block
from stored_codes import FORMATS, OTHERS, RING, label, random_weight, whole

from headrace.ops.cuda.codes import packing
from headrace.ops.cuda.codes.held import kind_of
from headrace.ops.cuda.codes.kinds import INT4, Kind
from headrace.ops.cuda.codes.layout import CodeLayout, codes_of
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.formats import Dense, Format, Stored
from headrace.ops.gguf_formats import GgufBlocks
from headrace.ops.quantised import Float4Groups, Fp8, IntGroups, Table4

MORE = {"q4_k": 0.0278, "q5_k": 0.0227, "q3_k": 0.327, "q2_k": 0.952, "iq4_xs": 0.0184}
"""By how much weights are larger in codes than in blocks of these kinds."""


@pytest.mark.parametrize("format", FORMATS, ids=label)
@pytest.mark.parametrize(("size_out", "size_in"), [(320, 192), (8, 64), (200, 896), (72, 320)])
def test_codes_stand_for_the_same_numbers(format: Format, size_out: int, size_in: int) -> None:
    size_in = whole(format, size_in)
    weight = random_weight(format, size_out, size_in)
    packed = in_codes(weight, torch.bfloat16)
    if isinstance(format, IntGroups) and format.group and size_in % format.group:
        assert packed.format == Dense(torch.bfloat16)
        return
    assert isinstance(packed.format, CodeLayout) and codes_of(packed).kind == packed.format.kind
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(packed.dense(dtype), weight.dense(dtype))


@pytest.mark.parametrize(
    "format",
    [Fp8((128, 128)), GgufBlocks(Block.Q5_K), Float4Groups("e4m3"), Table4(64), IntGroups(8, None, zeros=True)],
)
def test_stacked_weights_of_one_format_are_one(format: Format) -> None:
    """Three weights, none of which has whole blocks of 128 outputs; each has a table of its own."""
    pieces = [random_weight(format, size, 256, seed=size) for size in (192, 64, 72)]
    packed = in_codes(Stored.stack(pieces), torch.bfloat16)
    assert isinstance(packed.format, CodeLayout)
    assert torch.equal(packed.dense(torch.float32), torch.cat([piece.dense(torch.float32) for piece in pieces]))


@pytest.mark.parametrize("format", FORMATS, ids=label)
def test_bytes_are_those_of_the_file(format: Format) -> None:
    """But for padding of constants, and for what takes more bits: docs/models.md has these numbers."""
    weight = random_weight(format, 4096, 4096)
    more = in_codes(weight, torch.bfloat16).nbytes / weight.nbytes - 1
    known = MORE.get(format.name)
    assert -1e-6 <= more <= 0.005 if known is None else more == pytest.approx(known, abs=1e-3)


@pytest.mark.parametrize("format", FORMATS, ids=label)
def test_a_large_weight_is_packed_in_slices(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the last is smaller; the parts are those of a weight that is packed at once."""
    weight = random_weight(format, 2056, 256)
    whole_at_once = in_codes(weight, torch.bfloat16)
    monkeypatch.setattr(packing, "_SLICE", 1)
    packed = in_codes(weight, torch.bfloat16)
    assert packed.format == whole_at_once.format
    assert all(torch.equal(part, whole_at_once.parts[name]) for name, part in packed.parts.items())


def test_exponents_of_all_sizes_are_kept() -> None:
    """The least exponent stands for a number below the normal ones, and the largest for none."""
    weight = random_weight(Float4Groups("e8m0"), 64, 256)
    weight.parts["scale"].view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    packed = in_codes(weight, torch.bfloat16)
    assert torch.equal(packed.dense(torch.float32).nan_to_num(7), weight.dense(torch.float32).nan_to_num(7))


@pytest.mark.parametrize(
    ("format", "shape", "reason"),
    [
        (IntGroups(4, 48, scale=torch.float16), (64, 192), "groups of a power of two from 16"),
        (IntGroups(4, 128, scale=torch.float16), (64, 192), "not 128 of 192"),
        (Fp8((100, 128)), (64, 256), "multiples of 8 outputs"),
        (Fp8(), (64, 100), "64 inputs"),
        (Dense(torch.bfloat16), (64, 256), "quantised weights, not bfloat16"),
    ],
)
def test_what_cannot_be_held_is_said_in_words(format: Format, shape: tuple[int, int], reason: str) -> None:
    assert reason in str(kind_of(format, shape))


def test_pieces_that_differ_have_codes_of_their_own() -> None:
    """Two neighbours of one kind are one weight; each of several orders stays by itself."""
    kinds = (Block.Q4_K, Block.Q4_K, Block.Q6_K)
    ordered = IntGroups(4, 128, ordered=True, scale=torch.float16)
    for formats, count, reason in (
        ([GgufBlocks(kind) for kind in kinds], 2, "one format, not q4_k + q4_k + q6_k"),
        ([ordered, ordered], 2, "one order of columns"),
    ):
        whole = Stored.stack([random_weight(format, 64, 256, seed=seed) for seed, format in enumerate(formats)])
        assert reason in str(kind_of(whole.format, whole.shape))
        packed = in_codes(whole, torch.bfloat16)
        assert len(packed.pieces()) == count
        assert all(isinstance(piece.format, CodeLayout) for piece in packed.pieces())
        assert torch.equal(packed.dense(torch.float32), whole.dense(torch.float32))
    unknown = Stored.stack([random_weight(GgufBlocks(Block.Q4_K), 64, 256), random_weight(Fp8((100, 128)), 64, 256)])
    assert in_codes(unknown, torch.bfloat16).format == Dense(torch.bfloat16)


def test_kinds_have_names_of_their_own_and_the_ring_knows_its_kinds() -> None:
    kinds = {label(format): kind_of(format, (64, 1024)) for format in FORMATS}
    assert all(isinstance(kind, Kind) for kind in kinds.values())
    assert len({kind.name for kind in kinds.values() if isinstance(kind, Kind)}) == len(set(kinds.values()))
    for format in FORMATS:
        kind = kinds[label(format)]
        assert isinstance(kind, Kind)
        assert (kind.beyond_source is None) == (format in RING), kind.name
        assert kind.beyond_source is None or kind.name in kind.beyond_source
        assert (kind.beyond_expert_source is None) == (format in (*RING, Float4Groups("e8m0"))), kind.name
    assert set(OTHERS).isdisjoint(RING) and Kind(INT4, 64, True).macros == {"CODES": 3, "GROUP": 64, "ZEROS": 1}
