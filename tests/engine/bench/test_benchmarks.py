"""Every benchmark runs to its table and its file on a tiny model, and refuses what would mean something else."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import expert_models
import pytest
import tiny_models
from typer.testing import CliRunner

from headrace.engine import InvalidParams
from headrace.engine.bench import opening
from headrace.engine.bench.engine import flood, latency, lora, options, perplexity, repeat, startup, stream, throughput
from headrace.engine.bench.engine.latency import parse_params, parse_prefill
from headrace.engine.bench.floor import Speed, model_cost
from headrace.engine.bench.host import scheduler
from headrace.engine.bench.opening import BenchmarkFailed, Target, synthetic_table
from headrace.engine.bench.shapes import spec_of
from headrace.engine.tokens.text import Detokenizer
from headrace.server.cli import app


@pytest.fixture
def target(tmp_path: Path) -> Target:
    folder = tiny_models.random_folder(tmp_path / "tiny", max_position_embeddings=2048)
    return Target(model=str(folder), device="cpu", load_format="random", kv_memory="2MiB")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "figures.json"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_lora(target: Target, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "_LOADS", 10)
    monkeypatch.setattr(lora, "_FILLING", 2)
    monkeypatch.setattr(lora, "_REPEATS", 1)
    monkeypatch.setattr(lora, "_TRAFFIC", 2)
    sizes = lora.Sizes(batches=[1, 3], context=20, steps=8, slots=2, registered=5, rank=4, small=False)
    lora.run(target, sizes, str(out))
    found = read(out)
    assert [[case["adapters"] for case in each["cases"]] for each in found["decode"]] == [[0, 1], [0, 1, 3]]
    for each in found["decode"]:
        floors = [case["floor_ms"] for case in each["cases"]]
        assert floors == sorted(floors) and floors[0] > 0 and all(case["ms"] > 0 for case in each["cases"])
    assert found["traffic"]["few"] > 0 and found["loading"]["loading"] > 0
    assert set(found["prompts"]) == {"0", "1", "3"} and set(found["disabled_ms"]) == {"1", "3"}
    assert 0 < found["ready"]["least"] <= found["ready"]["median"] <= found["ready"]["most"]
    assert "Zipf over 5" in capsys.readouterr().out
    assert dataclasses.replace(sizes, registered=1, slots=9).adapters == 9
    assert "too many slots" in str(lora._lines(found | {"ready": {}}, sizes))


def test_latency(target: Target, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latency.run(
        target, batches=[1, 3], context=40, steps=8, prefill="2x40", repeats=2, peer=None, profile=True,
        json_path=str(out),
    )  # fmt: skip
    found = read(out)
    assert [figure["batch"] for figure in found["decode"]] == [1, 3]
    for figure in found["decode"]:
        step = figure["step_ms"]
        assert 0 < figure["floor_ms"] < step["p10"] <= step["p50"] <= step["p90"]
        assert figure["intervals"] == 16
        assert figure["mean_context"] == 40
    assert len(found["prefill"]["tokens_per_second"]) == 2
    assert found["profile"]["3"]["host_us"]["plan"]["p50"] > 0
    printed = capsys.readouterr().out
    assert "expected" not in printed, "the model has no experts"
    assert "decode step, ms" in printed and "prefill, tok/s" in printed and "batch 3: host" in printed


def in_bfloat16(elements: int) -> Any:
    """What the floor needs to know of an engine whose cache has so many elements of a token."""
    return SimpleNamespace(dtype="bfloat16", page_bytes=2 * 16 * elements, page_size=16)


@pytest.mark.filterwarnings("ignore")
def test_latency_of_experts_counts_them_for_the_floor(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = Speed(1e9, 1e15)
    monkeypatch.setattr(opening, "measure", lambda device: speed)
    folder = expert_models.expert_folder(tmp_path / "experts", num_experts=8, num_experts_per_tok=2)
    target = Target(model=str(folder), device="cpu", kv_memory="2MiB")
    latency.run(
        target, batches=[1, 3], context=40, steps=8, prefill=None, repeats=1, peer=None, profile=False,
        json_path=str(out),
    )  # fmt: skip
    found = read(out)["decode"]
    assert [figure["experts"] for figure in found] == [8, 8]
    assert [figure["expected_experts"] for figure in found] == pytest.approx([2.0, 8 * (1 - 0.75**3)])
    first, last = (figure["chosen_experts"] for figure in found)
    assert first == [2.0, 2.0], "one row"
    assert all(2 <= count <= 6 for count in last), "three rows"
    cost = model_cost(str(folder), in_bfloat16(spec_of(str(folder)).cached_elements))
    for rows, figure in zip((1, 3), found, strict=True):
        chosen = mean(figure["chosen_experts"])
        floor = cost.decode_seconds([figure["mean_context"]] * rows, speed, chosen)
        assert figure["floor_ms"] == pytest.approx(1000 * floor)
        unread = cost.expert_bytes * (1 - chosen / 8)
        assert floor == pytest.approx(cost.decode_seconds([figure["mean_context"]] * rows, speed, 8) - unread / 1e9)
    printed = " ".join(capsys.readouterr().out.split())
    assert "2.0 (2.0 to 2.0)" in printed and f"({min(last):.1f} to {max(last):.1f})" in printed
    assert "2.0 of 8" in printed and "4.6 of 8" in printed and "expected" in printed


def test_latency_expects_experts_that_it_does_not_count(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = expert_models.expert_folder(tmp_path / "experts", num_experts=8, num_experts_per_tok=2)
    target = Target(model=str(folder), device="cpu", kv_memory="2MiB", more={"speculation": "ngram:k=2"})
    latency.run(
        target, batches=[2], context=40, steps=8, prefill=None, repeats=1, peer=None, profile=False,
        json_path=str(out), params='{"speculate": false}',
    )  # fmt: skip
    (found,) = read(out)["decode"]
    assert found["chosen_experts"] == [] and found["floor_ms"] > 0
    assert "not seen" in " ".join(capsys.readouterr().out.split())


def test_latency_of_rows_with_options(target: Target, out: Path) -> None:
    latency.run(
        target, batches=[2], context=40, steps=8, prefill=None, repeats=1, peer=None, profile=False,
        json_path=str(out), params='{"frequency_penalty": 0.5, "temperature": 1.0}',
    )  # fmt: skip
    found = read(out)
    assert found["conditions"]["frequency_penalty"] == 0.5 and found["decode"][0]["intervals"] == 8


def test_options_are_measured_beside_none(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models.random_folder(tmp_path / "bytes", max_position_embeddings=2048, vocab_size=400)
    target = Target(model=str(folder), device="cpu", load_format="random", kv_memory="2MiB")
    options.run(target, batches=[2], context=20, steps=16, repeats=1, json_path=str(out))
    found = read(out)
    (figure,) = found["options"]
    steps = figure["step_ms"]
    assert steps.keys() == options.KINDS.keys() and all(len(each) == 1 for each in steps.values())
    assert figure["beside"].keys() == options.BESIDE.keys()
    for name, (measured,) in figure["beside"].items():
        assert 0 < measured["p50"] <= measured["p99"] <= measured["most"] and measured["own"] > 0, name
    assert 0 < found["mask_us"]["p50"] <= found["mask_us"]["p99"]
    assert "2, JSON schema" in capsys.readouterr().out


@pytest.mark.parametrize("params", ["[1]", "{", '{"top_q": 1}', '{"top_p": 7}', "3"])
def test_params_that_no_row_can_ask_for_are_refused(params: str) -> None:
    with pytest.raises(BenchmarkFailed, match="--params"):
        parse_params(params)


def test_answers_asked_again_say_the_options_that_they_were_asked_with(
    smollm2: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "CHATS", repeat.CHATS[:2])
    target = Target(model=str(smollm2), device="cpu", more={"dtype": "bfloat16"})
    repeat.run(target, tokens=1, json_path=str(out))
    found = read(out)
    assert (found["conditions"]["dtype"], found["conditions"]["chats"]) == ("bfloat16", 2)
    assert found["again"]["changed"] == found["all at once"]["changed"] == 0, "the CPU gives a row the same bits always"


def test_throughput(target: Target, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    throughput.run(target, requests=6, scale=0.03, repeats=2, peer=None, profile=True, json_path=str(out))
    found = read(out)
    for measured in found["headrace"]["runs"]:
        assert len(measured["first_tokens"]) == 6
        assert 0 < min(measured["first_tokens"]) <= max(measured["first_tokens"]) < measured["seconds"]
        assert measured["steps"] >= 25 and measured["preemptions"] == 0
    assert max(found["headrace"]["tokens_per_second"]) < found["floor_tokens_per_second"]
    assert found["profile"]["loop_lag_ms"]["p99"] >= found["profile"]["loop_lag_ms"]["p50"]
    assert "TTFT p50, ms" in capsys.readouterr().out


def test_stream_pays_for_text(target: Target, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream.run(target, requests=4, scale=0.03, repeats=1, profile=False, json_path=str(out))
    found = read(out)
    assert found["text"].startswith("yes, of a synthetic vocabulary")
    rate, beside = found["tokens_per_second"][0], found["offline_tokens_per_second"][0]
    assert found["loss"] == [pytest.approx(1 - rate / beside)]
    assert 0 < found["itl_p50_ms"][0] <= found["itl_p99_ms"][0]
    assert "event-loop lag p99, ms" in capsys.readouterr().out


def test_startup(target: Target, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    startup.run(target, prompt_tokens=8, repeats=1, json_path=str(out))
    seconds = read(out)["seconds"]
    parts = [seconds[phase][0] for phase in ("start Python", "import headrace.engine", "open", "first token")]
    assert all(part > 0 for part in parts)
    assert seconds["total"] == [pytest.approx(sum(parts))]
    assert "start to first token" in capsys.readouterr().out


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match="ModelRejected"):
        startup.measure_once(str(tmp_path / "nowhere"), {"device": "cpu"}, 1)


def test_too_little_memory_is_refused_with_what_is_needed(target: Target) -> None:
    small = Target(model=target.model, device="cpu", load_format="random", kv_memory="4KiB")
    with pytest.raises(BenchmarkFailed, match=r"pages are needed .* --kv-memory \d+MiB"):
        throughput.run(small, requests=6, scale=0.03, repeats=1, peer=None, profile=False, json_path=None)
    few = Target(model=target.model, device="cpu", load_format="random", max_rows=2)
    with pytest.raises(BenchmarkFailed, match="--max-rows"):
        throughput.run(few, requests=6, scale=0.03, repeats=1, peer=None, profile=False, json_path=None)


def test_peers_that_cannot_run_are_refused(target: Target) -> None:
    absent = [("other", "not known")] + ([] if find_spec("vllm") else [("vllm", "not installed")])
    for name, message in absent:
        with pytest.raises(BenchmarkFailed, match=message):
            throughput.run(target, requests=2, scale=0.03, repeats=1, peer=name, profile=False, json_path=None)


@pytest.mark.parametrize("text", ["32", "x", "0x5", "5x0", "ax2", "2x3x4", "-1x5"])
def test_prefill_shapes_that_mean_nothing_are_refused(text: str) -> None:
    assert parse_prefill("32x2048") == (32, 2048)
    with pytest.raises(BenchmarkFailed, match="32x2048"):
        parse_prefill(text)


def test_the_synthetic_vocabulary_has_text_and_broken_characters() -> None:
    table = synthetic_table(1000)
    assert len(table.pieces) == 1000
    assert 0.01 < sum(text is None for text in table.texts) / 1000 < 0.05
    detokenizer = Detokenizer(table)
    assert detokenizer.feed(50) == "" and detokenizer.feed(0) == "é"


def test_options_of_the_command_line_reach_the_engine(target: Target, out: Path) -> None:
    command = ["bench", "latency", target.model, "--load-format", "random", "--device", "cpu", "--kv-memory", "1MiB"]
    lengths = ["--batches", "2", "--context", "8", "--steps", "8", "--repeats", "1", "--json", str(out)]
    result = CliRunner().invoke(app, [*command, *lengths, "--max-rows", "4", "--set", "dtype=float32"])
    assert result.exit_code == 0, result.output
    found = read(out)["conditions"]
    assert (found["max_rows"], found["kv_memory"], found["dtype"]) == (4, "1MiB", "float32")
    refused = CliRunner().invoke(app, [*command, "--set", "nothing=1"])
    assert isinstance(refused.exception, InvalidParams)
    assert CliRunner().invoke(app, [*command, "--set", "nothing"]).exit_code == 2


@pytest.mark.parametrize("sizes", ["x", "", "1,,2", "0", "-1", "1,2,", "1.5", "²"])
@pytest.mark.parametrize("command", ["latency", "transformers"])
def test_batch_sizes_that_mean_nothing_are_refused_before_anything_is_loaded(
    command: str, sizes: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["bench", command, str(tmp_path / "no model"), "--batches", sizes])
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == (
        f"Error: Invalid value: --batches {sizes!r}: give sizes from 1 up, separated by commas, such as 1,8,32"
    )


@pytest.mark.parametrize("loads", ["", "x", "1,", "0", "-0.5", "nan", "inf", "1.01", "0.5;1"])
def test_shares_that_mean_nothing_are_refused_before_anything_is_loaded(loads: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "flood", str(tmp_path / "no model"), "--loads", loads])
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == (
        f"Error: Invalid value: --loads {loads!r}: give parts above 0 and up to 1, separated by commas, such as 1,0.87"
    )


def test_scheduler(out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_STEPS", 60)
    monkeypatch.setattr(scheduler, "_RUNS", 1)
    scheduler.run(rows=20, drafts=2, json_path=str(out))
    found = read(out)["microseconds"]
    assert [*found] == ["no drafts", "all right", "none right"]
    for name, times in found.items():
        assert times["all"] > times["commit"] > times["commit without prefix cache"] * 0.5 > 0
        assert (times["counting"] > 1) == (name != "no drafts")
    assert " 60 " in capsys.readouterr().out, "tokens of a step of 20 rows with two right drafts each"


def test_flood(target: Target, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood, "_WARMING", 0.2)
    monkeypatch.setattr(flood, "_SETTLING", 0.05)
    flood.run(target, rows=4, seconds=1.0, loads=[0.87], scale=0.02, json_path=str(out))
    found = read(out)
    for loads in (found["all alike"], found["fair_share"], found["first_come"]):
        each = loads.pop("0.87")
        assert not loads and each["requests"] and each["steps"] and each["tokens_per_second"] > 0
        assert 0 < each["ttft_p50"] <= each["ttft_p99"] and 0.25 <= each["jain"] <= 1
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 4 and "one at 10 times" in told.out


def test_perplexity(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the model is the one of transformers; quantised weights give another."""
    import torch
    import transformers

    folder = tiny_models.whole_folder(tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + 7 * at % 94) for at in range(90)))
    target = Target(model=str(folder), device="cpu", kv_memory="2MiB", more={"dtype": "float32", "quantize": "int8"})
    perplexity.run(target, text=text, tokens=80, row_tokens=40, json_path=str(out))
    found = read(out)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = torch.tensor([ord(char) - 33 for char in text.read_text()[:80]]).view(2, 40)
    with torch.inference_mode():
        wanted = model(rows, labels=rows).loss.exp().item()
    assert found["perplexity"]["as it is"] == pytest.approx(wanted, rel=1e-3) and found["predicted"] == 78
    assert 1e-6 < abs(found["perplexity"]["quantize=int8"] / wanted - 1) < 0.5
    assert "quantize=int8" in capsys.readouterr().out
    with pytest.raises(BenchmarkFailed, match="the text has 90 tokens of the 91 asked for"):
        perplexity.run(target, text=text, tokens=91, row_tokens=40, json_path=None)
    assert len(perplexity.fixed_text(None)) > 100_000
