"""Finds the compilers of kernels: nvcc of the CUDA that torch was built with, and a C++ compiler; never compiles.

pip brings nvcc with the `cuda` extra, so that a machine needs no CUDA toolkit of its own. Without it, a toolkit of the
system is used if it has the major version of torch's CUDA: code of another version does not load beside torch's
libraries.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["CannotCompile", "HostCompilers", "Toolkit", "find_host_compilers", "find_toolkit"]

_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_USUAL_HOME = Path("/usr/local/cuda")
_FIRST_OF_PIP = 13
"""First major version of CUDA whose nvcc is on PyPI."""


class CannotCompile(RuntimeError):
    """A kernel is not compiled yet and cannot be: the message says what to install, or the compiler's first error."""


class Toolkit(NamedTuple):
    """A CUDA toolkit on this machine."""

    home: Path
    """Folder that has `bin/nvcc` and usually `include`."""
    includes: tuple[Path, ...]
    """Further folders of headers: pip may put the runtime's elsewhere than nvcc."""

    @property
    def nvcc(self) -> Path:
        """Path of the compiler."""
        return self.home / "bin" / "nvcc"


class HostCompilers(NamedTuple):
    """Commands of the host's compilers, and the folder that has Python.h."""

    c: str
    cxx: str
    python_include: Path


def find_toolkit(cuda: str | None) -> Toolkit:
    """Return the toolkit with the major version of `cuda`, such as "13.0".

    The order of search is `CUDA_HOME` and `CUDA_PATH`, pip's packages, nvcc on the `PATH`, /usr/local/cuda.

    Raises:
        CannotCompile: There is no such toolkit.
    """
    if cuda is None:
        raise CannotCompile("this torch was built without CUDA: install a torch for GPUs")
    major = cuda.partition(".")[0]
    others = []
    packages = tuple(folder / f"cu{major}" for folder in _nvidia_packages())
    for home in dict.fromkeys(_homes(packages)):
        version = _version_of(str(home / "bin" / "nvcc"))
        if version is None:
            continue
        if version.partition(".")[0] == major:
            more = (package / "include" for package in packages if package != home) if home in packages else ()
            return Toolkit(home, tuple(folder for folder in more if folder.is_dir()))
        others.append(f"; {home} has CUDA {version}")
    if int(major) >= _FIRST_OF_PIP:
        cure = f'pip install "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]=={cuda}.*"'
    else:
        cure = f"install NVIDIA's CUDA Toolkit {cuda}, or a torch for CUDA {_FIRST_OF_PIP}, whose nvcc comes by pip"
    raise CannotCompile(
        f"compiling kernels needs nvcc of CUDA {major}, which torch was built with{''.join(others)}: {cure}"
    )


def find_host_compilers() -> HostCompilers:
    """Return the C and C++ compilers for nvcc and Triton: those that `CC` and `CXX` name, else the usual commands.

    Raises:
        CannotCompile: One of them, or Python.h, is not installed.
    """
    cxx = _command("CXX", "c++", "g++", "clang++")
    c = _command("CC", "gcc", "clang", "cc")
    if c is None or cxx is None:
        missing = "C++" if cxx is None else "C"
        raise CannotCompile(
            f"compiling kernels needs a {missing} compiler, and there is none on the PATH: install one "
            "(Debian and Ubuntu: apt-get install build-essential; Fedora and RHEL: dnf install gcc-c++)"
        )
    scheme = sysconfig.get_default_scheme()  # Debian's own scheme names a folder in /usr/local that has no headers
    include = Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
    if not (include / "Python.h").exists():
        raise CannotCompile(
            f"compiling kernels needs Python's headers, and {include} has no Python.h: install them "
            "(Debian and Ubuntu: apt-get install python3-dev; Fedora and RHEL: dnf install python3-devel)"
        )
    return HostCompilers(c, cxx, include)


def _command(variable: str, *names: str) -> str | None:
    """Return the command that an environment variable names, or else the first of `names` that is on the `PATH`.

    Raises:
        CannotCompile: The variable names something other than a command.
    """
    named = os.environ.get(variable)
    if not named:
        return next((found for name in names if (found := shutil.which(name))), None)
    found = shutil.which(named)
    if found is None:
        raise CannotCompile(
            f"compiling kernels needs a compiler, and {variable} names {named!r}, which is no command: "
            f"set {variable} to one without arguments, or unset it"
        )
    return found


def _homes(packages: tuple[Path, ...]) -> Iterator[Path]:
    """Yield folders that may hold a toolkit, the best first."""
    yield from (Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))
    yield from (home for home in packages if (home / "nvvm" / "bin" / "cicc").exists())  # nvcc needs cicc
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield Path(on_path).resolve().parent.parent
    yield _USUAL_HOME


def _nvidia_packages() -> list[Path]:
    """Return the folders of the package `nvidia`, which may have a part in each place that pip installs to."""
    return [folder for place in sys.path if (folder := Path(place) / "nvidia").is_dir()]


@functools.cache
def _version_of(nvcc: str) -> str | None:
    """Return major and minor version, such as "13.0"; None if `nvcc` does not run."""
    try:
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = _RELEASE.search(told)
    return None if found is None else f"{found[1]}.{found[2]}"
