"""What is free is read from the system and bounded by the control group, and never below nothing."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from headrace.engine.model import memory


def test_free_memory_is_what_the_system_has_to_give() -> None:
    free = memory.free_host_bytes()
    assert 0 < free <= psutil.virtual_memory().total
    assert free == pytest.approx(psutil.virtual_memory().available, rel=0.25, abs=2**30) or free < 2**40


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("1000000", "400000", 600000), ("1000000", "1200000", 0), ("max", "5", None), (None, None, None)],
)
def test_a_control_group_bounds_it(
    limit: str | None, used: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = memory._number

    def number(path: str) -> int | None:
        text = limit if path.endswith("max") else used
        file = tmp_path / Path(path).name
        if text is not None:
            file.write_text(text + "\n")
        return plain(str(file))

    monkeypatch.setattr(memory, "_number", number)
    free = memory.free_host_bytes()
    assert free == expected if expected is not None else free > 1000000
