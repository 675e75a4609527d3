"""AWQ in the version gemm: 4-bit integers packed along the outputs, [in, out / 8], in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.adapters.untrusted import Fields
from headrace.engine.model.checkpoint.found import Found, refuse_tensor
from headrace.engine.model.checkpoint.quantised.integers import codes_of
from headrace.engine.model.checkpoint.quantised.parts import FLOATS, check_scale, expect, turned
from headrace.engine.model.checkpoint.quantised.rules import Rules, group_size, names_module, texts_in
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.ops.quantised import IntGroups

__all__ = ["BITS", "VERSION", "AwqLayout", "parse"]

BITS = 4
"""Bits that are read."""
VERSION = "gemm"
"""Name of the version that is read."""
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of its eight columns."""
_PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """`X.qweight`, `X.qzeros` and `X.scales`."""

    group: int | None

    def find(self, files: SafetensorsFolder, module: str) -> Found | None:
        """Return how `files` hold a module's weight; None if they hold it in plain numbers, or not at all.

        Raises:
            ModelRejected: A tensor is missing, or has a wrong shape, dtype or value.
        """
        weight, zeros, scales = (f"{module}.{name}" for name in _PARTS)
        if weight not in files.shapes:
            if scales in files.shapes:
                refuse_tensor(files, weight, "missing", f"codes of {scales}")
            return None
        words = files.shapes[weight]
        if len(words) != 2 or not all(words) or words[0] % 2:
            refuse_tensor(files, weight, list(words), "a matrix of words for an even number of inputs")
        ins, outs = words[0], words[1] * 8
        if self.group is not None and ins % self.group:
            refuse_tensor(files, weight, f"of {ins} inputs", f"whole groups of {self.group} inputs")
        groups = 1 if self.group is None else ins // self.group
        expect(files, weight, [words], [torch.int32])
        expect(files, zeros, [(groups, words[1])], [torch.int32], weight)
        expect(files, scales, [(groups, outs)], FLOATS, weight)
        format = IntGroups(4, self.group, zeros=True, scale=files.dtype(scales))
        read_from = {"values": weight, "zero": zeros, "scale": scales}
        check = partial(check_scale, files, scales, may_be_zero=self.group is not None, may_be_negative=True)
        tensors = tuple(read_from.values())
        return turned(files, format, (outs, ins), read_from, _turn, tensors, check)


def _turn(raw: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the parts [out, ..] of tensors [in, ..] or [groups, ..]."""
    zero = codes_of(raw["zero"], 4, 8 * raw["zero"].shape[1])
    return {
        "values": _values(raw["values"]),
        "zero": zero.view(-1, 8)[:, _PLACES].view(zero.shape).T.contiguous(),
        "scale": raw["scale"].T.contiguous(),
    }


def _values(words: Tensor) -> Tensor:
    """Return 4-bit codes [out, in / 2] of words [in, out / 8]."""
    ins, count = words.shape
    values = torch.empty(count, 8, ins // 2, dtype=torch.uint8, device=words.device)
    data = words.T.contiguous().view(torch.uint8).view(count, ins // 2, 2, 4)
    for byte in range(4):
        even, odd = data[:, :, 0, byte], data[:, :, 1, byte]
        values[:, _PLACES.index(2 * byte)] = (even & 0x0F) | (odd << 4)
        values[:, _PLACES.index(2 * byte + 1)] = (even >> 4) | (odd & 0xF0)
    return values.view(8 * count, ins // 2)


def parse(fields: Fields, _modules: frozenset[str]) -> Rules:
    """Return the rules of `quant_method` awq."""
    if fields.data.get("bits", fields.data.get("w_bit", BITS)) != BITS:
        fields.refuse("bits" if "bits" in fields.data else "w_bit", str(BITS))
    for field in ("version", "checkpoint_format", "format"):
        version = fields.data.get(field)
        if version is not None and str(version).lower() != VERSION:
            fields.refuse(field, VERSION)
    name = "group_size" if "group_size" in fields.data else "q_group_size"
    layout = AwqLayout(group_size(fields, name, 128))
    ignored = texts_in(fields, "modules_to_not_convert")
    return lambda module: None if any(names_module(entry, module) for entry in ignored) else layout
