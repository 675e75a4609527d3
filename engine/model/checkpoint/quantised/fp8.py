"""Weights of 8-bit floats (e4m3) with scales of tensors, outputs or blocks, whatever tool wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.adapters.untrusted import Fields
from headrace.engine.model.checkpoint.found import Found, refuse_tensor
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
from headrace.ops.quantised import Fp8

__all__ = ["UNUSED", "Fp8Layout", "block_size", "parse"]

UNUSED = ("input_scale", "input_scale_inv", "input_global_scale", "activation_scale", "input_scale_ub")
"""Scales of activations, which stay in bfloat16 here."""
_SCALES = ("weight_scale_inv", "weight_scale")
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_MOST_IN_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """`X.weight` in e4m3 with `X.weight_scale_inv` or `X.weight_scale`, which multiplies it despite the first name.

    Scales of blocks are [blocks of outputs, blocks of inputs], or [.., 1, .., 1] as ModelOpt writes them.
    """

    block: tuple[int, int] | None = None
    """Outputs and inputs of a block. None: one scale for all outputs, or one for each."""

    def find(self, files: SafetensorsFolder, module: str) -> Found | None:
        """Return how `files` hold a module's weight; None if they hold it in plain numbers, or not at all.

        Raises:
            ModelRejected: The scale is missing, or has a wrong shape, dtype or value.
        """
        weight = f"{module}.weight"
        scales = present(files, module, _SCALES)
        if weight not in files.shapes or (is_plain(files, weight) and not scales):
            return None
        shape = files.shapes[weight]
        if len(shape) != 2 or not all(shape):
            refuse_tensor(files, weight, list(shape), "a matrix with elements")
        expect(files, weight, [shape], [torch.float8_e4m3fn])
        name = f"{module}.{_SCALES[0 if self.block is not None else 1]}"
        if len(scales) != 1:
            refuse_tensor(files, name, "missing" if not scales else "there beside another", "one tensor of scales")
        outs, ins = shape
        format = Fp8(self.block)
        grid = format.parts(shape)["scale"].shape
        shapes = [(), (1,), (1, 1), (outs,), (outs, 1)]
        if self.block is not None:
            shapes = [grid, (grid[0], 1, grid[1], 1)]
        expect(files, scales[0], shapes, (*FLOATS, *_EXPONENTS), weight)
        is_one = self.block is None and files.shapes[scales[0]] in ((), (1,), (1, 1))

        def one() -> Tensor:
            return _multipliers(read(files, scales[0])).view(1).repeat(outs)

        def multipliers(scale: Tensor) -> Tensor:
            return _multipliers(scale).view(-1, *grid[1:])

        scale = Whole(one) if is_one else Rows(scales[0], multipliers)
        tensors = (weight, scales[0], *present(files, module, UNUSED))
        check = partial(check_scale, files, scales[0])
        return by_rows(files, format, (outs, ins), {"values": Rows(weight), "scale": scale}, tensors, check)


def _multipliers(scale: Tensor) -> Tensor:
    """Return scales in float32; exponents are powers of two."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype in _EXPONENTS else scale).float()


def parse(fields: Fields, _modules: frozenset[str]) -> Rules:
    """Return the rules of `quant_method` fp8: blocks, or one scale for a tensor."""
    if fields.data.get("fmt", "e4m3") != "e4m3":
        fields.refuse("fmt", "e4m3")
    layout = Fp8Layout(block_size(fields, "weight_block_size"))
    ignored = texts_in(fields, "modules_to_not_convert", "ignored_layers")
    return lambda module: None if any(names_module(entry, module) for entry in ignored) else layout


def block_size(fields: Fields, name: str) -> tuple[int, int] | None:
    """Return the outputs and inputs of a block in the field `name`; None if there are no blocks.

    Raises:
        ModelRejected: The field is no such pair.
    """
    value = fields.data.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 1 <= size <= _MOST_IN_BLOCK for size in value)
    ):
        fields.refuse(name, f"two sizes of 1 to {_MOST_IN_BLOCK}")
    return value[0], value[1]
