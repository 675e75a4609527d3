"""Drafts on a GPU that is emulated (tests/emulated_cuda.py): every request gives what it gives without, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import emulated_cuda
import pytest
from emulated_cuda import Gpu, emulated
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.drafting import ASKED, PROMPTS, SPECULATING, draft_by_answers, random_depths, run, same_answers, told
from gpu.driving import at_rest, open_engine
from gpu.test_adapters import BASE
from gpu.wearing import make
from speculating import Answers, ask_every, wholes

from headrace.engine import InvalidParams, ResponseFormat
from headrace.engine.scheduling import planner
from headrace.engine.scheduling.speculation.depth import DepthRule


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"), "cuda")


SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.3, "seed": 6},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": list(range(100, 116)), "n": 2},
    {"max_tokens": 3, "temperature": 0.9, "seed": 2},
]
"""Options of requests whose lines are all chosen for at once, where nothing counts tokens or is told of them."""
FILTERED = [{"seed": 1, "temperature": 0.9, **each, "top_k": 20, "top_p": 0.9, "min_p": 0.01} for each in SAMPLED]
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


@pytest.mark.rotated(3)
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


@pytest.mark.rotated(3)
@pytest.mark.parametrize("asked", [SAMPLED, FILTERED], ids=["sampled", "filtered"])
@pytest.mark.parametrize("ahead", [1, 4, 8])
def test_lines_that_are_chosen_for_at_once(
    ahead: int, asked: list[dict[str, Any]], gpu: Gpu, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.folder("exact")
    (plain,) = run(folder, "cuda", asked)
    draft_by_answers(monkeypatch, told(plain))
    random_depths(monkeypatch, 0)

    def check(stats: Any) -> None:
        assert 50 < stats.drafted_tokens and 0 < stats.accepted_tokens < stats.drafted_tokens

    for found in run(folder, "cuda", asked, rounds=2, check=check, launch_ahead=ahead, **SPECULATING):
        same_answers(found, plain)
    assert gpu.launches["_accept_kernel"] > 10 and "_turn_kernel" not in gpu.launches


def test_the_rule_of_depths_is_told_which_graphs_ran(gpu: Gpu, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.folder("exact")
    (plain,) = run(folder, "cuda")
    draft_by_answers(monkeypatch, told(plain))
    random_depths(monkeypatch, 3)  # there are graphs of 1, 2 and 4 drafts
    ran: list[float] = []
    monkeypatch.setattr(DepthRule, "observe", lambda self, rows, context, drafts, seconds: ran.append(drafts))
    planned: set[int] = set()
    plan_drafts = planner.plan_drafts

    def plans(plan: Any, *rest: Any) -> None:
        plan_drafts(plan, *rest)
        planned.update(plan.drafts)

    monkeypatch.setattr(planner, "plan_drafts", plans)
    run(folder, "cuda", **SPECULATING)
    assert 3 in planned and set(ran) <= {0, 1, 2, 4} and ran.count(4) > 3


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


@pytest.mark.rotated(2)
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


@pytest.mark.rotated(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ahead", [1, 2, 8])
def test_no_option_notices_drafts(
    ahead: int, gpu: Gpu, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside requests that are cancelled, and behind prefix hits; hooks and grammars keep their steps from drafting."""
    base = zoo.folder("speaking")
    adapters = {name: make(base, tmp_path, kind).folder for name, kind in (("one", "all"), ("two", "q and v"))}

    async def answers(*left_out: Sequence[str], cancelled: bool = False, **more: Any) -> tuple[list[Answers], Any]:
        sizes = {"max_context": 256, "max_batched_tokens": 256, "adapter_slots": 2, "adapter_host_memory": "4MiB"}
        async with open_engine(base, "cuda", **sizes, **more) as engine:
            for name, folder in adapters.items():
                await engine.adapters.load(name, folder)
            found = [await ask_every(engine, but=names, cancelled=cancelled) for names in left_out]
            await at_rest(engine)
            return found, engine.stats()

    (plain,), _ = anyio.run(answers, ())
    draft_by_answers(monkeypatch, wholes(plain))
    random_depths(monkeypatch, 0)
    by_hosts = ("response_format", "logits_processor")
    found, counts = anyio.run(lambda: answers(by_hosts, (), cancelled=True, launch_ahead=ahead, **SPECULATING))
    for each in found:
        same_answers([each[place] for place in sorted(each)], [plain[place] for place in sorted(each)], rounded=True)
    assert counts.accepted_tokens > 0.4 * counts.drafted_tokens > 40


def any_first_draft_is_right(at: Any) -> None:
    firsts = [
        place * at.LINES for place in range(len(at.rows)) if int(at.line_rows[place * at.LINES + 1]) != at.padding_row
    ]
    for first in firsts:
        at.ids[first, int(at.scores[first].argmax())] = at.tokens[first + 1]


def lines_choose_with_the_noise_of_the_first(at: Any) -> None:
    at.positions.view(-1, at.LINES)[:, 1:] = at.positions.view(-1, at.LINES)[:, :1]


def runs_go_on_behind_wrong_drafts(at: Any) -> None:
    at.tokens.view(-1)[1 :: at.LINES] = at.ids[: len(at.tokens) // at.LINES]


BUGS = {
    any_first_draft_is_right: ("_accept_kernel", "before"),
    lines_choose_with_the_noise_of_the_first: ("_prepare_lines_kernel", "after"),
    runs_go_on_behind_wrong_drafts: ("_turn_kernel", "before"),
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_answers_tell_planted_bugs(bug: Any, gpu: Gpu, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, when = BUGS[bug]
    launch = emulated_cuda.EVERY_KERNEL[kernel]

    def changed(at: Any) -> None:
        if when == "before" and getattr(at, "AHEAD", 1) == 1:
            bug(at)
        launch(at)
        if when == "after":
            bug(at)

    folder, asked = zoo.folder("exact"), ASKED if kernel == "_turn_kernel" else SAMPLED
    (plain,) = run(folder, "cuda", asked)
    draft_by_answers(monkeypatch, told(plain))
    random_depths(monkeypatch, 0)
    monkeypatch.setitem(emulated_cuda.EVERY_KERNEL, kernel, changed)
    with pytest.raises(AssertionError):
        same_answers(run(folder, "cuda", asked, **SPECULATING)[0], plain)
