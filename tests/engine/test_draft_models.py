"""Engines that draft by a smaller model: the same answers as without, that model's own tokens, errors at opening."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from draft_heads import chosen
from drafting_engines import always_deep, small_folder, talk
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_models import chat_folder, write_tokenizer

from headrace.engine import Completion, Engine, InvalidParams, ModelRejected, SamplingParams
from headrace.engine.model.cpu.draft_model import CpuDraftModel
from headrace.engine.model.cpu.drafts import CpuDrafts
from headrace.engine.model.cpu.heads import DraftAsk
from headrace.engine.model.drafting.draft_model import check_vocabularies
from headrace.engine.model.drafting.filled import FilledPages
from headrace.engine.scheduling.asked import Sampling
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.engine.speculation import DraftModel, Eagle, speculation_of
from headrace.engine.testing import no_pages_held
from headrace.engine.tokens.token_table import TokenTable
from headrace.ops.cpu.native.library import library
from headrace.ops.cpu.sample import Choosing, sample_drafts

native = pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2")

TOKENS = 257
PROMPTS = [
    "one two three one two three one two",
    "the cat sat on the mat and the cat sat on the",
    "a",
    "x y x y x y x y x y x y x y x y x y",
    "the cat sat on the mat and the cat sat on the mat, and there it",
]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5, "top_k": 8, "logprobs": 2},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "stop_token_ids": list(range(100, 110)), "presence_penalty": 1.5},
    {"temperature": 1.0, "seed": 12, "n": 2},
    {"temperature": 1.0, "seed": 13, "speculate": False},
    {"temperature": 1.0, "seed": 11, "response_format": {"type": "json_object"}, "max_tokens": 12},
    {"temperature": 1.0, "seed": 12, "deterministic": True, "max_tokens": 8},
    {"temperature": 0.0, "beam_width": 2, "max_tokens": 6},
]
WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "far ahead": {"launch_ahead": 5, "page_size": 4},
    "short of pages": {"kv_memory": "64KiB", "page_size": 4, "max_rows": 6, "max_batched_tokens": 24},
    "swapped": {"kv_memory": "64KiB", "page_size": 4, "swap_memory": "1MiB", "prefix_cache": False},
}

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 2**63 - 9},
    {"temperature": 1.3, "seed": 6, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
]


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "cpu_threads": 1, "kv_memory": "1MiB", "dtype": "float32", "seed": 3} | more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("draft"))


async def ask_all(engine: Engine, asked: Sequence[dict[str, Any]] = ASKED) -> list[Completion]:
    found: dict[int, Completion] = {}

    async def one(index: int) -> None:
        params = SamplingParams(**({"max_tokens": 24} | asked[index]))
        found[index] = await engine.generate(PROMPTS[index % len(PROMPTS)], params)

    async with anyio.create_task_group() as group:
        for index in range(len(asked)):
            group.start_soon(one, index)
    return [found[index] for index in range(len(asked))]


def told(answers: Sequence[Completion]) -> list[Any]:
    return [(answer.choices, answer.usage.completion_tokens) for answer in answers]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Any]:
    """What an engine without speculation answers."""

    async def run() -> list[Any]:
        async with Engine(model, **options()) as engine:
            return told(await ask_all(engine))

    return anyio.run(run)


def random_depths(monkeypatch: pytest.MonkeyPatch, zero: float = 0.3) -> None:
    chance = random.Random(1)
    depth = lambda most: 0 if chance.random() < zero else chance.randint(1, most)  # noqa: E731
    monkeypatch.setattr(DepthRule, "choose", lambda self, rows, context: depth(self._most))


@native
@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_answer(
    way: str, model: Path, small: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(small, k=3), **options(**WAYS[way])) as engine:
            assert told(await ask_all(engine)) == alone
            assert told(await ask_all(engine)) == alone  # behind prefix hits
            counts = engine.stats()
            assert counts.drafted_tokens > 100
            if "kv_memory" in WAYS[way]:
                assert counts.preemptions > 0
            if "swap_memory" in WAYS[way]:
                assert counts.swaps > 0

    anyio.run(run)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DraftAsk, list[int], list[int]]]:
    """What engines ask for from now on, the tokens that were known, and the drafts that they get."""
    found: list[tuple[DraftAsk, list[int], list[int]]] = []
    guess = CpuDrafts._guess

    def spied(self: CpuDrafts, asked: Sequence[DraftAsk], tokens_RN: NDArray[Any]) -> list[list[int]]:
        known = [tokens_RN[ask.work.row, : ask.length].tolist() for ask in asked]
        drafts = guess(self, asked, tokens_RN)
        found.extend(each for each in zip(asked, known, drafts, strict=True) if each[0].most)
        return drafts

    monkeypatch.setattr(CpuDrafts, "_guess", spied)
    return found


def continued(reference: Any, tokens: Sequence[int], count: int, sampling: Sampling) -> list[int]:
    """The next tokens by a model of transformers, without a cache."""
    ids = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(chosen(reference(torch.tensor([ids])).logits[0, -1], sampling, len(ids)))
    return ids[len(tokens) :]


def check_drafts(
    drafts: Sequence[tuple[DraftAsk, list[int], list[int]]],
    folder: Path,
    *,
    every: int = 3,
    least: float = 0.98,
    fewest: int = 50,
) -> None:
    """Compare drafts with what the draft model says by itself."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(drafts) > fewest
    assert sum(len(each) for _, _, each in drafts) >= least * sum(ask.most for ask, _, _ in drafts)
    for ask, known, each in drafts[::every]:
        assert each == continued(reference, known, len(each), ask.work.request.asked.sampling), known


