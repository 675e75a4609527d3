"""Builds and loads the CPU kernels written in C; never packs a weight or runs a step.

The library is compiled when headrace is installed, if there is a compiler, or else when it is first needed, into the
user's cache folder. It is found by the contents of its sources, so a stale one is never loaded, and one that the system
cannot load is compiled again. Without a compiler, `library()` is None and torch's operations do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

__all__ = [
    "LEVELS",
    "Context",
    "HeadsStruct",
    "LayerStruct",
    "LinearStruct",
    "MatrixStruct",
    "StepStruct",
    "build",
    "library",
]

LEVELS = ("none", "AVX2", "AVX-VNNI", "AVX512-VNNI", "AVX512-BF16")
"""Instruction sets that the kernels are compiled for, by their number in the C interface, slowest first."""

_SOURCES = Path(__file__).parent / "csrc"
_BUILT = Path(__file__).parent / "built"
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-shared", "-w")
_COMPILERS = ("cc", "gcc", "clang")
_BUILD_SECONDS = 300
_NO_KERNELS = (
    "weights are multiplied by torch's operations, several times slower: no CPU kernels (%s); they are compiled at the "
    "next start if there is gcc or clang, or a C compiler in CC, and if ~/.cache, or XDG_CACHE_HOME, can be written"
)

_log = logging.getLogger("headrace")


class MatrixStruct(Structure):
    """`Matrix` of native.h."""

    _fields_ = [
        *((name, c_int32) for name in ("outs", "ins", "bits", "scale", "zero", "shared", "order")),
        *((name, c_void_p) for name in ("codes", "scales", "supers")),
    ]


class LinearStruct(Structure):
    """`Linear` of native.h."""

    _fields_ = [
        *((name, c_int32) for name in ("count", "outs", "ins", "reads", "count_orders")),
        ("matrices", POINTER(MatrixStruct)),
        ("orders", POINTER(c_void_p)),
        ("bias", c_void_p),
    ]


class StepStruct(Structure):
    """`Step` of native.h."""

    _fields_ = [
        ("tokens", c_int32),
        ("blocks", c_int32),
        *((name, c_void_p) for name in ("positions", "slots", "pages", "queries", "given")),
    ]


class HeadsStruct(Structure):
    """`Heads` of native.h."""

    _fields_ = [
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "page_size", "kv_floats", "only_queries")),
        ("window", c_int64),
        ("scale", c_float),
        ("eps", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
    ]


class LayerStruct(Structure):
    """`Layer` of layer.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("norm", "q_norm", "k_norm")),
        *((name, POINTER(LinearStruct)) for name in ("qkv", "o")),
        ("feed_norm", c_void_p),
        *((name, POINTER(LinearStruct)) for name in ("gate_up", "down")),
    ]


