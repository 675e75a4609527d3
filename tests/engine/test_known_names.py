"""Names that people bring from other tools: understood where they mean the same, else answered by their meaning."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from headrace.engine import Engine, EngineConfig, InvalidParams, SamplingParams
from headrace.engine.known_names import ENGINE_NAMES, SAMPLING_NAMES, SYNONYMS, all_names
from headrace.server.cli import app

VALUES: dict[str, Any] = {
    "block_size": 32,
    "enable_prefix_caching": False,
    "kv_cache_dtype": "fp8",
    "kv_cache_memory_bytes": "2GiB",
    "max_lora_rank": 8,
    "max_loras": 4,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 16,
    "scheduling_policy": "ageing",
}


@pytest.mark.parametrize("name", SYNONYMS)
def test_vllms_names_are_understood(name: str) -> None:
    ours = SYNONYMS[name]
    value = VALUES[name]
    config = EngineConfig(model="m", **{name: value})
    assert config == EngineConfig(model="m", **{ours: value}) != EngineConfig(model="m")
    assert Engine("m", **{name: value}).config == config
    with pytest.raises(InvalidParams, match=f"{name}: is another name of {ours}") as caught:
        EngineConfig(model="m", **{name: value, ours: value})
    assert caught.value.field == name


def test_the_command_line_has_both_names_of_each() -> None:
    commands: Any = typer.main.get_command(app)
    flags = {flag for param in commands.commands["serve"].params for flag in param.opts}
    both = SYNONYMS.keys() | set(SYNONYMS.values())
    assert not {"--" + name.replace("_", "-") for name in both} - flags


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gpu_memory_utilization", 'kv_memory="40GiB"'),
        ("tensor_parallel_size", "one device"),
        ("enforce_eager", "leave it out"),
        ("n_ctx", "it is max_context here"),
        ("n_gpu_layers", 'device="cuda"'),
        ("n_threads", "it is cpu_threads here"),
        ("filename", "it is file here"),
        ("torch_dtype", "it is dtype here"),
        ("mem_fraction_static", "kv_memory"),
        ("temperature", "SamplingParams"),
        ("max_batch_size", "it is max_rows here"),
        ("max_num_tokens", "it is max_batched_tokens here"),
        ("max_model_length", "it is max_context here"),
        ("n_ctxs", "it is max_context here"),
        ("MAX_ROWS", "did you mean max_rows?"),
        ("kv_memry", "did you mean kv_memory?"),
    ],
)
def test_other_names_of_an_engine_are_answered(name: str, told: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        Engine("m", **{name: 1})
    assert told in str(caught.value) and caught.value.field == name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_completion_tokens", "it is max_tokens here"),
        ("max_new_tokens", "it is max_tokens here"),
        ("n_predict", "it is max_tokens here"),
        ("repeat_penalty", "it is repetition_penalty here"),
        ("num_beams", "it is beam_width here"),
        ("do_sample", "temperature=0"),
        ("guided_json", "response_format="),
        ("grammar", "response_format="),
        ("stop_sequences", "it is stop here"),
        ("mirostat", "not built"),
        ("priority", "argument of stream"),
        ("max_context", "option of Engine"),
        ("temprature", "did you mean temperature?"),
    ],
)
def test_other_names_of_sampling_are_answered(name: str, told: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**{name: 1})
    assert told in str(caught.value) and caught.value.field == name


def test_a_name_that_nobody_has_is_not_answered_at_random() -> None:
    with pytest.raises(InvalidParams, match=r"^zzzz: there is no such option, got 1$"):
        Engine("m", zzzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("table", "model"), [(ENGINE_NAMES, EngineConfig), (SAMPLING_NAMES, SamplingParams)])
def test_the_tables_hold_no_name_of_ours_and_lead_to_one(table: Any, model: type[EngineConfig]) -> None:
    assert sum(map(len, table.values())) == len(all_names(table))  # none in two places
    for name, meant in all_names(table).items():
        assert name not in model.model_fields.keys() | SYNONYMS.keys(), name
        assert meant in model.model_fields or " " in meant, f"{name}: {meant} is neither an option nor a sentence"


def test_minus_one_is_all_tokens() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    for value in (-2, -1.0, True):
        with pytest.raises(InvalidParams, match="top_k"):
            SamplingParams(top_k=value)  # type: ignore[arg-type]
