"""A value that no model can have is refused under its field's name, in every family's config, or it says nothing.

A field that is left out has the value that transformers gives it.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from published_configs import GIVEN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace.engine import ModelRejected
from headrace.engine.model.families.registry import FAMILIES, from_hf

ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1},
)


def impossible(value: object) -> list[object]:
    """What no field can be that has `value` in a good config: of another type, not finite, negative or endless."""
    if isinstance(value, bool):
        return ["yes", 2, [], 0.5]
    if isinstance(value, int):
        return [-1, "3", 1.5, True, [], 10**12]
    if isinstance(value, float):
        return [-1.0, math.nan, math.inf, "0.5", True, []]
    if isinstance(value, str):
        return ["planted", 7, []]
    return ["planted", 7, [-1]] if isinstance(value, (list, dict)) else []


def described(model_type: str) -> dict[str, Any]:
    """A config.json of a family as transformers writes it, with all its fields."""
    family = next(each for each in FAMILIES if each.model_type == model_type)
    written = json.loads(CONFIG_MAPPING[model_type](**GIVEN.get(model_type, {})).to_json_string(use_diff=False))
    return {**written, "architectures": [family.architecture]}


@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES])
def test_a_value_is_refused_by_name_or_changes_nothing(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = described(model_type)
    expected, refused = from_hf(config), 0
    for field, value in config.items():
        for planted in impossible(value):
            if (field, planted) == ("query_pre_attn_scalar", 1.5):
                continue  # any number will do, though published ones are integers
            try:
                found = from_hf({**config, field: planted})
            except ModelRejected as error:
                assert field in str(error), f"{field} of {planted!r}: {error}"
                refused += 1
            else:
                assert found == expected, f"{field} may be {planted!r}"
    assert refused > 30


@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES])
def test_a_field_left_out_has_the_value_that_transformers_gives_it(model_type: str) -> None:
    """Or it is refused, since a published config may leave out what is the default there."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = described(model_type)
    expected = from_hf(config)
    for field in config:
        try:
            found = from_hf({name: value for name, value in config.items() if name != field})
        except ModelRejected:
            continue
        assert found == expected, f"without {field} it is not {config[field]!r}"


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_an_impossible_number_of_a_rope_is_refused_by_name(rope: dict[str, Any]) -> None:
    rope = {**rope, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    config = {**described("llama"), "max_position_embeddings": 128}
    assert from_hf({**config, "rope_parameters": rope}).ropes[0].scaling is not None
    for field, value in rope.items():
        used = field != "original_max_position_embeddings" or rope["rope_type"] != "linear"
        for planted in [*impossible(value), *([0] if field != "rope_type" else [])]:
            if used:
                with pytest.raises(ModelRejected, match=f"rope_parameters: {field} is ") as caught:
                    from_hf({**config, "rope_parameters": {**rope, field: planted}})
                assert caught.value.field == field
