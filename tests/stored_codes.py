"""Random weights in the formats that the GPU keeps in codes; holds no tests."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from headrace.ops.formats import Format, PartSpec, Stored
from headrace.ops.gguf_formats import BLOCK_KINDS, GgufBlocks
from headrace.ops.quantised import Float4Groups, Fp8, IntGroups, Table4

__all__ = ["FORMATS", "OTHERS", "RING", "label", "random_weight", "whole"]

RING: tuple[Format, ...] = (
    Fp8(),
    Fp8((128, 128)),
    IntGroups(8, None, scale=torch.float32),
    IntGroups(4, 128, scale=torch.bfloat16),
    IntGroups(4, 64, zeros=True, scale=torch.float16),
    IntGroups(4, 32, scale=torch.float16),
    IntGroups(4, 32, zeros=True, scale=torch.float16),
    IntGroups(8, 128, scale=torch.float16),
    GgufBlocks(Kind.Q8_0),
    GgufBlocks(Kind.Q4_0),
)
"""Formats that Hopper's kernels of csrc/ multiply by."""
OTHERS: tuple[Format, ...] = (
    *(GgufBlocks(kind) for kind in BLOCK_KINDS if kind not in (Kind.Q8_0, Kind.Q4_0)),
    Float4Groups("e8m0"),
    Float4Groups("e4m3"),
    Float4Groups("e4m3", divides=True),
    Table4(64),
    Table4(16),
    IntGroups(4, None, zeros=True, scale=torch.float16),
    IntGroups(4, 16, scale=torch.bfloat16),
    IntGroups(4, 32, zeros=True, ordered=True, scale=torch.float16),
    IntGroups(4, 64, scale=torch.float32),
    IntGroups(8, None, zeros=True, scale=torch.bfloat16),
    IntGroups(8, 16, zeros=True, scale=torch.float16),
    IntGroups(8, 64, zeros=True, scale=torch.float32),
    IntGroups(8, None, ordered=True, scale=torch.float16),
)
"""Formats that Triton's kernels alone multiply by, or that lie in an order of their own."""
FORMATS = RING + OTHERS


def label(format: Format) -> str:
    """The name of a format with what it does not say."""
    more = str(format.scale).removeprefix("torch.") if isinstance(format, IntGroups) else ""
    return f"{format.name} {more}".strip() + (" over" if getattr(format, "divides", False) else "")


def whole(format: Format, size_in: int) -> int:
    """Inputs of a weight with about `size_in` that are whole blocks of the format."""
    is_large = isinstance(format, GgufBlocks) and format.name.endswith(("_k", "_xs"))
    return -(-size_in // 256) * 256 if is_large else size_in


def random_weight(format: Format, size_out: int, size_in: int, device: str = "cpu", seed: int = 0) -> Stored:
    """A weight of order one over the square root of its inputs, all codes in use."""
    generator = torch.Generator().manual_seed(seed)
    parts = {
        name: _random(name, spec, size_in, generator).to(device)
        for name, spec in format.parts((size_out, size_in)).items()
    }
    return Stored(format, (size_out, size_in), parts)


def _random(name: str, spec: PartSpec, size_in: int, generator: torch.Generator) -> Tensor:
    if name in ("values", "codes"):
        codes = torch.randint(0, 256, spec.shape, generator=generator, dtype=torch.uint8)
        if spec.dtype == torch.float8_e4m3fn:
            codes = torch.where(codes & 127 == 127, codes - 1, codes)  # NaN
        return codes.view(spec.dtype)
    if name == "zero":
        return torch.randint(0, 16, spec.shape, generator=generator, dtype=torch.uint8)
    if name == "order":
        return torch.randperm(size_in, generator=generator, dtype=torch.int32)
    if name == "table":
        return torch.rand(spec.shape, generator=generator) * 2 - 1
    if spec.dtype == torch.uint8:  # exponents
        return torch.randint(112, 120, spec.shape, generator=generator, dtype=torch.uint8)
    if spec.dtype == torch.float8_e4m3fn:
        codes = torch.randint(0, 96, spec.shape, generator=generator, dtype=torch.uint8)
        return codes.view(spec.dtype)
    numbers = (torch.rand(spec.shape, generator=generator) + 0.5) / 100 / size_in**0.5
    if name == "constants":  # of both signs, as files have them
        numbers *= torch.randint(0, 2, spec.shape, generator=generator) * 2 - 1
    return numbers.to(spec.dtype)
