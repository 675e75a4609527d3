"""Engines that draft by trained heads: the same answers as without, drafts by the definition, and errors at opening."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import huggingface_hub
import pytest
import torch
from draft_driver import states_of
from draft_heads import SIZE, Eagle3Head, EagleHead, MedusaHead, MtpHead
from drafting_engines import (
    ASKED,
    HEADS,
    PROMPTS,
    always_deep,
    answers_alone,
    ask_all,
    chained_folder,
    check_drafts,
    fit,
    gemma4_folder,
    recorded,
    talk,
    told,
)
from emulated_cuda import emulated
from gguf_families import random_model, write_gguf
from mtp_models import LAYERS, with_module
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tiny_models import chat_folder
from tokenizer_files import byte_metadata

from headrace.engine import DeviceUnavailable, Engine, InvalidParams, ModelRejected, SamplingParams
from headrace.engine.model.cpu.heads import KEPT
from headrace.engine.model.drafting.heads.recurrent import RecurrentHead
from headrace.engine.model.drafting.ngram import NgramDrafter
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.engine.speculation import Eagle, Medusa, Mtp, Speculation
from headrace.ops.cpu.native.library import library

native = pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2")

WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "far ahead": {"launch_ahead": 5, "page_size": 4},
    "short of pages": {"kv_memory": "36KiB", "page_size": 4, "max_rows": 6, "max_batched_tokens": 24},
    "swapped": {"kv_memory": "36KiB", "page_size": 4, "swap_memory": "1MiB", "prefix_cache": False},
}


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "cpu_threads": 1, "kv_memory": "1MiB", "dtype": "float32", "seed": 3} | more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Any]:
    return answers_alone(model, **options())


@native
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HEADS)
def test_heads_change_no_answer(
    name: str, way: str, model: Path, alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    torch.manual_seed(3)
    make, method = HEADS[name]
    speculation = method(fit(make()).write(tmp_path / "head"), k=3)

    async def run() -> None:
        async with Engine(model, speculation=speculation, **options(**WAYS[way])) as engine:
            assert told(await ask_all(engine)) == alone
            assert told(await ask_all(engine)) == alone  # behind prefix hits
            counts = engine.stats()
            assert counts.drafted_tokens > 100
            if "kv_memory" in WAYS[way]:
                assert counts.preemptions > 0
            if "swap_memory" in WAYS[way]:
                assert counts.swaps > 0

    anyio.run(run)


@native
@pytest.mark.parametrize(
    ("swapped", "without"), [(False, 0), (True, 0), (True, 4)], ids=["roomy", "swapped", "swapped, seldom deep"]
)
@pytest.mark.parametrize("name", HEADS)
def test_an_engine_drafts_what_the_definition_says(
    name: str, swapped: bool, without: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    deep_after(monkeypatch, without)
    drafts = recorded(monkeypatch)
    torch.manual_seed(3)
    make, method = HEADS[name]
    head = fit(make())
    speculation = method(head.write(tmp_path / "head"), k=3)
    more: dict[str, Any] = {"prefix_cache": False, "page_size": 4, "launch_ahead": 3}
    if swapped:
        more |= {"kv_memory": "36KiB", "swap_memory": "1MiB", "max_batched_tokens": 24}

    async def run() -> None:
        async with Engine(model, speculation=speculation, **options(**more)) as engine:
            await ask_all(engine, ASKED[:4])
            assert not swapped or engine.stats().swaps > 0

    anyio.run(run)
    reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    filled = [(ask.work.request, ask.length, each) for ask, each in drafts if each]
    assert len(filled) > (8 if without else 50) and len(filled) >= 0.9 * len(drafts)
    for request, length, each in filled[:: 1 if without else 3]:
        tokens, sampling = request.tokens[:length], request.asked.sampling
        assert each == head.drafts(states_of(reference, tokens), tokens[1:], len(each), sampling), tokens


@native
@pytest.mark.rotated(2)
@pytest.mark.parametrize("without", [0, 6], ids=["always deep", "seldom deep"])
@pytest.mark.parametrize("name", [*HEADS, "MTP"])
def test_turns_and_forks_carry_what_a_head_has_read(
    name: str, without: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last entry of a page that another branch goes on from with another token."""
    import transformers

    torch.manual_seed(3)
    if name == "MTP":
        model = chat_folder(tmp_path / "model")
        reference, head = with_module("GLM-4.5", model, vocab_size=257, max_position_embeddings=512)
        speculation, layers = Mtp(k=3), LAYERS
    else:
        make, method = HEADS[name]
        reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        head, layers = fit(make()), None
        speculation = method(head.write(tmp_path / "head"), k=3)

    async def run(**more: Any) -> list[list[int]]:
        async with Engine(model, **options(**more)) as engine:
            return await talk(engine)

    alone = anyio.run(run)
    deep_after(monkeypatch, without)
    drafts = recorded(monkeypatch)
    assert anyio.run(lambda: run(speculation=speculation)) == alone
    filled = [(ask.work.request, ask.length, each) for ask, each in drafts if each]
    assert len(filled) == len(drafts) > (10 if without else 50)
    right = []
    for request, length, each in filled[:: 1 if without else 4]:
        states = states_of(reference, request.tokens[:length], layers)
        right.append(each == head.drafts(states, request.tokens[1:length], len(each), request.asked.sampling))
    assert sum(right) >= 0.92 * len(right)


