"""bfloat16 and 8-bit floats for Triton's interpreter, which cuts off where a GPU rounds; no tests.

Its loops also end at numbers that a kernel is given, or has loaded, which numpy 2 would not take for integers.

`teach()` is for a process of its own, in which TRITON_INTERPRET is set.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

__all__ = ["teach"]


def teach() -> None:
    """Make the interpreter round to bfloat16 as a GPU does, multiply matrices of it, and loop up to any number."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    tl = importlib.import_module("triton.language")
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    patch_tensor = interpreter._patch_lang_tensor

    def widened(bits: Any) -> Any:
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return widened(data)
        if source == tl.float32 and target == tl.bfloat16:
            numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
        if source == tl.float32 and target == tl.float8e4nv:
            numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(data, source, target, rounding)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *given: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return dot(self, a, b, d, *given)
        product = widened(a.data).astype(np.float64) @ widened(b.data).astype(np.float64)
        return interpreter.TensorHandle((product + d.data).astype(np.float32), d.dtype.scalar)

    def create_dot_scaled(self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, *given: Any) -> Any:
        # Of codes of 4 bits with scales that are powers of two, and bfloat16.
        assert b_scale is None
        numbers = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        codes = np.stack((a.data & 15, a.data >> 4), -1).reshape(len(a.data), -1)
        values = numbers[codes & 7] * np.where(codes & 8, -1.0, 1.0)
        scales = np.exp2(a_scale.data.astype(np.float64) - 127).repeat(codes.shape[1] // a_scale.data.shape[1], 1)
        product, d = (values * scales) @ widened(b.data).astype(np.float64), given[-1]
        return interpreter.TensorHandle((product + d.data).astype(np.float32), d.dtype.scalar)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot_scaled = create_dot_scaled
    interpreter._convert_float, interpreter.InterpreterBuilder.create_dot = convert_float, create_dot
