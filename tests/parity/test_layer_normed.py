"""Models with layer norms: greedy tokens by an engine, and bugs that would change their logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
import tiny_models
import torch
from layer_normed_models import LAYER_NORMED
from model_driver import ModelUnderTest, capacity
from torch import Tensor

from headrace.engine import Engine, SamplingParams
from headrace.engine.model.checkpoint.weights import DecoderWeights, LayerWeights, load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec, PlainFeed

LENGTH = 64
COUNT = 32


@cache
def reference(family: str) -> tuple[Any, list[int], Tensor]:
    """A model whose every parameter matters, a sequence, and its logits by transformers."""
    torch.manual_seed(5)
    model = LAYER_NORMED[family]().eval()
    for name, parameter in model.named_parameters():
        is_norm = ("norm" in name or "ln_" in name) and "bias" not in name
        mean, spread = (1.0, 0.2) if is_norm else (0.0, 0.3 if "bias" in name else 0.12)
        torch.nn.init.normal_(parameter, mean, spread)
    ids = torch.randint(0, 96, (LENGTH,)).tolist()
    with torch.inference_mode():
        return model, ids, model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", LAYER_NORMED)
def test_greedy_tokens_in_one_piece_in_chunks_and_after_a_prefix_hit(family: str, tmp_path: Path) -> None:
    model, ids, _ = reference(family)
    model.save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    options = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    made = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, LENGTH, dtype=torch.int64), **options)
    expected = [int(token) for token in made[0, LENGTH:]]

    async def run(most: int) -> list[list[int]]:
        params, found = SamplingParams(temperature=0, max_tokens=COUNT), []
        sizes = {"dtype": "float32", "page_size": 4, "max_batched_tokens": most, "max_rows": 2, "kv_memory": "1MiB"}
        async with Engine(tmp_path, **sizes) as engine:
            for _ in range(2):
                before = engine.stats().cached_tokens
                found.append((await engine.generate(ids, params)).choices[0].token_ids)
            assert engine.stats().cached_tokens - before >= LENGTH - 4, "the second time begins with a prefix"
        return found

    assert anyio.run(run, 128) == [expected] * 2 and anyio.run(run, 7) == [expected] * 2


def layers(change: Callable[[LayerSpec], LayerSpec]) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, layers=tuple(map(change, spec.layers)))


def attention(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, Attention)
        return replace(layer, mixer=replace(layer.mixer, **changes))

    return layers(change)


def activation(name: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.feed, PlainFeed)
        return replace(layer, feed=replace(layer.feed, activation=name))

    return layers(change)


def norms(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return layers(lambda layer: replace(layer, norms=replace(layer.norms, **changes)))


def ungrouped(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, names=replace(spec.names, grouped=False))


def heads_swapped(spec: DecoderSpec) -> DecoderSpec:
    roles = dict(spec.names.roles)
    roles["q_norm_0"], roles["q_norm_1"] = roles["q_norm_1"], roles["q_norm_0"]
    return replace(spec, names=replace(spec.names, roles=roles))


WRONG: list[tuple[str, str, Callable[[DecoderSpec], DecoderSpec]]] = [
    ("starcoder2, window", "the other GELU", activation("gelu")),
    ("starcoder2, window", "no window", attention(window=None)),
    ("gpt2", "positions one off", lambda spec: replace(spec, positions=replace(spec.positions, offset=1, rows=128))),
    ("gpt2", "the other GELU", activation("gelu")),
    ("gpt2 with other options", "scaled scores", attention(scale=None)),
    ("opt", "positions without the offset", lambda spec: replace(spec, positions=replace(spec.positions, offset=0))),
    ("opt", "GELU", activation("gelu")),
    ("falcon, new architecture", "heads as they lie", ungrouped),
    ("falcon, new architecture", "halves in series", norms(placement="pre")),
    ("falcon, a key a query, in series", "heads as they lie", ungrouped),
    ("falcon, a key a query, in series", "halves side by side", norms(placement="parallel")),
    ("cohere", "pairs half a head apart", attention(interleaved=False)),
    ("cohere", "plain logits", lambda spec: replace(spec, logits_scale=1.0)),
    ("cohere2, window in the middle layer", "every layer rotated", attention(rope=0)),
    ("cohere2, window in the middle layer", "no layer rotated", attention(rope=1)),
    ("gpt-neox", "heads as they lie", ungrouped),
    ("gpt-neox", "all of a head rotated", attention(rotary_dim=None)),
    ("gpt-neox", "halves in series", norms(placement="pre")),
    ("phi", "another part of a head rotated", attention(rotary_dim=4)),
    ("jais 2", "ReLU without its square", activation("relu")),
    ("stablelm with norms of heads", "heads with each other's norms", heads_swapped),
    ("stablelm, parallel", "all of a head rotated", attention(rotary_dim=None)),
]


@pytest.mark.parametrize(("family", "bug", "change"), WRONG)
def test_a_bug_would_change_the_logits(
    family: str, bug: str, change: Callable[[DecoderSpec], DecoderSpec], tmp_path: Path
) -> None:
    model, ids, expected = reference(family)
    model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    wrong = change(spec)
    assert wrong != spec
    assert distance(wrong, load_weights(tmp_path, wrong, dtype=torch.float32, device="cpu"), ids, expected) > 5e-4, bug
    assert distance(spec, load_weights(tmp_path, spec, dtype=torch.float32, device="cpu"), ids, expected) < 1e-4


BIASED = {
    "starcoder2, window": ("layer_norm_bias_E", "qkv_bias", "o_bias", "up_bias", "down_bias", "final"),
    "gpt2": ("positions", "layer_norm_bias_E", "qkv_bias", "o_bias", "up_bias", "down_bias"),
    "falcon, new architecture": ("layer_norm_bias_E", "qkv_bias", "o_bias", "up_bias", "down_bias"),
    "jais 2": ("layer_norm_bias_E", "qkv_bias", "o_bias", "up_bias", "down_bias", "final"),
    "phi": ("head", "layer_norm_bias_E"),
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in BIASED.items() for name in names])
def test_a_bias_left_out_would_change_the_logits(family: str, name: str, tmp_path: Path) -> None:
    model, ids, expected = reference(family)
    model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    weights = load_weights(tmp_path, spec, dtype=torch.float32, device="cpu")
    assert distance(spec, without(weights, name), ids, expected) > 5e-3


def without(weights: DecoderWeights, name: str) -> DecoderWeights:
    """The same weights with zeros for one kind of bias, which must be there."""
    if name == "head":
        assert weights.head_bias_V is not None
        return replace(weights, head_bias_V=torch.zeros_like(weights.head_bias_V))
    if name == "positions":
        assert weights.positions_PE is not None
        return replace(weights, positions_PE=torch.zeros_like(weights.positions_PE))
    if name == "final":
        bias_E = weights.final_norm["layer_norm_bias_E"]
        return replace(weights, final_norm={**weights.final_norm, "layer_norm_bias_E": torch.zeros_like(bias_E)})

    def zeroed(layer: LayerWeights) -> LayerWeights:
        halves = {}
        for half in ("mixer", "feed"):
            vectors = dict(getattr(layer, half).vectors)
            if name in vectors:
                vectors[name] = torch.zeros_like(vectors[name])
            halves[half] = replace(getattr(layer, half), vectors=vectors)
        return LayerWeights(**halves)

    all_layers = [weights.layers[number] for number in range(len(weights.layers))]
    assert any(name in {**layer.mixer.vectors, **layer.feed.vectors} for layer in all_layers)
    return replace(weights, layers=tuple(map(zeroed, all_layers)))


def distance(spec: DecoderSpec, weights: DecoderWeights, ids: list[int], expected: Tensor) -> float:
    tested = ModelUnderTest.make(spec, weights, torch.float32, capacity(spec.vocab_size))
    (found,) = tested.logits([ids], 128)
    return float((found - expected).abs().max())