def deep_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """From now on every step after so many without drafts has some."""
    asked = 0

    def choose(self: DepthRule, rows: int, context: int) -> int:
        nonlocal asked
        asked += 1
        return 0 if asked % (steps + 1) else 3

    monkeypatch.setattr(DepthRule, "choose", choose)


@native
@pytest.mark.parametrize("name", HEADS)
def test_a_head_takes_up_what_it_missed_before_it_drafts(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    deep_after(monkeypatch, 9)
    drafts = recorded(monkeypatch)
    torch.manual_seed(3)
    make, method = HEADS[name]
    head = fit(make())
    passes: list[int] = []
    advance = RecurrentHead.advance

    def counted(self: Any, tokens_N: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes.append(len(tokens_N))
        return advance(self, tokens_N, *rest)

    monkeypatch.setattr(RecurrentHead, "advance", counted)

    async def run() -> None:
        speculation = method(head.write(tmp_path / "head"), k=3)
        async with Engine(model, speculation=speculation, **options(prefix_cache=False)) as engine:
            await engine.generate(PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))

    anyio.run(run)
    reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    filled = [(ask.work.request, ask.length, each) for ask, each in drafts if each]
    assert 4 <= len(filled) <= 7
    for request, length, each in filled:
        tokens = request.tokens[:length]
        assert each == head.drafts(states_of(reference, tokens), tokens[1:], len(each)), tokens
    if name != "Medusa":
        assert len(passes) == 3 * len(filled) and max(passes) >= 9, "what was missed is one pass, and two drafts follow"


@native
@pytest.mark.parametrize("name", HEADS)
def test_a_head_has_read_all_behind_any_number_of_steps_without_drafts(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep_after(monkeypatch, KEPT + 9)
    drafts = recorded(monkeypatch)
    torch.manual_seed(3)
    make, method = HEADS[name]
    head = fit(make())
    asked = [each | {"max_tokens": 2 * KEPT, "ignore_eos": True} for each in ASKED[:3]]

    async def run() -> None:
        async with Engine(model, **options()) as engine:
            alone = told(await ask_all(engine, asked))
        speculation = method(head.write(tmp_path / "head"), k=3)
        async with Engine(model, speculation=speculation, **options()) as engine:
            assert told(await ask_all(engine, asked)) == alone
            assert told(await ask_all(engine, asked)) == alone

    anyio.run(run)
    assert len(drafts) >= 6
    check_drafts(drafts, head, model)


@native
@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3"])
@pytest.mark.parametrize("ends", ["by its length", "by a token", "while its pages are resized"])
def test_a_prefix_hit_finds_whole_pages_behind_steps_without_drafts(
    ends: str, name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = 0
    monkeypatch.setattr(DepthRule, "choose", lambda self, rows, context: depth)
    drafts = recorded(monkeypatch)
    torch.manual_seed(3)
    head = fit(HEADS[name][0]())
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    ended: dict[str, Any] = {"max_tokens": KEPT + 40}
    if ends == "by a token":
        ended = {"max_tokens": 300, "min_tokens": KEPT + 20, "stop_token_ids": list(range(0, 256, 16))}

    async def run() -> None:
        nonlocal depth
        async with Engine(model, speculation=Eagle(head.write(tmp_path / "head")), **options()) as engine:
            prompt = list(b"once")
            first = await engine.generate(prompt, SamplingParams(**asked, **ended))
            assert (first.choices[0].finish_reason == "stop") == (ends == "by a token")
            if "resized" in ends:
                await engine.resize_kv(engine.stats().pages // 2 * engine.info.page_bytes)
            depth = 3
            again = await engine.generate(prompt + first.choices[0].token_ids, SamplingParams(**asked, max_tokens=9))
            assert again.usage.cached_tokens >= KEPT

    anyio.run(run)
    assert len(drafts) >= 3
    check_drafts(drafts, head, model)


@native
def test_a_head_reads_nothing_of_requests_without_drafts_but_long_prompts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DepthRule, "choose", lambda self, rows, context: 0)
    torch.manual_seed(3)
    read: list[int] = []
    advance = RecurrentHead.advance

    def counted(self: Any, tokens_N: torch.Tensor, *rest: Any) -> torch.Tensor:
        read.append(len(tokens_N))
        return advance(self, tokens_N, *rest)

    monkeypatch.setattr(RecurrentHead, "advance", counted)
    asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 2 * KEPT + 9}

    async def run() -> None:
        async with Engine(model, speculation=Eagle(fit(Eagle3Head()).write(tmp_path / "head")), **options()) as engine:
            for prompt in ("a", "b", "ab"):
                await engine.generate(prompt, SamplingParams(**asked, speculate=False))
            assert read == []
            await engine.generate(PROMPTS[0], SamplingParams(**asked, speculate=False))
            assert read == [len(PROMPTS[0])]
            read.clear()
            await engine.generate("c", SamplingParams(**asked))
            assert read == [KEPT, KEPT]
            read.clear()
            await engine.generate("d", SamplingParams(**asked | {"max_tokens": 2 * KEPT, "n": 4, "temperature": 1.0}))
            assert len(read) >= 4 and max(read) < 2 * KEPT, "rows that began together are read in different steps"

    anyio.run(run)


@native
@pytest.mark.parametrize("swapped", [False, True], ids=["roomy", "swapped"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_a_model_with_several_pools_of_pages(
    name: str, swapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    always_deep(monkeypatch)
    drafts = recorded(monkeypatch)
    folder = gemma4_folder(tmp_path / "model")
    torch.manual_seed(3)
    make, method = HEADS[name]
    head = fit(make())
    speculation = method(head.write(tmp_path / "head"), k=3)
    more: dict[str, Any] = {"prefix_cache": False, "page_size": 4, "launch_ahead": 3}
    if swapped:
        more |= {"kv_memory": "56KiB", "swap_memory": "1MiB", "max_batched_tokens": 24}

    async def run(**also: Any) -> list[Any]:
        async with Engine(folder, **options(**more), **also) as engine:
            answers = told(await ask_all(engine, ASKED[:4] * 2))
            assert not swapped or not also or engine.stats().swaps > 0
            return answers

    assert anyio.run(lambda: run(speculation=speculation)) == anyio.run(run)
    reference = transformers.Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    filled = [(ask.work.request, ask.length, each) for ask, each in drafts if each]
    assert len(filled) > 50 and len(filled) >= 0.9 * len(drafts)
    for request, length, each in filled[::3]:
        tokens, sampling = request.tokens[:length], request.asked.sampling
        assert each == head.drafts(states_of(reference, tokens), tokens[1:], len(each), sampling), tokens


def one_row(model: Path, speculation: Speculation, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Drafted and accepted tokens, and all tokens of an answer."""
    always_deep(monkeypatch)

    async def run() -> tuple[int, int, int]:
        async with Engine(model, speculation=speculation, **options()) as engine:
            answer = await engine.generate("go", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
            counts = engine.stats()
            return counts.drafted_tokens, counts.accepted_tokens, answer.usage.completion_tokens

    return anyio.run(run)


@native
def test_a_head_that_knows_the_model_is_always_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = fit(EagleHead(biased=False))
    for name, tensor in head.tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    head.tensors["fc.weight"] = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1)
    speculation = Eagle(head.write(tmp_path / "head"), k=4)
    drafted, accepted, tokens = one_row(chained_folder(tmp_path / "model"), speculation, monkeypatch)
    assert tokens == 40 and drafted - accepted <= 4 and accepted >= 28  # but for drafts behind the last token


@native
def test_a_module_that_comes_with_the_model_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = chained_folder(tmp_path / "model", "Glm4Moe")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}))
    MtpHead.add_to(folder, 1, SIZE)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.eh_proj.weight"] = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1)
    for name in ("enorm", "shared_head.norm"):
        tensors[f"model.layers.1.{name}.weight"] = torch.ones(SIZE)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    drafted, accepted, tokens = one_row(folder, Mtp(k=2), monkeypatch)
    assert tokens == 40 and drafted - accepted <= 2 and accepted >= 24


@native
def test_a_head_comes_back_after_sleep(
    model: Path, alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_deep(monkeypatch)
    torch.manual_seed(3)
    speculation = Eagle(fit(Eagle3Head()).write(tmp_path / "head"))

    async def run() -> None:
        async with Engine(model, speculation=speculation, **options()) as engine:
            for level in (1, 2):
                await engine.sleep(level)
                await engine.wake()
                before = engine.stats().drafted_tokens
                assert told(await ask_all(engine)) == alone
                assert engine.stats().drafted_tokens > before

    anyio.run(run)


def test_memory_beside_the_cache_counts_the_head(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's pages grow with the cache, and go to host memory with it, also when it was read again."""
    torch.manual_seed(3)
    speculation = Eagle(fit(Eagle3Head()).write(tmp_path / "head"))
    free = 8 << 20
    monkeypatch.setattr("headrace.engine.model.cpu.runner.free_host_bytes", lambda: free)

    async def run() -> None:
        async with Engine(model, speculation=speculation, **options(**WAYS["swapped"])) as engine:
            runner = engine._serving.parts().opened.runner
            assert runner.most_pages == free // engine.info.page_bytes
            pool = runner._head.host
            await engine.sleep(2)
            await engine.wake()
            assert pool is not None and runner._head.host is pool

    anyio.run(run)


@pytest.mark.parametrize("name", HEADS)
def test_weights_beside_the_model_count_the_head(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    make, method = HEADS[name]
    head = fit(make())
    speculation = method(head.write(tmp_path / "head"), k=3)
    ids = 8 * len(head.tensors["d2t"]) if "d2t" in head.tensors else 0  # the map itself is int64
    taken = 4 * sum(each.numel() for key, each in head.tensors.items() if key not in ("d2t", "t2d")) + ids

    async def run(**more: Any) -> int:
        async with Engine(model, speculation=speculation, **options(**more)) as engine:
            of_head = [part.nbytes for part in engine.info.weights if part.part == "draft head"]
            assert taken <= sum(of_head) <= 1.2 * taken  # kernels fill up the last rows of a matrix
            return engine.info.weight_bytes

    weights = anyio.run(run)
    monkeypatch.setattr("headrace.engine.model.cpu.sizing.free_host_bytes", lambda: weights - 1)
    with pytest.raises(DeviceUnavailable, match=f"the weights take {weights} bytes"):
        anyio.run(run)


async def open_with(model: Path | str, speculation: Any, **more: Any) -> None:
    async with Engine(model, speculation=speculation, **options(**more)):
        pass


def test_heads_that_do_not_fit_are_refused_at_opening(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    medusa = fit(MedusaHead(heads=2)).write(tmp_path / "medusa")
    eagle = fit(EagleHead()).write(tmp_path / "eagle")
    other = EagleHead().write(tmp_path / "other")
    cases: list[tuple[Any, type[Exception], str]] = [
        (Medusa(medusa, k=3), InvalidParams, r"speculation\.k: medusa drafts at most 2 tokens in a row, got 3"),
        (Medusa(eagle), InvalidParams, "eagle holds a head for Eagle"),
        (Eagle(medusa), InvalidParams, "medusa holds a head for Medusa"),
        (Eagle(other), ModelRejected, r"vocab_size is 96; supported: 257, as in the model"),
        (Eagle(tmp_path / "nowhere"), ModelRejected, "nowhere: no such folder"),
        (Mtp(), ModelRejected, r"model\.layers\.2\.eh_proj\.weight .* a module that drafts"),
    ]
    for speculation, error, why in cases:
        with pytest.raises(error, match=why):
            anyio.run(lambda of=speculation: open_with(model, of))
    with pytest.raises(InvalidParams, match="only a model folder with weights holds a module that drafts"):
        anyio.run(lambda: open_with(model, Mtp(), load_format="random"))


def gguf_like(model: Path, path: Path) -> Path:
    """Write a GGUF file whose tokens are those of a folder by `chat_folder`, but for the name of the special one."""
    letters = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    tokens, end = [*sorted(letters, key=letters.get), "he"], len(letters)  # merges give it
    kinds = [1] * end + [3]
    fields = byte_metadata(tokens=tokens, token_type=kinds, merges=["h e"], bos_token_id=end, eos_token_id=end)
    made = random_model("llama", vocab_size=len(tokens), hidden_size=SIZE, num_hidden_layers=2)
    write_gguf(made, path, lambda metadata, _: metadata.update(fields))
    return path


@pytest.mark.parametrize("kind", ["folder", "GGUF file"])
def test_a_head_with_another_tokenizer_is_refused_by_an_id(kind: str, model: Path, tmp_path: Path) -> None:
    target = gguf_like(model, tmp_path / "model.gguf") if kind == "GGUF file" else model
    torch.manual_seed(3)
    head = fit(EagleHead()).write(tmp_path / "head")
    path = head / "tokenizer.json"
    written = json.loads((model / "tokenizer.json").read_text())
    letters = written["model"]["vocab"]
    written["added_tokens"][0]["content"] = "<|stop|>"  # special tokens may have other names
    path.write_text(json.dumps(written))
    anyio.run(open_with, target, Eagle(head))
    for changes, why in (
        ({"A": letters["B"], "B": letters["A"]}, rf"head reads the id {letters['A']} as 'B', the model as 'A': it has"),
        ({"A": "one"}, "the draft head .*head cannot be used: "),
    ):
        path.write_text(json.dumps(written | {"model": written["model"] | {"vocab": letters | changes}}))
        with pytest.raises(ModelRejected, match=rf"speculation\.path: {why}") as caught:
            anyio.run(open_with, target, Eagle(head))
        assert caught.value.field == "speculation.path"


def test_heads_can_be_named_by_text(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    folder = fit(EagleHead()).write(tmp_path / "123")
    anyio.run(lambda: open_with(model, f"eagle:path={folder},k=2"))
    for text, why in (("eagle", "speculation.path: must be the path"), ("medusa:path=", "speculation.path"),
                      ("mtp:k=17", "speculation.k: must be an int from 1 to 16")):  # fmt: skip
        with pytest.raises(InvalidParams, match=why):
            anyio.run(lambda of=text: open_with(model, of))


def cached_eagle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a head that fits, as the hub's library keeps `someone/tiny.eagle` on a machine."""
    torch.manual_seed(3)
    repository, commit = tmp_path / "hub/models--someone--tiny.eagle", "0" * 40
    folder = fit(EagleHead()).write(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


def test_a_head_may_be_a_hub_id_that_is_on_this_machine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_eagle(tmp_path, monkeypatch)
    anyio.run(open_with, model, "eagle:someone/tiny.eagle,k=2")
    with pytest.raises(InvalidParams, match=r"tiny\.eagle holds a head for Eagle"):
        anyio.run(open_with, model, Medusa("someone/tiny.eagle"))
    why = r"speculation\.path: the draft head someone/other cannot be used: .*allow_download=True fetches"
    with pytest.raises(ModelRejected, match=why) as caught:
        anyio.run(open_with, model, Eagle("someone/other"))
    assert caught.value.field == "speculation.path"
    for path in ("./someone/tiny.eagle", "someone/tiny.eagle/", "someone//tiny.eagle"):  # paths, of nothing
        with pytest.raises(ModelRejected, match="no such folder") as caught:
            anyio.run(open_with, model, Eagle(path))
        assert caught.value.field == "speculation.path" and "allow_download" not in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_head_is_looked_up_once(device: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer and its weights are of one revision, whatever the hub says next."""
    shutil.copy(model / "tokenizer.json", cached_eagle(tmp_path, monkeypatch))
    looked_up: list[str] = []
    look_up = huggingface_hub.snapshot_download

    def counted(repository: str, **asked: Any) -> str:
        looked_up.append(repository)
        return look_up(repository, **asked)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", counted)
    with emulated() if device == "cuda" else nullcontext():
        sizes = {"dtype": "auto", "max_context": 64, "max_rows": 1}
        anyio.run(partial(open_with, device=device, **sizes), model, "eagle:someone/tiny.eagle")
    assert looked_up == ["someone/tiny.eagle"]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (
            ["config.json", "medusa_lm_head.pt"],
            r"no safetensors; it holds medusa_lm_head\.pt, of which pickles",
        ),
        (["eagle-00001-of-00002.gguf"], r"no safetensors; it holds eagle-00001-of-00002\.gguf$"),
        (["README.md"], "no safetensors$"),
    ],
)
def test_a_repository_without_safetensors_is_not_fetched(
    names: list[str], why: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name: siblings)
    with pytest.raises(ModelRejected, match=why) as caught:
        anyio.run(partial(open_with, allow_download=True), model, Medusa("someone/heads"))
    assert caught.value.field == "speculation.path"


@pytest.mark.parametrize("way", ["eagle", "draft"])
def test_paths_that_cannot_be_looked_up_are_refused(way: str, model: Path) -> None:
    for path in ("a" * 300, "~nosuchuser/x"):
        with pytest.raises(ModelRejected, match="File name too long|no such folder") as caught:
            anyio.run(open_with, model, f"{way}:{path}")
        assert caught.value.field == "speculation.path"


def test_ngrams_read_what_lies_behind_a_prefix_hit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    draft = NgramDrafter.draft

    def spied(self: NgramDrafter, tokens_N: NDArray[Any], most: int) -> list[int]:
        seen.append(tokens_N.tolist())
        return draft(self, tokens_N, most)

    monkeypatch.setattr(NgramDrafter, "draft", spied)
    always_deep(monkeypatch)

    async def run() -> None:
        async with Engine(model, speculation="ngram", max_rows=1, page_size=4, **options()) as engine:
            for prompt in (PROMPTS[0], PROMPTS[3] * 2, PROMPTS[0]):  # the row holds another prompt in between
                seen.clear()
                answer = await engine.generate(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
                known = answer.prompt_token_ids + answer.choices[0].token_ids
                assert seen and all(tokens == known[: len(tokens)] for tokens in seen)
            assert answer.usage.cached_tokens > 0

    anyio.run(run)
