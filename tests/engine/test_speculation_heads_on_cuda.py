"""Engines on an emulated GPU that draft by trained heads: the same tokens as without, right drafts, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from draft_heads import SIZE, Eagle3Head, EagleHead, Head, MedusaHead, MtpHead
from drafting_engines import (
    ASKED,
    HEADS,
    PROMPTS,
    TOKENS,
    always_deep,
    answers_alone,
    ask_all,
    chained_folder,
    fit,
    gemma4_folder,
)
from drafting_engines import cuda_options as options
from drafting_engines import told_tokens as told
from emulated_cuda import Gpu, emulated
from safetensors.torch import load_file, save_file
from tiny_models import chat_folder

from headrace.engine import Engine, InvalidParams, SamplingParams
from headrace.engine.speculation import Eagle, Medusa, Mtp, Speculation

LONG: list[dict[str, Any]] = [{"max_tokens": 50, **each} for each in ASKED]
PAGE = 2 * 16 * 2 * 8 * 2
"""Bytes of a layer's keys and values in a page."""
WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "short of pages": {"kv_memory": 12 * 3 * PAGE, "max_context": 128, "max_batched_tokens": 24},
    "swapped": {"kv_memory": 12 * 3 * PAGE, "max_context": 128, "swap_memory": "1MiB", "prefix_cache": False},
}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def alone(model: Path, gpu: Gpu) -> list[Any]:
    return answers_alone(model, LONG, told, **options())


@pytest.mark.rotated(4)
@pytest.mark.parametrize(
    ("name", "way"), [("EAGLE", "roomy"), ("EAGLE-3", "roomy"), ("EAGLE-3", "short of pages"),
                      ("EAGLE-3", "swapped"), ("Medusa", "roomy")]
)  # fmt: skip
def test_heads_change_no_token(
    name: str, way: str, model: Path, alone: list[Any], gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    torch.manual_seed(3)
    make, method = HEADS[name]
    speculation = method(fit(make()).write(tmp_path / "head"), k=3)

    async def run() -> None:
        async with Engine(model, speculation=speculation, **options(**WAYS[way])) as engine:
            assert told(await ask_all(engine, LONG)) == alone
            assert told(await ask_all(engine, LONG)) == alone  # behind prefix hits
            counts = engine.stats()
            assert counts.drafted_tokens > 100
            if "kv_memory" in WAYS[way]:
                assert counts.preemptions > 0
            if "swap_memory" in WAYS[way]:
                assert counts.swaps > 0

    anyio.run(run)


def counting_folder(folder: Path) -> tuple[Path, torch.Tensor]:
    """A model whose next token is the one behind the latest, by number; and its embeddings."""
    chained_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"] = torch.randn(TOKENS, SIZE)
    tensors["lm_head.weight"] = table.roll(1, 0)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder, table


def knowing_eagle(table: torch.Tensor) -> tuple[Head, type[Eagle | Medusa], int]:
    head = fit(EagleHead(biased=False))
    for name, tensor in head.tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    head.tensors["fc.weight"] = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1)
    return head, Eagle, 4


def knowing_eagle3(table: torch.Tensor) -> tuple[Head, type[Eagle | Medusa], int]:
    head = fit(Eagle3Head(vocabulary=40))
    for name, tensor in head.tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    head.tensors["norm.weight"].fill_(1.0)
    head.tensors["fc.weight"] = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, 2 * SIZE)), 1)
    head.tensors["d2t"] = torch.full((40,), 100)  # the tokens from 100 to 139
    head.tensors["t2d"] = torch.zeros(TOKENS, dtype=torch.bool).index_fill(0, torch.arange(100, 140), True)
    head.tensors["lm_head.weight"] = table.roll(2, 0)[100:140].clone()
    return head, Eagle, 1


def knowing_medusa(table: torch.Tensor) -> tuple[Head, type[Eagle | Medusa], int]:
    head = fit(MedusaHead())
    for number in range(4):
        head.tensors[f"{number}.0.linear.weight"].zero_()
        head.tensors[f"{number}.0.linear.bias"].zero_()
        head.tensors[f"{number}.1.weight"] = table.roll(2 + number, 0)
    return head, Medusa, 4


async def accepted(model: Path, speculation: Speculation, prompt: list[int], count: int) -> tuple[int, int]:
    """Drafted and accepted tokens of two rows side by side, the second of which finds the first one's prompt."""
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    async with Engine(model, speculation=speculation, **options(max_batched_tokens=20)) as engine:
        await engine.generate(prompt, params)
        before = engine.stats()
        async with anyio.create_task_group() as group:
            for at in range(2):
                group.start_soon(engine.generate, prompt[at:], params)
        counts = engine.stats()
        assert counts.cached_tokens > before.cached_tokens
        return counts.drafted_tokens, counts.accepted_tokens


