"""Compiled kernels as a wheel: written once, then installed by pip on every machine; never compiles or loads a kernel.

Such a wheel has an entry point in the group `headrace.kernels`, whose name has the GPUs and versions that its kernels
are made for (as cache.py writes them) and whose value names the package that holds them.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import logging
import os
import platform
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

__all__ = ["installed_kernels", "write_wheel"]

logger = logging.getLogger("headrace.ops")

_GROUP = "headrace.kernels"
_DATE = (1980, 1, 1, 0, 0, 0)
"""Time of every file in a wheel, so that the same kernels give the same wheel."""


def installed_kernels(label: str) -> Iterator[Path]:
    """Yield the folders of installed kernels that are made for `label`; log those that are made for something else."""
    for entry in metadata.entry_points(group=_GROUP):
        if entry.name != label:
            logger.info(
                "the kernels in %s are not used: they are made for %s, and this is %s", entry.value, entry.name, label
            )
            continue
        spec = importlib.util.find_spec(entry.value)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            logger.info("compiled kernels are taken from %s", folder)
            yield Path(folder)


def write_wheel(kernels: Path, out: Path) -> Path:
    """Pack the kernels that a folder keeps into a wheel; return its path.

    The wheel is named after the GPUs, and its version is headrace's with a digest of the kernels: pip replaces an
    installed one by another.

    Args:
        kernels: The folder that `use_cache` returned, whose name says what they are made for.
        out: The folder to write to.
    """
    label, tag = kernels.name, _tag()
    name = f"headrace_kernels_{re.split('[^a-z0-9_]', label, maxsplit=1)[0]}"
    kept = sorted(_kept(kernels))
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in kept)).hexdigest()[:8]
    version = f"{_version()}+k{digest}"
    about = f"{name}-{version}.dist-info"
    files: dict[str, bytes | Path] = {
        f"{name}/__init__.py": f'"""GPU kernels of headrace, compiled for {label}."""\n'.encode()
    }
    files |= {f"{name}/{file.relative_to(kernels).as_posix()}": file for file in kept}
    files |= {
        f"{about}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            f"Summary: GPU kernels of headrace, compiled for {label}\n"
        ).encode(),
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: headrace\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        f"{about}/entry_points.txt": f"[{_GROUP}]\n{label} = {name}\n".encode(),
    }
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{name}-{version}-{tag}.whl"
    part = wheel.with_suffix(".part")
    record = []
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, content in files.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            _add(archive, place, data)
            checksum = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{place},sha256={checksum},{len(data)}\n")
        record.append(f"{about}/RECORD,,\n")
        _add(archive, f"{about}/RECORD", "".join(record).encode())
    os.replace(part, wheel)
    return wheel


def _kept(kernels: Path) -> Iterator[Path]:
    """Yield the files of a cache that loading needs: no locks, no logs and no remains of interrupted compilations."""
    yield from kernels.glob("flashinfer/*/*.so")
    yield from (file for file in kernels.glob("triton/*/*") if file.is_file())


def _add(archive: zipfile.ZipFile, place: str, data: bytes) -> None:
    member = zipfile.ZipInfo(place, _DATE)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = (0o100755 if place.endswith(".so") else 0o100644) << 16
    archive.writestr(member, data)


def _version() -> str:
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:  # headrace runs from its source folders
        return "0"


def _tag() -> str:
    """Return the tag of this interpreter, for which launchers are compiled, and of a C library as new as this one."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    abi = f"{python}{getattr(sys, 'abiflags', '')}"
    kind, libc = platform.libc_ver()
    machine = sysconfig.get_platform().rpartition("-")[2].replace(".", "_")
    system = f"manylinux_{libc.replace('.', '_')}" if kind == "glibc" else "linux"
    return f"{python}-{abi}-{system}_{machine}"
