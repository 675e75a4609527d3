"""What docs/scheduling.md says of the policies holds in shorter runs of the same simulation."""

from __future__ import annotations

import pytest

from headrace.engine.bench import policies
from headrace.engine.bench.policies import deadlines, fairness, sizes


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
