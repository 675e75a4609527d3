"""`compiled`: a source of csrc/ as kernels that can be called; never knows what they compute."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flashinfer.jit.core import gen_jit_spec

__all__ = ["compiled"]

_FOLDER = Path(__file__).parent / "csrc"


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
    source = _FOLDER / f"{name}.cu"
    parts = [source, *sorted(_FOLDER.glob("*.cuh"))]
    version = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:8]  # caches hold older ones
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    flags = [f"-D{macro}={value}" for macro, value in defines.items()]
    return gen_jit_spec(
        f"headrace_{name}_{kind}{variant}_{version}", [source], extra_cuda_cflags=flags
    ).build_and_load()
