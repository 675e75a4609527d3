"""The device under test and its checkpoints; skips this folder where there is no GPU and nobody named another device.

`HEADRACE_TEST_DEVICE=cpu` runs the same tests against the CPU engine, all but those that speak of device memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gpu.checkpoints import MAKERS
from gpu.judge import Judge

from headrace.ops.cuda.arch import Arch

NAMED = os.environ.get("HEADRACE_TEST_DEVICE")
NO_GPU = "needs a CUDA GPU and torch sees none here; HEADRACE_TEST_DEVICE=cpu runs these tests on the CPU engine"
HERE = Path(__file__).parent
# What the libraries around a GPU warn of is not ours to fix; our own unraisable errors stay errors.
TOLERATED = ("default::DeprecationWarning", "default::FutureWarning", "default::UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with one clear sentence, and let other libraries' warnings pass."""
    absent = NAMED is None and not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            for warning in TOLERATED:
                item.add_marker(pytest.mark.filterwarnings(warning))
            if absent:
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(scope="session")
def device() -> str:
    """Where the engine under test runs."""
    return NAMED or "cuda"


@pytest.fixture
def cuda(device: str) -> str:
    """The device, for tests that mean nothing on another."""
    if device != "cuda":
        pytest.skip("speaks of a GPU's memory or numbers")
    return device


@pytest.fixture
def cuda_8_bits(cuda: str) -> str:
    """The device, for tests of keys and values in 8 bits, which older GPUs cannot convert."""
    if not Arch.of(cuda).has("fp8"):
        pytest.skip("needs a GPU with 8-bit floats")
    return cuda


class Zoo:
    """Checkpoints and their judges, each made when it is first asked for."""

    def __init__(self, root: Path, device: str) -> None:
        self.device = device
        self._root = root
        self._judges: dict[tuple[str, bool], Judge] = {}

    def folder(self, name: str) -> Path:
        """The folder of a checkpoint; `name` is a key of `checkpoints.MAKERS`."""
        folder = self._root / name.replace(" ", "-")
        if not folder.exists():
            MAKERS[name](folder)
        return folder

    def judge(self, name: str, *, fp8: bool = False) -> Judge:
        """Its judge; `fp8` allows for keys and values that are stored in 8 bits."""
        key = (name, fp8)
        if key not in self._judges:
            # Where the last of a token's experts is close, rounding may choose another, and every logit moves.
            loose = 8.0 if "experts" in name or "gpt-oss" in name else 4.0
            self._judges[key] = Judge(self.folder(name), self.device, fp8=fp8, loose=loose)
        return self._judges[key]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory, device: str) -> Zoo:
    """All checkpoints of this run."""
    return Zoo(tmp_path_factory.mktemp("checkpoints"), device)
