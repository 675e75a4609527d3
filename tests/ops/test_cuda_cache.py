"""Compiled kernels are kept, found and shared: by processes that start at once, after a kill, and as a wheel.

FlashInfer and Triton are stand-ins, and nvcc is the C++ compiler; everything else is real.
"""

from __future__ import annotations

import copy
import errno
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from emulated_cuda import modules
from fake_toolkit import Spec, make_toolkit

from headrace.ops.cuda.compiling import toolkit as cuda_toolkit
from headrace.ops.cuda.compiling.toolkit import CannotCompile
from headrace.ops.cuda.compiling.wheel import write_wheel

BUILT_ON = ("headrace.ops.cuda.compiling.cache", "headrace.ops.cuda.compiling.source")


class FileCacheManager:
    """As Triton's, for files that are put."""

    cache_dir: str

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        os.makedirs(self.cache_dir, exist_ok=True)
        path = Path(self.cache_dir, filename)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(path)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return self.put(json.dumps({"child_paths": group}), f"__grp__{filename}")


@pytest.fixture
def cuda_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The module, with stand-ins of what it imports; the user's cache folder is empty."""
    stand_ins = modules()
    stand_ins["triton.runtime.cache"].FileCacheManager = FileCacheManager  # type: ignore[attr-defined]
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in BUILT_ON:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    yield importlib.import_module("headrace.ops.cuda.compiling.cache")
    for name in BUILT_ON:
        sys.modules.pop(name, None)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Spec, Path]]:
    """Makes a module of two sources, and says where calls of nvcc are counted."""

    def make(**toolkit: Any) -> tuple[Spec, Path]:
        home = tmp_path / "site" / "nvidia" / "cu13"
        calls = make_toolkit(home, **toolkit)
        monkeypatch.setattr(cuda_toolkit, "_nvidia_packages", lambda: [home.parent])
        monkeypatch.delenv("CUDA_HOME", raising=False)
        sources = [tmp_path / "one.cu", tmp_path / "two.cu"]
        sources[0].write_text('extern "C" int one() { return 1; }\n')
        sources[1].write_text('extern "C" int two() { return 2; }\n')
        return Spec("a_module", sources, home / "bin" / "nvcc"), calls

    return make


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def test_a_kernel_is_compiled_once_and_kept_in_the_users_cache(
    cuda_cache: ModuleType, spec: Callable[..., tuple[Spec, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, calls = spec()
    before = dict(os.environ)
    folder = cuda_cache.use_cache()
    assert folder.parent == tmp_path / "cache" / "headrace" / "kernels"
    for version in ("sm90a", f"torch{torch.__version__}", "triton3.6.0", "flashinfer0.6.16"):
        assert version in folder.name
    with caplog.at_level(logging.INFO):
        loaded = cuda_cache._build_and_load(module)
    assert loaded.path == folder / "flashinfer" / "a_module" / "a_module.so"
    assert count(calls) == 2
    told = [line for line in caplog.messages if "compiling kernel" in line]
    assert len(told) == 2
    assert "of 2" in told[-1]
    assert cuda_cache._build_and_load(module).path == loaded.path
    assert count(calls) == 2
    assert cuda_cache.count_kernels(folder) == 1
    assert dict(os.environ) == before, "the application's environment is its own"


def test_a_kept_kernel_needs_no_compiler(
    cuda_cache: ModuleType,
    spec: Callable[..., tuple[Spec, Path]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    module, _ = spec()
    kept = cuda_cache.use_cache(tmp_path / "kept")
    cuda_cache._build_and_load(module)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cuda_toolkit, "_nvidia_packages", list)
    cuda_cache._toolkit.cache_clear()
    cuda_cache.check_compilers()
    assert cuda_cache._build_and_load(module).path.is_relative_to(kept)
    cuda_cache.use_cache(tmp_path / "empty")
    for act in (cuda_cache.check_compilers, lambda: cuda_cache._build_and_load(module)):
        with pytest.raises(CannotCompile, match=r"needs (a C\+\+ compiler|nvcc of CUDA 13)"):
            act()


def test_other_versions_have_a_folder_of_their_own(cuda_cache: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cuda_cache.use_cache()
    monkeypatch.setattr(sys.modules["triton"], "__version__", "3.7.0")
    second = cuda_cache.use_cache()
    monkeypatch.setattr(
        sys.modules["flashinfer.compilation_context"].CompilationContext, "TARGET_CUDA_ARCHS", {(8, "0")}
    )
    assert len({first, second, cuda_cache.use_cache()}) == 3


def test_a_failed_compilation_names_its_first_error_and_the_log(
    cuda_cache: ModuleType, spec: Callable[..., tuple[Spec, Path]]
) -> None:
    module, _ = spec(error="one.cu(1): error: identifier 'x' is undefined")
    folder = cuda_cache.use_cache()
    with pytest.raises(CannotCompile, match=r"a_module failed: one\.cu\(1\): error: identifier") as caught:
        cuda_cache._build_and_load(module)
    log = folder / "flashinfer" / "a_module" / "a_module.log"
    assert str(log) in str(caught.value)
    assert "some remark" in log.read_text()
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in log.parent.iterdir()) == ["a_module.log", "lock"]


def test_a_broken_library_is_compiled_again(cuda_cache: ModuleType, spec: Callable[..., tuple[Spec, Path]]) -> None:
    module, calls = spec()
    cuda_cache.use_cache()
    path = cuda_cache._build_and_load(module).path
    path.write_bytes(b"half a")
    assert cuda_cache._build_and_load(module).path.read_bytes().startswith(b"\x7fELF")
    assert count(calls) == 4


def test_a_library_that_another_process_has_mended_meanwhile_is_taken(
    cuda_cache: ModuleType, spec: Callable[..., tuple[Spec, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls = spec()
    cuda_cache.use_cache()
    path = cuda_cache._build_and_load(module).path
    whole, load = path.read_bytes(), module.load
    path.write_bytes(b"half a")

    def load_slowly(library: Path) -> Any:
        try:
            return load(library)
        except Exception:
            path.with_suffix(".new").write_bytes(whole)
            path.with_suffix(".new").replace(path)  # as another process does that has found the same
            raise

    monkeypatch.setattr(module, "load", load_slowly)
    assert cuda_cache._build_and_load(module).path.read_bytes() == whole
    assert count(calls) == 2, "what the other process had compiled was removed, which that one may be about to load"


def test_a_folder_that_cannot_be_written_is_still_read(
    cuda_cache: ModuleType,
    spec: Callable[..., tuple[Spec, Path]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in an image whose file system is read-only, into which one of two kernels was put when it was built."""
    kept, calls = spec()
    folder = cuda_cache.use_cache(tmp_path / "kept")
    expected = cuda_cache._build_and_load(kept).path
    missing = copy.copy(kept)
    missing.name = "another_module"
    files = sorted((tmp_path / "kept").rglob("*"))

    def refuse(*, dir: Path) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write wherever permissions forbid it
    own = cuda_cache.use_cache(tmp_path / "kept")
    assert "compiled again at each start" in caplog.text
    assert cuda_cache._build_and_load(kept).path == expected and expected.is_relative_to(folder)
    assert count(calls) == 2
    assert cuda_cache._build_and_load(missing).path.is_relative_to(own)
    assert count(calls) == 4
    assert sorted((tmp_path / "kept").rglob("*")) == files and not own.is_relative_to(tmp_path)


def test_where_no_folder_can_be_made_kernels_are_compiled_elsewhere(
    cuda_cache: ModuleType, spec: Callable[..., tuple[Spec, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, calls = spec()
    (tmp_path / "file").touch()
    own = cuda_cache.use_cache(tmp_path / "file")  # no folder can be made in a file, not even by root
    assert "compiled again at each start" in caplog.text
    assert cuda_cache._build_and_load(module).path.is_relative_to(own) and not own.is_relative_to(tmp_path)
    assert count(calls) == 2


# -- several processes ------------------------------------------------------------------------------------------------

CHILD = """
import json, sys
from pathlib import Path
from headrace.ops.cuda.compiling.library import compile_library
target, sources = json.loads(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
compile_library(Path(target), sources, ["c++", "-shared"])
"""


def start_child(target: Path, module: Spec) -> subprocess.Popen[str]:
    sources = [entry["command"].split(" -o ")[0].split() for entry in module.get_compile_commands()]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps([str(target), sources])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    return child


def go(child: subprocess.Popen[str]) -> None:
    assert child.stdin
    child.stdin.write("go\n")
    child.stdin.flush()


def test_two_processes_at_once_compile_once(spec: Callable[..., tuple[Spec, Path]], tmp_path: Path) -> None:
    module, calls = spec(seconds=0.5)
    target = tmp_path / "a_module" / "a_module.so"
    children = [start_child(target, module) for _ in range(2)]
    for child in children:
        go(child)
    for child in children:
        child.communicate(timeout=120)
    assert [child.returncode for child in children] == [0, 0]
    assert count(calls) == 2, "both processes compiled"
    assert module.load(target)


def test_a_process_that_is_killed_in_the_middle_leaves_nothing_broken(
    spec: Callable[..., tuple[Spec, Path]], tmp_path: Path
) -> None:
    module, calls = spec(seconds=5.0)
    target = tmp_path / "a_module" / "a_module.so"
    with start_child(target, module) as child:
        go(child)
        while not count(calls):
            time.sleep(0.01)
        child.kill()
    assert not target.exists()
    assert [path for path in target.parent.iterdir() if path.is_dir()], "it was killed before it began"
    module, calls = spec()
    with start_child(target, module) as child:
        go(child)
        child.communicate(timeout=120)
    assert sorted(path.name for path in target.parent.iterdir()) == ["a_module.so", "lock"]
    assert module.load(target)


# -- wheels -----------------------------------------------------------------------------------------------------------


def install(wheel: Path, site: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run([*command, "--disable-pip-version-check"], check=True, capture_output=True)


def test_a_wheel_of_kernels_serves_where_it_is_installed(
    cuda_cache: ModuleType,
    spec: Callable[..., tuple[Spec, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, calls = spec()
    folder = cuda_cache.use_cache(tmp_path / "built")
    cuda_cache._build_and_load(module)
    kernel = cuda_cache._TritonCache("KEY")
    kernel.put_group("kernel.json", {"kernel.cubin": kernel.put(b"code", "kernel.cubin")})
    wheel = write_wheel(folder, tmp_path / "dist")
    assert wheel.name.startswith(f"headrace_kernels_sm90a-{metadata.version('headrace')}+")
    assert write_wheel(folder, tmp_path / "again").read_bytes() == wheel.read_bytes()
    install(wheel, tmp_path / "installed")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    (tmp_path / "built").rename(tmp_path / "moved")

    own = cuda_cache.use_cache()
    cuda_cache.check_compilers()
    assert cuda_cache._build_and_load(module).path.is_relative_to(tmp_path / "installed")
    files = cuda_cache._TritonCache("KEY").get_group("kernel.json")
    assert Path(files["kernel.cubin"]).read_bytes() == b"code"
    assert Path(files["kernel.cubin"]).is_relative_to(tmp_path / "installed")
    assert count(calls) == 2
    assert cuda_cache.count_kernels(own) == 0

    monkeypatch.setattr(sys.modules["triton"], "__version__", "3.7.0")
    with caplog.at_level(logging.INFO):
        cuda_cache.use_cache()
    assert "are not used: they are made for sm90a" in caplog.text
    cuda_cache._build_and_load(module)
    assert count(calls) == 4


def test_a_builder_of_kernels_takes_none_that_are_installed(
    cuda_cache: ModuleType, spec: Callable[..., tuple[Spec, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls = spec()
    folder = cuda_cache.use_cache(tmp_path / "built")
    cuda_cache._build_and_load(module)
    install(write_wheel(folder, tmp_path / "dist"), tmp_path / "installed")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    own = cuda_cache.use_cache(tmp_path / "new", installed=False)
    assert cuda_cache._build_and_load(module).path.is_relative_to(own)
    assert count(calls) == 4


# -- Triton -----------------------------------------------------------------------------------------------------------


def test_tritons_files_are_found_after_their_folder_has_moved(cuda_cache: ModuleType, tmp_path: Path) -> None:
    cuda_cache.use_cache(tmp_path / "old")
    kernel = cuda_cache._TritonCache("KEY")
    kernel.put_group("kernel.json", {"kernel.cubin": kernel.put(b"code", "kernel.cubin")})
    (tmp_path / "old").rename(tmp_path / "new")
    cuda_cache.use_cache(tmp_path / "new")
    found = cuda_cache._TritonCache("KEY").get_group("kernel.json")
    assert Path(found["kernel.cubin"]).read_bytes() == b"code"
    assert cuda_cache._TritonCache("OTHER").get_group("kernel.json") is None


def test_tritons_launchers_are_found_by_the_same_name_without_the_program_file(
    cuda_cache: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_cache.use_cache()
    key = sys.modules["triton.runtime.build"].platform_key
    before = key()
    monkeypatch.setenv("PATH", "")
    assert key() == before


def test_tritons_launcher_is_compiled_or_its_error_is_told(cuda_cache: ModuleType, tmp_path: Path) -> None:
    folder = cuda_cache.use_cache()
    source = tmp_path / "launcher.c"
    source.write_text("#include <Python.h>\nint answer(void) { return 42; }\n")
    assert Path(cuda_cache._build_launcher("launcher", str(source), str(tmp_path), [], [], [])).exists()
    source.write_text("#include <missing.h>\n")
    with pytest.raises(CannotCompile, match=r"missing\.h") as caught:
        cuda_cache._build_launcher("launcher", str(source), str(tmp_path), [], [], [])
    assert str(folder / "launcher.log") in str(caught.value)
