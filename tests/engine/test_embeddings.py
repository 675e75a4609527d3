"""`Engine.embed` and `Engine.hidden_states`: against transformers' hidden states, and what they do to the scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_folders
import anyio
import numpy as np
import pytest
import tiny_models
import torch
import transformers
from gpu.test_embeddings import check_nothing_is_copied
from numpy.typing import NDArray
from scripted import Gate, capacity, greedy, returned, serving, until

from headrace.engine import (
    Engine,
    EngineStopped,
    InvalidParams,
    ModelRejected,
    NonFiniteLogits,
    PromptTooLong,
    UnknownAdapter,
)
from headrace.engine.model.checkpoint.embedding import read_embedding
from headrace.engine.scheduling.result import NoToken
from headrace.engine.testing import scripted_vector

SHARED = [(at * 7) % 89 + 1 for at in range(40)]
PROMPTS = [[5, 6, 7], SHARED, [*SHARED, 9, 9, 3], [8] * 20, [1], [*SHARED[:32]], [*SHARED, *SHARED[::-1]]]
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": 64 * tiny_models.PAGE_BYTES}
CUTS: list[dict[str, Any]] = [
    {},
    {"max_batched_tokens": 7, "max_rows": 3},  # every prompt in chunks, some of one token
    {"kv_memory": 6 * tiny_models.PAGE_BYTES, "max_rows": 4, "max_batched_tokens": 24},  # with preemptions
]


def hidden_states(folder: Path) -> list[NDArray[np.float32]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model.model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in PROMPTS]


def unit(vectors: Any) -> NDArray[np.float32]:
    array = np.asarray(vectors, np.float32)
    unit: NDArray[np.float32] = array / np.linalg.norm(array, axis=-1, keepdims=True)
    return unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.whole_folder(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def states(folder: Path) -> list[NDArray[np.float32]]:
    return hidden_states(folder)


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "chunks", "preempted"])
def test_vectors_and_states_are_those_of_transformers(
    folder: Path, states: list[NDArray[np.float32]], cut: dict[str, Any]
) -> None:
    async def main() -> None:
        async with Engine(folder, **(OPTIONS | cut)) as engine:
            await engine.generate(SHARED, greedy(1))  # its pages are there for whoever may use them
            last = await engine.embed(PROMPTS)
            np.testing.assert_allclose(last.vectors, unit([each[-1] for each in states]), atol=1e-5)
            mean = await engine.embed(PROMPTS, pooling="mean", normalize=False)
            np.testing.assert_allclose(mean.vectors, [each.mean(0) for each in states], rtol=1e-4, atol=1e-5)
            assert mean.usage.cached_tokens == 0, "mean pooling needs every token's hidden state"
            if not cut:
                assert last.usage.cached_tokens > 0, "the last token's hidden state needs no other's"
            assert mean.vectors.dtype == np.float32
            assert last.usage.prompt_tokens == sum(map(len, PROMPTS))
            short = await engine.embed(PROMPTS, dimensions=5)
            np.testing.assert_allclose(short.vectors, unit([each[-1][:5] for each in states]), atol=1e-5)
            for prompt, expected in zip(PROMPTS, states, strict=True):
                found = await engine.hidden_states(prompt)
                np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
            assert engine.stats().pages_held == 0
            assert engine.stats().generated_tokens == 1

    anyio.run(main)


def test_hidden_states_are_not_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_nothing_is_copied(folder, "cpu", monkeypatch)


def test_a_batch_is_embedded_beside_generations(folder: Path, states: list[NDArray[np.float32]]) -> None:
    async def main() -> None:
        async with Engine(folder, **OPTIONS, max_batched_tokens=16, max_rows=4) as engine:
            alone = await engine.generate([5, 6, 7], greedy(24))
            beside: list[Any] = []

            async def generate() -> None:
                beside.append(await engine.generate([5, 6, 7], greedy(24)))

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(generate)
                found = await engine.embed(PROMPTS * 4, pooling="mean")
            expected = unit([each.mean(0) for each in states] * 4)
            np.testing.assert_allclose(found.vectors, expected, atol=1e-5)
            assert [answer.choices[0].token_ids for answer in beside] == [alone.choices[0].token_ids] * 3

    anyio.run(main)


def test_each_input_wears_its_own_adapter(folder: Path, tmp_path: Path) -> None:
    """Prefix pages of one are never those of another."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    models = {None: base, "worn": adapter_folders.merged(base, adapter_folders.lora_tensors(3, 4))}
    names = [None, "worn", "worn", None, "worn"]
    asked = [SHARED, SHARED, [*SHARED, 9, 9, 3], [*SHARED, 9, 9, 3], [5, 6, 7]]
    with torch.no_grad():
        expected = [
            models[name].model(torch.tensor([ids])).last_hidden_state[0].numpy()
            for ids, name in zip(asked, names, strict=True)
        ]

    async def main() -> None:
        async with Engine(folder, **OPTIONS, adapter_slots=2, max_batched_tokens=24) as engine:
            await engine.adapters.load("worn", adapter_folders.lora_folder(tmp_path / "worn", 3))
            for _ in range(2):
                last = await engine.embed(asked, adapter=names)
                np.testing.assert_allclose(last.vectors, unit([each[-1] for each in expected]), atol=1e-5)
            mean = await engine.embed(asked, adapter=names, pooling="mean", normalize=False)
            np.testing.assert_allclose(mean.vectors, [each.mean(0) for each in expected], rtol=1e-4, atol=1e-5)
            found = await engine.hidden_states(SHARED, adapter="worn")
            np.testing.assert_allclose(found.numpy(), expected[1], rtol=1e-4, atol=1e-5)
            assert not np.allclose(last.vectors[0], last.vectors[1], atol=1e-2)

    anyio.run(main)


