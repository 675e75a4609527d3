"""What a model's files recommend for sampling: which values, when requests take them, and how that is turned off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from headrace.engine import Engine, ModelRejected, SamplingParams
from headrace.engine.life.generation_defaults import from_generation_config, from_gguf_metadata, with_defaults

SMALL: dict[str, Any] = {"dtype": "float32", "kv_memory": "1MiB"}
QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.whole_folder(tmp_path_factory.mktemp("model") / "whole")


def recommending(whole: Path, folder: Path, **values: Any) -> Path:
    shutil.copytree(whole, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, **values}))
    return folder


def test_values_of_a_folder() -> None:
    more = {"do_sample": True, "max_new_tokens": 9, "top_k": None, "transformers_version": "5"}
    assert from_generation_config({**QWEN, **more}) == {name: QWEN[name] for name in QWEN if name != "top_k"}
    assert from_generation_config({**QWEN, "do_sample": False}) == {"repetition_penalty": 1.1}
    assert from_generation_config({}) == {}


def test_values_of_a_gguf_file() -> None:
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "general.sampling.penalty_repeat": 1.1}
    assert from_gguf_metadata({**metadata, "general.name": "x"}) == {"temperature": 0.5, "top_k": 40}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, QWEN),
        ({"temperature": 0.6, "top_p": 1.0}, {**QWEN, "top_p": 1.0}),
        ({"temperature": 1.0}, {**QWEN, "temperature": 1.0}),
        ({"temperature": 0}, {"repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.0, "top_k": -1}, {"temperature": 0.6, "top_p": 0.95}),
        ({"beam_width": 2}, {}),
    ],
)
def test_only_what_was_left_out_is_filled_up(given: dict[str, Any], expected: dict[str, Any]) -> None:
    filled = with_defaults(
        SamplingParams(seed=1, **given) if "beam_width" not in given else SamplingParams(**given), QWEN
    )
    seed = {} if "beam_width" in given else {"seed": 1}
    assert filled == SamplingParams(**{**given, **expected, **seed})


def test_nothing_is_made_anew_where_nothing_is_recommended() -> None:
    params = SamplingParams()
    assert with_defaults(params, {}) is params
    assert with_defaults(params, {"temperature": 1.0}) is params


@pytest.mark.anyio
async def test_an_engine_takes_them_unless_it_is_told_not_to(whole: Path, tmp_path: Path) -> None:
    """A top-k of 1 takes the likeliest token at any temperature, so that what was taken shows."""
    folder = recommending(whole, tmp_path / "model", temperature=3.0, top_k=1)
    prompt, asked = [7, 8, 9], SamplingParams(max_tokens=24, seed=4, ignore_eos=True)

    async def tokens(engine: Engine, params: SamplingParams) -> list[int]:
        return (await engine.generate(prompt, params)).choices[0].token_ids

    async with Engine(folder, **SMALL) as engine:
        assert engine.info.generation_defaults == {"temperature": 3.0, "top_k": 1}
        greedy = await tokens(engine, asked.replace(temperature=0))
        assert await tokens(engine, asked) == greedy
        hot = await tokens(engine, asked.replace(top_k=0))  # asked for, although it is the default
        assert hot != greedy
        stream = engine.stream(prompt, asked)
        first = [token.id async for token in stream]
        await stream.send([3], asked)
        again = [token.id async for token in stream]
        assert first == greedy and again == await tokens_after(engine, [*prompt, *greedy, 3], asked)
    async with Engine(folder, generation_defaults="none", **SMALL) as engine:
        assert engine.info.generation_defaults == {}
        assert await tokens(engine, asked) == await tokens(engine, asked.replace(temperature=1.0, top_k=0)) != greedy
        ended = await engine.generate(prompt, SamplingParams(max_tokens=24, logit_bias={5: 100}))
        assert ended.choices[0].token_ids == [5]  # stop ids are the model's whatever was chosen


async def tokens_after(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    return (await engine.generate(prompt, params.replace(temperature=0))).choices[0].token_ids


@pytest.mark.anyio
async def test_what_no_request_may_ask_is_refused_with_a_way_out(whole: Path, tmp_path: Path) -> None:
    folder = recommending(whole, tmp_path / "model", top_p=1.5)
    with pytest.raises(ModelRejected, match='generation_config.json: top_p: .* generation_defaults="none"') as caught:
        async with Engine(folder, **SMALL):
            pass
    assert caught.value.field == "top_p"
    async with Engine(folder, generation_defaults="none", **SMALL) as engine:
        assert engine.info.generation_defaults == {}
