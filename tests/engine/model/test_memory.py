"""What is free is read from the system and bounded by the control group, and never below nothing."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil
import pytest
from leftovers import settle

from headrace.engine.model.shared import memory


def test_free_memory_is_what_the_system_has_to_give() -> None:
    settle()
    free = memory.free_host_bytes()
    available = psutil.virtual_memory().available
    assert 0 < free < 1.25 * available + 2**30
    if memory._number("memory.max") is None:  # a control group may leave less than the system has
        assert free > 0.75 * available - 2**30


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("1000000", "400000", 600000), ("1000000", "1200000", 0), ("max", "5", None), (None, None, None)],
)
@pytest.mark.parametrize("cached", [0, 700_000])
def test_a_control_group_bounds_it(
    limit: str | None,
    used: str | None,
    expected: int | None,
    cached: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Files in memory count as used there, and are given up for whatever needs the memory."""
    for name, text in (("max", limit), ("current", None if used is None else str(int(used) + cached))):
        if text is not None:
            (tmp_path / f"memory.{name}").write_text(text + "\n")
    if cached:
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached - 1000}\nactive_file 1000\n")
    monkeypatch.setattr(memory, "_CONTROL_GROUP", tmp_path)
    free = memory.free_host_bytes()
    assert free == expected if expected is not None else free > 1000000


def test_freed_memory_goes_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    process, size = psutil.Process(), 1 << 14
    settle()
    blocks = [libc.malloc(size) for _ in range(8000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # the last one keeps malloc from shrinking the heap by itself
        libc.free(block)
    before = process.memory_info().rss
    memory.return_freed_memory()
    assert before - process.memory_info().rss > 0.8 * 8000 * size
    libc.free(blocks[-1])


@pytest.mark.parametrize("error", [AttributeError, OSError])
def test_another_c_library_is_left_alone(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", missing)
    memory.return_freed_memory()
