"""GPTQ: integers packed along the inputs, [in / 8, out], with zeros packed along the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from headrace.adapters.untrusted import Fields
from headrace.engine.model.checkpoint.found import Found, refuse_tensor
from headrace.engine.model.checkpoint.quantised.integers import codes_of, in_order_of_rows, values_of
from headrace.engine.model.checkpoint.quantised.orders import sorted_columns
from headrace.engine.model.checkpoint.quantised.parts import FLOATS, check_scale, expect, present, read, turned
from headrace.engine.model.checkpoint.quantised.rules import (
    Layout,
    Rules,
    check_names,
    group_size,
    matched,
    objects_in,
)
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.ops.quantised import IntGroups

__all__ = ["BITS", "FORMATS", "GptqLayout", "parse"]

BITS = (4, 8)
"""Bits that are read."""
FORMATS = ("gptq", "gptq_v2")
"""Names of the formats that are read."""
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def _word_of(code: int, bits: int) -> int:
    """Return an int32 that holds `code` in each of its places."""
    word = sum(code << at for at in range(0, 32, bits))
    return word - (1 << 32) if word >= 1 << 31 else word


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """`X.qweight`, `X.qzeros`, `X.scales`, and perhaps the group of each input in `X.g_idx`."""

    bits: Literal[4, 8]
    group: int | None
    symmetric: bool
    """Whether every zero is half of the codes, whatever `X.qzeros` holds of it."""
    is_v2: bool
    """Whether zeros are stored as they are; else 1 has been subtracted from each."""
    is_ordered: bool = False
    """Whether the columns of a group may stand anywhere, so that `X.g_idx` has to be there."""

    def find(self, files: SafetensorsFolder, module: str) -> Found | None:
        """Return how `files` hold a module's weight; None if they hold it in plain numbers, or not at all.

        Raises:
            ModelRejected: A tensor is missing, or has a wrong shape, dtype or value.
        """
        weight, zeros, scales, index = (f"{module}.{name}" for name in _PARTS)
        if weight not in files.shapes:
            if scales in files.shapes:
                refuse_tensor(files, weight, "missing", f"codes of {scales}")
            return None
        words = files.shapes[weight]
        if len(words) != 2 or not all(words) or words[0] * 32 % self.bits:
            refuse_tensor(files, weight, list(words), "a matrix of words")
        expect(files, weight, [words], [torch.int32])
        ins, outs = words[0] * 32 // self.bits, words[1]
        groups = -(-ins // (self.group or ins))
        expect(files, scales, [(groups, outs)], FLOATS, weight)
        expect(files, zeros, [(groups, -(-outs * self.bits // 32))], [torch.int32], weight)
        has_index = index in files.shapes or (self.is_ordered and self.group is not None)
        order = sorted_columns(files, index, ins, self.group, weight) if has_index else None
        bits = self.bits
        format = IntGroups(bits, self.group, not self.symmetric, order is not None, files.dtype(scales))

        def turn(raw: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            parts = {"scale": raw["scales"].T.contiguous()}
            if order is None:
                parts["values"] = values_of(raw["qweight"].T, bits, ins)
            else:
                placed = order.to(raw["qweight"].device)
                parts |= {"values": in_order_of_rows(raw["qweight"], placed, bits), "order": placed.int()}
            if not self.symmetric:
                # Tools subtract the 1 from a word as a whole, so that a zero of 0 borrows from the next.
                stored = raw["qzeros"] + (0 if self.is_v2 else _word_of(1, bits))
                parts["zero"] = codes_of(stored, bits, outs).T.contiguous()
            return parts

        read_from = {"qweight": weight, "scales": scales, **({} if self.symmetric else {"qzeros": zeros})}
        tensors = (weight, zeros, scales, *present(files, module, ["g_idx"]), *_empty_bias(files, module, outs))
        check = partial(self._check, files, scales, zeros, outs)
        kind = IntGroups(bits, self.group).name
        return turned(files, format, (outs, ins), read_from, turn, tensors, check, kind)

    def _check(self, files: SafetensorsFolder, scales: str, zeros: str, outs: int) -> None:
        check_scale(files, scales, may_be_zero=self.group is not None, may_be_negative=True)
        if not self.symmetric:
            return
        # Some tools call their zeros v1 and store v2's; both mean half of the codes.
        half = 1 << (self.bits - 1)
        codes = codes_of(read(files, zeros), self.bits, outs)
        if not any(bool((codes == code).all()) for code in (half - 1, half)):
            refuse_tensor(files, zeros, "zeros of their own", f"{half} everywhere, since the config says sym")


def _empty_bias(files: SafetensorsFolder, module: str, outs: int) -> tuple[str, ...]:
    """Return the name of a bias that is zero, which some tools wrote for models without one."""
    bias = f"{module}.bias"
    if files.shapes.get(bias) != (outs,) or files.dtype(bias) not in FLOATS:
        return ()
    return () if bool(read(files, bias).any()) else (bias,)


def parse(fields: Fields, modules: frozenset[str]) -> Rules:
    """Return the rules of `quant_method` gptq."""
    name = "checkpoint_format" if fields.data.get("checkpoint_format") is not None else "format"
    stored = fields.data.get(name, "gptq")
    if stored not in FORMATS:
        fields.refuse(name, ", ".join(FORMATS))
    if fields.data.get("pack_dtype", "int32") not in ("int32", None):
        fields.refuse("pack_dtype", "int32")
    standard = _layout(fields, stored == "gptq_v2")
    rules_of = dict(objects_in(fields, "dynamic"))
    found = matched((_expression(pattern) for pattern in rules_of), modules, fields, "dynamic")
    positive = {pattern: _expression(pattern) for pattern in rules_of if not pattern.startswith("-:")}
    check_names(positive, modules, fields, "dynamic", rules="rules")
    dynamic = [
        (
            found[_expression(pattern)],
            None if pattern.startswith("-:") else _layout(_over(fields, rule), stored == "gptq_v2"),
        )
        for pattern, rule in rules_of.items()
    ]

    def rules(module: str) -> Layout | None:
        return next((layout for names, layout in dynamic if module in names), standard)

    return rules


def _expression(pattern: str) -> str:
    return pattern.removeprefix("-:").removeprefix("+:")


def _over(fields: Fields, rule: Fields) -> Fields:
    return Fields({**fields.data, **rule.data}, rule.origin)


def _layout(fields: Fields, is_v2: bool) -> GptqLayout:
    bits = fields.data.get("bits")
    if bits not in BITS:
        fields.refuse("bits", ", ".join(map(str, BITS)))
    group, symmetric = group_size(fields, "group_size", 128), fields.flag("sym", True)
    is_ordered = fields.flag("desc_act", False)
    return GptqLayout(8 if bits == 8 else 4, group, symmetric, is_v2, is_ordered)
