"""Bugs to plant in tiny models: ways to misread their configs and files, or to miscompute them; holds no tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from against_transformers import difference
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.model.checkpoint.weights import DecoderWeights, LayerWeights, SublayerWeights, load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.rope import UNROTATED, Rope
from headrace.engine.model.spec import Attention, DecoderSpec, DenseFeed, LayerSpec, PlainFeed

__all__ = [
    "Bug", "Change", "attention", "change_tensors", "exchanged", "feed", "halves_exchanged", "in_series", "is_caught",
    "layers", "misread", "names", "norms", "norms_before_rotation", "norms_behind_rotation", "plain_ropes", "pre_norms",
    "rms_norms", "ropes", "stored", "vectors", "whole", "without", "zeroed",
]  # fmt: skip

Change: TypeAlias = Callable[[DecoderSpec], DecoderSpec]
Bug: TypeAlias = Callable[[Path, DecoderSpec], tuple[DecoderSpec, DecoderWeights]]
"""Makes what a decoder with the bug computes with, from a folder and the right spec."""
Vectors: TypeAlias = Mapping[str, Tensor]


def is_caught(bug: Bug, folder: Path, ids: list[int], expected: Tensor) -> bool:
    """Whether logits with the bug are several times as far from the expected ones as tests of parity allow."""
    return difference(*bug(folder, from_hf(read_hf_config(folder))), ids, expected) > 5e-4


def _load(folder: Path, spec: DecoderSpec) -> DecoderWeights:
    return load_weights(folder, spec, dtype=torch.float32, device="cpu")


def misread(*changes: Change) -> Bug:
    """Read and compute a checkpoint by a changed spec."""

    def bug(folder: Path, spec: DecoderSpec) -> tuple[DecoderSpec, DecoderWeights]:
        wrong = spec
        for change in changes:
            before, wrong = wrong, change(wrong)
            assert wrong != before, "a change of nothing"
        return wrong, _load(folder, wrong)

    return bug


def whole(**changes: Any) -> Change:
    """Change fields of the spec itself."""
    return lambda spec: replace(spec, **changes)


def layers(change: Callable[[LayerSpec], LayerSpec]) -> Change:
    """Change every layer."""
    return lambda spec: replace(spec, layers=tuple(map(change, spec.layers)))


def attention(**changes: Any) -> Change:
    """Change fields of every layer's attention."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, Attention)
        return replace(layer, mixer=replace(layer.mixer, **changes))

    return layers(change)


def feed(**changes: Any) -> Change:
    """Change fields of every layer's feed."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.feed, (DenseFeed, PlainFeed))
        return replace(layer, feed=replace(layer.feed, **changes))

    return layers(change)


def norms(**changes: Any) -> Change:
    """Change fields of every layer's norms."""
    return layers(lambda layer: replace(layer, norms=replace(layer.norms, **changes)))


def names(**changes: Any) -> Change:
    """Change fields of the names of tensors."""
    return lambda spec: replace(spec, names=replace(spec.names, **changes))


def exchanged(first: str, second: str) -> Change:
    """Let two roles have each other's tensors."""

    def change(spec: DecoderSpec) -> DecoderSpec:
        roles = spec.names.roles
        return names(roles={**roles, first: roles[second], second: roles[first]})(spec)

    return change


def ropes(**changes: Any) -> Change:
    """Change fields of every rope."""
    return lambda spec: replace(spec, ropes=tuple(replace(rope, **changes) for rope in spec.ropes))


def plain_ropes(spec: DecoderSpec) -> DecoderSpec:
    """Leave nothing of the ropes but their bases."""
    return replace(spec, ropes=tuple(Rope(rope.theta) for rope in spec.ropes))


def pre_norms(spec: DecoderSpec) -> DecoderSpec:
    """Put the norms behind mixer and feed before them."""
    roles = spec.names.roles
    ahead = {f"{half}_norm": roles[f"{half}_result_norm"] for half in ("mixer", "feed")}
    return names(roles={**roles, **ahead})(norms(placement="pre")(spec))


