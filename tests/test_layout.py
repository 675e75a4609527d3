"""The repository's own rules that no linter knows: sizes, packages, declared libraries, and nothing of one machine."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from source_files import PACKAGES, ROOT, name_of, repository_files, sources, tree_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MODULES = 18
MAX_DIRECT_LIBRARIES = 15

# Longer because it reads better so: a path, or path:function, with its own limit and the reason.
EXCEPTIONS: dict[str, tuple[int, str]] = {
    "ops/cuda/adapters/alike.py:_expand_alike_kernel": (66, "one kernel is one launch"),
    "ops/cuda/attention/decode.py:_fused_decode_kernel": (165, "one kernel is one launch"),
    "ops/cuda/attention/split.py:_split_decode_kernel": (65, "one kernel is one launch"),
    "ops/cuda/adapters/expand.py:_expand_group_kernel": (70, "one kernel is one launch"),
    "ops/cuda/adapters/expand.py:_expand_row_kernel": (90, "one kernel is one launch"),
    "ops/cuda/heads.py:_norm_rope_kernel": (85, "one kernel is one launch"),
    "ops/cuda/products/linear.py:_linear_kernel": (64, "one kernel is one launch"),
    "ops/cuda/adapters/shrink.py:_shrink_row_kernel": (62, "one kernel is one launch"),
    "ops/cuda/products/vector.py:_vector_kernel": (70, "one kernel is one launch"),
    "ops/cuda/adapters/vector_expand.py:_norm_shrink_kernel": (70, "one kernel is one launch"),
    "ops/cuda/adapters/vector_expand.py:_vector_expand_kernel": (105, "one kernel is one launch"),
    "server/commands/quantize.py:quantize": (72, "five lines for each flag"),
    "server/commands/serve.py:serve": (95, "three lines for each flag"),
}

C_SOURCES = {"cpu/native/csrc": ("c", "h"), "cuda/csrc": ("cu", "cuh")}

# Folders of tests that mirror no folder of the package.
OTHER_TEST_FOLDERS = {"additive", "examples", "gpu", "parity", "simulation"}

# Import names that differ from the name of the library that ships them, or that is the one to say which version.
SHIPPED_BY = {
    "flashinfer": "flashinfer-python",
    "huggingface_hub": "transformers",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "sse_starlette": "sse-starlette",
    "triton": "torch",
    "tvm_ffi": "flashinfer-python",
}

# Declared since they are imported, with a floor of our own; each comes with another library in any case, so that naming
# it adds nothing to an installation and does not count among the direct ones.
BROUGHT_BY = {"h11": "uvicorn", "jinja2": "torch", "tokenizers": "transformers"}


# A library that torch requires, of which the `cuda` extra asks for more parts.
OF_TORCH = {"cuda-toolkit"}

# Used where the application has it, and done without elsewhere.
OPTIONAL = {"httpx2", "opentelemetry-api"}


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def sizes() -> dict[str, tuple[int, int]]:
    """Each file and function of the packages with its length in lines and the general limit."""
    found: dict[str, tuple[int, int]] = {}
    for path in sources(*PACKAGES):
        found[name_of(path)] = (len(path.read_text(encoding="utf-8").splitlines()), MAX_FILE_LINES)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                key = f"{name_of(path)}:{node.name}"
                found[key] = max(found.get(key, (0, 0)), (length, MAX_FUNCTION_LINES))
    return found


def test_files_and_functions_stay_small() -> None:
    long = [
        f"{name}: {length} lines, at most {limit}"
        for name, (length, general) in sizes().items()
        if length > (limit := EXCEPTIONS.get(name, (general, ""))[0])
    ]
    assert not long, "\n".join(long)


def test_exceptions_to_the_size_limits_are_still_needed() -> None:
    found = sizes()
    stale = [name for name in EXCEPTIONS if name not in found or found[name][0] <= found[name][1]]
    assert not stale


def test_folders_stay_small() -> None:
    """A reader sees all modules of a folder at once; families of models, one file each, are as many as there are."""
    counts = Counter(path.parent for path in sources(*PACKAGES) if path.name != "__init__.py")
    large = [
        f"{name_of(folder)}: {count} modules, at most {MAX_MODULES}"
        for folder, count in counts.items()
        if count > MAX_MODULES and folder.name != "families"
    ]
    assert not large, large


def test_what_is_for_one_device_is_in_its_folder() -> None:
    """Code for the CPU lies under cpu/ and code for CUDA under cuda/, with one name on both sides."""
    prefixed = [name_of(path) for path in sources("engine", "ops") if re.match(r"(cpu|cuda)_", path.name)]
    assert not prefixed


def test_every_file_says_what_it_owns() -> None:
    silent = []
    for path in sources(*PACKAGES, "examples", "tests", ".ci"):
        summary = (ast.get_docstring(tree_of(path)) or "").split("\n\n")[0]
        if not re.search(r"\w.*\.(\s|$)", summary, re.DOTALL):
            silent.append(name_of(path))
    assert not silent, f"no first sentence in the docstring of {silent}"


def test_every_module_of_the_packages_names_its_exports() -> None:
    missing = []
    for path in sources(*PACKAGES):
        assigned = {
            target.id
            for node in tree_of(path).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if len(tree_of(path).body) > 1 and "__all__" not in assigned:
            missing.append(name_of(path))
    assert not missing, f"no __all__ in {missing}"


def test_every_package_is_listed_and_typed() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in sources(*PACKAGES) if path.suffix == ".py"}
    assert sorted(listed) == ["headrace", *sorted("headrace." + ".".join(folder.parts) for folder in folders)]
    for folder in folders:
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} has modules but no __init__.py"
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
        data = project()["tool"]["setuptools"]["package-data"][f"headrace.{package}"]
        c_sources = [f"{folder}/*.{kind}" for folder, kinds in C_SOURCES.items() for kind in kinds]
        assert data == [*{"ops": c_sources, "server": ["page/*"]}.get(package, []), "py.typed"]
    assert not (ROOT / "__init__.py").exists()


def declared(*extras: str) -> set[str]:
    """The names of the libraries that users install: the base ones and those of the named extras."""
    optional = project()["project"]["optional-dependencies"]
    wanted = [*project()["project"]["dependencies"], *(line for extra in extras for line in optional[extra])]
    return {re.split(r"[<>=!~;\[ ]", line)[0] for line in wanted}


def imported(*packages: str) -> dict[str, str]:
    """The libraries that the packages import, each with one file that does."""
    found: dict[str, str] = {}
    for path in sources(*packages):
        for node in ast.walk(tree_of(path)):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
                assert node.level == 0, f"{name_of(path)}: imports are absolute here"
            for top in (module.split(".")[0] for module in modules):
                if top != "headrace" and top not in sys.stdlib_module_names:
                    found[SHIPPED_BY.get(top, top)] = name_of(path)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_library_that_is_imported_is_declared_where_it_is(package: str) -> None:
    """What the server alone imports is of its extra; what the others import comes with the package."""
    known = declared(*{"server": ["server"]}.get(package, ["cuda"])) | OPTIONAL
    assert not {library: path for library, path in imported(package).items() if library not in known}


def test_every_library_that_is_declared_is_imported() -> None:
    assert not declared("server", "cuda") - imported(*PACKAGES).keys() - OF_TORCH


@pytest.mark.parametrize(("library", "by"), BROUGHT_BY.items())
def test_a_library_that_others_bring_has_a_floor(library: str, by: str) -> None:
    optional = project()["project"]["optional-dependencies"]
    lines = [*project()["project"]["dependencies"], *optional["server"]]
    assert [line for line in lines if re.match(rf"{library}>=\d", line)]
    brought = {re.split(r"[<>=!~;\[ (]", line)[0] for line in requires(by) or () if "extra ==" not in line}
    assert library in brought


def test_direct_libraries_are_few_and_each_is_explained() -> None:
    names = declared("server", "cuda")
    assert len(names - BROUGHT_BY.keys() - OF_TORCH) <= MAX_DIRECT_LIBRARIES
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    everything = names | declared("dev")
    assert not [name for name in sorted(everything) if f"`{name}`" not in text]


# Written so that this file does not match itself.
OF_ONE_MACHINE = re.compile(
    r"(?<![\w.])/(?:wor[k]|op[t]|roo[t]|hom[e]|User[s])/"  # a folder of some machine
    r"|find-link[s]|(?:extra-)?index-ur[l]|trusted-hos[t]"  # where a machine gets its packages
    r"|https?://[\w.-]+\.(?:interna[l]|loca[l]|cor[p]|la[n])\b"
    r"|\b(?:10\.\d+|192\.16[8]|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+\b"
)


def test_nothing_in_the_repository_belongs_to_one_machine() -> None:
    found = []
    for path in repository_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            if match := OF_ONE_MACHINE.search(line):
                found.append(f"{name_of(path)}:{number}: {match.group()}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "parts", [("cd /wor", "k/main"), ("--find-lin", "ks x"), ("http://pkg.loc", "al/"), ("10.1", ".2.3")]
)
def test_the_search_for_machine_paths_finds_them(parts: tuple[str, str]) -> None:
    assert OF_ONE_MACHINE.search("".join(parts))


def test_the_readme_names_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", "\n".join(re.findall(r"```.*?```|`[^`\n]+`", readme, re.DOTALL))))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    commands = [line for line in script.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert commands == ['cd "$(dirname "$0")/.." && exec make test']


def test_test_folders_mirror_the_package() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in sources("tests")} - {Path()}
    stray = [str(folder) for folder in folders if folder.parts[0] not in OTHER_TEST_FOLDERS]
    assert not [folder for folder in stray if not (ROOT / folder).is_dir()]
