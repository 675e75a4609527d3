"""`headrace quantize` as a person at the terminal sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest
import torch
from quantising import contents, copied, dense_folder

from headrace.engine import Engine
from headrace.engine.many.own_texts import own_texts
from headrace.server.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", "quantize", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_folder(tmp_path_factory.mktemp("models") / "model", intermediate_size=176)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(f'{{"text": "{number * 7919:x}" }}\n' for number in range(400)))
    return path


def test_it_tells_sizes_and_what_stays_as_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, model, tmp_path / "out", "--format", "int4") == 0
    *told, sizes, layers = capsys.readouterr().out.splitlines()
    dense = [line for line in told if "is not quantised" in line]
    assert [line.split()[0] for line in dense] == [f"model.layers.{number}.mlp.down_proj" for number in range(2)]
    assert dense[0].endswith("is not quantised: 176 inputs are no multiple of 32")
    assert 5 <= sum("%" in line for line in told) <= 10 and told[-1].startswith("100 %")
    before = (model / "model.safetensors").stat().st_size / 1000
    after = (tmp_path / "out" / "model.safetensors").stat().st_size / 1000
    assert sizes.startswith("model: ") and sizes.endswith(f"in {tmp_path / 'out'}")
    stated = [float(word) for word in sizes.replace("(", "").split() if word[0].isdigit()]
    assert stated[0] == pytest.approx(before, rel=0.02) and stated[1] == pytest.approx(after, rel=0.02)
    first, kinds = layers.split("; as they were: ")
    assert first == "12 linear layers are quantised"
    dense_kinds = ["embeddings (36.9 kB)", "linear layers (135.2 kB)", "norms (1.9 kB)", "output head (36.9 kB)"]
    assert sorted(kinds.split(", ")) == dense_kinds


def test_a_repeated_command_says_that_its_copy_is_complete(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, model, tmp_path / "out", "--format", "int8") == 0
    sizes = capsys.readouterr().out.splitlines()[-2:]
    assert run(monkeypatch, model, tmp_path / "out", "--format", "int8") == 0
    complete = f"{tmp_path / 'out'} is complete: an earlier run has made it from this model with these options"
    assert capsys.readouterr().out.splitlines() == [complete, *sizes]
    assert run(monkeypatch, model, tmp_path / "out", "--format", "fp8") == 1
    assert "is there already, made with format 'int8' and not 'fp8'" in capsys.readouterr().err


def test_data_changes_the_weights(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, model, tmp_path / "a", "--format", "int8", "--data", texts, "--sequence-tokens", "60") == 0
    assert run(monkeypatch, model, tmp_path / "b", "--format", "int8") == 0
    names = {name for name, data in contents(tmp_path / "a").items() if contents(tmp_path / "b")[name] != data}
    assert names == {"model.safetensors", "headrace_quantize.json"}


def test_the_model_writes_the_texts_to_calibrate_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--format", "int4", "--self-data", "--sequences", "11", "--sequence-tokens", "40"]
    assert run(monkeypatch, model, tmp_path / "out", *asked) == 0
    shares = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("writing texts")]
    assert shares == [f"{share}" for share in range(10, 101, 10)]

    async def texts() -> list[list[int]]:
        async with Engine(model, device="cpu", kv_memory="8MiB", generation_defaults="none") as engine:
            return await own_texts(engine, first=1, sequences=11, tokens=40, wrote=lambda done: None)

    copied(model, tmp_path / "by hand", "int4", data=torch.tensor(anyio.run(texts)))
    names = {name for name, data in contents(tmp_path / "out").items() if contents(tmp_path / "by hand")[name] != data}
    assert names == {"headrace_quantize.json"}
    assert run(monkeypatch, model, tmp_path / "out", *asked) == 0
    assert "is complete" in capsys.readouterr().out
    assert run(monkeypatch, model, tmp_path / "out", *asked[:-1], "41") == 1
    assert "made with data '11 x 40 of its own' and not '11 x 41 of its own'" in capsys.readouterr().err


def test_data_and_data_of_the_models_own_are_not_given_together(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, model, tmp_path / "out", "--format", "int4", "--self-data", "--data", texts) == 2
    assert "--self-data stands in place of --data" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--format", "int4", "--data", "{texts}", "--sequences", "1", "--sequence-tokens", "9"],
            "data: is too short: 9 ",
        ),
        (["--format", "int8", "--data", "/missing"], "data: /missing cannot be read"),
        (["--format", "int8", "--device", "tpu"], "device: tpu is not known"),
    ],
)
def test_what_does_not_fit_is_one_line(
    arguments: list[str],
    message: str,
    model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [each.format(texts=texts) for each in arguments]
    assert run(monkeypatch, model, tmp_path / "out", *given) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headrace: {message}")
    assert not list(tmp_path.iterdir())


def test_a_gguf_and_an_unknown_format_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert run(monkeypatch, tmp_path / "small.gguf", tmp_path / "out", "--format", "int8") == 1
    assert "is a GGUF file" in capsys.readouterr().err
    assert run(monkeypatch, model, tmp_path / "out", "--format", "int3") == 2
    assert "'fp8', 'int8', 'int4'" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_a_stopped_process_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "model", num_hidden_layers=24)
    code = "from headrace.server.cli import main; main()"
    command = [sys.executable, "-c", code, "quantize", str(folder), str(tmp_path / "out"), "--format", "int4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "out.partial" / "journal.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    os.kill(process.pid, number)
    out, error = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    if number == signal.SIGINT:
        assert "the same command goes on from here" in out and error == "headrace: interrupted\n"
    copied(folder, tmp_path / "out", "int4")
    copied(folder, tmp_path / "whole", "int4")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
