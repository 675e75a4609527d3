"""Runs every example in this process on the real model, and looks at what it prints or answers."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import httpx2
import pytest
import uvicorn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE = 60.0


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [path.stem for path in EXAMPLES.glob("*.py") if f'example("{path.stem}")' not in tests] == []


def test_chat(smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say hello.\nSay it again.\n\n"))
    anyio.run(example("chat").main, str(smollm2), 8)
    assert re.fullmatch(r"> \S.*\n> \S.*\n> ", capsys.readouterr().out, re.DOTALL)


def test_embeddings(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anyio.run(example("embeddings").main, str(minilm))
    printed = capsys.readouterr().out
    assert re.search(r"5 texts, 384 dimensions, \d+ tokens", printed)
    mill, dough = printed.split("Why does dough grow?")
    assert re.search(r"\(embedding\)\n  0\.\d\d  A headrace leads water", mill)
    assert re.search(r"\(embedding\)\n  0\.\d\d  Bread .*\n  0\.\d\d  A loaf rises", dough)


def test_many_streams(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anyio.run(example("many_streams").main, str(smollm2))
    printed = capsys.readouterr().out
    assert printed.count("together: ") == 10
    assert "together: 96 tokens" in printed
    assert "together: 112 of 256 prompt tokens" in printed  # seven of eight chats share the page of the system prompt
    assert re.search(r"cancelled: after 5 tokens, [1-9]\d* pages held, then 0", printed)
    assert re.search(r"timed out: \d+ tokens in 0.5 s, ended 'cancelled'", printed)
    assert re.search(r"slow reader: 1 paused .* completion_tokens=24", printed)
    read = re.search(r"paused with (\d+) tokens read", printed)
    chunks = re.search(r"in chunks of \[([\d, ]+)\]", printed)
    assert read is not None and chunks is not None
    sizes = [int(size) for size in chunks[1].split(",")]
    assert int(read[1]) + sum(sizes) == 24
    assert sizes[0] > 8, "what the reader missed did not arrive merged"
    assert printed.count("(length)") + printed.count("(stop)") == 3


class Letters:
    """A tokenizer of letters, as far as training needs one."""

    eos_token_id = 0

    def apply_chat_template(self, chat: Any, **options: Any) -> str:
        return f"<{chat[0]['content']}>"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(char) % 96 for char in text]}


@pytest.mark.filterwarnings("ignore")
def test_train_adapters(tmp_path: Path) -> None:
    """On a tiny model: it learns, and what it saves loads."""
    import torch
    import transformers

    from headrace.adapters.files import read_adapter
    from headrace.adapters.layout import ModelShape

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, **sizes))
    train = example("train_adapters").train
    losses = [train(base, Letters(), "json", tmp_path / str(steps), steps) for steps in (1, 60)]
    assert losses[1] < losses[0]
    shape = ModelShape(3, 32, 4, 2, 8, 48, 96)
    loaded = read_adapter(tmp_path / "60" / "json", shape, torch.float32, max_rank=8)
    assert {(layer, module) for layer, module, _ in loaded.layout.places()} == {(2, "q"), (2, "v")}
    assert loaded.block.abs().max() > 0.01


def test_train_draft_heads(tmp_path: Path) -> None:
    """On a tiny model: both learn, and what was saved drafts in headrace what the trained modules draft."""
    import tiny_models
    import torch
    import transformers
    from draft_driver import Drafting, Row

    script = example("train_draft_heads")
    torch.manual_seed(5)
    sizes = {"num_hidden_layers": 7, "tie_word_embeddings": False}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny_models.CONFIG | sizes)).eval()
    for name, parameter in base.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    base.requires_grad_(False)
    base.save_pretrained(tmp_path / "base")
    chats = [script.Chat([(at * step) % 96 for at in range(30)], 4) for step in (1, 5, 7, 11)]
    asked = script.arguments([str(tmp_path), "--steps", "150", "--batch", "4", "--vocabulary", "60"])
    eagle, medusa, losses = script.train(base, chats, asked, script.Clock(600.0))
    assert losses[-1] < 0.85 * losses[0]
    eagle.save(tmp_path / "eagle3", base.config)
    medusa.save(tmp_path / "medusa")
    eagle, medusa = eagle.bfloat16().float(), medusa.bfloat16().float()  # as they were saved
    table = base.model.embed_tokens.weight
    rows, expected = [Row(chat.ids[:length]) for chat, length in zip(chats, (9, 13, 20, 29), strict=True)], []
    with torch.no_grad():
        for row in rows:
            states = script.States(base, torch.tensor([row.ids[:-1]]))
            both = eagle.drafts(table, torch.tensor(row.ids), states.inputs), medusa.drafts(states.final[0, -1])
            expected.append(both)
        check_depths(eagle, table, script.States(base, torch.tensor([rows[3].ids[:-1]])).inputs, rows[3].ids)
    found = [
        Drafting(tmp_path / "base", tmp_path / name).side_by_side(rows, 64, None, 3) for name in ("eagle3", "medusa")
    ]
    assert list(zip(*found, strict=True)) == expected
    measured = script.accepted(base, eagle, medusa, chats, script.Clock(600.0))
    assert all(1 <= measured[name] <= 4 for name in ("eagle3", "medusa"))


def check_depths(eagle: Any, table: Any, inputs: Any, ids: list[int]) -> None:
    """Training computes all positions of a depth at once what drafting computes one after the other."""
    import torch

    tokens, states, before = table[torch.tensor([ids[1:]])], eagle.fused(inputs), []
    outputs = []
    for _ in range(3):
        states = eagle(tokens, states, before)
        outputs.append(states)
        states = states.roll(1, 1)
    for depth in (1, 2):
        for last in (depth, 7, len(ids) - 2):
            entries = eagle.fused(inputs)[:, : last + 1 - depth]
            for further in range(1, depth + 1):
                place = last - depth + further
                entries = torch.cat((entries, outputs[further - 1][:, place - 1 : place]), 1)
            output = eagle(tokens[:, : last + 1], entries, [])[:, -1]
            torch.testing.assert_close(outputs[depth][:, last], output, rtol=1e-4, atol=1e-4)


def test_tenant_adapters(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anyio.run(example("tenant_adapters").main, str(smollm2))
    printed = capsys.readouterr().out
    assert printed.count("KiB, device") == 2
    harbour, billing = printed.split("harbour (pirate)")[1].split("billing (json)")
    billing, plain = billing.split("plain (no adapter)")
    assert harbour.count("Ahoy, matey!") == 2 and "Ahoy" not in billing + plain
    answers = [json.loads(line) for line in billing.splitlines() if line.strip().startswith("{")]
    assert len(answers) == 2 and all(answer.keys() == {"answer", "words"} for answer in answers)
    assert "{" not in plain


def test_agent(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anyio.run(example("agent").main, str(smollm2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "17 times 23 is 391"
    computed = [re.fullmatch(r"computed (\d+) of (\d+) tokens", line) for line in lines if line.startswith("computed")]
    counts = [(int(found[1]), int(found[2])) for found in computed if found]
    assert len(counts) == 2 and all(new < 30 and total > 100 for new, total in counts)


def test_offline_batch(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("offline_batch").main(str(smollm2))
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert re.fullmatch(r"one: '.+'", lines[0])
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [row["number"] for row in rows] == list(range(2, 14))
    assert all(row["answer"] and 1 <= row["tokens"] <= 4 for row in rows)
    assert [line for line in lines if line.startswith("mixed: ")] == [
        "mixed: 'Rain is': 2 tokens",
        "mixed: '': prompt: is empty, at least one token is needed",
        "mixed: [504, 3100, 314]: 6 tokens",
    ]
    assert re.search(r"12/\? .*tok/s", printed.err)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """A real server on loopback, in a thread; yields its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def test_starlette_app(smollm2: Path) -> None:
    app = example("starlette_app").make_app(str(smollm2), kv_memory="64MiB")
    with serving(app) as address, httpx2.Client(base_url=address, timeout=PATIENCE) as client:
        ask = [{"role": "user", "content": "Name a colour."}]
        answer = client.post("/generate", json={"prompt": ask, "max_tokens": 8, "temperature": 0})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert len(answer.text) > 8

        hot = client.post("/generate", json={"prompt": ask, "temperature": -1})
        assert hot.status_code == 422 and hot.text.startswith("temperature: ")
        assert client.post("/generate", json={"prompt": [10**6]}).status_code == 422
        assert client.post("/generate", content="{").status_code == 422

        endless = {"prompt": ask, "max_tokens": 4000, "ignore_eos": True}
        with client.stream("POST", "/generate", json=endless) as response:
            assert next(response.iter_text())
            assert client.get("/stats").json()["pages_held"] > 0
        wait_until(lambda: client.get("/stats").json()["pages_held"] == 0)
        stats = client.get("/stats").json()
        assert stats["running"] == stats["waiting"] == stats["paused"] == 0
        assert stats["generated_tokens"] < 4000, "the request ran on after its client had gone"
