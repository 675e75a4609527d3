"""Draft heads by the operations of an emulated GPU against their definitions, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_draft_driver import CudaDrafting
from draft_driver import states_of
from draft_heads import HEADS, VOCABULARY, random_target
from emulated_cuda import Gpu, emulated
from mtp_models import LAYERS, with_module

from headrace.engine.scheduling.asked import Sampling

LENGTHS = (21, 9, 40, 4)
DEPTH = 3
DRAWN = [*(Sampling(temperature=8.0, seed=seed) for seed in (1, 2, 3)), Sampling()]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


def drawn() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.rotated(3)
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_definition(
    name: str, target_folder: Path, model: Any, gpu: Gpu, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    head, rows = HEADS[name](), drawn()
    expected = [head.drafts(states_of(model, ids), ids[1:], DEPTH) for ids in rows]
    assert len({tuple(drafts) for drafts in expected}) >= 3, "drafts that depend on nothing prove nothing"
    with torch.inference_mode():
        drafting = CudaDrafting(gpu, target_folder, head.write(tmp_path / "head"), DEPTH)
        for prompt, chunk in ((64, 64), (64, 5)):
            drafting.start(rows, prompt, chunk)
            assert drafting.drafts(range(len(rows)), DEPTH) == expected, "behind prompts"
        for seed in range(3):
            assert drafting.verified(rows, seed, 2) == expected, "behind steps with drafts and without"


@pytest.mark.rotated(3)
@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "EAGLE-3 of all tokens, named like a layer", "Medusa"])
def test_drafts_are_the_same_behind_many_steps_without(
    name: str, target_folder: Path, model: Any, gpu: Gpu, tmp_path: Path
) -> None:
    """Fewer than may be unread of a row, as many and more, while rows wait for others."""
    torch.manual_seed(3)
    head, rows = HEADS[name](), [ids * 2 for ids in drawn()]
    expected = [head.drafts(states_of(model, ids), ids[1:], DEPTH) for ids in rows]
    with torch.inference_mode():
        drafting = CudaDrafting(gpu, target_folder, head.write(tmp_path / "head"), DEPTH)
        for seed in range(4):
            assert drafting.verified(rows, seed, 2, pauses=True) == expected


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "EAGLE-3 of all tokens, named like a layer", "Medusa"])
def test_drafts_of_rows_that_sample_have_the_noise_of_their_places(
    name: str, target_folder: Path, model: Any, gpu: Gpu, tmp_path: Path
) -> None:
    """Each draft is what a target with the head's logits would choose there, whichever tokens the head knows."""
    torch.manual_seed(3)
    head, rows = HEADS[name](), drawn()
    expected = [
        head.drafts(states_of(model, ids), ids[1:], DEPTH, sampling) for ids, sampling in zip(rows, DRAWN, strict=True)
    ]
    with torch.inference_mode():
        drafting = CudaDrafting(gpu, target_folder, head.write(tmp_path / "head"), DEPTH)
        for row, sampling in enumerate(DRAWN):
            drafting.rows.asks.temperature_R[row], drafting.rows.asks.seed_R[row] = sampling.temperature, sampling.seed
        drafting.start(rows, 64, 5)
        assert drafting.drafts(range(len(rows)), DEPTH) == expected, "behind prompts"
        assert drafting.verified(rows, 0, 2) == expected, "behind steps with drafts and without"


def test_drafts_of_a_module_are_those_of_the_equations(gpu: Gpu, tmp_path: Path) -> None:
    """A module of GLM-4.5 whose feeds are dense, since no kernel of experts computes in float32."""
    model, head = with_module("GLM-4.5", tmp_path, first_k_dense_replace=LAYERS + 1)
    rows = drawn()
    expected = [head.drafts(states_of(model, ids, LAYERS), ids[1:], DEPTH) for ids in rows]
    assert len({tuple(drafts) for drafts in expected}) >= 3, "drafts that depend on nothing prove nothing"
    with torch.inference_mode():
        drafting = CudaDrafting(gpu, tmp_path, None, DEPTH)
        for prompt, chunk in ((64, 64), (64, 5)):
            drafting.start(rows, prompt, chunk)
            assert drafting.drafts(range(len(rows)), DEPTH) == expected, "behind prompts"
        for seed in range(3):
            assert drafting.verified(rows, seed, 2) == expected, "behind steps with drafts and without"