@native
@pytest.mark.parametrize("depths", [always_deep, random_depths])
@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_the_continuation_by_the_draft_model(
    way: str, depths: Any, model: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind steps without drafts, and pages that requests without speculation have computed."""
    depths(monkeypatch)
    drafts = recorded(monkeypatch)

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(small, k=4), **options(**WAYS[way])) as engine:
            await ask_all(engine, [{"speculate": False, "max_tokens": 40, "temperature": 0.0}])
            await ask_all(engine, [*ASKED, *({"max_tokens": 70, "temperature": 0.0},) * 3])
            assert "prefix_cache" in WAYS[way] or engine.stats().cached_tokens > 0
            await no_pages_held(engine)

    anyio.run(run)
    check_drafts(drafts, small, least=0.98 if "max_batched_tokens" not in WAYS[way] else 0.9)


@native
def test_turns_and_forks_carry_what_the_draft_model_has_read(
    model: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(**more: Any) -> list[Any]:
        async with Engine(model, **options(**more)) as engine:
            return await talk(engine)

    before = anyio.run(run)
    always_deep(monkeypatch)
    drafts = recorded(monkeypatch)
    assert anyio.run(lambda: run(speculation=DraftModel(small, k=3))) == before
    check_drafts(drafts, small, every=2)


@native
@pytest.mark.parametrize("way", WAYS)
def test_a_draft_model_equal_to_its_target_is_always_right(
    way: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tokens are drawn, too, since drafts are drawn with the same noise."""
    always_deep(monkeypatch)
    asked = [each | {"ignore_eos": True, "max_tokens": 61} for each in SAMPLINGS]

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(model, k=4), **options(**WAYS[way])) as engine:
            for before, each in enumerate(asked):
                answer = await engine.generate(PROMPTS[0], SamplingParams(**each))
                counts = engine.stats()
                assert answer.usage.completion_tokens == 61
                assert counts.draft_runs == 12 * (before + 1) and counts.mean_accepted_length == 5.0
            await ask_all(engine, [*asked, *asked[:2]])
            counts = engine.stats()
            assert counts.accepted_tokens == counts.drafted_tokens
            assert "kv_memory" not in WAYS[way] or counts.preemptions > 0
            assert "swap_memory" not in WAYS[way] or counts.swaps > 0

    anyio.run(run)


