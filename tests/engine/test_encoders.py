"""BERT-type encoders: vectors and scores are those of transformers, and what is not supported is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from product_shapes import ProductShapes

from headrace.engine import Engine, InvalidParams, ModelRejected, PromptTooLong
from headrace.engine.model.encoder.network import Encoder, Texts
from headrace.engine.model.encoder.spec import encoder_from_hf
from headrace.engine.model.encoder.weights import load_encoder

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 70,
    "pad_token_id": 1,
}
FAMILIES = {
    "Bert": transformers.BertConfig,
    "Roberta": transformers.RobertaConfig,
    "XLMRoberta": transformers.XLMRobertaConfig,
}
LENGTHS = [1, 2, 9, 10, 17, 17, 30, 64, 5]
TEXTS = [
    "Rain is water that falls from clouds.",
    "It rains.",
    "A stone is hard, and it lasts for a very long time, as rivers and mountains do. " * 40,
    "Ünïcode ☃ and 漢字, too",
    "x",
]


def make(folder: Path, family: str, kind: str, **changes: Any) -> Any:
    """A tiny encoder with weights large enough that attention and positions matter, and its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    torch.manual_seed(7)
    config = FAMILIES[family](**(SIZES | {"type_vocab_size": 2 if family == "Bert" else 1} | changes))
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder)
    words = {"[CLS]": 0, "[PAD]": 1, "[SEP]": 2, "[UNK]": 3} | {f"w{number}": number for number in range(4, 90)}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    types = 1 if family == "Bert" else 0
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{types} [SEP]:{types}",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    core.decoder = decoders.WordPiece()
    core.save(str(folder / "tokenizer.json"))
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 90, (length,), generator=generator).tolist() for length in LENGTHS]


