"""What products with quantised weights keep on a GPU beside the weights, computed without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import compiling_for
from stored_codes import FORMATS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.ops.formats import Stored

pytest.importorskip("triton", reason="needs triton, which `make test` installs")

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
"""Outputs and inputs of the matrices of Llama 3.1 8B, its head the last."""


class Allocated(TorchDispatchMode):
    """While it lasts, adds up the bytes of new tensors."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.nbytes += made.nbytes
        return made


@pytest.mark.rotated(2)
@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_scratch_of_an_8b_model_is_within_its_bound(name: str, tmp_path: Path) -> None:
    """Whatever mixture of formats its weights have, with all kernels opened."""
    kept = Allocated()
    with compiling_for(name, tmp_path) as launches:
        from headrace.ops.cuda.arch import Arch
        from headrace.ops.cuda.codes.held import kind_of
        from headrace.ops.cuda.codes.kinds import Kind
        from headrace.ops.cuda.codes.layout import CodeLayout, codes_of
        from headrace.ops.cuda.hazards import Chain
        from headrace.ops.cuda.kernels import KERNELS
        from headrace.ops.cuda.products.linear import LinearScratch
        from headrace.ops.cuda.products.packed import Products
        from headrace.ops.cuda.products.registry import ProductRoom
        from headrace.ops.cuda.products.running import UnpackedRun

        launches.compiles = False
        arch, kinds = Arch.named(name), {kind_of(format, (4096, 4096)) for format in FORMATS}
        with kept:
            scratch = LinearScratch("meta", arch)
            room = ProductRoom(scratch, 1e-5, arch.has("dependent_launch"), Chain())
        coded = (kernel for kind in kinds if isinstance(kind, Kind) for kernel in KERNELS.coded(kind))
        able = [each for each in (*coded, *KERNELS.products) if each.lacks(arch, torch.bfloat16, 128) is None]
        products = Products(arch, room, able)
        for kind in kinds:
            assert isinstance(kind, Kind)
            layout = CodeLayout(kind, torch.bfloat16 if kind.scales == "plain" else torch.float32)
            for size_out, size_in in SHAPES:
                weight = codes_of(Stored.allocate(layout, (size_out, size_in), empty))
                with kept:
                    product = products.pack(weight, None, 128, torch.bfloat16)
                run = product.runs.plain[8192].run
                if isinstance(run, UnpackedRun):
                    run.run(empty((8192, size_in)), weight, empty((8192, size_out)))
    assert scratch.dense(1, torch.bfloat16).nbytes == 64 << 20, "no weight wants more than a slice"
    assert round(kept.nbytes / 1e6) == 84, "docs/models.md says so; the bound is 256"


def empty(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
