"""Rearranges integers as tools pack them in 32-bit words into those of `IntGroups`; on any device, never from files."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.ops.quantised import pack_nibbles, unpack_nibbles

__all__ = ["codes_of", "in_order", "in_order_of_rows", "signed_codes", "values_of"]

_CPU_ELEMENTS = 1 << 15
_DEVICE_ELEMENTS = 1 << 24


def values_of(words: Tensor, bits: int, ins: int) -> Tensor:
    """Return the `values` [out, ..] of `IntGroups` from int32 words [out, ..] whose low bits are the first inputs."""
    return words.contiguous().view(torch.uint8)[:, : -(-ins * bits // 8)]


def codes_of(words: Tensor, bits: int, count: int) -> Tensor:
    """Return one uint8 code a number [rows, count] from int32 words [rows, ..], the low bits first."""
    data = words.contiguous().view(torch.uint8)
    return data[:, :count] if bits == 8 else unpack_nibbles(data, count)


def in_order(values: Tensor, order: Tensor, bits: int) -> Tensor:
    """Return `values` with the columns in `order`."""
    if bits == 8:
        return values.index_select(1, order)
    return pack_nibbles(unpack_nibbles(values, len(order)).index_select(1, order))


def in_order_of_rows(words: Tensor, order: Tensor, bits: int) -> Tensor:
    """Return the `values` [out, ..] of words [in / .., out], whose inputs are gathered in `order` [in] (int64)."""
    ins, outs, in_word, in_byte = len(order), words.shape[1], 32 // bits, 8 // bits
    values = torch.empty(-(-ins // in_byte), outs, dtype=torch.uint8, device=words.device)
    few = _CPU_ELEMENTS if words.device.type == "cpu" else _DEVICE_ELEMENTS
    step = max(few // outs // in_byte, 1) * in_byte
    for first in range(0, ins, step):
        row_I = order[first : first + step]
        codes = words[row_I // in_word] >> (row_I % in_word * bits).int().unsqueeze(1)
        codes = codes.bitwise_and_((1 << bits) - 1).to(torch.uint8)
        if bits == 4:
            codes = codes[0::2] | codes[1::2] << 4
        values[first // in_byte : first // in_byte + len(codes)] = codes
    return values.T.contiguous()


def signed_codes(numbers: Tensor) -> Tensor:
    """Return signed 8-bit integers as codes with a zero of 128."""
    return numbers.view(torch.uint8) ^ 0x80
