"""Weights in 4-bit groups with random numbers, and formats whose parts are not cut as weights are; holds no tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.ops.formats import Int4Groups, PartSpec, Stored

__all__ = ["Blocks", "Table", "random_groups"]


def random_groups(outs: int, ins: int, group: int = 32) -> Stored:
    """A matrix [outs, ins] whose numbers have a mean near 0, from torch's own generator."""
    scale = torch.rand(outs, ins // group) * 0.02
    parts = {
        "values": torch.randint(0, 16, (outs, ins), dtype=torch.uint8),
        "scale": scale,
        "minimum": -8 * scale + torch.randn_like(scale) * 0.01,
    }
    return Stored(Int4Groups(group), (outs, ins), parts)


@dataclass(frozen=True)
class Blocks:
    """8-bit floats with one scale for each block of outputs and inputs, the last of which may be partial."""

    outputs: int = 8
    inputs: int = 16
    name: str = "blocks"

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        *outer, outs, ins = shape
        blocks = (*outer, -(-outs // self.outputs), -(-ins // self.inputs))
        scale = PartSpec(blocks, torch.float32, outputs=self.outputs)
        return {"values": PartSpec(shape, torch.float8_e4m3fn), "scale": scale}

    def dense(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        scale = parts["scale"].repeat_interleave(self.outputs, -2).repeat_interleave(self.inputs, -1)
        return (parts["values"].float() * scale[..., : shape[-2], : shape[-1]]).to(dtype)


@dataclass(frozen=True)
class Table:
    """Indices into one table of values for the whole weight."""

    name: str = "table"

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        return {"index": PartSpec(shape, torch.uint8), "table": PartSpec((16,), torch.float32, outputs=None)}

    def dense(self, parts: Mapping[str, Tensor], _shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return parts["table"][parts["index"].long()].to(dtype)
