"""Draft heads of every format against their definitions, token for token, over rows, chunks and shared pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from draft_driver import PAGE, Drafting, Row, states_of
from draft_heads import HEADS, EagleHead, Eagle3Head, MtpHead, VOCABULARY
from model_driver import OPERATIONS

CUTS = {"in one piece": (64, None), "in chunks": (5, None), "decode after a prompt": (7, 9), "one by one": (1, None)}
LENGTHS = (21, 9, 16, 3)
COUNT = 3


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(11)
    sizes = {"num_hidden_layers": 7, "tie_word_embeddings": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny_models.CONFIG | sizes))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


def drawn(lengths: Sequence[int]) -> list[Row]:
    generator = torch.Generator().manual_seed(2)
    return [Row(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]


@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_definition(
    name: str, native: bool, target_folder: Path, model: Any, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    head = HEADS[name]()
    drafting = Drafting(target_folder, head.write(tmp_path / "head"), native=native)
    rows = drawn(LENGTHS)
    expected = [head.drafts(states_of(model, row.ids), row.ids[1:], COUNT) for row in rows]
    assert len({tuple(drafts) for drafts in expected}) == len(rows), "drafts that depend on nothing prove nothing"
    for cut in CUTS.values():
        assert drafting.side_by_side(rows, *cut, COUNT) == expected, cut
