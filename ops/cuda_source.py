"""`compiled`: a source of csrc/ as kernels that can be called; never knows what they compute."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flashinfer.jit.core import gen_jit_spec

__all__ = ["compiled"]


def compiled(name: str, dtype: torch.dtype, variant: str, defines: Mapping[str, int]) -> Any:
    """The kernels of csrc/`name`.cu, compiled unless kept.

    Args:
        name: Of the file.
        dtype: bf16 or fp16: of their elements.
        variant: What tells these `defines` from others, as a part of a file's name.
        defines: Values of the source's macros.

    Raises:
        RuntimeError: They cannot be compiled.
        OSError: There is nothing to compile them with.
    """
    source = Path(__file__).parent / "csrc" / f"{name}.cu"
    version = hashlib.sha256(source.read_bytes()).hexdigest()[:8]  # a cache may hold an older one
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    flags = [f"-D{macro}={value}" for macro, value in defines.items()]
    return gen_jit_spec(
        f"headrace_{name}_{kind}{variant}_{version}", [source], extra_cuda_cflags=flags
    ).build_and_load()