_MATRIX, _LINEAR, _STEP, _HEADS = map(POINTER, (MatrixStruct, LinearStruct, StepStruct, HeadsStruct))
_SIGNATURES = {
    "best_level": (c_int, []),
    "supports": (c_int, [c_int]),
    "open": (c_void_p, [c_int, c_int]),
    "close": (None, [c_void_p]),
    "threads": (c_int, [c_void_p]),
    "step": (None, [c_void_p, c_int]),
    "pack_blocks": (None, [_MATRIX, c_int, c_void_p, c_void_p]),
    "pack_codes": (None, [_MATRIX, c_void_p, c_void_p, c_void_p]),
    "pack_dense": (None, [_MATRIX, c_void_p]),
    "read_rows": (None, [_MATRIX, c_void_p, c_int, c_void_p]),
    "linear": (c_int, [c_void_p, _LINEAR, c_void_p, c_int, c_void_p, c_int]),
    "norm": (c_int, [c_void_p, *[c_void_p] * 4, c_float, c_int, c_int, c_void_p]),
    "silu_mul": (c_int, [c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "gelu_tanh": (c_int, [c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "feed": (c_int, [c_void_p, *[c_void_p] * 4, c_float, _LINEAR, c_void_p, c_int]),
    "grouped": (c_int, [c_void_p, c_void_p, c_int, *[c_void_p] * 4]),
    "weighted_sums": (None, [*[c_void_p] * 4, c_int, c_int, c_int, c_void_p]),
    "attend": (c_int, [c_void_p, _HEADS, _STEP, c_int, *[c_void_p] * 4, _LINEAR, *[c_void_p] * 4, c_int]),
    "layer": (c_int, [c_void_p, _HEADS, _STEP, POINTER(LayerStruct), c_int, c_void_p, c_void_p, c_int]),
    "attend_with": (c_int, [c_void_p, _HEADS, _STEP, c_int, *[c_void_p] * 5]),
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the kernels, compiled now if need be; None, with one line in the log that says why, if there are none."""
    try:
        found = _load_built() or _load_cached()
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        _log.warning(_NO_KERNELS, _said(error))
        return None
    if found.headrace_best_level() == 0:
        _log.warning("weights are multiplied by torch's operations: this processor has no AVX2")
        return None
    return found


def build(folder: Path) -> Path:
    """Compile the kernels into `folder`, unless they are there already, and return the library's path.

    The file appears under its name when it is complete, so that several processes may build at a time.

    Raises:
        OSError: There is no compiler, or the folder cannot be written.
        subprocess.SubprocessError: The compiler failed, or took longer than five minutes.
    """
    path = folder / _name()
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=folder, suffix=".so")
    os.close(handle)
    try:
        command = [*_compiler(), *_FLAGS, str(_SOURCES / "native.c"), "-o", draft, "-pthread", "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_SECONDS)
        os.chmod(draft, 0o755)
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
    return path


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", "")) or [name for name in _COMPILERS if shutil.which(name)][:1]
    if not chosen:
        raise FileNotFoundError("no C compiler")
    return chosen


def _name() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return f"native-{digest.hexdigest()[:16]}-{os.uname().machine}.so"


def _load_built() -> ctypes.CDLL | None:
    """Return the library that was built when headrace was installed; None without one that this system can load."""
    try:
        return _load(_BUILT / _name())
    except OSError:
        return None


def _load_cached() -> ctypes.CDLL:
    """Return the library of the cache folder, compiled now if it is not there or if this system cannot load it."""
    folder = _cache_folder()
    path = folder / _name()
    if path.exists():
        try:
            return _load(path)
        except OSError:  # damaged, or linked with a newer C library, as in a home folder that several machines share
            path.unlink()
    return _load(build(folder))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "native"


def _load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, f"headrace_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def _said(error: Exception) -> str:
    """Return an error in one line; of a compiler's, the first line that it printed about one."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if "error" in line]
        return (lines or [f"the compiler ended with status {error.returncode}"])[0]
    return str(error)


class Context:
    """Threads and working memory of the kernels, for one operation at a time."""

    def __init__(self, threads: int, level: int | None = None) -> None:
        """Start `threads - 1` helpers.

        Args:
            threads: Number of threads that share an operation, including the one that calls it.
            level: Index in `LEVELS` of the instruction set; None for the best.

        Raises:
            RuntimeError: There are no kernels, the processor lacks the instruction set, or memory is short.
        """
        kernels = library()
        if kernels is None:
            raise RuntimeError("there are no CPU kernels")
        level = kernels.headrace_best_level() if level is None else level
        self.kernels = kernels
        self._closing = threading.Lock()
        self.handle: int | None = kernels.headrace_open(level, threads)
        if not self.handle:
            raise RuntimeError(f"{LEVELS[level]} with {threads} threads: the processor or the memory does not allow it")

    def close(self) -> None:
        """Join the helpers and release the memory; idempotent."""
        with self._closing:
            handle, self.handle = self.handle, None
        if handle:
            self.kernels.headrace_close(handle)

    def __del__(self) -> None:
        """Release what `close` was not called for."""
        if getattr(self, "handle", None):
            self.close()