def write_modules(folder: Path, types: list[str], pooling: dict[str, Any]) -> None:
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": f"{at}_{name}"} for at, name in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_a_folder_says_how_it_embeds(tmp_path: Path) -> None:
    def read() -> Any:
        return read_embedding(tmp_path, 32, ("last", "mean"), default="last")

    assert (read().kind, read().normalize) == ("last", True)
    write_modules(
        tmp_path, ["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    )
    assert (read().kind, read().normalize) == ("mean", False)
    write_modules(tmp_path, ["Transformer", "Pooling", "Normalize"], {"pooling_mode": "lasttoken"})
    assert (read().kind, read().normalize) == ("last", True)
    both = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    for types, pooling in (
        (["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"}),
        (["Transformer", "Pooling"], both),
        (["Transformer", "Pooling"], {"pooling_mode": "cls"}),
        (["Transformer", "Pooling"], {"pooling_mode": ["mean"]}),
    ):
        write_modules(tmp_path, types, pooling)
        assert read().kind is None, (types, pooling)
    (tmp_path / "modules.json").write_text('[{"type": "a.Pooling", "path": "../1_Pooling"}, {"type": "a.Transformer"}]')
    with pytest.raises(ModelRejected, match="path of the pooling"):
        read()
    (tmp_path / "modules.json").write_text('{"type": 1}')
    with pytest.raises(ModelRejected, match="list of objects"):
        read()


def test_a_model_without_a_head_embeds_and_generates_nothing(tmp_path: Path) -> None:
    torch.manual_seed(3)
    sizes = tiny_models.CONFIG | {"model_type": "qwen3", "architectures": None, "head_dim": 8}
    model = transformers.Qwen3Model(transformers.Qwen3Config(**sizes))
    model.save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    write_modules(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": "mean"})
    with torch.no_grad():
        expected = model(torch.tensor([SHARED])).last_hidden_state[0].mean(0).numpy()

    async def main() -> None:
        async with Engine(tmp_path, **OPTIONS) as engine:
            found = await engine.embed([SHARED])
            np.testing.assert_allclose(found.vectors[0], expected, rtol=1e-4, atol=1e-5)
            with pytest.raises(InvalidParams, match="Qwen3Model cannot generate"):
                await engine.generate(SHARED)

    anyio.run(main)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": 9}, "dimensions"),
    ({"dimensions": True}, "dimensions"),
    ({"pooling": "cls"}, "pooling"),
    ({"pooling": "max"}, "pooling"),
    ({"adapter": ["a"]}, "adapter"),
    ({"tenant": 3}, "tenant"),
    ({"priority": "first"}, "priority"),
    ({"normalize": "no"}, "normalize"),
    ({"truncate": 1}, "truncate"),
    ({"started": 5}, "started"),
]


@pytest.mark.anyio
async def test_what_cannot_be_embedded_is_refused() -> None:
    async with serving() as engine:
        for options, field in WRONG:
            with pytest.raises(InvalidParams) as refused:
                await engine.embed(["a", "b"], **options)
            assert refused.value.field == field, options
        for prompts in (5, b"ab", None, {"a": 1}):
            with pytest.raises(InvalidParams, match="prompts: must be an iterable"):
                await engine.embed(prompts)  # type: ignore[arg-type]
        with pytest.raises(InvalidParams, match=r"prompts\[1\]: prompt: is empty"):
            await engine.embed(["a", ""])
        with pytest.raises(InvalidParams, match=r"prompts\[0\]: prompt\[1\]"):
            await engine.embed([[1, 257]])
        with pytest.raises(UnknownAdapter, match=r"prompts\[1\]: adapter"):
            await engine.embed(["a", "b"], adapter=[None, "b"])
        with pytest.raises(PromptTooLong, match="1025 tokens are more than fit the context of 1024"):
            await engine.embed([[1] * 1025])
        await returned(engine)
        empty = await engine.embed([])
        assert empty.vectors.shape == (0, 8)
    with pytest.raises(EngineStopped):
        await engine.embed("a")
    with pytest.raises(EngineStopped):
        await engine.hidden_states("a")


@pytest.mark.anyio
async def test_a_prompt_may_fill_the_context_and_a_longer_one_may_be_cut() -> None:
    async with serving(capacity(max_context=40)) as engine:
        full = list(range(40))
        assert np.allclose((await engine.embed([full])).vectors[0], unit(scripted_vector(full)))
        cut = await engine.embed([[*full, 1, 2], bytes(full).decode() * 1000], truncate=True, normalize=False)
        assert np.allclose(cut.vectors, [scripted_vector(full)] * 2)
        assert cut.usage.prompt_tokens == 80
    async with serving(capacity(num_pages=2)) as engine:  # and the page pool
        assert (await engine.embed([list(range(32))])).usage.prompt_tokens == 32
        with pytest.raises(PromptTooLong, match="page pool of 32"):
            await engine.embed([list(range(33))])


@pytest.mark.anyio
async def test_no_more_are_taken_than_two_for_each_row() -> None:
    gate = Gate()
    taken = 0

    def prompts() -> Any:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield [number % 250]

    async with serving(gate=gate) as engine:
        gate.hold()
        async with anyio.create_task_group() as tasks:
            found: list[Any] = []

            async def embed() -> None:
                found.append(await engine.embed(prompts()))

            tasks.start_soon(embed)
            await until(lambda: taken >= 8)
            await anyio.wait_all_tasks_blocked()
            assert taken == 8
            gate.release()
        assert np.allclose(found[0].vectors, [unit(scripted_vector([number % 250])) for number in range(100)])


@pytest.mark.anyio
async def test_cancelling_returns_all_pages() -> None:
    gate = Gate()
    async with serving(gate=gate) as engine:
        gate.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, [[1] * 300, [2] * 300, [3] * 10])
            await until(lambda: engine.stats().running >= 1)
            tasks.cancel_scope.cancel()
        gate.release()
        await returned(engine)
        assert (await engine.embed("still")).vectors.shape == (1, 8)


@pytest.mark.anyio
async def test_closing_the_engine_ends_an_embedding() -> None:
    gate = Gate()
    raised: list[Exception] = []

    async def embed(engine: Engine) -> None:
        try:
            await engine.embed([[1] * 300] * 20)
        except EngineStopped as error:
            raised.append(error)

    async with anyio.create_task_group() as tasks:
        async with serving(gate=gate) as engine:
            gate.hold()
            tasks.start_soon(embed, engine)
            await until(lambda: engine.stats().running >= 1)
            gate.release()
    assert len(raised) == 1


@pytest.mark.anyio
async def test_what_is_not_finite_fails_its_own_prompt() -> None:
    async with serving(faults={0: NoToken.NON_FINITE}) as engine:
        with pytest.raises(NonFiniteLogits, match=r"prompts\[0\]"):
            await engine.embed(["bad"])
        assert (await engine.embed("good")).vectors.shape == (1, 8)
        await returned(engine)