@pytest.mark.parametrize("knowing", [knowing_eagle, knowing_eagle3, knowing_medusa])
def test_a_head_that_knows_the_model_is_always_right(
    knowing: Callable[[torch.Tensor], tuple[Head, type[Eagle | Medusa], int]],
    gpu: Gpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind prompts in parts, behind steps with drafts, and behind pages that another row has left."""
    always_deep(monkeypatch)
    torch.manual_seed(4)
    folder, table = counting_folder(tmp_path / "model")
    head, method, k = knowing(table)
    speculation = method(head.write(tmp_path / "head"), k=k)
    prompt = [*range(3, 55), 100]
    drafted, right = anyio.run(accepted, folder, speculation, prompt, 31)
    assert right >= 3 * 31 * k // (k + 1) - 6 and drafted - right <= 3 * 2 * k  # but for drafts behind the last token


def test_a_module_that_comes_with_the_model_drafts(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_deep(monkeypatch)
    folder = chained_folder(tmp_path / "model", "Glm4Moe")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}))
    MtpHead.add_to(folder, 1, SIZE)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.eh_proj.weight"] = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1)
    for name in ("enorm", "shared_head.norm"):
        tensors[f"model.layers.1.{name}.weight"] = torch.ones(SIZE)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    drafted, right = anyio.run(accepted, folder, Mtp(k=2), [*range(3, 55), 100], 31)
    assert right >= 50 and drafted - right <= 12


def test_a_head_comes_back_after_sleep_and_is_told_of(
    model: Path, alone: list[Any], gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    torch.manual_seed(3)
    head = fit(Eagle3Head())
    speculation = Eagle(head.write(tmp_path / "head"))
    maps = 8 * len(head.tensors["d2t"])
    taken = 2 * sum(each.numel() for name, each in head.tensors.items() if name not in ("d2t", "t2d")) + maps

    async def run() -> None:
        async with Engine(model, speculation=speculation, **options()) as engine:
            assert sum(part.nbytes for part in engine.info.weights if part.part == "draft head") == taken
            assert engine.info.page_bytes == 3 * PAGE
            for level in (1, 2):
                await engine.sleep(level)
                await engine.wake()
                before = engine.stats().drafted_tokens
                assert told(await ask_all(engine, LONG)) == alone
                assert engine.stats().drafted_tokens > before

    anyio.run(run)


def test_heads_that_do_not_fit_into_the_pages_are_refused(model: Path, gpu: Gpu, tmp_path: Path) -> None:
    torch.manual_seed(3)
    head = fit(EagleHead(biased=False))
    head.config["num_key_value_heads"] = 1
    for name in ("k", "v"):
        head.tensors[f"layers.0.self_attn.{name}_proj.weight"] = torch.randn(8, SIZE)

    async def run() -> None:
        async with Engine(model, speculation=Eagle(head.write(tmp_path / "head")), **options()):
            pass

    with pytest.raises(InvalidParams, match="speculation: head keeps 8 elements of keys .* and the model's layers 16"):
        anyio.run(run)


@pytest.mark.rotated(2)
@pytest.mark.parametrize("name", ["EAGLE-3", "Medusa"])
def test_heads_of_a_model_with_several_pools_of_pages(
    name: str, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's layer lies in the pool of the first one, whose layers read what they have written there."""
    always_deep(monkeypatch)
    folder = gemma4_folder(tmp_path / "model")
    torch.manual_seed(3)
    make, method = HEADS[name]
    speculation = method(fit(make()).write(tmp_path / "head"), k=3)
    greedy = [{"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}] * len(PROMPTS)

    async def run(**more: Any) -> tuple[list[Any], int, int]:
        async with Engine(folder, **options(**more)) as engine:
            answers = told(await ask_all(engine, greedy))
            return answers, engine.info.page_bytes, engine.stats().drafted_tokens

    plain, page_bytes, _ = anyio.run(run)
    answers, with_head, drafted = anyio.run(lambda: run(speculation=speculation))
    assert answers == plain and drafted > 100
    assert with_head - page_bytes == (PAGE if name == "EAGLE-3" else 0)


def test_rows_that_no_graph_has_drafts_for_are_warned_of(
    model: Path, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU has graphs of up to so many lines, which are rows times a token and its drafts."""
    monkeypatch.setattr("headrace.engine.model.cuda.drafting.drafts.MOST_LINES", 6)
    torch.manual_seed(3)
    speculation = Eagle(fit(EagleHead()).write(tmp_path / "head"))

    async def opened(rows: int) -> None:
        async with Engine(model, speculation=speculation, **options(max_rows=rows)):
            pass

    anyio.run(opened, 3)
    assert "max_rows" not in caplog.text
    anyio.run(opened, 4)
    assert "max_rows: it is 4, and steps of more than 2 rows that speculate verify no drafts" in caplog.text
