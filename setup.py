"""Compiles the CPU kernels when headrace is installed from its sources; an installation never fails for them.

Everything else about the package is in pyproject.toml. An editable installation compiles them on first use.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_FOLDER = Path("headrace/ops/cpu/native")


class BuildWithKernels(build_py):
    """Copies the modules, then compiles the kernels beside them."""

    def run(self) -> None:
        """Do both; say in one line why there are no kernels, if there are none."""
        super().run()
        if self.editable_mode:
            return
        try:
            spec = importlib.util.spec_from_file_location("native_library", Path(".src") / _FOLDER / "library.py")
            assert spec is not None and spec.loader is not None
            library = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(library)
            library.build(Path(self.build_lib) / _FOLDER / "built")
        except (OSError, subprocess.SubprocessError) as error:
            told = f"the CPU kernels are not compiled: {error}; headrace compiles them when it first needs them"
            self.announce(told, level=logging.WARNING)


class WheelOfPlatform(bdist_wheel):
    """Names a wheel that holds compiled kernels after the platform that they are for."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of any Python, and of this platform if there are kernels."""
        tags = super().get_tag()
        if not list(Path(self.bdist_dir).glob("**/built/*.so")):
            return tags
        self.root_is_pure = False
        platform = super().get_tag()[2]
        self.root_is_pure = True
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfPlatform})
