"""Options as editors and notebooks show them are those that are checked; a copy is checked as a new one is."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import LLM, Engine, EngineConfig, InvalidParams, SamplingParams, options
from headrace.engine.known_names import SYNONYMS

SAMPLING = SamplingParams.model_fields
CONFIG = EngineConfig.model_fields


def explained() -> dict[str, dict[str, str]]:
    """Class -> option -> its docstring, as an editor shows it."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(options.__file__).read_text()).body:
        if isinstance(node, ast.ClassDef):
            pairs = zip(node.body, node.body[1:], strict=False)
            found[node.name] = {
                name.target.id: text.value.value
                for name, text in pairs
                if isinstance(name, ast.AnnAssign) and isinstance(name.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(text.value.value, str)
            }
    return found


def test_the_options_that_are_typed_are_those_that_are_checked() -> None:
    assert options.SamplingOptions.__annotations__.keys() == SAMPLING.keys()
    assert options.ConfigOptions.__annotations__.keys() == CONFIG.keys() | SYNONYMS.keys()
    assert options.EngineOptions.__annotations__.keys() == (CONFIG.keys() - {"model"}) | SYNONYMS.keys()
    assert options.ConfigOptions.__required_keys__ == {"model"}
    assert set(SYNONYMS.values()) <= CONFIG.keys()


def test_every_option_is_explained_with_its_default() -> None:
    told = explained()
    for name, text in told["VllmNames"].items():
        assert text == f"Another name of `{SYNONYMS[name]}`."
    assert told["VllmNames"].keys() == SYNONYMS.keys()
    for texts, fields in ((told["EngineOptions"], CONFIG), (told["SamplingOptions"], SAMPLING)):
        assert texts.keys() == fields.keys() - {"model"}
        for name, text in texts.items():
            default = fields[name].default
            written = f'"{default}"' if isinstance(default, str) else repr(default)
            assert " ".join(text.split()).endswith(f" Default: {written}."), name


@pytest.mark.parametrize("constructor", [Engine, LLM])
def test_a_notebook_sees_the_options_of_an_engine(constructor: Any) -> None:
    shown = inspect.signature(constructor).parameters
    assert shown.keys() - {"progress"} == CONFIG.keys()  # which is of `LLM` alone
    assert shown["model"].default is inspect.Parameter.empty
    for name in CONFIG.keys() - {"model"}:
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY and shown[name].default == CONFIG[name].default
    assert shown["kv_memory"].annotation == "int | str | None"


def test_a_notebook_sees_the_options_of_sampling_as_they_may_be_written() -> None:
    shown = inspect.signature(SamplingParams).parameters
    assert shown.keys() == SAMPLING.keys()
    assert str(shown["stop"]) == "stop: 'str | Sequence[str]' = ()"


def test_a_replacement_keeps_the_rest_and_is_checked() -> None:
    params = SamplingParams(n=2, stop="end", logit_bias={7: 1.0})
    assert params.replace(seed=3) == SamplingParams(n=2, stop=("end",), logit_bias={7: 1.0}, seed=3)
    assert params.replace(n=1, best_of=4) == SamplingParams(n=1, best_of=4, stop=("end",), logit_bias={7: 1.0})
    assert params.replace() == params and params.n == 2
    for changes, field in (
        ({"temperature": -1.0}, "temperature"),
        ({"temprature": 1.0}, "temprature"),
        ({"best_of": 1}, "best_of"),
        ({"beam_width": 2}, "logit_bias"),
        ({"stop": [""]}, "stop.0"),
    ):
        with pytest.raises(InvalidParams) as caught:
            params.replace(**changes)
        assert caught.value.field == field
        with pytest.raises(InvalidParams):
            params.model_copy(update=changes)


def test_a_copy_is_checked_whatever_makes_it() -> None:
    params, config = SamplingParams(seed=1), EngineConfig(model="m", max_rows=8)
    assert params.model_copy(update={"stop": "x"}).stop == ("x",)  # as the constructor understands it
    assert config.model_copy(update={"kv_memory": "1KiB"}).kv_memory == 1024
    with pytest.raises(InvalidParams, match="max_batched_tokens"):
        config.model_copy(update={"max_batched_tokens": 4})
    if sys.version_info >= (3, 13):
        with pytest.raises(InvalidParams):
            copy.replace(params, top_p=0.0)
    same = [params.model_copy(), params.model_copy(deep=True), copy.copy(params), pickle.loads(pickle.dumps(params))]
    assert same == [params] * 4


def test_a_copy_knows_what_was_given() -> None:
    params = SamplingParams(seed=1)
    for again in (params, params.replace(n=2), params.model_copy(), pickle.loads(pickle.dumps(params))):
        assert "temperature" not in again.model_fields_set and "seed" in again.model_fields_set
    assert "temperature" in params.replace(temperature=1.0).model_fields_set
