"""Specs say what each layer is: mixed layers are described, and refused by name where one value must serve them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from headrace.engine.bench.shapes import SHAPES
from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.plan import all_parts, layer_plan
from headrace.engine.model.families.registry import FAMILIES, from_hf
from headrace.engine.model.roles import Fused
from headrace.engine.model.spec import Attention, DecoderSpec, DenseFeed, LayerSpec, MixerSpec, Norms, Paged, PerRow

FIRST = LayerSpec(Attention(4, 2, 16), DenseFeed(48), Norms(1e-6))


@dataclass(frozen=True, slots=True)
class Recurrence(MixerSpec):
    """A mixer that keeps one vector a row."""

    size: int

    @property
    def state(self) -> PerRow:
        return PerRow(self.size)

    def parameters(self, hidden_size: int) -> Mapping[str, Fused]:
        return {}


def spec(*layers: LayerSpec) -> DecoderSpec:
    return replace(from_hf(SHAPES["qwen3-0.6b"]), layers=layers, hidden_size=64)


def test_layers_may_differ_in_their_windows() -> None:
    late = replace(FIRST, mixer=replace(FIRST.mixer, window=8))
    mixed = spec(FIRST, late, late)
    assert mixed.windows == (None, 8, 8) and mixed.num_layers == 3
    assert mixed.uniform_attention == FIRST.mixer
    assert late.mixer.state == Paged(2 * 2 * 16, 8)


@pytest.mark.parametrize(
    ("name", "other", "field"),
    [
        ("uniform_attention", replace(FIRST, mixer=Attention(4, 4, 16)), "the heads of a layer"),
        ("uniform_attention", replace(FIRST, mixer=Attention(4, 2, 32)), "the heads of a layer"),
        ("uniform_attention", replace(FIRST, mixer=Recurrence(9)), "the mixer of a layer"),
        ("windows", replace(FIRST, mixer=Recurrence(9)), "the mixer of a layer"),
        ("uniform_epsilon", replace(FIRST, norms=Norms(1e-5)), "the epsilon of a norm"),
    ],
)
def test_mixed_layers_are_refused_by_name_where_one_value_serves_all(name: str, other: LayerSpec, field: str) -> None:
    for layers in ((FIRST, other), (other, FIRST)):
        with pytest.raises(ModelRejected) as caught:
            getattr(spec(*layers), name)
        assert caught.value.field == field and caught.value.limit is not None
        assert "Qwen3ForCausalLM" in str(caught.value)


def test_every_layer_has_the_parameters_of_its_own_sizes() -> None:
    wide = LayerSpec(Attention(8, 4, 16, qk_norm=True, o_bias=True), DenseFeed(96, bias=True), Norms(1e-6))
    mixed = spec(FIRST, wide)
    assert layer_plan(mixed, 0).mixer["qkv"].shape == ((4 + 2 + 2) * 16, 64)
    assert layer_plan(mixed, 1).mixer["qkv"].shape == ((8 + 4 + 4) * 16, 64)
    assert layer_plan(mixed, 1).feed["down_bias"].shape == (64,) and "down_bias" not in layer_plan(mixed, 0).feed
    names = [mixed.names.of(part) for part, _ in all_parts(mixed)]
    assert len(set(names)) == len(names) == 2 + (9) + (9 + 3 + 3)
    assert "model.layers.1.self_attn.o_proj.bias" in names and "model.layers.0.self_attn.o_proj.bias" not in names


PACKAGE = "headrace.engine.model.families"


def test_every_family_is_in_a_file_named_after_its_model_type() -> None:
    """Gemma 4 12B, whose config has another class than its siblings', is in their file."""
    for family in FAMILIES:
        folder, _, module = family.from_config.__module__.rpartition(".")
        assert folder in (PACKAGE, f"{PACKAGE}.experts")
        assert module == family.model_type.replace("gemma4_unified_text", "gemma4_text")
        assert (family.gguf is None) is (family.from_header is None)
