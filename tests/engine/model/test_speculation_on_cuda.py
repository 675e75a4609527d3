"""Drafts on a GPU that is emulated (tests/emulated_cuda.py): every request gives what it gives without, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated_cuda import Gpu, emulated
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.drafting import ASKED, PROMPTS, SPECULATING, draft_by_answers, random_depths, run, same_answers, told
from gpu.test_adapters import BASE
from gpu.wearing import make

from headrace.engine import InvalidParams, ResponseFormat


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"), "cuda")


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "deep": ("exact", 4, {}),
    "one ahead": ("exact", 0, {"launch_ahead": 1}),
    "far ahead": ("exact", 0, {"launch_ahead": 8, "prefix_cache": False}),
    "short of pages": ("exact", 3, {"pages": 24}),
    "swapped": ("exact", 3, {"pages": 24, "swap_memory": "8MiB", "prefix_cache": False}),
    "keys of drafts": ("llama 3", 4, {}),
    "keys far ahead": ("llama 3", 0, {"launch_ahead": 8}),
    "planned": ("llama 3", 4, {"decode_attention": "fa2"}),
}
"""Checkpoint, least depth and options; "exact" has the same logits whatever is computed beside them."""


@pytest.mark.parametrize("case", CASES)
def test_drafts_change_nothing(case: str, gpu: Gpu, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    name, least, more = CASES[case]
    folder = zoo.folder(name)
    count = 60 if "pages" in more else 20
    (plain,) = run(folder, "cuda", count=count)
    draft_by_answers(monkeypatch, told(plain))
    random_depths(monkeypatch, least)
    options = {**SPECULATING, **more}
    if pages := options.pop("pages", 0):
        options["kv_memory"] = kv_bytes(folder, pages)

    def check(stats: Any) -> None:
        assert stats.drafted_tokens > 50
        assert stats.accepted_tokens > 0.5 * stats.drafted_tokens
        if pages:
            assert stats.preemptions > 0

    for found in run(folder, "cuda", count=count, rounds=2, check=check, **options):
        same_answers(found, plain, rounded=name != "exact")


def test_requests_that_wait_for_the_host_share_steps(gpu: Gpu, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.folder("speaking")
    waiting: list[dict[str, Any]] = [
        {"response_format": ResponseFormat.regex("[a-f]{3,40}"), "temperature": 1.0, "seed": 2},
        {"deterministic": True, "max_tokens": 6},
        {"beam_width": 2, "max_tokens": 6},
    ]
    (plain,) = run(folder, "cuda", [*ASKED, *waiting], count=20)
    draft_by_answers(monkeypatch, told(plain))
    random_depths(monkeypatch, 4)
    (found,) = run(folder, "cuda", [*ASKED, *waiting], count=20, **SPECULATING)
    same_answers(found, plain, rounded=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("worn_by", [1, 2], ids=["all", "half"])
def test_lines_wear_the_adapter_of_their_row(
    worn_by: int, gpu: Gpu, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.folder(BASE)
    sampled = [{"temperature": 0.8, "seed": number} for number in range(len(PROMPTS))]
    asked = [each | {"adapter": None if each["seed"] % worn_by else "worn"} for each in sampled]
    options: dict[str, Any] = {"adapter_slots": 1, "adapter_host_memory": "4MiB"}
    options["adapters"] = {"worn": make(folder, tmp_path, "all").folder}
    (plain,) = run(folder, "cuda", asked, count=20, **options)
    (bare,) = run(folder, "cuda", sampled, count=20)
    assert told(plain)[0] != told(bare)[0], "the adapter changes too little to mean anything"
    draft_by_answers(monkeypatch, told(plain))
    random_depths(monkeypatch, 4)

    def check(stats: Any) -> None:
        assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 25

    (found,) = run(folder, "cuda", asked, count=20, check=check, **options, **SPECULATING)
    same_answers(found, plain, rounded=True)


def test_ngrams_are_drafted_by_the_kernel(gpu: Gpu, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.folder("exact")
    (plain,) = run(folder, "cuda", [{}] * len(PROMPTS), count=60)
    random_depths(monkeypatch, 4)

    def check(stats: Any) -> None:
        assert stats.accepted_tokens > 20

    (found,) = run(folder, "cuda", [{}] * len(PROMPTS), count=60, check=check, **SPECULATING)
    same_answers(found, plain)
    assert gpu.launches["_ngram_kernel"] > 10


def test_a_way_that_cannot_see_drafts_is_refused(gpu: Gpu, zoo: Zoo) -> None:
    with pytest.raises(InvalidParams, match="drafts are several"):
        run(zoo.folder("exact"), "cuda", decode_attention="fused", **SPECULATING)
