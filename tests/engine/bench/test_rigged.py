"""Rigged routers choose as many experts as they are meant to, in each family and on either device."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import transformers
from emulated_cuda import emulated
from expert_models import CONFIG, expert_folder
from tiny_models import random_folder
from typer.testing import CliRunner

from headrace.engine.bench import opening
from headrace.engine.bench.engine import latency
from headrace.engine.bench.floor import Speed
from headrace.engine.bench.opening import BenchmarkFailed, Target
from headrace.engine.bench.rigged import RiggedRouting
from headrace.engine.model.network.decoder import Decoder
from headrace.ops.routing import Routing
from headrace.server.cli import app

BATCHES = (1, 2, 5)
WIDE: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 64, "num_attention_heads": 2}
GROUPS: dict[str, Any] = {
    "n_routed_experts": 12, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "num_key_value_heads": 4, "q_lora_rank": None,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _of_known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "measure", lambda device: Speed(1e9, 1e15))


def chosen(folder: Path, routing: str, out: Path, *, device: str = "cpu") -> list[dict[str, Any]]:
    """Figures of batches of 1, 2 and 5 rows."""
    target = Target(model=str(folder), device=device, load_format="random", kv_memory="2MiB", max_rows=8)
    latency.run(
        target, batches=BATCHES, context=40, steps=8, prefill=None, repeats=1, peer=None, profile=False,
        json_path=str(out), routing=routing,
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert found["conditions"].get("routing", "uniform") == routing
    return [*found["decode"]]


def folder_of(family: str, folder: Path) -> tuple[Path, int, int]:
    """A folder of a family, its layers with experts and how many of them a layer has; 3 are chosen, of groups 2."""
    if family != "DeepseekV3":
        return expert_folder(folder, family), 2, 8
    transformers.DeepseekV3Config(**CONFIG | GROUPS).save_pretrained(folder)
    return folder, 1, 12


@pytest.mark.rotated(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "GraniteMoe", "DeepseekV3"])
def test_rows_choose_the_same_experts_or_all_there_are(family: str, tmp_path: Path) -> None:
    folder, layers, experts = folder_of(family, tmp_path / "model")
    top_k = 3 if experts == 8 else 2
    for routing, meant in (
        ("one", [top_k] * 3),
        ("each", [top_k, 2 * top_k, min(5 * top_k, experts)]),
    ):
        found = chosen(folder, routing, tmp_path / "figures.json")
        assert [each["chosen_experts"] for each in found] == [[float(count)] * layers for count in meant]


@pytest.mark.filterwarnings("ignore")
def test_bytes_of_experts_are_those_of_the_distinct_ones(tmp_path: Path) -> None:
    folder = expert_folder(tmp_path / "model", **WIDE)
    of_an_expert = 2 * 3 * WIDE["hidden_size"] * WIDE["moe_intermediate_size"] * 2  # layers, matrices, bfloat16
    for device in ("cpu", "cuda"):
        with emulated() if device == "cuda" else nullcontext():
            one, each = (chosen(folder, how, tmp_path / "figures.json", device=device) for how in ("one", "each"))
        for figures, meant in ((one, [3, 3, 3]), (each, [3, 6, 8])):
            assert [figure["expert_bytes"] for figure in figures] == [count * of_an_expert for count in meant]
            assert [figure["chosen_experts"] for figure in figures] == [[float(count)] * 2 for count in meant]
        for apart, alike in zip(each, one, strict=True):
            assert apart["bytes"] - alike["bytes"] == apart["expert_bytes"] - alike["expert_bytes"]
    assert chosen(folder, "uniform", tmp_path / "figures.json")[0]["expert_bytes"] == 3 * of_an_expert


def test_steps_that_chose_others_give_no_figures() -> None:
    each, one = (RiggedRouting(how, Routing(8, 3)) for how in ("each", "one"))
    assert [each.distinct(rows) for rows in (1, 2, 3, 9)] == [3, 6, 8, 8]
    each.check(2, 6.0)
    for rig, rows, seen in ((each, 2, 5.0), (one, 2, 6.0), (one, 1, None)):
        with pytest.raises(BenchmarkFailed, match=f"{rows} rows are to choose {rig.distinct(rows)} experts"):
            rig.check(rows, seen)


@pytest.mark.parametrize(
    ("routing", "changes", "told"),
    [
        ("two", {}, "give one of uniform, one, each"),
        ("one", {"load_format": "auto"}, "random weights alone; use --load-format random"),
        ("each", {"more": {"speculation": "ngram:k=2"}}, "rigs neither what drafts"),
        ("one", {"peer": "transformers"}, "a peer has weights of its own"),
    ],
)
def test_what_cannot_be_rigged_is_refused(routing: str, changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    peer = changes.pop("peer", None)
    target = Target(**{"model": str(expert_folder(tmp_path)), "device": "cpu", "load_format": "random"} | changes)
    before = Decoder.__init__
    with pytest.raises(BenchmarkFailed, match=told):
        latency.run(
            target, batches=[1], context=40, steps=8, prefill=None, repeats=1, peer=peer, profile=False,
            json_path=None, routing=routing,
        )  # fmt: skip
    assert Decoder.__init__ is before


def test_a_model_without_experts_is_refused_by_the_command(tmp_path: Path) -> None:
    model = str(random_folder(tmp_path / "dense"))
    command = ["bench", "latency", model, "--load-format", "random", "--device", "cpu", "--routing", "one"]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, BenchmarkFailed)
    assert f"--routing one: {model} has no experts" in str(refused.exception)
