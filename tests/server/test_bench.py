"""`headrace bench serve`: its figures add up and its processes end; never how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.server.bench import fake, serve


@pytest.mark.parametrize("name", sorted(fake.SCENARIOS))
def test_scenarios_over_the_fake_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "_STREAMS", 10)
    monkeypatch.setattr(fake, "_STEP_SECONDS", 0.2)
    path = tmp_path / "figures.json"
    fake.run([name], seconds=1.0, scale=0.01, json_path=str(path))
    figures = json.loads(path.read_text())["figures"][name]
    assert figures["pages held at the end"] == figures["requests left at the end"] == 0
    if name == "idle":
        assert figures["streams with their first token"] == 100
    elif name == "disconnects":
        assert figures["disconnects"] == 100
    elif name == "overload":
        assert 0 < figures["answered/s at 3 times"] <= 1.1 * figures["answered/s at peak"] + 8
    else:
        expected = {"events": 200, "events-half": 100, "tokens": 1000, "tokens-half": 500}[name]
        assert 0 < figures["events/s"] <= figures["tokens/s"] <= 1.3 * expected


def test_a_real_model(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    serve.run(
        str(smollm2),
        options={"kv_memory": "32MiB"},
        requests=4,
        concurrency=2,
        prompt_tokens=8,
        output_tokens=6,
        json_path=str(path),
    )
    figures = json.loads(path.read_text())["figures"]
    assert figures["failed"] == 0 and figures["output tokens/s"] == pytest.approx(6 * figures["requests/s"])
