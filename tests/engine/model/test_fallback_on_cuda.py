"""Models that transformers' modules compute give the right tokens on an emulated GPU, with graphs or without."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest
from emulated_cuda import emulated
from gpu.checkpoints import WINDOW, build, save
from gpu.driving import at_rest, draw, greedy, one_by_one, open_engine, together
from gpu.judge import Judge, Output
from torch import Tensor
from transformers.models.arcee import modeling_arcee

from headrace.engine import EngineConfig, InvalidParams
from headrace.engine.life.build import build_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to fix

SMALL: dict[str, Any] = {
    "max_context": 256, "max_batched_tokens": 256, "max_rows": 8, "model_impl": "transformers",
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", {"head_dim": 64}),
    "cwm": (
        "Cwm",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "head_dim": 64, "bos_token_id": 1, "eos_token_id": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "mlp_layer_types": ["dense"] * 3, "head_dim": 64, "v_head_dim": 48, "num_key_value_heads": 1,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
         }},
    ),
    "vaultgemma": (
        "VaultGemma",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "head_dim": 64, "query_pre_attn_scalar": 50, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
    ),
}  # fmt: skip


async def answers(folder: Path, **options: Any) -> list[Output]:
    async with open_engine(folder, "cuda", **(SMALL | options)) as engine:
        assert engine.info.model_impl == "transformers"
        outputs = await one_by_one(engine, [draw(length, length) for length in (1, 45, 150)], 6)
        outputs += await together(engine, [draw(length, length) for length in (3, 17, 127)], greedy(6))
        await at_rest(engine)
        return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_alone_and_together(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(build(*FAMILIES[family]), tmp_path)
    with emulated() as gpu:
        outputs = anyio.run(answers, tmp_path)
        assert len(gpu.replays) > 20, "decodes are graphs"
    assert "without CUDA graphs" not in caplog.text
    Judge(tmp_path, "cpu").check(outputs, family)


def test_a_module_that_no_graph_can_record_runs_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A feed that looks at a number, which a graph cannot wait for."""
    plain = modeling_arcee.ArceeMLP.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return plain(self, x) if x.is_meta or float(x[0, 0, 0]) > -1e9 else x

    monkeypatch.setattr(modeling_arcee.ArceeMLP, "forward", forward)
    save(build(*FAMILIES["arcee"]), tmp_path)
    with caplog.at_level(logging.WARNING, "headrace.engine"), emulated() as gpu:
        outputs = anyio.run(answers, tmp_path)
        assert not gpu.replays
    told = [record.message for record in caplog.records if "without CUDA graphs" in record.message]
    assert len(told) == 1 and "is not permitted while a graph is captured" in told[0]
    Judge(tmp_path, "cpu").check(outputs, "arcee, eager")


def test_weights_come_back_to_their_places(tmp_path: Path) -> None:
    """Graphs keep the addresses of the weights while an engine sleeps."""
    save(build(*FAMILIES["arcee"]), tmp_path)

    async def run() -> list[list[int]]:
        found = []
        async with open_engine(tmp_path, "cuda", **SMALL) as engine:
            for level in (1, 2, None):
                found.append((await engine.generate(draw(20, 1), greedy(6))).choices[0].token_ids)
                if level is not None:
                    await engine.sleep(level)
                    await engine.wake()
        return found

    with emulated():
        first, second, third = anyio.run(run)
    assert first == second == third


def test_kernels_of_attention_are_built_from_a_config_alone(tmp_path: Path) -> None:
    config = build(*FAMILIES["arcee"]).config
    config.architectures = ["ArceeForCausalLM"]
    config.save_pretrained(tmp_path)
    options: dict[str, Any] = {"model_impl": "transformers", "kv_memory": "64MiB", "max_rows": 2, "max_context": 64}
    small = EngineConfig(model=str(tmp_path), device="cuda", **options)
    with emulated() as gpu:
        assert build_kernels(small).formats == ("dense",)
        assert gpu.launches["prefill: FlashInfer"]


def test_adapters_are_refused_by_name(tmp_path: Path) -> None:
    save(build(*FAMILIES["vaultgemma"]), tmp_path)
    with emulated(), pytest.raises(InvalidParams, match="adapter_slots: .*VaultGemmaForCausalLM has no native code"):
        anyio.run(lambda: answers(tmp_path, adapter_slots=1, model_impl="auto"))
