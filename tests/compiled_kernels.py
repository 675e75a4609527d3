"""Triton's kernels compiled for a GPU that is not there, as the code that launches them asks; holds no tests.

`compiling_for("sm_89")` makes every launch a compilation: for tensors without memory (device "meta"), for the named
target, down to machine code. What a launch wants of a block is kept, to be compared with what the GPU has; or launches
are noted and nothing is compiled, which takes no time.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from emulated_cuda import built_anew, modules

__all__ = ["Launch", "Launches", "compiling_for"]


class Launch(NamedTuple):
    """One kernel as it was compiled."""

    kernel: str
    shared_bytes: int
    """Of a block."""


class Launches:
    """What was launched."""

    def __init__(self) -> None:
        self.compiled: set[Launch] = set()
        self.kernels: set[str] = set()
        """Names of all kernels that were launched, compiled or not."""
        self.compiles = True
        """Whether launches compile; may be set between them."""


class Target:
    """A driver without a device, which Triton asks what to compile for."""

    def __init__(self, capability: int) -> None:
        self._target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(arch: str, cache: Path) -> Iterator[Launches]:
    """While it lasts, launches of Triton's kernels compile for `arch`, into the folder `cache`; what was launched."""
    launches = Launches()
    with built_anew(), pytest.MonkeyPatch.context() as patch:
        for name, module in modules().items():
            if name.startswith("flashinfer"):
                patch.setitem(sys.modules, name, module)
        triton = importlib.import_module("triton")
        jit = importlib.import_module("triton.runtime.jit").JITFunction
        run = jit.run

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            launches.kernels.add(self.fn.__name__)
            if launches.compiles:
                kernel = run(self, *args, grid=grid, warmup=True, **options)
                launches.compiled.add(Launch(self.fn.__name__, kernel.metadata.shared))

        patch.setattr(jit, "run", compile_only)
        patch.setattr(triton.knobs.cache, "dir", str(cache))
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name in ("coded.rows", "dense"):  # csrc/ has a test of its own
            products = importlib.import_module(f"headrace.ops.cuda.experts.{name}")
            patch.setattr(products, "compiled", lambda name, **sizes: SimpleNamespace(run=lambda *given: None))
        patch.setattr(torch, "_scaled_mm", lambda *given, out, **named: out)  # torch's own; meta has none
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        driver = triton.runtime.driver
        before = driver._active
        driver.set_active(Target(int(arch.removeprefix("sm_"))))
        try:
            yield launches
        finally:
            driver._active = before
