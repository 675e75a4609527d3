"""Drafts are right as often as a benchmark wants it, its windows hold what they should, and its refusals say why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from drafting_engines import always_deep
from emulated_cuda import emulated
from typer.testing import CliRunner

from headrace.engine import DeviceUnavailable, EngineConfig
from headrace.engine.bench.engine import drafted_answers
from headrace.engine.bench.engine.speculation import Plan, drafter_of, expected_length, rates_of, run, windows
from headrace.engine.bench.opening import BenchmarkFailed, Target
from headrace.engine.bench.profile import Commit
from headrace.engine.life.build import open_engine
from headrace.engine.speculation import DraftModel, Ngram
from headrace.server.cli import app

RATES = (0.9, 0.6, 0.3)
PLAN = Plan(
    batches=[3], k=3, rates=RATES, drafter="eagle3", modes=["off", "idle", "on", "wrong"],
    context=60, tokens=60, warm_up=8, repeats=2, temperature=0.7,
)  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> Target:
    folder = tiny_models.random_folder(tmp_path / "tiny", max_position_embeddings=2048)
    return Target(model=str(folder), device="cpu", load_format="random", kv_memory="4MiB")


def figures_of(target: Target, plan: Plan, path: Path) -> Any:
    run(target, plan, str(path))
    return json.loads(path.read_text())["figures"]


def test_drafts_are_right_by_the_rates(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    always_deep(monkeypatch)
    with emulated():
        found = figures_of(replace(target, device="cuda"), PLAN, tmp_path / "out.json")["3"]
    assert found.keys() == {"off", "idle", "on", "wrong"}
    for mode, figure in found.items():
        assert len(figure["tokens_per_second"]) == 2 and min(figure["tokens_per_second"]) > 0, mode
        assert figure["depths"].keys() == ({"3"} if mode in ("on", "wrong") else {"0"}), mode
    assert found["off"]["tokens_a_step"] == found["idle"]["tokens_a_step"] == found["wrong"]["tokens_a_step"] == 1.0
    assert found["idle"]["drafted_runs"] == 0 < found["wrong"]["drafted_runs"]
    wrong = found["wrong"]
    assert wrong["drafted_runs"] == wrong["drafted_by_position"][0] >= wrong["drafted_by_position"][2] > 0
    assert wrong["right_by_position"] == [0, 0, 0] and wrong["accepted_length"] == 1.0
    check_rates(found["on"])
    assert "3, right by the rates" in capsys.readouterr().out


def test_drafts_without_a_drafter_are_right_by_the_rates(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    plan = replace(PLAN, drafter="free", modes=["on"])
    with emulated():
        check_rates(figures_of(replace(target, device="cuda"), plan, tmp_path / "out.json")["3"]["on"])


def check_rates(figure: Any) -> None:
    """The number of right drafts at each place lies within four deviations of what the rate says."""
    runs, right = figure["drafted_runs"], figure["right_by_position"]
    for rate, before, here in zip(RATES, [runs, *right], right, strict=False):
        assert here == pytest.approx(rate * before, abs=4 * (rate * (1 - rate) * before) ** 0.5 + 1)
    assert figure["accepted_length"] == pytest.approx(1 + sum(right) / runs)
    assert figure["tokens_a_step"] == pytest.approx(figure["accepted_length"], abs=0.1)


def test_a_cpu_measures_what_an_idle_head_costs(target: Target, tmp_path: Path) -> None:
    plan = replace(PLAN, tokens=16, modes=["off", "idle"], drafter="eagle3:quantize=int8")
    found = figures_of(target, plan, tmp_path / "out.json")["3"]
    assert found.keys() == {"off", "idle"} and found["idle"]["depths"] == {"0": 32}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "on: only a GPU"),
        ({"modes": ["off"], "drafter": "free"}, "free: only a GPU"),
        ({"modes": ["off", "of"]}, "--modes of: give some of off, idle, on, wrong"),
        ({"drafter": "eagle4"}, "--drafter eagle4: must begin with one of ngram, draft"),
        ({"drafter": "eagle3:quantize=int3"}, r"eagle3,quantize=int3: speculation\.quantize: must be fp8"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], told: str, target: Target) -> None:
    with pytest.raises(BenchmarkFailed, match=told):
        run(target, replace(PLAN, **changes), None)


def test_drafts_are_chosen_in_one_way(target: Target) -> None:
    chosen = replace(target, more={"speculation": "ngram"})
    with pytest.raises(BenchmarkFailed, match="use --drafter"):
        run(chosen, replace(PLAN, modes=["off"]), None)
    asked = drafted_answers.Asked(task="copy", batches=[1], tokens=8, repeats=1, temperature=0.0)
    with pytest.raises(BenchmarkFailed, match="use --drafter"):
        drafted_answers.run(chosen, Ngram(), asked, None)
    with pytest.raises(BenchmarkFailed, match="give one of copy, chat"):
        drafted_answers.run(target, Ngram(), replace(asked, task="sing"), None)


def test_rows_that_end_too_early_give_no_figures(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.bench.engine.speculation._SPREAD", 0.5)
    with pytest.raises(BenchmarkFailed, match="3 rows did not decode together"):
        run(target, replace(PLAN, tokens=200, context=1000, modes=["off"]), None)


def test_an_engine_on_a_cpu_keeps_its_drafts(target: Target) -> None:
    config = EngineConfig(model=target.model, device="cpu", load_format="random", speculation=Ngram())
    with pytest.raises(DeviceUnavailable, match="on a GPU alone"):
        open_engine(config, change_drafts=lambda drafts: drafts)


def test_rates_and_drafters_are_read_from_text() -> None:
    assert expected_length(rates_of(None, 3)) == pytest.approx(2.9, abs=1e-3)
    assert rates_of(None, 1) == (0.82,) and rates_of(None, 5) == (0.82, 0.77, 0.71, 0.71, 0.71)
    assert rates_of("0.5,1", 2) == (0.5, 1.0) and expected_length((0.5, 1.0)) == 2.0
    assert drafter_of("ngram", 7) == Ngram(k=7) and drafter_of("draft:here", 2) == DraftModel("here", k=2)


@pytest.mark.parametrize("text", ["", "0.5", "0.5,0.5,0.5", "0.5,x", "0.5,1.1", "-0.1,0.5", "nan,0.5"])
def test_rates_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(BenchmarkFailed, match="give 2 numbers from 0 to 1"):
        rates_of(text, 2)


def test_windows_begin_where_the_one_before_ends() -> None:
    commits = [Commit(float(at), tokens) for at, tokens in enumerate([2, 2, 4, 1, 3, 2, 2, 2])]
    first, second = windows(commits, skipped=4, tokens=5, count=2)
    assert [commit.at for commit in first] == [1.0, 2.0, 3.0]
    assert [commit.at for commit in second] == [3.0, 4.0, 5.0]


def answers_of(smollm2: Path, task: str, out: Path, *more: str) -> Any:
    command = ["bench", "speculation", str(smollm2), "--task", task, "--batches", "2", "--device", "cpu"]
    options = ["--tokens", "8", "--repeats", "1", "--kv-memory", "64MiB", "--json", str(out), *more]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert f"{task}, tokens a processor second" in result.output
    return json.loads(out.read_text())


def test_answers_with_drafts_are_compared(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafted_answers, "_FEWEST_CHATS", 3)
    monkeypatch.setattr(drafted_answers, "_TEXTS", ("one two three one two three {year}",))
    monkeypatch.setattr(drafted_answers, "_COMPARED", 8)
    found = answers_of(smollm2, "copy", tmp_path / "out.json")
    (figure,) = found["figures"]
    assert found["conditions"]["speculation"] == "Ngram(k=4, longest=4)"
    assert figure["chats"] == figure["compared"] == 4 and not figure["margins"]
    assert figure["off"][0] > 0 and figure["ratios"] == [figure["on"][0] / figure["off"][0]]


def test_drawn_answers_are_not_compared(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafted_answers, "_FEWEST_CHATS", 1)
    (figure,) = answers_of(smollm2, "chat", tmp_path / "out.json", "--temperature", "0.5")["figures"]
    assert (figure["chats"], figure["compared"], figure["margins"]) == (2, 0, [])
