"""Random weights in the formats that the GPU keeps in codes; holds no tests."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType as Kind

from headrace.ops.formats import Format, Stored
from headrace.ops.gguf_formats import GgufBlocks
from headrace.ops.quantised import Fp8, IntGroups

__all__ = ["FORMATS", "random_weight"]

FORMATS: tuple[Format, ...] = (
    Fp8(),
    Fp8((128, 128)),
    IntGroups(8, None, scale=torch.float32),
    IntGroups(4, 128, scale=torch.bfloat16),
    IntGroups(4, 64, zeros=True, scale=torch.float16),
    IntGroups(4, 32, scale=torch.float16),
    IntGroups(8, 128, scale=torch.float16),
    GgufBlocks(Kind.Q8_0),
    GgufBlocks(Kind.Q4_0),
)


def random_weight(format: Format, size_out: int, size_in: int, device: str = "cpu", seed: int = 0) -> Stored:
    """A weight of order one over the square root of its inputs, all codes in use."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, spec in format.parts((size_out, size_in)).items():
        if name in ("values", "codes"):
            codes = torch.randint(0, 256, spec.shape, generator=generator, dtype=torch.uint8)
            if spec.dtype == torch.float8_e4m3fn:
                codes = torch.where(codes & 127 == 127, codes - 1, codes)  # NaN
            part = codes.view(spec.dtype)
        elif name == "zero":
            part = torch.randint(0, 16, spec.shape, generator=generator, dtype=torch.uint8)
        else:
            part = ((torch.rand(spec.shape, generator=generator) + 0.5) / 100 / size_in**0.5).to(spec.dtype)
        parts[name] = part.to(device)
    return Stored(format, (size_out, size_in), parts)
