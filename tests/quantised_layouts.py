"""Layouts of quantisation tools by specifications in numpy; holds no tests.

Codes, scales and zeros are drawn at random. From these each writer makes two things: the tensors as its tool packs
them, and the matrix that they stand for. So nothing here undoes a packing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "E2M1",
    "E4M3",
    "Writer",
    "Written",
    "awq",
    "bnb4",
    "bnb8",
    "ct_bytes",
    "ct_words",
    "fp8",
    "gptq",
    "mxfp4",
    "nvfp4",
    "plain",
]

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Written: TypeAlias = tuple[dict[str, Tensor], Floats]
"""The tensors of a module, by the last part of their names, and the matrix [out, in] that they stand for."""
Writer: TypeAlias = Callable[[np.random.Generator, int, int], Written]


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return float(sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)))


E4M3: Floats = np.array([_e4m3(code) for code in range(256)], dtype=np.float32)
"""Value of each 8-bit float with 4 bits of exponent."""
E2M1: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
"""Value of each 4-bit float."""


def tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def scales(rng: np.random.Generator, shape: tuple[int, ...], size: float, dtype: torch.dtype) -> tuple[Tensor, Floats]:
    """Positive scales around `size`, as a file holds them and in float32."""
    drawn = tensor((rng.uniform(0.5, 1.5, shape) * size).astype(np.float32)).to(dtype)
    return drawn, drawn.float().numpy()


def words(codes: Ints, bits: int) -> Tensor:
    """Codes [rows, count] packed along the last dimension into int32, the first in the lowest bits."""
    rows, count = codes.shape
    padded = np.zeros((rows, -(-count * bits // 32) * 32 // bits), dtype=np.uint64)
    padded[:, :count] = codes
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    return tensor((padded.reshape(rows, -1, 32 // bits) << shifts).sum(-1).astype(np.uint32).view(np.int32))


def plain(rng: np.random.Generator, outs: int, ins: int) -> Written:
    weight = tensor(rng.normal(0, ins**-0.5, (outs, ins)).astype(np.float32)).bfloat16()
    return {"weight": weight}, weight.float().numpy()


def fp8(
    scale: str, shape: str, dtype: torch.dtype = torch.float32, block: int = 128, extra: str | None = None
) -> Writer:
    """8-bit floats whose scale has the name `scale` and is that of a tensor, channel or block.

    "spread block" is a block as ModelOpt writes it, in four dimensions.
    """

    def write(rng: np.random.Generator, outs: int, ins: int) -> Written:
        codes = rng.integers(0, 256, (outs, ins)).astype(np.uint8)
        codes[codes & 127 == 127] = 0
        sizes = {
            "tensor": (),
            "one": (1,),
            "channel": (outs, 1),
            "row": (outs,),
            "block": (-(-outs // block), -(-ins // block)),
            "spread block": (-(-outs // block), -(-ins // block)),
        }
        if dtype == torch.float8_e8m0fnu:
            exponents = rng.integers(114, 118, sizes[shape]).astype(np.uint8)
            stored, values = tensor(exponents).view(dtype), np.exp2(exponents - 127.0).astype(np.float32)
        else:
            stored, values = scales(rng, sizes[shape], 0.0006, dtype)
        if shape.endswith("block"):
            values = values[np.arange(outs)[:, None] // block, np.arange(ins) // block]
        elif shape == "row":
            values = values[:, None]
        if shape == "spread block":
            stored = stored[:, None, :, None]
        tensors = {"weight": tensor(codes).view(torch.float8_e4m3fn), scale: stored}
        if extra is not None:
            tensors[extra] = torch.tensor(0.1)
        return tensors, E4M3[codes] * values

    return write


def _integers(
    rng: np.random.Generator, outs: int, ins: int, bits: int, group: int | None, zeros: bool, dtype: torch.dtype
) -> tuple[Ints, Ints, Tensor, Floats]:
    """Codes [out, in], zeros [out, groups], scales [out, groups] as they are stored, and in float32."""
    groups = 1 if group is None else -(-ins // group)
    codes = rng.integers(0, 1 << bits, (outs, ins))
    zero = rng.integers(1, 1 << bits, (outs, groups)) if zeros else np.full((outs, groups), 1 << (bits - 1))
    stored, values = scales(rng, (outs, groups), 0.24 / (1 << bits), dtype)
    return codes, zero, stored, values


def _matrix(codes: Ints, zero: Ints, values: Floats, group_of: Ints) -> Floats:
    return (codes - zero[:, group_of]).astype(np.float32) * values[:, group_of]


def _group_of(rng: np.random.Generator, ins: int, group: int | None, ordered: bool) -> Ints:
    group_of = np.arange(ins) // (group or ins)
    return rng.permutation(group_of) if ordered else group_of


def ct_bytes(group: int | None = None, zeros: bool = False, dtype: torch.dtype = torch.bfloat16) -> Writer:
    """compressed-tensors, int-quantized: signed bytes."""

    def write(rng: np.random.Generator, outs: int, ins: int) -> Written:
        codes, zero, stored, values = _integers(rng, outs, ins, 8, group, zeros, dtype)
        tensors = {"weight": tensor((codes - 128).astype(np.int8)), "weight_scale": stored}
        if zeros:
            tensors["weight_zero_point"] = tensor((zero - 128).astype(np.int8))
        return tensors, _matrix(codes, zero, values, _group_of(rng, ins, group, ordered=False))

    return write


def ct_words(
    bits: int, group: int | None, zeros: bool = False, ordered: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Writer:
    """compressed-tensors, pack-quantized: words along the inputs, zeros along the outputs."""

    def write(rng: np.random.Generator, outs: int, ins: int) -> Written:
        codes, zero, stored, values = _integers(rng, outs, ins, bits, group, zeros, dtype)
        group_of = _group_of(rng, ins, group, ordered)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": stored,
            "weight_shape": torch.tensor([outs, ins]),
        }
        if zeros:
            tensors["weight_zero_point"] = words(zero.T, bits).T.contiguous()
        if ordered:
            tensors["weight_g_idx"] = tensor(group_of.astype(np.int32))
        return tensors, _matrix(codes, zero, values, group_of)

    return write


def gptq(
    bits: int, group: int | None, zeros: bool = False, ordered: bool = False, v2: bool = False, stored_half: int = 0
) -> Writer:
    """GPTQ: words along the inputs, everything with the outputs last, and zeros less 1 in the first version.

    `stored_half` is added to the stored zeros of a symmetric checkpoint, as tools do that call their zeros v1.
    """

    def write(rng: np.random.Generator, outs: int, ins: int) -> Written:
        codes, zero, stored, values = _integers(rng, outs, ins, bits, group, zeros, torch.float16)
        group_of = _group_of(rng, ins, group, ordered)
        tensors = {
            "qweight": words(codes.T.T, bits).T.contiguous(),
            "qzeros": words(zero.T - (0 if v2 else 1) + stored_half, bits),
            "scales": stored.T.contiguous(),
            "g_idx": tensor(group_of.astype(np.int32)),
        }
        return tensors, _matrix(codes, zero, values, group_of)

    return write


_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(group: int | None) -> Writer:
    """AWQ gemm: words along the outputs; nibble i of a word is its column `_AWQ_ORDER[i]`."""

    def write(rng: np.random.Generator, outs: int, ins: int) -> Written:
        codes, zero, stored, values = _integers(rng, outs, ins, 4, group, True, torch.float16)

        def packed(columns: Ints) -> Tensor:
            return words(columns.reshape(len(columns), -1, 8)[:, :, _AWQ_ORDER].reshape(columns.shape), 4)

        tensors = {"qweight": packed(codes.T), "qzeros": packed(zero.T), "scales": stored.T.contiguous()}
        return tensors, _matrix(codes, zero, values, _group_of(rng, ins, group, ordered=False))

    return write


def _float4(rng: np.random.Generator, outs: int, ins: int) -> tuple[Tensor, Floats]:
    codes = rng.integers(0, 16, (outs, ins))
    return tensor((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)), E2M1[codes]


def mxfp4(values: str, scale: str, blocked: bool = False) -> Writer:
    """MXFP4: exponents with an offset of 127 for each 32 inputs."""

    def write(rng: np.random.Generator, outs: int, ins: int) -> Written:
        packed, numbers = _float4(rng, outs, ins)
        exponents = rng.integers(120, 124, (outs, ins // 32))
        dense = numbers * np.repeat(np.exp2(exponents - 127.0), 32, axis=1).astype(np.float32)
        shaped = packed.view(outs, -1, 16) if blocked else packed
        return {values: shaped, scale: tensor(exponents.astype(np.uint8))}, dense

    return write


def nvfp4(values: str, factor: str, divides: bool) -> Writer:
    """NVFP4: e4m3 scales for each 16 inputs, and one number that multiplies them or divides them all."""

    def write(rng: np.random.Generator, outs: int, ins: int) -> Written:
        packed, numbers = _float4(rng, outs, ins)
        codes = rng.integers(0x30, 0x60, (outs, ins // 16)).astype(np.uint8)
        codes[0, 0] = 0  # of a group of zeros
        one = np.float32(rng.uniform(150, 170) if divides else 1 / rng.uniform(150, 170))
        scale = E4M3[codes] / one if divides else E4M3[codes] * one
        dense = numbers * np.repeat(scale, 16, axis=1)
        tensors = {values: packed, "weight_scale": tensor(codes).view(torch.float8_e4m3fn)}
        tensors |= {factor: torch.tensor([one]) if divides else torch.tensor(one), "input_scale": torch.tensor(1.0)}
        return tensors, dense

    return write


def bnb4(block: int = 64, nested: bool = True, kind: str = "nf4") -> Writer:
    """bitsandbytes in 4 bits: blocks of the flattened matrix, the even element in the high half of a byte."""

    def write(rng: np.random.Generator, outs: int, ins: int) -> Written:
        count = outs * ins
        codes = rng.integers(0, 16, count)
        table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
        blocks = -(-count // block)
        state: dict[str, object] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [outs, ins]}
        tensors = {
            "weight": tensor((codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
            "weight.quant_map": tensor(table),
        }
        if nested:
            inner = rng.integers(0, 256, blocks)
            inner_table = np.linspace(0.01, 1, 256, dtype=np.float32)
            outer = rng.uniform(0.05, 0.1, -(-blocks // 256)).astype(np.float32)
            offset = 0.0625
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            absmax = inner_table[inner] * np.repeat(outer, 256)[:blocks] + np.float32(offset)
            tensors["weight.absmax"] = tensor(inner.astype(np.uint8))
            tensors |= {"weight.nested_absmax": tensor(outer), "weight.nested_quant_map": tensor(inner_table)}
        else:
            absmax = rng.uniform(0.05, 0.15, blocks).astype(np.float32)
            tensors["weight.absmax"] = tensor(absmax)
        text = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8).copy()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = tensor(text)
        return tensors, (table[codes] * np.repeat(absmax, block)[:count]).reshape(outs, ins)

    return write


def bnb8(rng: np.random.Generator, outs: int, ins: int) -> Written:
    """bitsandbytes in 8 bits: the largest value of each output beside signed bytes of 127ths."""
    codes = rng.integers(-127, 128, (outs, ins))
    most = rng.uniform(0.1, 0.2, outs).astype(np.float32)
    dense = codes.astype(np.float32) * (most / np.float32(127))[:, None]
    tensors = {"weight": tensor(codes.astype(np.int8)), "SCB": tensor(most), "weight_format": torch.tensor(0).byte()}
    return tensors, dense