def expected_states(model: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        states: NDArray[np.float32] = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return states


def words(seed: int, count: int) -> str:
    numbers = torch.randint(4, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{number}" for number in numbers)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make(tmp_path, family, "Model")
    states = [expected_states(model, ids) for ids in prompts()]
    used = sum(weight.nbytes for name, weight in model.named_parameters() if "pooler" not in name)

    async def main() -> None:
        async with Engine(tmp_path, max_rows=3, max_batched_tokens=20) as engine:  # texts of several steps, too
            assert engine.info.weight_bytes == used and {each.format for each in engine.info.weights} == {"float32"}
            assert engine.info.max_context == (70 if family == "Bert" else 68)
            for kind, pooled in (
                ("mean", [each.mean(0) for each in states]),
                ("cls", [each[0] for each in states]),
                ("last", [each[-1] for each in states]),
            ):
                for _ in range(2):  # the second time nothing may come from a prefix cache
                    found = await engine.embed(prompts(), pooling=kind, normalize=False)  # type: ignore[arg-type]
                    np.testing.assert_allclose(found.vectors, pooled, rtol=1e-4, atol=1e-4)
            for ids, expected in zip(prompts(), states, strict=True):
                np.testing.assert_allclose((await engine.hidden_states(ids)).numpy(), expected, rtol=1e-4, atol=1e-4)
            full = list(range(4, 4 + engine.info.max_context))
            assert (await engine.embed([full])).usage.prompt_tokens == engine.info.max_context
            with pytest.raises(PromptTooLong):
                await engine.embed([[*full, 4]])
            stats = engine.stats()
            assert (stats.pages_held, stats.pages_cached, stats.cached_tokens) == (0, 0, 0)

    anyio.run(main)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sigmoid", [True, False])
def test_scores_of_a_cross_encoder_are_those_of_transformers(family: str, sigmoid: bool, tmp_path: Path) -> None:
    model = make(tmp_path, family, "ForSequenceClassification", num_labels=1)
    if not sigmoid:
        config = json.loads((tmp_path / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    query = words(1, 6)
    documents = [words(seed, count) for seed, count in enumerate((1, 5, 30, 12, 5), 2)]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = []
    for document in documents:
        found = tokenizer.backend_tokenizer.encode(query, document)
        with torch.no_grad():
            logit = model(torch.tensor([found.ids]), token_type_ids=torch.tensor([found.type_ids])).logits[0, 0]
        expected.append(float(logit.sigmoid() if sigmoid else logit))

    async def main() -> None:
        async with Engine(tmp_path, max_rows=2) as engine:
            found = await engine.score(query, documents)
            assert found.method == "cross-encoder"
            np.testing.assert_allclose(found.scores, expected, rtol=1e-4, atol=1e-5)
            assert found.usage.prompt_tokens == sum(9 + len(each.split()) for each in documents)
            long = words(9, 80)
            with pytest.raises(PromptTooLong, match=r"documents\[1\]"):
                await engine.score(query, [documents[0], long])
            cut = await engine.score(query, [long, long.rsplit(" ", 12)[0]], truncate=True)
            assert cut.scores[0] == pytest.approx(cut.scores[1], rel=1e-5)
            assert cut.usage.prompt_tokens == 2 * engine.info.max_context
            with pytest.raises(PromptTooLong, match="query"):
                await engine.score(long, [documents[0]], truncate=True)
            for wrong in ([[4, 5]], [5]):
                with pytest.raises(InvalidParams, match="must be a text"):
                    await engine.score(query, wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidParams, match="query"):
                await engine.score([4, 5], documents)
            with pytest.raises(InvalidParams, match="pooling"):
                await engine.embed("a")

    anyio.run(main)


def test_minilm_gives_the_vectors_of_sentence_transformers(minilm: Path) -> None:
    """Whose arithmetic is the transformer, the mean over what is no padding, and vectors of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        states = transformers.BertModel.from_pretrained(minilm)(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    means = (states * mask).sum(1) / mask.sum(1)
    expected = torch.nn.functional.normalize(means, dim=1).numpy()

    async def main() -> None:
        async with Engine(minilm) as engine:
            found = await engine.embed(TEXTS, truncate=True)
            cosines = (found.vectors * expected).sum(1)
            assert cosines.min() > 0.99999, cosines
            assert found.usage.prompt_tokens == int(batch["attention_mask"].sum())
            with pytest.raises(PromptTooLong):
                await engine.embed(TEXTS)
            for truncate in (False, True):  # it has more characters than tokens that are read could have
                sparse = await engine.embed(["Rain falls.", " \n\n" * 3000 + "Rain \t  falls."], truncate=truncate)
                np.testing.assert_allclose(*sparse.vectors, atol=1e-6)
            scores = await engine.score(TEXTS[0], TEXTS[1:], truncate=True)
            assert scores.method == "embedding"
            np.testing.assert_allclose(scores.scores, expected[1:] @ expected[0], atol=1e-5)
            assert scores.scores.argmax() == 0
            with pytest.raises(InvalidParams, match="BertModel cannot generate"):
                await engine.stream("Rain").admitted()
            assert "rain" in engine.detokenize(await engine.tokenize("Rain"))

    anyio.run(main)


def test_texts_of_all_lengths_multiply_in_few_shapes_and_come_out_right(minilm: Path) -> None:
    """On a CPU in bfloat16, where oneDNN keeps code for each."""
    spec, cpu = encoder_from_hf(json.loads((minilm / "config.json").read_text())), torch.device("cpu")
    with torch.inference_mode():
        half, full = (
            Encoder(spec, load_encoder(minilm, spec, dtype=dtype, device=cpu))
            for dtype in (torch.bfloat16, torch.float32)
        )
        with ProductShapes() as shapes:
            for length in range(5, 140, 3):
                texts = Texts.of([list(range(1000, 1000 + length))], [0], cpu, pads=True)
                hidden_NE = half.hidden(texts)
        cosines = torch.cosine_similarity(hidden_NE.float(), full.hidden(texts))
    assert hidden_NE.shape[0] == length and cosines.min() > 0.99
    assert 4 < len(shapes.seen) < 100  # 180 where each length has its own


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "relu6"}, "hidden_act"),
    ({"num_attention_heads": 5}, "hidden_size"),
    ({"is_decoder": True}, "is_decoder"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
    ({"vocab_size": 91}, "embeddings.word_embeddings.weight"),
    ({"num_hidden_layers": 4}, "encoder.layer.3.attention.self.query.weight"),
    ({"num_hidden_layers": 2}, "encoder.layer.2."),
    ({"architectures": ["BertForSequenceClassification"]}, "id2label"),
    ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}}, "bert.pooler.dense.weight"),
]


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "Bert", "Model")
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())

    async def open_it(**options: Any) -> None:
        async with Engine(tmp_path, **options):
            pass

    for changes, field in WRONG:
        path.write_text(json.dumps(good | changes))
        with pytest.raises(ModelRejected) as refused:
            anyio.run(open_it)
        assert str(refused.value.field).startswith(field), changes
    path.write_text(json.dumps(good))
    for options in ({"kv_dtype": "fp8"}, {"max_context": 71}, {"adapter_slots": 1}):
        with pytest.raises(InvalidParams) as invalid:
            anyio.run(partial(open_it, **options))
        assert invalid.value.field == next(iter(options))
    anyio.run(partial(open_it, max_context=9))


@pytest.mark.parametrize("level", [1, 2])
def test_an_encoder_sleeps_and_embeds_afterwards_as_before(level: Literal[1, 2], tmp_path: Path) -> None:
    make(tmp_path, "Bert", "Model")

    async def main() -> None:
        async with Engine(tmp_path, max_rows=3, max_batched_tokens=20) as engine:
            expected = (await engine.embed(prompts())).vectors
            with pytest.raises(InvalidParams, match="^kv_memory: an encoder keeps no keys and values") as refused:
                await engine.resize_kv("1MiB")
            assert (refused.value.field, refused.value.value) == ("kv_memory", "1MiB")
            found: list[Any] = []

            async def ask() -> None:
                found.append((await engine.embed(prompts())).vectors)

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await anyio.lowlevel.checkpoint()
                await engine.sleep(level)
                group.start_soon(ask)
                await anyio.sleep(0.02)
                assert engine.sleep_level == level and len(found) < 2
                await engine.wake()
            assert len(found) == 2
            for vectors in found:
                np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)

    anyio.run(main)


def test_an_encoder_whose_files_have_gone_sleeps_on(tmp_path: Path) -> None:
    make(tmp_path, "Bert", "Model")

    async def main() -> None:
        async with Engine(tmp_path, max_rows=3) as engine:
            expected = (await engine.embed(prompts())).vectors
            await engine.sleep(2)
            (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
            with pytest.raises(ModelRejected):
                await engine.wake()
            assert engine.sleep_level == 2
            (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")
            await engine.wake()
            np.testing.assert_allclose((await engine.embed(prompts())).vectors, expected, rtol=1e-4, atol=1e-5)

    anyio.run(main)
