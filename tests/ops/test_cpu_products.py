"""The choice of product kernels on a CPU: by rows, in the order of the tuple, and with every refusal in words."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
from stored_weights import random_groups
from torch import Tensor

from headrace.ops.cpu.linear import CpuLinear, Int4Kernel, KeptWeight, OneDnnKernel, TorchKernel
from headrace.ops.cpu.native import linear
from headrace.ops.cpu.products import PRODUCTS, explain, pack_product
from headrace.ops.formats import Dense, Format, Int4Groups, Stored


@dataclass(frozen=True)
class Constant:
    """A kernel whose result says that it ran."""

    name: str
    pays: range
    reason: str | None = None

    def refuses(self, _weight: Stored, _dtype: torch.dtype) -> str | None:
        return self.reason

    def rows(self, _weight: Stored) -> range:
        return self.pays

    def pack(self, weight: Stored, _bias_O: Tensor | None, dtype: torch.dtype) -> CpuLinear:
        assert self.reason is None
        return lambda x_NI: torch.full((len(x_NI), weight.shape[0]), float(self.name), dtype=dtype)

    def kept(self, _weight: Stored, _dtype: torch.dtype) -> list[KeptWeight]:
        return []


def meta(format: Format, *shape: int) -> Stored:
    return Stored.allocate(format, shape, lambda size, dtype: torch.empty(size, dtype=dtype, device="meta"))


def dense_kernels() -> list[OneDnnKernel | TorchKernel]:
    """The kernels that multiply by any matrix in bfloat16 on this processor."""
    kernels = (OneDnnKernel(), TorchKernel())
    return [kernel for kernel in kernels if kernel.refuses(meta(Dense(torch.bfloat16), 8, 8), torch.bfloat16) is None]


def test_without_compiled_kernels_four_bits_for_few_rows_and_dense_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "library", lambda: None)
    choice = explain(meta(Int4Groups(), 64, 96), torch.bfloat16)
    assert choice.refusals["native"] == "there are no compiled kernels"
    (few, int4), (many, dense) = choice.kernels
    assert (few, int4) == (range(1, 5), "int4") and many == range(5, sys.maxsize)
    assert dense == explain(meta(Dense(torch.bfloat16), 64, 96), torch.bfloat16).kernels[0][1]


@pytest.mark.parametrize(
    ("weight", "dtype", "reason"),
    [
        (meta(Int4Groups(), 64, 96), torch.float32, "multiplies in bfloat16, not in float32"),
        (meta(Int4Groups(), 17, 96), torch.bfloat16, "takes outputs in a multiple of 16, not 17"),
        (meta(Int4Groups(48), 64, 96), torch.bfloat16, "takes groups of 32, 64, 128, 256 inputs, not of 48"),
        (meta(Dense(torch.bfloat16), 64, 96), torch.bfloat16, "multiplies by 4-bit groups, not by bfloat16"),
        (Stored.stack([random_groups(16, 32)] * 2), torch.bfloat16, "not by int4-g32 + int4-g32"),
    ],
)
def test_what_the_four_bit_kernel_refuses(weight: Stored, dtype: torch.dtype, reason: str) -> None:
    choice = explain(weight, dtype, PRODUCTS[1:])
    assert choice.refusals["int4"].endswith(reason)
    assert [(rows, name != "int4") for rows, name in choice.kernels] == [(range(1, sys.maxsize), True)]


def test_a_processor_without_bfloat16_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    choice = explain(meta(Dense(torch.bfloat16), 64, 96), torch.bfloat16)
    assert choice.refusals["onednn"] == "this build of torch has no oneDNN"
    assert choice.kernels == ((range(1, sys.maxsize), "torch"),)


def test_the_first_that_pays_multiplies() -> None:
    products = (
        Constant("1", range(3, 6)),
        Constant("2", range(1, 9), "is out of order"),
        Constant("3", range(2, 4)),
        Constant("4", range(1, 8)),
        Constant("5", range(1, sys.maxsize)),
    )
    weight = meta(Dense(torch.bfloat16), 2, 4)
    choice = explain(weight, torch.bfloat16, products)
    assert choice.refusals == {"2": "is out of order"}
    ranges = [(rows.start, rows.stop - 1, name) for rows, name in choice.kernels]
    assert ranges == [(1, 1, "4"), (2, 2, "3"), (3, 5, "1"), (6, 7, "4"), (8, sys.maxsize - 1, "5")]
    product = pack_product(weight, None, dtype=torch.bfloat16, products=products)
    ran = [int(product(torch.zeros(rows, 4, dtype=torch.bfloat16))[0, 0]) for rows in range(1, 10)]
    assert ran == [4, 3, 1, 1, 1, 4, 4, 5, 5]


def test_a_weight_that_no_kernel_takes_is_refused_with_every_reason() -> None:
    with pytest.raises(
        ValueError, match="no product kernel takes 1 rows .* native: .*; int4: .*; onednn: .*; torch: .*3, 16, 32"
    ):
        pack_product(meta(Dense(torch.bfloat16), 3, 16, 32), None, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="takes 5 rows"):
        explain(meta(Int4Groups(), 64, 96), torch.bfloat16, PRODUCTS[1:2])


@pytest.mark.parametrize(
    ("kernel", "form"),
    [
        (Int4Kernel(), "4 bits"),
        *((kernel, form) for kernel in dense_kernels() for form in ("4 bits", "bfloat16", "both")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_each_kernel_multiplies_by_what_the_format_says(
    kernel: Int4Kernel | OneDnnKernel | TorchKernel, form: str, rows: int
) -> None:
    torch.manual_seed(3)
    weight = random_groups(48, 64, group=64)
    if form == "bfloat16":
        weight = Stored.from_dense(weight.dense(torch.bfloat16))
    elif form == "both":
        weight = Stored.stack([weight, Stored.from_dense(weight.dense(torch.bfloat16))])
    assert kernel.refuses(weight, torch.bfloat16) is None
    x_NI, bias_O = torch.randn(rows, 64).bfloat16(), torch.randn(weight.shape[0]).bfloat16()
    truth_NO = x_NI.float() @ weight.dense(torch.float32).T + bias_O
    found_NO = kernel.pack(weight, bias_O, torch.bfloat16)(x_NI).float()
    assert float((found_NO - truth_NO).norm() / truth_NO.norm()) < 0.01
