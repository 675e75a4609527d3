"""The public workload is the published one, whatever the scale; named shapes are the models' own sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.engine.bench.shapes import SHAPES, located, spec_of
from headrace.engine.bench.workload import public_workload, random_prompts


def test_the_workload_has_the_published_totals() -> None:
    workload = public_workload(vocab_size=151_936)
    assert len(workload.prompts) == len(workload.outputs) == 256
    assert workload.prompt_tokens == 142_827
    assert workload.output_tokens == 133_966
    assert [params.max_tokens for params in workload.params()] == workload.outputs
    assert all(params.ignore_eos and params.temperature == 0.6 for params in workload.params())


def test_ids_stay_below_the_vocabulary_and_variants_share_no_page() -> None:
    first, second = (public_workload(requests=8, vocab_size=512, variant=variant) for variant in (0, 1))
    assert max(map(max, first.prompts)) < 512
    assert first.outputs == second.outputs
    for before, after in zip(first.prompts, second.prompts, strict=True):
        assert len(before) == len(after)
        assert all(one != other for one, other in zip(before, after, strict=True))


def test_a_scaled_workload_shrinks_every_length_alike() -> None:
    whole = public_workload(requests=16, vocab_size=20_000)
    tenth = public_workload(requests=16, scale=0.1, vocab_size=20_000)
    assert tenth.outputs == [round(count * 0.1) for count in whole.outputs]
    assert [len(prompt) for prompt in tenth.prompts] == [round(len(prompt) * 0.1) for prompt in whole.prompts]
    assert min(public_workload(requests=16, scale=1e-6, vocab_size=9).outputs) == 1


def test_random_prompts_differ_by_seed_and_not_otherwise() -> None:
    assert random_prompts(2, 9, vocab_size=99, seed=1) == random_prompts(2, 9, vocab_size=99, seed=1)
    assert random_prompts(2, 9, vocab_size=99, seed=1) != random_prompts(2, 9, vocab_size=99, seed=2)


@pytest.mark.parametrize(("name", "layers", "tied"), [("qwen3-0.6b", 28, True), ("llama-3.1-8b", 32, False)])
def test_a_named_shape_is_a_folder_while_it_is_used(name: str, layers: int, tied: bool) -> None:
    with located(name) as (path, only_shape):
        assert only_shape
        assert json.loads((Path(path) / "config.json").read_text()) == SHAPES[name]
        spec = spec_of(path)
    assert not Path(path).exists()
    attention = spec.uniform_attention
    assert (spec.num_layers, spec.tied_head, attention.qk_norm, attention.head_dim) == (layers, tied, tied, 128)


def test_any_other_model_is_a_path() -> None:
    with located("some/folder") as found:
        assert found == ("some/folder", False)
