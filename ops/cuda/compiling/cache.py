"""The cache of compiled kernels, those of Triton, of FlashInfer and of our own; never chooses a kernel.

A process's folder is named after its GPUs and the versions of the packages that compile and load kernels, so that only
processes that agree in these share it. Kernels that came as a wheel (wheel.py) are read where pip put them. `use_cache`
replaces a few functions of FlashInfer and Triton; environment variables stay as they are.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import platform
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import flashinfer
import torch
import triton
import tvm_ffi
from flashinfer.compilation_context import CompilationContext
from flashinfer.jit import core, cpp_ext
from flashinfer.jit import env as flashinfer_env
from triton import knobs
from triton.runtime import build as triton_build
from triton.runtime.cache import FileCacheManager

from headrace.ops.cuda.compiling.library import PROGRESS, compile_library, run_compiler
from headrace.ops.cuda.compiling.toolkit import Toolkit, find_host_compilers, find_toolkit
from headrace.ops.cuda.compiling.wheel import installed_kernels

__all__ = ["cache", "check_compilers", "count_kernels", "use_cache"]

logger = logging.getLogger("headrace.ops")

_build_with_ninja = core.JitSpecNvcc.build_and_load


class _Folders(NamedTuple):
    own: Path
    """Folder where kernels are looked for first, and where new ones are written."""
    others: tuple[Path, ...]
    """Further folders where kernels are looked for, but never written."""


_folders: _Folders | None = None
"""Folders of the last call of `use_cache`."""


def _label() -> str:
    """Return the name of the folder for kernels of this process: its GPUs, and versions."""
    archs = "_".join(f"{major}{minor}" for major, minor in sorted(CompilationContext().TARGET_CUDA_ARCHS))
    versions = {"torch": torch, "triton": triton, "flashinfer": flashinfer, "ffi": tvm_ffi}
    parts = [f"sm{archs}", *(f"{name}{module.__version__}" for name, module in versions.items()), platform.machine()]
    return re.sub(r"[^\w.+-]", "_", "-".join(parts))


def _default_folder() -> Path:
    """Return the folder of kernels in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace" / "kernels"


def use_cache(folder: str | os.PathLike[str] | None = None, *, installed: bool = True) -> Path:
    """Find and keep compiled kernels in `folder`, in this process from now on.

    Args:
        folder: The parent folder; None is $XDG_CACHE_HOME/headrace/kernels, or ~/.cache/headrace/kernels.
        installed: Whether kernels that came as a wheel are used, too.

    Returns:
        The folder for kernels of this process: one inside `folder`, or, if that cannot be written, one that is
        removed when the process ends.
    """
    global _folders
    cpp_ext.get_cuda_path = lambda: str(_toolkit().home)
    cpp_ext.get_cuda_version.cache_clear()
    # FlashInfer asked the first nvcc on the PATH when it was imported; that may be too old for the GPU.
    core.current_compilation_context.TARGET_CUDA_ARCHS = CompilationContext().TARGET_CUDA_ARCHS
    name = _label()
    own = (_default_folder() if folder is None else Path(folder).expanduser()) / name
    others = tuple(installed_kernels(name)) if installed else ()
    try:
        own.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=own).close()
    except OSError as error:
        logger.warning("kernels that must be compiled are compiled again at each start: %s", error)
        own, others = _scratch() / name, (own, *others)
    _folders = _Folders(own, others)
    core.JitSpecNvcc.build_and_load = _build_and_load
    flashinfer_env.FLASHINFER_GEN_SRC_DIR = _scratch() / "generated"
    knobs.cache.manager_class = _TritonCache
    knobs.build.impl = _build_launcher
    # Triton's own function runs the program `file`, and without it finds no launcher.
    triton_build.platform_key = lambda: f"{platform.machine()},{platform.system()}"
    return own


def cache() -> _Folders:
    """Return the folders that `use_cache` set last; if there are none, use the default cache."""
    if _folders is None:
        use_cache()
    assert _folders is not None
    return _folders


def check_compilers() -> None:
    """Raise the error now that the first kernel would raise if no kernel is kept and none can be compiled.

    Raises:
        CannotCompile: No kernel is kept, and there is no compiler.
    """
    if not any(count_kernels(folder) for folder in (cache().own, *cache().others)):
        find_host_compilers()
        if not flashinfer_env.has_flashinfer_jit_cache():
            _toolkit()


def count_kernels(folder: Path) -> int:
    """Return how many kernels are kept in a folder that `use_cache` returned."""
    return sum(1 for _ in folder.glob("flashinfer/*/*.so")) + sum(1 for _ in folder.glob("triton/*/*.cubin"))


