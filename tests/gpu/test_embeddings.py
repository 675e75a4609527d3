"""Vectors, scores and hidden states of the device are those of the CPU in float32, up to the precision of 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import pytest
import torch
import transformers
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, open_engine
from numpy.typing import NDArray

from headrace.engine import Engine
from headrace.engine.model.network.decoder import Decoder

LENGTHS = [1, 2, 7, 8, 9, 33, 64, 64, 100, 127, 128, 5, 60, 17]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM's shape with random weights, large enough that every layer matters."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=600, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.BertModel(config)
    for name, parameter in model.named_parameters():
        if "LayerNorm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.06)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    core = Tokenizer(models.WordLevel({f"w{number}": number for number in range(600)}, unk_token="w0"))
    core.decoder = decoders.WordPiece()
    core.save(str(folder / "tokenizer.json"))


def cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    products: NDArray[np.float32] = (one * other).sum(-1)
    return products / (np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1))


async def embed(folder: Path, device: str, dtype: str, **options: Any) -> dict[str, NDArray[np.float32]]:
    prompts = [draw(length, place) for place, length in enumerate(LENGTHS)]
    found: dict[str, NDArray[np.float32]] = {}
    async with Engine(folder, device=device, dtype=dtype, max_rows=8, **options) as engine:
        for kind in ("mean", "cls", "last"):
            found[kind] = (await engine.embed(prompts * 3, pooling=kind, normalize=False)).vectors  # type: ignore[arg-type]
        states = [await engine.hidden_states(ids) for ids in prompts]
        assert {state.device.type for state in states} == {device}
        found["states"] = np.concatenate([state.float().cpu().numpy() for state in states])
        await at_rest(engine)
    return found


def test_vectors_of_an_encoder_are_those_of_the_cpu(encoder: Path, device: str) -> None:
    expected = anyio.run(embed, encoder, "cpu", "float32")
    for dtype, least in (("auto", 0.9999), ("float32", 0.9999), ("bfloat16", 0.995)):
        found = anyio.run(embed, encoder, device, dtype)
        for kind in expected:
            worst = cosines(found[kind], expected[kind]).min()
            print(f"{device} {dtype} {kind}: worst cosine {worst:.6f}")
            assert worst > least, (dtype, kind)


@pytest.mark.parametrize("level", [1, 2])
def test_an_encoder_sleeps_and_embeds_afterwards_as_before(encoder: Path, device: str, level: Literal[1, 2]) -> None:
    prompts = [draw(length, place) for place, length in enumerate(LENGTHS)]

    async def run() -> None:
        async with Engine(encoder, device=device) as engine:
            expected = (await engine.embed(prompts)).vectors
            held = torch.cuda.memory_reserved() if device == "cuda" else 0
            await engine.sleep(level)
            if device == "cuda":
                weights = 2 * 6 * 12 * 384 * 384  # bytes of the products of all layers in 16 bits
                assert held - torch.cuda.memory_reserved() >= weights // 2  # some lie beside what others hold
            await engine.wake()
            assert cosines((await engine.embed(prompts)).vectors, expected).min() > 0.9999

    anyio.run(run)


async def embed_beside(folder: Path, device: str, dtype: str) -> dict[str, NDArray[np.float32]]:
    """Vectors of a decoder, in chunks, from the prefix cache and beside generations."""
    prompts = [draw(length, place) for place, length in enumerate(LENGTHS)]
    prompts += [[*prompts[8], 9, 10], [*prompts[8][:48], 11]]
    found: dict[str, NDArray[np.float32]] = {}
    async with open_engine(folder, device, dtype=dtype, max_batched_tokens=48, max_rows=6, max_context=256) as engine:
        async with anyio.create_task_group() as tasks:
            for seed in range(3):
                tasks.start_soon(engine.generate, draw(20, 100 + seed), greedy(60))
            for kind in ("last", "mean"):
                found[kind] = (await engine.embed(prompts, pooling=kind, normalize=False)).vectors  # type: ignore[arg-type]
            again = await engine.embed(prompts)
            assert again.usage.cached_tokens > 0
            found["normalised"] = again.vectors
        states = [await engine.hidden_states(ids) for ids in prompts]
        found["states"] = np.concatenate([state.float().cpu().numpy() for state in states])
        await at_rest(engine)
    return found


def check_nothing_is_copied(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states are, in place, what the model's last operation wrote; those of one prompt begin where it began."""
    written: list[torch.Tensor] = []
    hidden = Decoder.hidden

    def watched(*values: Any, **more: Any) -> torch.Tensor:
        written.append(hidden(*values, **more))
        return written[-1]

    async def run() -> None:
        async with open_engine(folder, device, max_context=256) as engine:
            monkeypatch.setattr(Decoder, "hidden", watched)
            states = await engine.hidden_states(list(range(1, 34)))
            (made,) = [each for each in written if len(each) >= 33]
            assert states.device == made.device and states.dtype == made.dtype and states.shape == (33, made.shape[1])
            assert states.untyped_storage().data_ptr() == made.untyped_storage().data_ptr()
            assert states.data_ptr() == made.data_ptr()

    anyio.run(run)


def test_hidden_states_are_not_copied(zoo: Zoo, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_nothing_is_copied(zoo.folder("llama 3"), device, monkeypatch)


@pytest.mark.parametrize("name", ["llama 3", "qwen3"])
def test_vectors_of_a_decoder_are_those_of_the_cpu(zoo: Zoo, name: str) -> None:
    expected = anyio.run(embed_beside, zoo.folder(name), "cpu", "float32")
    found = anyio.run(embed_beside, zoo.folder(name), zoo.device, "bfloat16")
    for kind in expected:
        worst = cosines(found[kind], expected[kind]).min()
        print(f"{zoo.device} {name} {kind}: worst cosine {worst:.6f}")
        assert worst > 0.998, kind
