"""What docs/scheduling.md says of the policies holds in shorter runs of the same simulation."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from headrace.engine.bench.host import policies
from headrace.engine.bench.host.policies import deadlines, fairness, sizes


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_SECONDS", 20.0)


def test_a_flood_costs_others_little_and_the_device_nothing() -> None:
    found = fairness(8.0)
    assert found["fair_share"]["ratio"] <= 1.5 < 10 < found["first_come"]["ratio"]
    assert found["fair_share"]["jain"] >= 0.95 > found["first_come"]["jain"]
    assert found["fair_share"]["tokens_per_second"] >= 0.97 * found["first_come"]["tokens_per_second"]


def test_short_questions_do_not_wait_for_long_documents() -> None:
    found = sizes()
    assert found["size_classes"]["short"] <= 0.4 * found["first_come"]["short"]
    assert found["size_classes"]["long"] <= 1.2 * found["first_come"]["long"]


def test_under_overload_more_is_done_in_time_and_nothing_too_late() -> None:
    found = deadlines()
    assert found["deadlines"]["goodput"] >= 1.2 * found["first_come"]["goodput"]
    assert found["deadlines"]["late_tokens"] == found["first_come"]["late_tokens"] == 0


def test_longer_answers_gain_with_a_target_for_what_runs() -> None:
    found = sizes(30, 0.03)
    assert found["size_classes"]["short"] <= 0.4 * found["first_come"]["short"]
    assert found["size_classes"]["long"] <= 1.2 * found["first_come"]["long"]


def test_the_plots_of_the_documents_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(policies, "_SECONDS", 0.5)
    docs = Path(__file__).parents[3] / "docs"
    script = runpy.run_path(str(docs / "plots" / "scheduling.py"))
    script["main"].__globals__["FOLDER"] = tmp_path
    script["main"]()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (docs / "plots").glob("*.svg")}
    text = (docs / "scheduling.md").read_text(encoding="utf-8")
    assert all(f"](plots/{name})" in text for name in drawn)