@functools.cache
def _scratch() -> Path:
    """Return the folder for files of this process alone, such as FlashInfer's sources; it is removed at exit."""
    folder = tempfile.mkdtemp(prefix="headrace-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _toolkit() -> Toolkit:
    return find_toolkit(torch.version.cuda)


# -- FlashInfer's modules, and ours, which are built so ----------------------------------------------------------


def _build_and_load(spec: core.JitSpecNvcc) -> Any:
    """Load a module, compiled unless it is kept.

    This replaces FlashInfer's method, which needs ninja, file names of libraries that pip does not install, and nvcc
    even for modules that are compiled already.

    Raises:
        CannotCompile: The module is not kept and cannot be compiled.
        OSError: The cache cannot be written.
    """
    if spec.needs_device_linking:
        return _build_with_ninja(spec)
    own, place = cache().own, Path("flashinfer", spec.name, f"{spec.name}.so")
    for library in (*(folder / place for folder in (own, *cache().others)), spec.aot_path):
        loaded = _load(spec, library)
        if loaded is not None:
            return loaded
    _compile(spec, own / place)
    return spec.load(own / place)


def _load(spec: core.JitSpecNvcc, library: Path) -> Any:
    """Return the module that is kept at `library`, or None if it cannot be loaded."""
    if not library.exists():
        return None
    try:
        return spec.load(library)
    except Exception as error:  # tvm_ffi documents no type of error
        logger.warning("%s is passed over, since it cannot be loaded: %s", library, error)
        return None


def _compile(spec: core.JitSpecNvcc, library: Path) -> None:
    toolkit, host = _toolkit(), find_host_compilers()
    headers = [flag for folder in toolkit.includes for flag in ("-isystem", str(folder))]
    sources = []
    for entry in spec.get_compile_commands():
        source = shlex.split(entry["command"])
        del source[source.index("-o") :]
        if not entry["file"].endswith(".cu"):
            source[0] = host.cxx
        elif "-ccbin" in source:
            source += headers
        else:
            source += ["-ccbin", host.cxx, *headers]
        sources.append(source)
    by_file = ("-lcuda", "-lcudart")  # names that exist only with a complete toolkit and driver
    flags = [flag for flag in spec.extra_ldflags or () if flag not in by_file]
    folders = [f"-L{toolkit.home / name}" for name in ("lib64", "lib")]
    link = [host.cxx, "-shared", *flags, *folders, *_libraries(toolkit)]
    compile_library(library, sources, link, lambda kept: _load(spec, kept) is not None)


def _libraries(toolkit: Toolkit) -> list[str]:
    """Return the files of CUDA's driver and runtime that this process has loaded; modules find them by these names."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    loaded = sorted(set(re.findall(r"(/.*/libcuda(?:rt)?\.so\.[\d.]+)$", maps, re.MULTILINE)))
    if any("libcudart" in path for path in loaded):
        return loaded
    return [*loaded, *(str(path) for path in sorted(toolkit.home.glob("lib*/libcudart.so.*"))[:1])]


# -- Triton's kernels -------------------------------------------------------------------------------------------------


class _TritonCache(FileCacheManager):
    """Cache of Triton's files of one kernel: in our folder, then in the further ones."""

    cache_dir: str
    _places: tuple[Path, ...]

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if override or dump:
            super().__init__(key, override, dump)
            self._places = (Path(self.cache_dir),)
            return
        self._places = tuple(folder / "triton" / key for folder in (cache().own, *cache().others))
        self.key, self.cache_dir = key, str(self._places[0])
        self.lock_path = str(self._places[0] / "lock")

    def has_file(self, filename: str) -> bool:
        return self.get_file(filename) is not None

    def get_file(self, filename: str) -> str | None:
        return next((str(place / filename) for place in self._places if (place / filename).exists()), None)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the files of a group, looked up beside its index, which has the paths where they were compiled."""
        group = self.get_file(f"__grp__{filename}")
        if group is None:
            return None
        folder = Path(group).parent
        names = json.loads(Path(group).read_text(encoding="utf-8")).get("child_paths")
        return None if names is None else {name: str(folder / name) for name in names if (folder / name).exists()}

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        PROGRESS.count_other()
        return super().put_group(filename, group)


def _build_launcher(
    name: str, source: str, folder: str, library_dirs: list[str], include_dirs: list[str], libraries: list[str]
) -> str:
    """Compile a small C library of Triton's, such as a kernel's launcher, in `folder`; return its path."""
    host = find_host_compilers()
    library = str(Path(folder) / f"{name}.so")
    includes = [f"-I{each}" for each in (*include_dirs, folder, host.python_include, *knobs.build.backend_dirs) if each]
    linked = [f"-l:{each}" if ".so" in each or each.endswith(".a") else f"-l{each}" for each in libraries]
    folders = [f"-L{each}" for each in library_dirs]
    command = [host.c, source, "-O3", "-shared", "-fPIC", "-Wno-psabi", *linked, *folders, *includes, "-o", library]
    run_compiler(command, name, cache().own / f"{name}.log", folder)
    return library
