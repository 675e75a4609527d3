"""Weights in codes stand for the numbers of the weights that they were made of, and say which they cannot hold."""

from __future__ import annotations

import pytest
import torch
from stored_codes import FORMATS, random_weight

from headrace.ops.cuda.products.codes import CodeLayout, codes_of, in_codes, kind_of
from headrace.ops.formats import Dense, Format, Stored
from headrace.ops.quantised import Float4Groups, Fp8, IntGroups


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize(("size_out", "size_in"), [(320, 192), (8, 64), (200, 896)])
def test_codes_stand_for_the_same_numbers(format: Format, size_out: int, size_in: int) -> None:
    weight = random_weight(format, size_out, size_in)
    packed = in_codes(weight, torch.bfloat16)
    if isinstance(format, IntGroups) and format.group and size_in % format.group:
        assert packed.format == Dense(torch.bfloat16)
    else:
        assert isinstance(packed.format, CodeLayout) and codes_of(packed).kind == packed.format.kind
        assert torch.equal(packed.dense(torch.float32), weight.dense(torch.float32))


def test_stacked_weights_of_one_format_are_one() -> None:
    """Blocks of 128 outputs of three weights, none of which has whole blocks."""
    pieces = [random_weight(Fp8((128, 128)), size, 256, seed=size) for size in (192, 64, 72)]
    packed = in_codes(Stored.stack(pieces), torch.bfloat16)
    assert isinstance(packed.format, CodeLayout)
    assert torch.equal(packed.dense(torch.float32), torch.cat([piece.dense(torch.float32) for piece in pieces]))


def test_bytes_are_those_of_the_file() -> None:
    """Within 2 % for a matrix of a model's size, the padding of scales included."""
    for format in (Fp8(), Fp8((128, 128)), IntGroups(4, 128, scale=torch.bfloat16), IntGroups(8, None)):
        weight = random_weight(format, 4096, 4096)
        assert in_codes(weight, torch.bfloat16).nbytes <= 1.02 * weight.nbytes


@pytest.mark.parametrize(
    ("format", "shape", "reason"),
    [
        (IntGroups(4, 128, ordered=True, scale=torch.float16), (64, 256), "order"),
        (IntGroups(4, 128, scale=torch.float32), (64, 256), "16-bit scales"),
        (IntGroups(4, 48, scale=torch.float16), (64, 192), "groups of 32, 64 or 128"),
        (Fp8((100, 128)), (64, 256), "multiples of 8 outputs"),
        (Fp8(), (64, 100), "64 inputs"),
        (Float4Groups("e8m0"), (64, 256), "not"),
    ],
)
def test_what_cannot_be_held_is_said_in_words(format: Format, shape: tuple[int, int], reason: str) -> None:
    assert reason in str(kind_of(format, shape))