@native
def test_drafts_with_the_noise_of_another_position_are_wrong(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_deep(monkeypatch)

    def late(logits_RV: torch.Tensor, rows: Sequence[Choosing]) -> list[int]:
        return sample_drafts(logits_RV, [row._replace(position=row.position + 1) for row in rows])

    monkeypatch.setattr("headrace.engine.model.cpu.draft_model.sample_drafts", late)

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(model, k=4), **options()) as engine:
            await engine.generate(PROMPTS[0], SamplingParams(**SAMPLINGS[1], ignore_eos=True, max_tokens=61))
            counts = engine.stats()
            assert counts.accepted_tokens < 0.5 * counts.drafted_tokens

    anyio.run(run)


@native
def test_a_quantised_file_drafts_for_itself(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_deep(monkeypatch)

    async def run() -> None:
        text = f"draft:{smollm2},k=3"
        async with Engine(smollm2, device="cpu", kv_memory="64MiB", cpu_threads=1, speculation=text) as engine:
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=17)
            await engine.generate("A headrace is", params)
            assert engine.stats().mean_accepted_length == 4.0
            formats = {each.format for each in engine.info.weights if each.part == "draft model"}
            assert formats == {each.format for each in engine.info.weights if each.part != "draft model"}

    anyio.run(run)


