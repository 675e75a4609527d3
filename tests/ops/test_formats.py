"""Stored weights: parts are as their format says, and pieces, rows and stacks stand for the same numbers."""

from __future__ import annotations

import pytest
import torch
from stored_weights import Blocks, Table, random_groups
from torch import Tensor

from headrace.ops.formats import Dense, Int4Groups, Stacked, Stored, joins


def blocks(*shape: int) -> Stored:
    specs = Blocks().parts(shape)
    parts = {"values": torch.randn(shape).to(torch.float8_e4m3fn), "scale": torch.rand(specs["scale"].shape)}
    return Stored(Blocks(), shape, parts)


def table(*shape: int) -> Stored:
    return Stored(Table(), shape, {"index": torch.randint(0, 16, shape, dtype=torch.uint8), "table": torch.randn(16)})


def weights() -> list[Stored]:
    torch.manual_seed(1)
    return [Stored.from_dense(torch.randn(44, 64)), random_groups(44, 64), blocks(44, 64), table(44, 64)]


@pytest.mark.parametrize("weight", weights(), ids=lambda weight: weight.format.name)
def test_rows_are_those_of_the_dense_weight(weight: Stored) -> None:
    for ids in ([43], [0, 7, 8, 8, 40, 43], list(range(44)), []):
        ids_K = torch.tensor(ids, dtype=torch.int64)
        assert torch.equal(weight.rows(ids_K, torch.float32), weight.dense(torch.float32)[ids_K])


@pytest.mark.parametrize("weight", weights()[:3], ids=lambda weight: weight.format.name)
def test_pieces_are_the_rows_of_the_weight_and_share_its_memory(weight: Stored) -> None:
    whole = weight.dense(torch.float32).clone()
    pieces = weight.split([8, 24, 12])
    assert torch.equal(torch.cat([piece.dense(torch.float32) for piece in pieces]), whole)
    pieces[1].parts["values"].zero_()
    assert not torch.equal(weight.dense(torch.float32), whole)


def test_a_weight_is_not_split_inside_a_slice_of_a_part() -> None:
    assert joins(Blocks(), (44, 64), [16, 16, 12]) and not joins(Blocks(), (44, 64), [16, 12, 16])
    assert not joins(Table(), (44, 64), [22, 22]) and not joins(Dense(torch.float32), (44, 64), [22, 21])
    with pytest.raises(ValueError, match="blocks cannot be split into"):
        blocks(44, 64).split([12, 32])


def test_weights_of_different_formats_stack_as_they_are() -> None:
    pieces = weights()
    stacked = Stored.stack(pieces)
    dense = torch.cat([piece.dense(torch.bfloat16) for piece in pieces])
    assert stacked.shape == (176, 64) and torch.equal(stacked.dense(torch.bfloat16), dense)
    assert stacked.nbytes == sum(piece.nbytes for piece in pieces)
    assert isinstance(stacked.format, Stacked)
    for piece, again in zip(pieces, stacked.format.unstack(stacked.parts, stacked.shape), strict=True):
        assert again.format == piece.format and all(again.parts[name] is piece.parts[name] for name in piece.parts)
    ids_K = torch.tensor([0, 44, 90, 175])
    assert torch.equal(stacked.rows(ids_K, torch.bfloat16), dense[ids_K])


def test_experts_are_a_stack_of_matrices() -> None:
    experts = [random_groups(32, 64) for _ in range(3)]
    parts = {name: torch.stack([expert.parts[name] for expert in experts]) for name in experts[0].parts}
    weight = Stored(Int4Groups(), (3, 32, 64), parts)
    dense = torch.stack([expert.dense(torch.bfloat16) for expert in experts])
    assert torch.equal(weight.dense(torch.bfloat16), dense)
    gate, up = weight.split([16, 16])
    assert torch.equal(gate.dense(torch.bfloat16), dense[:, :16]) and up.shape == (3, 16, 64)
    both = Stored.stack([gate, blocks(3, 8, 64)])
    assert both.shape == (3, 24, 64) and torch.equal(both.dense(torch.bfloat16)[:, :16], dense[:, :16])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": torch.ones(4, 3)}, r"scale of a weight \[4, 64\] in int4-g32 is torch.float32 \[4, 2\]; got .*3"),
        ({"scale": torch.ones(4, 2).half()}, "got torch.float16"),
        ({"values": torch.zeros(4, 64, dtype=torch.int8)}, "values .* torch.uint8"),
        ({"zero": torch.ones(4, 2)}, "has the parts values, scale, minimum; got values, scale, minimum, zero"),
    ],
)
def test_parts_that_the_format_does_not_say_are_refused(changes: dict[str, Tensor], message: str) -> None:
    parts = dict(random_groups(4, 64).parts) | changes
    with pytest.raises(ValueError, match=message):
        Stored(Int4Groups(), (4, 64), parts)


def test_shapes_that_a_format_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        Int4Groups().parts((4, 40))
    with pytest.raises(ValueError, match="7 outputs"):
        Stacked(((Dense(torch.float32), 3), (Dense(torch.float32), 4))).parts((8, 2))