def in_series(spec: DecoderSpec) -> DecoderSpec:
    """Compute a mixer and a feed that share a norm one behind the other, each with that norm."""
    roles = spec.names.roles
    return names(roles={**roles, "feed_norm": roles["mixer_norm"]})(norms(placement="pre")(spec))


def norms_behind_rotation(spec: DecoderSpec) -> DecoderSpec:
    """Rotate heads before their norms."""
    unrotated = replace(spec, ropes=(*spec.ropes, UNROTATED))
    return layers(
        lambda layer: replace(layer, mixer=replace(layer.mixer, early_rope=layer.mixer.rope, rope=len(spec.ropes)))
    )(unrotated)


def norms_before_rotation(spec: DecoderSpec) -> DecoderSpec:
    """Rotate heads behind their norms."""
    return layers(
        lambda layer: replace(layer, mixer=replace(layer.mixer, early_rope=None, rope=layer.mixer.early_rope))
    )(spec)


def vectors(change: Callable[[Vectors], Vectors], *changes: Change) -> Bug:
    """Change the norms and biases of each half of every layer, and compute by a changed spec."""

    def changed(half: SublayerWeights) -> SublayerWeights:
        return replace(half, vectors=change(half.vectors))

    def bug(folder: Path, spec: DecoderSpec) -> tuple[DecoderSpec, DecoderWeights]:
        weights = _load(folder, spec)
        read = [weights.layers[number] for number in range(len(weights.layers))]
        made = tuple(LayerWeights(changed(layer.mixer), changed(layer.feed)) for layer in read)
        for each in changes:
            spec = each(spec)
        return spec, replace(weights, layers=made)

    return bug


def without(*left_out: str) -> Bug:
    """Leave out norms of every layer."""
    return vectors(lambda found: {name: vector for name, vector in found.items() if name not in left_out})


def zeroed(bias: str) -> Bug:
    """Put zeros in place of a bias: of the head, of positions, of the final norm, or of one kind in all layers."""

    def bug(folder: Path, spec: DecoderSpec) -> tuple[DecoderSpec, DecoderWeights]:
        weights = _load(folder, spec)
        if bias == "final":
            return spec, replace(weights, final_norm=_with_zeros(weights.final_norm, "layer_norm_bias_E"))
        return spec, replace(weights, **{bias: torch.zeros_like(getattr(weights, bias))})

    if bias in ("final", "head_bias_V", "positions_PE"):
        return bug
    return vectors(lambda found: _with_zeros(found, bias) if bias in found else found)


def _with_zeros(found: Vectors, name: str) -> Vectors:
    return {**found, name: torch.zeros_like(found[name])}


def _rms(found: Vectors) -> Vectors:
    kept = {name: vector for name, vector in found.items() if not name.startswith("layer_norm")}
    return {"norm_E": found["layer_norm_E"], **kept} if "layer_norm_E" in found else kept


rms_norms = vectors(_rms)
"""Take the layer norms of every layer for RMS norms."""


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Write a checkpoint again, with tensors that `change` has changed."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def stored(end: str, change: Callable[[Tensor], Tensor]) -> Bug:
    """Change the tensors in the file whose names end so."""

    def rewrite(tensors: dict[str, Tensor]) -> None:
        found = [name for name in tensors if name.endswith(end)]
        assert found, "no such tensor"
        for name in found:
            tensors[name] = change(tensors[name]).contiguous()

    def bug(folder: Path, spec: DecoderSpec) -> tuple[DecoderSpec, DecoderWeights]:
        change_tensors(folder, rewrite)
        return spec, _load(folder, spec)

    return bug


def halves_exchanged(tensor: Tensor) -> Tensor:
    """Put the last half of the rows before the first."""
    return torch.cat(tensor.chunk(2)[::-1])