@native
def test_matrices_of_a_draft_model_may_be_quantised(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    small = small_folder(tmp_path / "draft", hidden_size=64, intermediate_size=64, head_dim=32)

    async def run(**more: Any) -> list[Any]:
        async with Engine(model, **options(dtype="auto", **more)) as engine:
            own = {each.format for each in engine.info.weights if each.part == "draft model"}
            assert not more or "int8" in own
            assert all(each.format == "bfloat16" for each in engine.info.weights if each.part != "draft model")
            return told(await ask_all(engine))

    assert anyio.run(lambda: run(speculation=DraftModel(small, quantize="int8"))) == anyio.run(run)


@native
def test_drafts_end_with_the_context_of_the_draft_model(
    model: Path, tmp_path: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    drafts = recorded(monkeypatch)
    small = small_folder(tmp_path / "draft", max_position_embeddings=40)

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(small, k=4), **options()) as engine:
            assert engine.info.max_context == 2048
            assert told(await ask_all(engine)) == alone

    anyio.run(run)
    ends = [len(known) + len(each) for _, known, each in drafts if each]
    assert max(ends) == 41, "the last token that is read, at position 39, gives a draft for position 40"
    assert any(len(known) > 40 and not each for _, known, each in drafts)
    filled = [(ask._replace(most=len(each)), known, each) for ask, known, each in drafts if each]
    check_drafts(filled, small, every=2, fewest=20)


@native
@pytest.mark.parametrize("windows", [(12, 20), (20, 12), (12, None), (None, 12)])
def test_windows_of_both_models_hold_pages(
    windows: tuple[int | None, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    drafts = recorded(monkeypatch)
    target = small_folder(tmp_path / "target", "Mistral", sliding_window=windows[0], num_hidden_layers=2)
    small = small_folder(tmp_path / "draft", "Mistral", sliding_window=windows[1])

    async def run(**more: Any) -> Any:
        async with Engine(target, **options(page_size=4, kv_memory="60KiB", **more)) as engine:
            capacity = engine._serving.parts().opened.capacity
            if more:
                assert capacity.window == (max(windows) if None not in windows else None)
            return told(await ask_all(engine, [{"max_tokens": 90, "temperature": 0.0, "ignore_eos": True}] * 3))

    assert anyio.run(lambda: run(speculation=DraftModel(small, k=3))) == anyio.run(run)
    check_drafts(drafts, small, every=7)


@native
def test_memory_holds_both_models_and_comes_back_after_sleep(
    model: Path, small: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)

    async def run() -> None:
        async with Engine(model, **options()) as engine:
            before = engine.info
        async with Engine(
            model, speculation=DraftModel(small), **options(**WAYS["swapped"] | {"page_size": 16})
        ) as engine:
            info, runner = engine.info, engine._serving.parts().opened.runner
            own = 2 * 16 * 1 * 8 * 4  # keys and values of 16 tokens, one head of one layer
            assert info.page_bytes == before.page_bytes + own
            assert info.num_pages == (64 << 10) // info.page_bytes
            assert info.draft_model == small.name
            extra = sum(each.nbytes for each in info.weights if each.part == "draft model")
            assert info.weight_bytes == before.weight_bytes + extra and extra > 10_000
            assert isinstance(runner._draft, CpuDraftModel) and runner._page_bytes == info.page_bytes
            for level in (1, 2):
                await engine.sleep(level)
                assert runner._draft._kv.num_pages == 1 and (runner._draft._decoder is None) == (level == 2)
                await engine.wake()
                drafted = engine.stats().drafted_tokens
                assert told(await ask_all(engine)) == alone
                assert engine.stats().drafted_tokens > drafted
            await engine.resize_kv("48KiB")
            assert runner._draft._kv.num_pages == (48 << 10) // info.page_bytes
            assert told(await ask_all(engine)) == alone

    anyio.run(run)


@native
def test_cancelled_requests_give_everything_back(model: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_deep(monkeypatch)

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(small), **options(launch_ahead=4)) as engine:
            for count in range(8):
                async with engine.stream("one two", SamplingParams(max_tokens=100, ignore_eos=True)) as stream:
                    for _ in range(count):
                        await anext(stream)
            await no_pages_held(engine)

    anyio.run(run)


async def open_with(model: Path | str, speculation: Any, **more: Any) -> None:
    async with Engine(model, speculation=speculation, **options(**more)):
        pass


def test_draft_models_that_do_not_fit_are_refused_at_opening(model: Path, small: Path, tmp_path: Path) -> None:
    other = shutil.copytree(small, tmp_path / "other")
    write_tokenizer(other)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"A": 32', '"A": 33').replace('"B": 33', '"B": 32'))
    encoder = shutil.copytree(small, tmp_path / "encoder")
    (encoder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    headless = shutil.copytree(small, tmp_path / "headless")
    config = json.loads((headless / "config.json").read_text())
    (headless / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    damaged = shutil.copytree(small, tmp_path / "damaged")
    (damaged / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    cases: list[tuple[Any, str]] = [
        (other, r"speculation\.path: other reads the id 32 as 'B', the model as 'A': it has another tokenizer"),
        (encoder, r"speculation\.path: the draft model .*encoder cannot be used: .*BertModel"),
        (headless, r"speculation\.path: headless has no output head, so it is no causal language model"),
        (damaged, r"speculation\.path: the draft model .*damaged cannot be used: .*mlp"),
        (tmp_path / "none", r"speculation\.path: the draft model .*none cannot be used: .*no such folder"),
    ]
    for path, pattern in cases:
        with pytest.raises(ModelRejected, match=pattern) as caught:
            anyio.run(open_with, model, DraftModel(path))
        assert caught.value.field == "speculation.path"


def test_random_weights_need_vocabularies_of_one_size(model: Path, small: Path, tmp_path: Path) -> None:
    def run(folder: Path) -> None:
        anyio.run(lambda: open_with(model, DraftModel(folder), load_format="random"))

    run(small)
    with pytest.raises(ModelRejected, match="has a vocabulary of 300 tokens, the model one of 257"):
        run(small_folder(tmp_path / "wide", vocab_size=300))


def test_a_draft_model_larger_than_its_target_is_told_of(
    model: Path, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    anyio.run(open_with, model, DraftModel(small))
    assert "more than the model" not in caplog.text
    anyio.run(open_with, small, DraftModel(model))
    assert f"the draft model {model.name} takes " in caplog.text


@native
def test_vocabularies_may_be_padded_differently(
    model: Path, alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    wide = small_folder(tmp_path / "wide", vocab_size=320)

    async def run() -> None:
        async with Engine(model, speculation=DraftModel(wide), **options()) as engine:
            assert told(await ask_all(engine)) == alone
        async with Engine(wide, speculation=DraftModel(model), **options()) as engine:
            await engine.generate(PROMPTS[0], SamplingParams(max_tokens=30, logit_bias={300: 100.0}, temperature=0.0))
            assert engine.stats().drafted_tokens > 0

    anyio.run(run)


def test_tokenizers_agree_on_what_both_have_but_for_special_tokens() -> None:
    def table(*pieces: bytes, special: Sequence[int] = ()) -> TokenTable:
        return TokenTable(list(pieces), frozenset(special))

    whole = table(b"a", b"b", b"", b"<end>", special=[3])
    for fits in (table(b"a", b"b"), table(b"a", b"b", b"c", b"<stop>", b"more", special=[3]), whole):
        check_vocabularies("draft", fits, whole)
        check_vocabularies("draft", whole, fits)
    with pytest.raises(ModelRejected, match="draft reads the id 1 as 'c', the model as 'b'"):
        check_vocabularies("draft", table(b"a", b"c"), whole)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("draft:path/to/model", DraftModel("path/to/model")),
        ("draft:path/to/model,k=5", DraftModel("path/to/model", k=5)),
        ("draft:path=org/name,file=*Q4*,quantize=int8", DraftModel("org/name", file="*Q4*", quantize="int8")),
        ("draft:k=2,path=7", DraftModel("7", k=2)),
        ("eagle:path/to/head,k=2", Eagle("path/to/head", k=2)),
    ],
)
def test_draft_models_are_named_by_text(text: str, expected: Any) -> None:
    assert speculation_of(text) == expected


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("draft", "speculation.path"),
        ("draft:k=3", "speculation.path"),
        ("draft:model,k=17", "speculation.k"),
        ("draft:model,depth=4", "speculation.depth"),
        ("draft:model,path=other", "speculation.path"),
        ("draft:model,quantize=int3", "speculation.quantize"),
        ("draft:model,file=", "speculation.file"),
    ],
)
def test_wrong_texts_name_the_option(text: str, field: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        speculation_of(text)
    assert caught.value.field == field


SIZE = 4


@given(st.data())
def test_filled_pages_tell_how_far_a_row_was_read(data: st.DataObject) -> None:
    """The target computes from anywhere in front of its end, and the draft model reads on up to the target's end."""
    pages, counts = np.array([3, 0, 2, 4]), FilledPages(5, SIZE)
    counts.resize(6)
    end = read = 0
    for _ in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.integers(0, min(end, 4 * SIZE - 1)))
        end = data.draw(st.integers(start + 1, 4 * SIZE))
        row = pages[: -(-end // SIZE)]
        counts.overwrite(row, start)
        read = min(read, start)
        assert min(counts.first_open(row), end) == read
        if data.draw(st.booleans()):
            before, read = read, data.draw(st.integers(read + 1, end))
            counts.fill(pages[: -(-read // SIZE)], before, read)
        assert min(counts.first_open(row), end) == read


def test_filled_pages_go_where_pages_go() -> None:
    counts, row = FilledPages(4, SIZE), np.array([1, 2])
    counts.open_host(3)
    counts.fill(row, 0, 7)
    counts.copy([(2, 3), (1, 2)])
    assert [counts.first_open(np.array([page])) for page in range(4)] == [0, 4, 4, 3]
    counts.spill([(3, 2), (1, 0)])
    counts.overwrite(np.array([1, 3]), 0)
    assert counts.first_open(np.array([1, 3])) == 0
    counts.fetch([(0, 3), (2, 0)])
    assert [counts.first_open(np.array([page])) for page in range(4)] == [3, 0, 4, 4]
    counts.resize(1)
    counts.resize(4)
    assert [counts.first_open(np.array([page])) for page in range(4)] == [3, 0, 0, 0]
