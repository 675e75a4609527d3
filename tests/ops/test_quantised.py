"""Formats of quantised weights: `dense` returns what an independent specification in numpy says, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.formats import Format, Stored, joins
from headrace.ops.quantised import Float4Groups, Fp8, IntGroups, Table4

SHAPES = ((320, 192), (2, 48, 192))
FORMATS: tuple[Format, ...] = (
    Fp8(),
    Fp8((128, 128)),
    Fp8((16, 128)),
    IntGroups(4, 64),
    IntGroups(4, 128, zeros=True, scale=torch.float16),  # the last group is partial
    IntGroups(4, 32, zeros=True, ordered=True, scale=torch.bfloat16),
    IntGroups(8, None),
    IntGroups(8, 64, zeros=True, ordered=True),
    Float4Groups("e8m0"),
    Float4Groups("e4m3"),
    Float4Groups("e4m3", divides=True),
    Table4(),
)


def part(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if name == "order":
        return torch.stack([torch.randperm(shape[-1]) for _ in range(int(np.prod(shape[:-1])))]).view(shape).int()
    if dtype is torch.uint8:
        low, high = {"scale": (100, 155), "zero": (0, 16)}.get(name, (0, 256))
        return torch.randint(low, high, shape, dtype=torch.uint8)
    if dtype is torch.float8_e4m3fn and name == "values":
        codes = torch.randint(0, 256, shape, dtype=torch.uint8)
        return codes.masked_fill_(codes & 127 == 127, 0).view(dtype)
    drawn = torch.randn(shape) if name in ("values", "table") else torch.rand(shape) + 0.01
    return drawn.to(dtype)


def stored(format: Format, shape: tuple[int, ...]) -> Stored:
    torch.manual_seed(3)
    specs = format.parts(shape)
    return Stored(format, shape, {name: part(name, spec.shape, spec.dtype) for name, spec in specs.items()})


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return float(sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)))


E4M3 = np.array([e4m3(code) for code in range(256)], dtype=np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def array(tensor: Tensor) -> NDArray[np.float32]:
    if tensor.dtype is torch.float8_e4m3fn:
        return E4M3[tensor.view(torch.uint8).numpy()]
    return tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()


def specified(format: Format, parts: Mapping[str, Tensor], outs: int, ins: int) -> NDArray[np.float32]:
    """The matrix in float32, element by element as its format says."""
    data = {name: array(tensor) for name, tensor in parts.items()}
    values, scale = data["values"], data["scale"]
    row, column = np.mgrid[:outs, :ins]
    if isinstance(format, Fp8):
        if format.block is None:
            return values * scale[:, None]
        return values * scale[row // format.block[0], column // format.block[1]]
    nibble = values[row, column // 2] >> (4 * (column % 2)) & 15 if values.shape[1] != ins else values
    if isinstance(format, IntGroups):
        group = column // (format.group or ins)
        zero = data["zero"][row, group].astype(np.int64) if format.zeros else 2 ** (format.bits - 1)
        weight = (nibble.astype(np.int64) - zero).astype(np.float32) * scale[row, group]
        if not format.ordered:
            return weight
        placed = np.empty_like(weight)
        placed[:, data["order"]] = weight
        return placed
    if isinstance(format, Table4):
        return data["table"][nibble] * scale[row, column // 64]
    assert isinstance(format, Float4Groups)
    if format.scale == "e8m0":
        return E2M1[nibble] * np.float32(2) ** (scale[row, column // 32].astype(np.float32) - 127)
    factor = data["factor"][:, None]
    whole = scale / factor if format.divides else scale * factor
    return E2M1[nibble] * whole[row, column // 16]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.name}-{FORMATS.index(format)}")
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_is_what_the_specification_says(format: Format, shape: tuple[int, ...]) -> None:
    weight = stored(format, shape)
    *outer, outs, ins = shape
    for index in np.ndindex(*outer):
        matrix = {name: tensor[index] for name, tensor in weight.parts.items()}
        expected = torch.from_numpy(specified(format, matrix, outs, ins))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(weight.dense(dtype)[index], expected.to(dtype))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.name}-{FORMATS.index(format)}")
def test_rows_and_pieces_are_those_of_the_dense_weight(format: Format) -> None:
    weight = stored(format, (320, 192))
    dense = weight.dense(torch.bfloat16)
    ids_K = torch.tensor([319, 0, 17, 255])
    assert torch.equal(weight.rows(ids_K, torch.bfloat16), dense[ids_K])
    pieces = [256, 64]
    assert joins(format, (320, 192), pieces) == all(name not in ("order", "table") for name in weight.parts)
    if joins(format, (320, 192), pieces):
        assert torch.equal(torch.cat([piece.dense(torch.bfloat16) for piece in weight.split(pieces)]), dense)


def test_a_nan_of_a_code_or_of_a_scale_is_one_of_the_weight() -> None:
    fp8 = stored(Fp8(), (4, 64))
    fp8.parts["values"].view(torch.uint8)[1, 2] = 0xFF
    assert fp8.dense(torch.float32).isnan().nonzero().tolist() == [[1, 2]]
    mxfp4 = stored(Float4Groups("e8m0"), (4, 64))
    mxfp4.parts["values"].fill_(0x11)
    mxfp4.parts["scale"][3, 1] = 255
    assert mxfp4.dense(torch.bfloat16).isnan().nonzero()[:, 0].unique().tolist() == [3]


def test_an_odd_number_of_inputs_fills_a_byte() -> None:
    weight = stored(IntGroups(4, None), (8, 5))
    assert weight.parts["values"].shape == (8, 3) and weight.dense(torch.float32).shape == (8, 5)


def test_shapes_and_fields_that_a_format_cannot_hold_are_refused() -> None:
    for format, shape in ((Float4Groups("e8m0"), (4, 48)), (Table4(), (4, 96)), (Fp8(), (4,)), (Fp8(), (0, 4))):
        with pytest.raises(ValueError, match=r"groups of|quantised weights are matrices"):
            format.parts(shape)
    for format in (IntGroups(3, 32), IntGroups(4, 0), IntGroups(4, 32, scale=torch.int8)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no groups of"):
            format.parts((4, 64))
