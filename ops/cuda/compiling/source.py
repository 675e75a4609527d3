"""`compiled`: compiles and loads the sources of csrc/; knows nothing of what they compute."""

from __future__ import annotations

import functools
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashinfer.jit.core import gen_jit_spec

from headrace.ops.cuda.compiling.cache import cache

__all__ = ["MOST_ROWS", "INSIDE_RANK", "build_for_rows", "compiled", "compiled_for"]

_FOLDER = Path(__file__).parents[1] / "csrc"
_ROWS = (16, 32, 64)
"""Numbers of rows that few_rows.cuh is compiled for."""
MOST_ROWS = _ROWS[-1]
INSIDE_RANK = 16
"""Largest rank of a module's update that a product with an update inside takes."""


@functools.cache
def compiled(name: str, **sizes: int) -> Any:
    """Return the kernels of csrc/`name`.cu; compile them unless they are kept.

    Args:
        name: Name of the file, without the suffix.
        sizes: Values of the source's macros.

    Raises:
        CannotCompile: The kernels are not kept, and cannot be compiled.
        OSError: The folder of kernels cannot be written.
    """
    cache()
    source = _FOLDER / f"{name}.cu"
    parts = [source, *sorted(_FOLDER.glob("*.cuh"))]
    version = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:8]  # caches hold older ones
    variant = "".join(f"_{macro.lower()}{value}" for macro, value in sizes.items())
    flags = [f"-D{macro}={value}" for macro, value in sizes.items()]
    return gen_jit_spec(f"headrace_{name}{variant}_{version}", [source], extra_cuda_cflags=flags).build_and_load()


def compiled_for(rows: int, name: str, *, updates: bool = False, **sizes: int) -> Any:
    """Return the kernels of a source with updates.cuh for `rows` rows, at most `MOST_ROWS`.

    `updates` is whether an adapter's are inside; `sizes` are the values of the source's other macros.
    """
    most = next((most for most in _ROWS if rows <= most), MOST_ROWS)
    return compiled(name, ROWS=most, RANKS=INSIDE_RANK if updates else 0, **sizes)


def build_for_rows(name: str, *, updates: bool = False, **sizes: int) -> None:
    """Compile all kernels that `compiled_for` returns for a source; raise the errors of `compiled`."""
    with ThreadPoolExecutor(len(_ROWS)) as pool:
        list(pool.map(lambda rows: compiled_for(rows, name, updates=updates, **sizes), _ROWS))
