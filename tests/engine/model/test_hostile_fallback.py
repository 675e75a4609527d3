"""Values of which transformers makes a module that says nonsense, or fails, are refused by their names in the file."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from fallback_models import ORIGINAL, described
from transformers.models.olmo import modeling_olmo

from headrace.engine import EngineConfig, ModelRejected
from headrace.engine.model.fallback.choice import fallback_for
from headrace.engine.model.fallback.model import FallbackModel

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to fix

REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "text for a number": ("olmo", {"hidden_size": "64"}, "hidden_size", "is '64'; supported: an integer from 1"),
    "text for a flag": ("olmo", {"attention_bias": "no"}, "attention_bias", "is 'no'; supported: true or false"),
    "a list for a rope": ("olmo", {"rope_parameters": []}, "rope_parameters", r"is \[\]; supported: an object"),
    "sizes that contradict each other": (
        "arcee",
        {"hidden_size": 66},
        "config.json",
        r"size \(66\) is not a multiple .* heads \(4\)",
    ),
    "no heads": ("olmo", {"num_attention_heads": 0}, "num_attention_heads", "is 0; supported: an integer from 1"),
    "no heads, by a name of its own": (
        "gpt_bigcode",
        {"n_head": -4},
        "n_head",
        "is -4; supported: an integer from 1 to 1024",
    ),
    "roots of negative numbers": ("arcee", {"rms_norm_eps": -1.0}, "rms_norm_eps", "from 0 to 1"),
    "more chosen experts than there are": (
        "flex_olmo",
        {"num_experts_per_tok": 5},
        "num_experts_per_tok",
        "is 5; .* from 1 to 4",
    ),
    "no choice of experts": ("flex_olmo", {"num_experts_per_tok": 0}, "num_experts_per_tok", "from 1 to"),
    "an unknown activation": ("olmo", {"hidden_act": "planted"}, "hidden_act", "is 'planted'; supported: an act"),
    "an unknown dtype": ("olmo", {"dtype": "planted"}, "dtype", "is 'planted'; supported: a dtype of torch"),
    "an unknown kind of layer": (
        "arcee",
        {"layer_types": ["planted"] * 3},
        "layer_types",
        "is 'planted'; supported: .*attention",
    ),
    "a list for a kind of layer": (
        "arcee",
        {"layer_types": [[], "full_attention", "full_attention"]},
        "layer_types",
        r"is \[\]; supported: .*attention",
    ),
    "a negative window": (
        "cwm, window in the middle layer",
        {"sliding_window": -1},
        "sliding_window",
        "is -1; supported",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_impossible_value_is_refused_by_name(what: str) -> None:
    name, changes, field, words = REFUSED[what]
    with pytest.raises(ModelRejected, match=words) as caught:
        FallbackModel.read(described(name, **changes), "random")
    assert caught.value.field == field


LINEAR, YARN, LLAMA3 = (
    {"rope_type": "linear", "rope_theta": 1e4},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
)  # fmt: skip
LONG_ROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
DIVISORS = {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
ROPES: list[tuple[dict[str, Any], str, object]] = [
    *((LINEAR, "factor", value) for value in (-2.0, 0.0, math.nan, math.inf, "2", True, None)),
    *(
        (LONG_ROPE | DIVISORS, field, value)
        for field in DIVISORS
        for value in (None, 2.0, [], [0.0] * 8, [-1.0] * 8, [math.nan] * 8, ["1"] * 8, [True] * 8)
    ),
    (LONG_ROPE | DIVISORS, "original_max_position_embeddings", 0),
    *(({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0}, "alpha", value) for value in (0.5, math.inf, "2")),
    *((LINEAR | {"factor": 2.0}, "rope_theta", value) for value in (-1e4, 0.0, math.nan, "10000")),
    ({"rope_theta": 1e4}, "rope_type", "planted"),
    (LINEAR | {"factor": 2.0}, "partial_rotary_factor", -0.5),
    (LINEAR | {"factor": 2.0}, "partial_rotary_factor", 0),
    (YARN, "factor", -4.0),
    (YARN, "original_max_position_embeddings", -32),
    (YARN, "beta_fast", "32"),
    (YARN, "beta_slow", 40),
    (YARN, "attention_factor", -1),
    (LLAMA3, "factor", 0.5),
    (LLAMA3, "high_freq_factor", 1.0),
]


@pytest.mark.parametrize(("rope", "field", "value"), ROPES)
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_impossible_numbers_of_a_rope_are_refused_by_name(
    rope: dict[str, Any], field: str, value: object, place: str
) -> None:
    changes: dict[str, Any] = {"rope_parameters": ..., place: rope | {field: value}}
    with pytest.raises(ModelRejected, match=re.escape(f"{place}: {field} is {value!r}; supported: ")) as caught:
        FallbackModel.read(described("arcee", **changes), "random")
    assert caught.value.field == field and repr(caught.value.value) == repr(value)


@pytest.mark.parametrize(
    "rope", [LINEAR | {"factor": 2.0}, YARN, YARN | {"beta_slow": 32.0}, LLAMA3, LONG_ROPE | DIVISORS]
)
def test_ropes_that_modules_compute_are_taken(rope: dict[str, Any]) -> None:
    assert FallbackModel.read(described("arcee", rope_parameters=rope), "random").spec.max_context == 128


PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
SCALED = {"factor": 2.0, "attention_factor": 1.0}
PARTIAL = {field: values[:8] for field, values in DIVISORS.items()}
LAGUNA = "laguna, more heads in the middle layer"
PLANTED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "divisors, beside a nested rope": (
        "arcee", LONG_ROPE | DIVISORS | {"long_factor": [-1.0] * 12, "planted": PLAIN}, "long_factor", "is .-1.0, ",
    ),
    "a base, beside a nested rope": (
        "arcee", {"rope_theta": -5.0, "planted": PLAIN}, "rope_theta", "rope_parameters: rope_theta is -5.0",
    ),
    "a base, in a nested rope": (
        "arcee", {"rope_theta": 1e4, "planted": PLAIN | {"rope_theta": -5.0}}, "rope_theta", "planted: rope_theta is -",
    ),
    "no original context": (
        "arcee", LONG_ROPE | DIVISORS | SCALED | {ORIGINAL: None},
        ORIGINAL, "is None; supported: an integer from 1",
    ),
    "no original context of a nested rope": (
        "arcee", LONG_ROPE | DIVISORS | {"planted": {"rope_type": "longrope", "rope_theta": 1e4, **DIVISORS}},
        ORIGINAL, "is None; supported: an integer from 1",
    ),
    "no divisors beside those of layers": (
        LAGUNA, {"rope_type": "longrope", "full_attention": PLAIN, "sliding_attention": PLAIN}, "short_factor",
        "is None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_rope_within_another_hides_nothing(what: str) -> None:
    name, rope, field, words = PLANTED[what]
    with pytest.raises(ModelRejected, match=words) as caught:
        FallbackModel.read(described(name, rope_parameters=rope), "random")
    assert caught.value.field == field


def test_an_original_context_beside_a_rope_counts_for_more() -> None:
    config = described("arcee", rope_parameters=LONG_ROPE | DIVISORS | SCALED, **{ORIGINAL: None})
    with pytest.raises(ModelRejected, match=f"{ORIGINAL} is None; supported: an integer from 1") as caught:
        FallbackModel.read(config, "random")
    assert caught.value.field == ORIGINAL


def test_an_alpha_excuses_dynamic_ropes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a longrope whose module has no frequencies by the usual name."""
    plain = modeling_olmo.OlmoRotaryEmbedding.__init__

    def init(self: Any, config: Any) -> None:
        plain(self, config)
        self.rope_type = "planted"

    monkeypatch.setattr(modeling_olmo.OlmoRotaryEmbedding, "__init__", init)
    rope = LONG_ROPE | PARTIAL | {"alpha": 5.0}
    with pytest.raises(ModelRejected, match="rope_type is 'longrope'; supported: rotations that do not"):
        FallbackModel.read(described("olmo", rope_parameters=rope), "random")


def test_a_rope_of_layers_that_a_model_lacks_does_not_matter() -> None:
    ropes = {"full_attention": PLAIN, "sliding_attention": LONG_ROPE | DIVISORS}
    config = described(LAGUNA, layer_types=["full_attention"] * 3, rope_parameters=ropes)
    assert FallbackModel.read(config, "random").spec.windows == (None, None, None)


@pytest.mark.parametrize("asked", ["auto", "transformers"])
def test_the_field_is_named_whoever_asks_for_the_module(asked: Any) -> None:
    config = described("apertus", rope_parameters=LINEAR | {"factor": -2.0})
    with pytest.raises(ModelRejected, match="rope_parameters: factor is -2.0; supported: a number from 1 to") as caught:
        fallback_for(EngineConfig(model="m", model_impl=asked), config, "random")
    assert (caught.value.field, caught.value.value) == ("factor", -2.0)
