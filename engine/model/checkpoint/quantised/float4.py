"""Weights of 4-bit floats (e2m1): MXFP4 with exponents for each 32 inputs, NVFP4 with scales for each 16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.adapters.untrusted import Fields
from headrace.engine.model.checkpoint.found import Found, refuse_tensor
from headrace.engine.model.checkpoint.quantised.fp8 import UNUSED
from headrace.engine.model.checkpoint.quantised.parts import (
    FLOATS,
    Rows,
    Whole,
    by_rows,
    check_scale,
    expect,
    is_plain,
    present,
    read,
)
from headrace.engine.model.checkpoint.quantised.rules import Rules, names_module, texts_in
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.ops.quantised import Float4Groups

__all__ = ["COMPRESSED_MXFP4", "COMPRESSED_NVFP4", "MODELOPT_NVFP4", "Float4Layout", "parse"]

_ANY = 1 << 16


@dataclass(frozen=True, slots=True)
class Float4Layout:
    """Two e2m1 codes in a byte, the even input in the low half, and the scales of groups."""

    format: Float4Groups
    values: str
    """Name of the tensor of codes behind the module's, such as `.weight_packed`."""
    scale: str
    """Name of the tensor of scales behind the module's."""
    factor: str | None = None
    """Name of the number that multiplies or divides all scales, behind the module's; None for MXFP4."""
    is_blocked: bool = False
    """Whether the codes of a group have a dimension of their own: [out, groups, 16]."""

    def find(self, files: SafetensorsFolder, module: str) -> Found | None:
        """Return how `files` hold a module's weight; None if they hold it in plain numbers, or not at all.

        Raises:
            ModelRejected: A scale is missing, or has a wrong shape, dtype or value.
        """
        values, scale = module + self.values, module + self.scale
        if values not in files.shapes or is_plain(files, values):
            if scale in files.shapes:
                refuse_tensor(files, values, "missing" if values not in files.shapes else "plain", f"codes of {scale}")
            return None
        found = files.shapes[values]
        if len(found) != 2 + self.is_blocked or not all(found):
            refuse_tensor(files, values, list(found), "a matrix of codes")
        outs, ins = found[0], 2 * found[1] * (found[2] if self.is_blocked else 1)
        group = self.format.group
        if ins % group or (self.is_blocked and found[2] != group // 2):
            refuse_tensor(files, values, list(found), f"codes of {ins} inputs in whole groups of {group}")
        expect(files, values, [found], [torch.uint8])
        scales = [torch.uint8, torch.float8_e8m0fnu] if self.factor is None else [torch.float8_e4m3fn]
        expect(files, scale, [(outs, ins // group)], scales, values)
        parts: dict[str, Rows | Whole] = {"values": Rows(values, _flat), "scale": Rows(scale, _codes(scales[0]))}
        checks: list[Callable[[], None]] = [partial(check_scale, files, scale, may_be_zero=True)]
        tensors = [values, scale, *present(files, module, UNUSED)]
        if self.factor is not None:
            factor = module + self.factor
            expect(files, factor, [(), (1,), (1, 1)], FLOATS)
            parts["factor"] = Whole(lambda: read(files, factor).float().view(1).repeat(outs))
            checks.append(partial(check_scale, files, factor))
            tensors.append(factor)

        def check() -> None:
            for each in checks:
                each()

        return by_rows(files, self.format, (outs, ins), parts, tensors, check)


def _flat(block: Tensor) -> Tensor:
    return block.flatten(1)


def _codes(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that gives scales the dtype in which the format keeps their bits."""
    return lambda block: block.view(dtype)


COMPRESSED_NVFP4 = Float4Layout(
    Float4Groups("e4m3", divides=True), ".weight_packed", ".weight_scale", ".weight_global_scale"
)
"""NVFP4 as compressed-tensors stores it."""
COMPRESSED_MXFP4 = Float4Layout(Float4Groups("e8m0"), ".weight_packed", ".weight_scale")
"""MXFP4 as compressed-tensors stores it."""
MODELOPT_NVFP4 = Float4Layout(Float4Groups("e4m3"), ".weight", ".weight_scale", ".weight_scale_2")
"""NVFP4 as ModelOpt stores it."""
BLOCKED_MXFP4 = Float4Layout(Float4Groups("e8m0"), ".weight_blocks", ".weight_scales", is_blocked=True)
"""MXFP4 as `quant_method` mxfp4 stores it."""


def parse(fields: Fields, _modules: frozenset[str]) -> Rules:
    """Return the rules of `quant_method` mxfp4."""
    ignored = texts_in(fields, "modules_to_not_convert")
    return lambda module: None if any(names_module(entry, module) for entry in ignored) else BLOCKED_MXFP4
