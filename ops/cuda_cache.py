"""The folder of compiled kernels that a start may use instead of a compiler; never compiles and never loads a kernel.

Triton and FlashInfer keep what they compile in caches of their own; this points both at one folder that can be shipped.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from flashinfer.jit import env as flashinfer_env
from flashinfer.jit.core import jit_spec_registry
from triton import knobs

__all__ = ["keep_compiled", "use_cache"]


def use_cache(folder: str | os.PathLike[str]) -> None:
    """Take compiled kernels from `folder`, in this process from now on; what it lacks is compiled, Triton's into it."""
    path = Path(folder).expanduser()
    knobs.cache.dir = str(path / "triton")
    flashinfer_env.FLASHINFER_AOT_DIR = path / "flashinfer"


def keep_compiled(folder: str | os.PathLike[str]) -> int:
    """Copy the FlashInfer modules that this process uses into `folder`; how many kernels it now holds.

    Triton's are there already: `use_cache` made it compile into it.
    """
    path = Path(folder).expanduser()
    for name, spec in jit_spec_registry.get_all_specs().items():
        built, kept = Path(spec.get_library_path()), path / "flashinfer" / name / f"{name}.so"
        if built.exists() and built != kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built, kept)
    return sum(1 for _ in path.glob("flashinfer/*/*.so")) + sum(1 for _ in path.glob("triton/*/*.cubin"))
