"""Which nvcc and which C++ compiler are taken, and what is said where there is none."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from fake_toolkit import make_toolkit

from headrace.ops.cuda.compiling import toolkit as cuda_toolkit
from headrace.ops.cuda.compiling.toolkit import CannotCompile, find_host_compilers, find_toolkit

NVIDIA_PACKAGES = cuda_toolkit._nvidia_packages


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No toolkit anywhere, and no compiler on the PATH."""
    for name in ("CC", "CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(cuda_toolkit, "_USUAL_HOME", tmp_path / "usual")
    monkeypatch.setattr(cuda_toolkit, "_nvidia_packages", lambda: list(tmp_path.glob("site*/nvidia")))


def on_path(tmp_path: Path, *names: str) -> None:
    for name in names:
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)


def test_the_toolkit_that_pip_installed_is_found(tmp_path: Path) -> None:
    make_toolkit(tmp_path / "site" / "nvidia" / "cu13")
    found = find_toolkit("13.0")
    assert (found.home, found.includes) == (tmp_path / "site" / "nvidia" / "cu13", ())
    assert found.nvcc.exists()


def test_every_place_that_pip_installs_to_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolkit, "_nvidia_packages", NVIDIA_PACKAGES)
    make_toolkit(tmp_path / "user" / "nvidia" / "cu13")
    (tmp_path / "system" / "nvidia").mkdir(parents=True)
    (tmp_path / "system" / "nvidia" / "__init__.py").touch()  # some of NVIDIA's packages have one, which hides others
    for site in ("user", "system"):
        monkeypatch.syspath_prepend(str(tmp_path / site))
    assert find_toolkit("13.0").home == tmp_path / "user" / "nvidia" / "cu13"


def test_headers_that_pip_put_elsewhere_are_found_too(tmp_path: Path) -> None:
    make_toolkit(tmp_path / "site" / "nvidia" / "cu13")
    (tmp_path / "site2" / "nvidia" / "cu13" / "include").mkdir(parents=True)  # torch's own runtime, without nvcc
    assert find_toolkit("13.0").includes == (tmp_path / "site2" / "nvidia" / "cu13" / "include",)


@pytest.mark.parametrize("place", ["path", "usual", "CUDA_HOME"])
def test_a_toolkit_of_another_major_version_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    other = tmp_path / "usual" if place == "usual" else tmp_path / "other"
    make_toolkit(other, release="12.8")
    if place == "path":
        (tmp_path / "bin" / "nvcc").symlink_to(other / "bin" / "nvcc")
    elif place == "CUDA_HOME":
        monkeypatch.setenv("CUDA_HOME", str(other))
    with pytest.raises(CannotCompile, match=r"nvcc of CUDA 13.*has CUDA 12\.8: pip install \"cuda-toolkit\["):
        find_toolkit("13.0")
    make_toolkit(tmp_path / "site" / "nvidia" / "cu13")
    assert find_toolkit("13.0").home == tmp_path / "site" / "nvidia" / "cu13"


def test_the_order_is_what_was_named_then_pip_then_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_toolkit(tmp_path / "usual", release="13.2")
    assert find_toolkit("13.0").home == tmp_path / "usual"
    make_toolkit(tmp_path / "site" / "nvidia" / "cu13")
    assert find_toolkit("13.0").home == tmp_path / "site" / "nvidia" / "cu13"
    make_toolkit(tmp_path / "named", release="13.1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    assert find_toolkit("13.0").home == tmp_path / "named"


def test_half_a_toolkit_of_pip_is_none(tmp_path: Path) -> None:
    make_toolkit(tmp_path / "site" / "nvidia" / "cu13", complete=False)
    with pytest.raises(CannotCompile, match="needs nvcc of CUDA 13"):
        find_toolkit("13.0")


def test_what_pip_cannot_bring_is_not_asked_of_it() -> None:
    with pytest.raises(CannotCompile, match=r"install NVIDIA's CUDA Toolkit 12\.8"):
        find_toolkit("12.8")
    with pytest.raises(CannotCompile, match="built without CUDA"):
        find_toolkit(None)


@pytest.mark.parametrize(("there", "missing"), [((), r"C\+\+"), (("gcc",), r"C\+\+"), (("c++",), "C")])
def test_a_missing_compiler_is_one_sentence(tmp_path: Path, there: tuple[str, ...], missing: str) -> None:
    on_path(tmp_path, *there)
    with pytest.raises(CannotCompile, match=rf"needs a {missing} compiler.*apt-get install build-essential"):
        find_host_compilers()


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_a_variable_that_names_no_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    on_path(tmp_path, "gcc", "c++", "ccache")
    monkeypatch.setenv(variable, "ccache gcc")
    with pytest.raises(CannotCompile, match=rf"{variable} names 'ccache gcc', which is no command.*unset it"):
        find_host_compilers()


def test_missing_headers_of_python_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(tmp_path, "gcc", "c++")
    monkeypatch.setattr(sysconfig, "get_path", lambda *values: str(tmp_path))
    with pytest.raises(CannotCompile, match=r"no Python\.h.*apt-get install python3-dev"):
        find_host_compilers()
    (tmp_path / "Python.h").touch()
    assert find_host_compilers().python_include == tmp_path


def test_named_compilers_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(tmp_path, "gcc", "c++", "my-cc", "my-c++")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *values: str(tmp_path))
    monkeypatch.setenv("CC", "my-cc")
    monkeypatch.setenv("CXX", "my-c++")
    found = find_host_compilers()
    assert (Path(found.c).name, Path(found.cxx).name) == ("my-cc", "my-c++")
