"""Integer weights of compressed-tensors: one in a byte (int-quantized), or packed in words (pack-quantized)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.found import Found, refuse_tensor
from headrace.engine.model.checkpoint.quantised.fp8 import UNUSED
from headrace.engine.model.checkpoint.quantised.integers import codes_of, in_order, signed_codes, values_of
from headrace.engine.model.checkpoint.quantised.orders import sorted_columns
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
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.ops.quantised import IntGroups

__all__ = ["CompressedInts"]

_MOST_SIZE = 1 << 31


@dataclass(frozen=True, slots=True)
class CompressedInts:
    """`X.weight_packed` in words, or `X.weight` in signed bytes, with scales of rows or groups of inputs."""

    bits: Literal[4, 8]
    group: int | None
    symmetric: bool
    is_ordered: bool = False
    """Whether the columns of a group may stand anywhere, so that `X.weight_g_idx` has to be there."""

    def find(self, files: SafetensorsFolder, module: str) -> Found | None:
        """Return how `files` hold a module's weight; None if they hold it in plain numbers, or not at all.

        Raises:
            ModelRejected: A tensor is missing, or has a wrong shape, dtype or value.
        """
        if f"{module}.weight_packed" in files.shapes:
            return self._words(files, module)
        weight, scale = f"{module}.weight", f"{module}.weight_scale"
        if weight not in files.shapes and scale in files.shapes:
            refuse_tensor(files, f"{module}.weight_packed", "missing", f"codes of {scale}")
        if weight not in files.shapes or (is_plain(files, weight) and scale not in files.shapes):
            return None
        return self._bytes(files, module, weight)

    def _bytes(self, files: SafetensorsFolder, module: str, weight: str) -> Found:
        shape = files.shapes[weight]
        if len(shape) != 2 or not all(shape):
            refuse_tensor(files, weight, list(shape), "a matrix with elements")
        expect(files, weight, [shape], [torch.int8])
        outs, groups = shape[0], self._groups(files, weight, shape[1])
        zero, zeros = f"{module}.weight_zero_point", []
        if not self.symmetric or zero in files.shapes:
            shapes = [(outs, groups), *([(outs,)] if groups == 1 else [])]
            expect(files, zero, shapes, [torch.int8], weight)
            zeros = [zero]
        format = IntGroups(8, self.group, zeros=bool(zeros), scale=self._scale_dtype(files, module))
        parts: dict[str, Rows | Whole] = {
            "values": Rows(weight, signed_codes),
            "scale": self._scale(files, module, outs, groups, weight),
        }
        if zeros:
            parts["zero"] = Rows(zero, lambda block: signed_codes(block).view(-1, groups))
        tensors = (weight, f"{module}.weight_scale", *zeros, *present(files, module, UNUSED))
        return by_rows(files, format, (outs, shape[1]), parts, tensors, self._check(files, module), self._kind())

    def _words(self, files: SafetensorsFolder, module: str) -> Found:
        weight, zero, index = (f"{module}.weight_{name}" for name in ("packed", "zero_point", "g_idx"))
        outs, ins = self._shape(files, module)
        expect(files, weight, [(outs, -(-ins * self.bits // 32))], [torch.int32])
        groups = self._groups(files, weight, ins)
        has_zeros, order = not self.symmetric or zero in files.shapes, None
        if index in files.shapes or self.is_ordered:
            order = sorted_columns(files, index, ins, self.group, weight)
        format = IntGroups(self.bits, self.group, has_zeros, order is not None, self._scale_dtype(files, module))

        def values(words: Tensor) -> Tensor:
            stored = values_of(words, self.bits, ins)
            return stored if order is None else in_order(stored, order.to(stored.device), self.bits)

        parts: dict[str, Rows | Whole] = {
            "values": Rows(weight, values),
            "scale": self._scale(files, module, outs, groups, weight),
        }
        if has_zeros:
            expect(files, zero, [(-(-outs * self.bits // 32), groups)], [torch.int32], weight)
            parts["zero"] = Whole(lambda: codes_of(read(files, zero).T, self.bits, outs).T.contiguous())
        if order is not None:
            parts["order"] = Whole(order.int)
        extra = present(files, module, ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", *UNUSED))
        check = self._check(files, module)
        return by_rows(files, format, (outs, ins), parts, (weight, *extra), check, self._kind())

    def _shape(self, files: SafetensorsFolder, module: str) -> tuple[int, int]:
        tensor = f"{module}.weight_shape"
        expect(files, tensor, [(2,)], [torch.int64, torch.int32])
        outs, ins = read(files, tensor).tolist()
        if not (0 < outs < _MOST_SIZE and 0 < ins < _MOST_SIZE):
            refuse_tensor(files, tensor, [outs, ins], f"two sizes below {_MOST_SIZE}")
        return outs, ins

    def _groups(self, files: SafetensorsFolder, weight: str, ins: int) -> int:
        if self.group is not None and ins % self.group:
            refuse_tensor(files, weight, f"of {ins} inputs", f"whole groups of {self.group} inputs")
        return 1 if self.group is None else ins // self.group

    def _scale_dtype(self, files: SafetensorsFolder, module: str) -> torch.dtype:
        scale = f"{module}.weight_scale"
        if scale not in files.shapes:
            refuse_tensor(files, scale, "missing", f"scales of {module}")
        return files.dtype(scale)

    def _scale(self, files: SafetensorsFolder, module: str, outs: int, groups: int, weight: str) -> Rows | Whole:
        scale = f"{module}.weight_scale"
        shapes: list[tuple[int, ...]] = [(outs, groups)]
        ones: list[tuple[int, ...]] = [(), (1,), (1, 1)] if groups == 1 and self.symmetric else []
        expect(files, scale, [*shapes, *([(outs,)] if groups == 1 else []), *ones], FLOATS, weight)
        if outs > 1 and files.shapes[scale] in ones:
            return Whole(lambda: read(files, scale).view(1, 1).repeat(outs, 1))
        return Rows(scale, lambda block: block.view(-1, groups))

    def _check(self, files: SafetensorsFolder, module: str) -> Callable[[], None]:
        return lambda: check_scale(
            files, f"{module}.weight_scale", may_be_zero=self.group is not None, may_be_negative=True
        )

    def _kind(self) -> str:
        return IntGroups(self.bits, self.group).name
