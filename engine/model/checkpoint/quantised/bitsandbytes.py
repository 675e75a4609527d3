"""bitsandbytes: 4-bit indices into a table with scales of blocks, themselves quantised or not, and 8-bit rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.adapters.untrusted import Fields, parse_object
from headrace.engine.model.checkpoint.found import Found, Pieces, Staging, refuse_tensor
from headrace.engine.model.checkpoint.quantised.integers import signed_codes
from headrace.engine.model.checkpoint.quantised.parts import (
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
from headrace.ops.formats import Dense, Stored
from headrace.ops.quantised import IntGroups, Table4

__all__ = ["TYPES", "parse"]
_STATE = "weight.quant_state.bitsandbytes__"
TYPES = ("nf4", "fp4")
"""Names of the types of 4 bits that are read."""
_SIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE_BYTES = 1 << 16
_MOST_SIZE = 1 << 31
_MOST_IN_BLOCK = 1 << 16


class BitsAndBytes:
    """`X.weight` in 4 bits beside `X.weight.absmax` and a table, or in 8 beside `X.SCB`."""

    def find(self, files: SafetensorsFolder, module: str) -> Found | None:
        """Return how `files` hold a module's weight; None if they hold it in plain numbers, or not at all.

        Raises:
            ModelRejected: A tensor is missing, or has a wrong shape, dtype or value.
        """
        weight = f"{module}.weight"
        if weight not in files.shapes:
            return None
        states = present(files, module, (f"{_STATE}{kind}" for kind in TYPES))
        if states:
            return _FourBits(files, module, states[0]).found()
        sides = present(files, module, ("weight.absmax", "weight.quant_map"))
        if sides:
            refuse_tensor(files, f"{module}.{_STATE}nf4", "missing", f"the shape behind {sides[0]}")
        if is_plain(files, weight) and f"{module}.SCB" not in files.shapes:
            return None
        return _eight_bits(files, module, weight)


def _eight_bits(files: SafetensorsFolder, module: str, weight: str) -> Found:
    shape, scale = files.shapes[weight], f"{module}.SCB"
    if len(shape) != 2 or not all(shape):
        refuse_tensor(files, weight, list(shape), "a matrix with elements")
    expect(files, weight, [shape], [torch.int8])
    expect(files, scale, [(shape[0],)], [torch.float32], weight)
    parts: dict[str, Rows | Whole] = {
        "values": Rows(weight, signed_codes),
        "scale": Rows(scale, lambda block: (block / 127).view(-1, 1)),
    }
    tensors = (weight, scale, *present(files, module, ["weight_format"]))
    check = partial(check_scale, files, scale, may_be_zero=True)
    return by_rows(files, IntGroups(8, None), (shape[0], shape[1]), parts, tensors, check)


@dataclass(frozen=True, slots=True)
class _FourBits:
    files: SafetensorsFolder
    module: str
    state: str
    """Name of the tensor with the JSON of the weight's state."""

    def found(self) -> Found:
        files, weight = self.files, f"{self.module}.weight"
        fields = self._fields()
        outs, ins = self._shape(fields)
        block = fields.size("blocksize", _MOST_IN_BLOCK)
        count = -(-outs * ins // block)
        expect(files, weight, [(-(-outs * ins // 2), 1), (1, -(-outs * ins // 2))], [torch.uint8])
        expect(files, self._side("quant_map"), [(16,)], [torch.float32])
        nested = self._side("nested_absmax") in files.shapes
        expect(files, self._side("absmax"), [(count,)], [torch.uint8 if nested else torch.float32])
        if nested:
            size = fields.size("nested_blocksize", _MOST_IN_BLOCK)
            fields.real("nested_offset", -math.inf, math.inf)
            expect(files, self._side("nested_absmax"), [(-(-count // size),)], [torch.float32])
            expect(files, self._side("nested_quant_map"), [(256,)], [torch.float32])
        tensors = (weight, self.state, *present(files, self.module, (f"weight.{side}" for side in _SIDES)))
        if ins % block or block % 2 or files.shapes[weight][1] != 1:
            return Found(
                Dense(torch.float32), (outs, ins), tensors, partial(self._dense, fields, outs, ins), self._check,
                f"{self.state.rpartition('__')[2]} in blocks of {block}",
            )  # fmt: skip
        parts: dict[str, Rows | Whole] = {
            "values": Rows(weight, lambda data: _swapped(data.view(-1, ins // 2)), each=ins // 2),
            "scale": Whole(lambda: self._absmax(fields).view(outs, -1)),
            "table": Whole(partial(read, files, self._side("quant_map"))),
        }
        return by_rows(files, Table4(block), (outs, ins), parts, tensors, self._check)

    def _side(self, name: str) -> str:
        return f"{self.module}.weight.{name}"

    def _fields(self) -> Fields:
        if len(self.files.shapes[self.state]) != 1 or self.files.nbytes(self.state) > _STATE_BYTES:
            refuse_tensor(self.files, self.state, list(self.files.shapes[self.state]), f"up to {_STATE_BYTES} bytes")
        expect(self.files, self.state, [self.files.shapes[self.state]], [torch.uint8])
        return Fields(parse_object(bytes(read(self.files, self.state).tolist()), self.state), self.state)

    def _shape(self, fields: Fields) -> tuple[int, int]:
        match fields.data.get("shape"):
            case [int(outs), int(ins)] if 0 < outs < _MOST_SIZE and 0 < ins < _MOST_SIZE:
                return outs, ins
        fields.refuse("shape", f"two sizes below {_MOST_SIZE}")

    def _check(self) -> None:
        for name in _SIDES:
            tensor = self._side(name)
            if tensor in self.files.shapes and self.files.dtype(tensor) == torch.float32:
                check_scale(self.files, tensor, may_be_zero=True, may_be_negative=name.endswith("map"))

    def _absmax(self, fields: Fields) -> Tensor:
        """Return the scale of each block in float32."""
        absmax = read(self.files, self._side("absmax"))
        if absmax.dtype == torch.float32:
            return absmax
        table = read(self.files, self._side("nested_quant_map"))
        outer = read(self.files, self._side("nested_absmax"))
        size = fields.size("nested_blocksize", _MOST_IN_BLOCK)
        scale = table[absmax.int()].mul_(outer.repeat_interleave(size)[: len(absmax)])
        return scale.add_(fields.real("nested_offset", -math.inf, math.inf))

    def _dense(self, fields: Fields, outs: int, ins: int, elements: int, _staging: Staging) -> Pieces:
        """Yield the numbers themselves, where blocks do not end with an output."""
        weight, block = f"{self.module}.weight", fields.size("blocksize", _MOST_IN_BLOCK)
        absmax, table = self._absmax(fields), read(self.files, self._side("quant_map"))
        data = read(self.files, weight).view(-1)
        step = max(elements // ins // 2, 1) * 2  # an even number of outputs begins with a byte
        for first in range(0, outs, step):
            start, stop = first * ins, min(first + step, outs) * ins
            few = data[start // 2 : -(-stop // 2)]
            codes = torch.stack((few >> 4, few & 15), dim=-1).view(-1)[: stop - start]
            values = table[codes.int()] * absmax[torch.arange(start, stop) // block]
            yield first, Stored.from_dense(values.view(-1, ins))


def _swapped(data: Tensor) -> Tensor:
    """Return bytes with their halves swapped: the file has the even input in the high one."""
    return (data >> 4) | (data << 4)


def parse(fields: Fields, _modules: frozenset[str]) -> Rules:
    """Return the rules of `quant_method` bitsandbytes; whether 4 or 8 bits is said by each weight's tensors."""
    ignored = texts_in(fields, "llm_int8_skip_modules")
    layout = BitsAndBytes()
    return lambda module: None if any(names_module(entry, module) for entry in ignored) else layout
