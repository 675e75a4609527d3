"""Models that are quantised while they are loaded, or were before: what any device must do with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_families import Metadata, Tensors, random_model, write_gguf
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, one_by_one, open_engine, together
from gpu.judge import Judge
from quantised_checkpoints import CASES, CONFIG, write_checkpoint
from safetensors.torch import load_file, save_file
from tokenizer_files import byte_metadata

from headrace.ops.formats import Stored
from headrace.ops.quantise import Method, quantise

__all__ = ["check_checkpoint", "check_gguf", "check_mxfp4", "check_quantise", "dense_twin", "write_mixture"]

_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}
"""Heads of 64 features, which kernels of attention take, in matrices of the same sizes."""
_MIXTURE = {"attn_v.weight": Kind.Q6_K, "ffn_down.weight": Kind.Q6_K, "output.weight": Kind.Q6_K}
"""As in Q4_K_M files."""
_CHAOTIC = ("compressed nvfp4", "compressed int8 with zeros")
"""Cases whose logits in bfloat16 are furthest from those in float32."""
_CODES = {"q4_k": "int4-g32-minima-factors", "q6_k": "int6-g16-factors"}
"""Names of what a GPU keeps."""
LENGTHS = (1, 3, 17, 40, 64, 90, 5, 33, 21, 8, 2, 70, 11, 26, 50, 9, 4, 31, 6, 12)


def dense_twin(folder: Path, to: Path, method: Method, head: bool) -> Path:
    """A checkpoint of the numbers that the quantised matrices of another one stand for, its own head among them."""
    shutil.copytree(folder, to)
    if head:
        config = json.loads((to / "config.json").read_text())
        (to / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        if head:
            tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
        for name, tensor in tensors.items():
            if name.endswith("proj.weight") or (head and name == "lm_head.weight"):
                tensors[name] = quantise(Stored.from_dense(tensor), method).dense(torch.bfloat16).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    return to


def check_quantise(
    zoo: Zoo, device: str, judge_on: str, method: Method, root: Path, *, family: str = "llama 3", head: bool = False
) -> None:
    """Assert that tokens are those of the dequantised model: alone, side by side, in chunks, and after sleep.

    With `head` the output head is quantised, too.
    """
    folder = zoo.folder(family)
    judge = Judge(dense_twin(folder, root / method, method, head), judge_on)

    async def run() -> None:
        options: dict[str, Any] = {"kv_memory": "24MiB", "max_rows": 64, "max_context": 256}
        # With more tokens in a step, 8-bit floats are multiplied by 8-bit floats.
        options["max_batched_tokens"] = 64 if method == "fp8" else 192
        async with open_engine(folder, device, quantize=method, quantize_head=head, **options) as engine:
            judge.check(await one_by_one(engine, [draw(length, length) for length in (1, 45, 150)], 12), "alone")
            prompts = [draw(length, length) for length in LENGTHS]
            before = await together(engine, prompts, greedy(10))
            judge.check(before, "side by side")
            await engine.sleep(level=1)
            await engine.wake()
            judge.check(await one_by_one(engine, [draw(30, 2)], 10), "after sleep")
            await engine.sleep(level=2)
            await engine.wake()
            judge.check(await together(engine, prompts, greedy(6)), "read again")
            await at_rest(engine)

    anyio.run(run)


def check_checkpoint(name: str, device: str, judge_on: str, root: Path) -> None:
    """Assert that a quantised checkpoint gives the tokens of its plain model."""
    state = write_checkpoint(root / "quantised", CASES[name], **_HEADS)
    plain = root / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(CONFIG | _HEADS))
    tensors = {name: torch.from_numpy(array).bfloat16().contiguous() for name, array in state.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    loose = 16.0 if name in _CHAOTIC else 8.0  # of 64 ids: weights of random codes make the model chaotic
    judge = Judge(plain, judge_on, loose=loose)

    async def run() -> None:
        options: dict[str, Any] = {"kv_memory": "8MiB", "max_rows": 32, "max_batched_tokens": 64}
        async with open_engine(root / "quantised", device, **options) as engine:
            judge.check(await together(engine, [draw(7, seed, 60) for seed in range(20)], greedy(12)), name)

    anyio.run(run)


def _with_tokenizer(metadata: Metadata, _tensors: Tensors) -> None:
    """Add a tokenizer without a token that ends a completion."""
    metadata.update(byte_metadata())
    del metadata["tokenizer.ggml.eos_token_id"]


def write_mixture(path: Path, *, tied: bool) -> Any:
    """Write a GGUF file of several kinds of blocks, and return transformers' model of its numbers."""
    model = random_model(
        "llama", vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64,
        max_position_embeddings=512, tie_word_embeddings=tied,
    )  # fmt: skip
    numbers = write_gguf(model, path, _with_tokenizer, kind=Kind.Q4_K, kinds=_MIXTURE)
    model.load_state_dict(numbers, strict=False)
    return model


def check_gguf(device: str, judge_on: str, root: Path, *, tied: bool) -> None:
    """Assert that a file of blocks gives the tokens of their numbers; a GPU keeps embeddings and head in their bits."""
    write_mixture(root / "model.gguf", tied=tied).bfloat16().save_pretrained(root / "plain")
    judge = Judge(root / "plain", judge_on, loose=8.0)

    async def run() -> None:
        options: dict[str, Any] = {"kv_memory": "8MiB", "max_rows": 32, "max_batched_tokens": 192}
        async with open_engine(root / "model.gguf", device, **options) as engine:
            kept = {(each.part, each.format) for each in engine.info.weights if each.part in ("embedding", "head")}
            ends = {("embedding", "q4_k"), ("head", "q6_k")} if not tied else {("embedding", "q4_k")}
            assert device == "cpu" or kept == {(part, _CODES[format]) for part, format in ends}, kept
            judge.check(await one_by_one(engine, [draw(length, length) for length in (1, 45, 90)], 12), "alone")
            judge.check(await together(engine, [draw(n, n) for n in LENGTHS], greedy(8)), "side by side")
            await at_rest(engine)

    anyio.run(run)


def check_mxfp4(zoo: Zoo, device: str, judge: Judge) -> None:
    """Assert that a gpt-oss whose experts are 4-bit floats gives the tokens of their numbers, and keeps them packed."""

    async def run() -> None:
        options: dict[str, Any] = {"kv_memory": "24MiB", "max_rows": 32, "max_context": 256, "max_batched_tokens": 192}
        async with open_engine(zoo.folder("gpt-oss mxfp4"), device, **options) as engine:
            kept = {each.format for each in engine.info.weights if each.part == "experts"}
            assert len(kept) == 1 and (device == "cpu" or "fp4" in kept.pop()), engine.info.weights
            judge.check(await one_by_one(engine, [draw(length, length) for length in (1, 45)], 6), "alone")
            judge.check(await together(engine, [draw(n, n) for n in LENGTHS[:8]], greedy(5)), "side by side")
            await engine.sleep(level=2)
            await engine.wake()
            judge.check(await together(engine, [draw(n, n) for n in LENGTHS[:2]], greedy(5)), "read again")
            await at_rest(engine)

    anyio.run(run)
