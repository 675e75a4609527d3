"""Draft heads of every format against their definitions, token for token, over rows, chunks and shared pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_driver import PAGE, Drafting, Row, Target, states_of
from draft_heads import HEADS, VOCABULARY, EagleHead, Head, random_target
from model_driver import OPERATIONS

from headrace.engine import ModelRejected
from headrace.engine.model.drafting.heads.reading import open_head
from headrace.engine.model.drafting.heads.spec import MOST_DRAFTS, RecurrentSpec
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.scheduling.asked import Sampling

CUTS = {"in one piece": (64, None), "in chunks": (5, None), "decode after a prompt": (7, 9), "one by one": (1, None)}
LENGTHS = (21, 9, 16, 3)
COUNT = 3
SAMPLINGS = [
    *(Sampling(temperature=30.0, seed=seed) for seed in (1, 2, 3)), Sampling(), *(Sampling(20.0, 20, 0.9, 0.01, 7),) * 4
]  # fmt: skip


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


def drawn(lengths: Sequence[int]) -> list[Row]:
    generator = torch.Generator().manual_seed(2)
    return [Row(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]


@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_definition(
    name: str, native: bool, target_folder: Path, model: Any, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    head = HEADS[name]()
    drafting = Drafting(target_folder, head.write(tmp_path / "head"), native=native)
    rows = drawn(LENGTHS)
    expected = [head.drafts(states_of(model, row.ids), row.ids[1:], COUNT) for row in rows]
    assert len({tuple(drafts) for drafts in expected}) == len(rows), "drafts that depend on nothing prove nothing"
    for cut in CUTS.values():
        assert drafting.side_by_side(rows, *cut, COUNT) == expected, cut


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "EAGLE-3 of all tokens, named like a layer", "Medusa"])
def test_drafts_of_rows_that_sample_have_the_noise_of_their_places(
    name: str, target_folder: Path, model: Any, tmp_path: Path
) -> None:
    """Each draft is what a target with the head's logits would choose there, whichever tokens the head knows."""
    torch.manual_seed(3)
    head = HEADS[name]()
    drafting = Drafting(target_folder, head.write(tmp_path / "head"))
    rows = [row for _ in range(2) for row in drawn(LENGTHS)]
    for row, sampling in zip(rows, SAMPLINGS, strict=True):
        row.sampling = sampling
    expected = [head.drafts(states_of(model, row.ids), row.ids[1:], COUNT, row.sampling) for row in rows]
    assert sum(expected[at] != expected[at + len(LENGTHS)] for at in range(len(LENGTHS))) >= 3
    assert drafting.side_by_side(rows, *CUTS["in chunks"], COUNT) == expected


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "Medusa"])
@pytest.mark.parametrize("goes_on_alike", [True, False])
def test_rows_that_share_pages_draft_from_what_lies_there(
    name: str, goes_on_alike: bool, target_folder: Path, model: Any, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    head = HEADS[name]()
    drafting = Drafting(target_folder, head.write(tmp_path / "head"))
    first, second = drawn((19, 15))
    found = 2 * PAGE
    second.ids[:found] = first.ids[:found]
    second.ids[found] = first.ids[found] if goes_on_alike else (first.ids[found] + 1) % VOCABULARY
    second.shares = (0, found)
    drafts = drafting.drafts([first, second], 64, None, COUNT)
    following = second.ids[1:]
    following[found - 1] = first.ids[found]  # the last position of a shared page knows how the first row went on
    assert drafts[0] == head.drafts(states_of(model, first.ids), first.ids[1:], COUNT)
    assert drafts[1] == head.drafts(states_of(model, second.ids), following, COUNT)


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "Medusa"])
@pytest.mark.parametrize("seed", range(4))
def test_refused_drafts_leave_nothing_behind(
    name: str, seed: int, target_folder: Path, model: Any, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    head = HEADS[name]()
    drafting = Drafting(target_folder, head.write(tmp_path / "head"))
    rows = drawn((21, 9, 16, 4))
    expected = [head.drafts(states_of(model, row.ids), row.ids[1:], COUNT) for row in rows]
    assert drafting.after_guesses(rows, seed, COUNT) == expected


@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "speculators, norm of all states", "Medusa"])
def test_bfloat16_drafts_mostly_the_same(
    name: str, native: bool, target_folder: Path, model: Any, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    head = HEADS[name]()
    drafting = Drafting(target_folder, head.write(tmp_path / "head"), torch.bfloat16, native=native)
    rows = drawn(tuple(range(3, 11)))
    drafts = drafting.side_by_side(rows, 64, None, 1)
    expected = [head.drafts(states_of(model, row.ids), row.ids[1:], 1) for row in rows]
    alike = sum(left == right for left, right in zip(drafts, expected, strict=True))
    assert alike >= 5, (drafts, expected)


@pytest.mark.parametrize("native", OPERATIONS)
def test_inputs_of_layers_are_those_of_transformers(native: bool, target_folder: Path, model: Any) -> None:
    spec = from_hf(read_hf_config(target_folder))
    tested = Target(target_folder, native=native)
    (row,) = drawn((21,))
    expected = states_of(model, row.ids)
    wanted = (0, 1, 4, 6, 7)
    hidden, plain = tested.hidden(row.ids[:-1], wanted)
    assert len(hidden.inputs) == len(wanted) < len(expected.inputs) == spec.num_layers + 1
    for layer, found in zip(wanted, hidden.inputs, strict=True):
        torch.testing.assert_close(found, expected.inputs[layer], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden.final_NE, expected.final, rtol=1e-4, atol=1e-4)
    assert torch.equal(hidden.final_NE, plain), "asking for inputs of layers may not change what comes out"


Change = Callable[[Head], object]


def config_says(**fields: Any) -> Change:
    return lambda head: head.config.update(fields)


def tensor_is(name: str, tensor: torch.Tensor | None) -> Change:
    return lambda head: head.tensors.pop(name) if tensor is None else head.tensors.update({name: tensor})


def layer_says(**fields: Any) -> Change:
    return lambda head: head.config["transformer_layer_config"].update(fields)


def moved(head: Head, id: int, by: int) -> None:
    head.tensors["d2t"][id] += by


BAD: dict[str, tuple[str, Change, str, str]] = {
    "EAGLE of another hidden size": ("EAGLE", config_says(hidden_size=64), "hidden_size", "32, as in the model"),
    "EAGLE-3 of another hidden size": ("EAGLE-3", config_says(hidden_size=64), "hidden_size", "32, as in the model"),
    "another target's states": ("EAGLE-3", config_says(target_hidden_size=48), "target_hidden_size", "32, as in"),
    "another vocabulary": ("EAGLE", config_says(vocab_size=100), "vocab_size", "96, as in the model"),
    "more drafts than tokens": ("EAGLE-3", config_says(draft_vocab_size=97), "draft_vocab_size", "1 to 96"),
    "two layers": ("EAGLE", config_says(num_hidden_layers=2), "num_hidden_layers", "1: a head of one layer"),
    "another activation": ("EAGLE", config_says(hidden_act="gelu"), "hidden_act", "silu"),
    "layers that the target has not": (
        "EAGLE-3", config_says(eagle_aux_hidden_state_layer_ids=[1, 4, 8]), "eagle_aux_hidden_state_layer_ids", "to 7"
    ),
    "layers in disorder": (
        "EAGLE-3", config_says(eagle_aux_hidden_state_layer_ids=[4, 1, 6]), "eagle_aux_hidden_state_layer_ids", "rising"
    ),
    "no product": ("EAGLE-3", tensor_is("fc.weight", None), "fc.weight", "missing"),
    "a product of two states": (
        "EAGLE-3", tensor_is("fc.weight", torch.ones(32, 64)), "fc.weight", r"the shape \[32, 96\]"
    ),
    "attention without tokens": (
        "EAGLE-3", tensor_is("midlayer.self_attn.k_proj.weight", torch.ones(16, 32)),
        "midlayer.self_attn.k_proj.weight", r"the shape \[16, 64\]",
    ),
    "no output head": ("EAGLE-3", tensor_is("lm_head.weight", None), "lm_head.weight", "missing"),
    "a tensor too many": ("EAGLE", tensor_is("layers.1.mlp.up_proj.weight", torch.ones(2)), "layers.1.", "left over"),
    "an EAGLE layer with a first norm": (
        "EAGLE", tensor_is("layers.0.input_layernorm.weight", torch.ones(32)), "input_layernorm", "left over"
    ),
    "no map": ("EAGLE-3", tensor_is("d2t", None), "d2t", "missing"),
    "a short map": ("EAGLE-3", tensor_is("d2t", torch.zeros(39, dtype=torch.int64)), "d2t", r"int64 \[40\]"),
    "a map of floats": ("EAGLE-3", tensor_is("d2t", torch.zeros(40)), "d2t", r"int64 \[40\]"),
    "a map out of the vocabulary": ("EAGLE-3", lambda head: moved(head, 0, 96), "d2t", "ids from 0 to 95"),
    "a map to negative ids": ("EAGLE-3", lambda head: moved(head, 0, -96), "d2t", "ids from 0 to 95"),
    "a map of two to one": (
        "EAGLE-3", tensor_is("d2t", -torch.arange(40)), "d2t", "another id of the target for each token"
    ),
    "marks of other tokens": (
        "EAGLE-3", tensor_is("t2d", torch.zeros(96, dtype=torch.bool)), "t2d", "the 40 ids that d2t maps to"
    ),
    "marks of another vocabulary": (
        "EAGLE-3", tensor_is("t2d", torch.zeros(90, dtype=torch.bool)), "t2d", r"bool \[96\]"
    ),
    "numbers that are none": (
        "EAGLE-3", tensor_is("norm.weight", torch.full((32,), torch.nan)), "norm.weight", "not finite"
    ),
    "another kind of speculator": (
        "speculators", config_says(speculators_model_type="dflash"), "speculators_model_type", "eagle3"
    ),
    "a speculator of another architecture": (
        "speculators",
        config_says(speculators_config={"verifier": {"architectures": ["Qwen3ForCausalLM"]}}),
        "architectures", "LlamaForCausalLM, the model that it is to draft for",
    ),
    "a speculator of another vocabulary": ("speculators", layer_says(vocab_size=97), "vocab_size", "96, as in"),
    "a speculator without a layer": (
        "speculators", config_says(transformer_layer_config=None), "transformer_layer_config", "an object"
    ),
    "a norm that is not there": ("speculators", config_says(norm_before_fc=True), "input_norm.weight", "missing"),
    "a norm that nothing reads": (
        "speculators, norm of all states", config_says(norm_before_fc=False), "input_norm.weight", "left over"
    ),
    "Medusa of another hidden size": (
        "Medusa", tensor_is("0.1.weight", torch.ones(96, 64)), "0.1.weight", "32, as in the model"
    ),
    "Medusa of another vocabulary": (
        "Medusa", tensor_is("0.1.weight", torch.ones(95, 32)), "0.1.weight", "96, as in the model"
    ),
    "Medusa with a gap": ("Medusa", tensor_is("1.1.weight", None), "the number of heads", "without gaps"),
    "Medusa without a bias": ("Medusa", tensor_is("2.0.linear.bias", None), "2.0.linear.bias", "missing"),
    "nothing known": ("EAGLE", tensor_is("fc.weight", None), "the format", "a draft head in a format of EAGLE"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_heads_that_do_not_fit_are_refused(case: str, target_folder: Path, tmp_path: Path) -> None:
    name, change, field, why = BAD[case]
    torch.manual_seed(3)
    head = HEADS[name]()
    change(head)
    with pytest.raises(ModelRejected, match=why) as caught:
        Drafting(target_folder, head.write(tmp_path / "head"))
    assert field in str(caught.value.field)
    if case != "numbers that are none":  # found before memory is taken
        with pytest.raises(ModelRejected), open_head(tmp_path / "head", from_hf(read_hf_config(target_folder))):
            pass


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickles_are_refused_by_name(pickle: str, target_folder: Path, tmp_path: Path) -> None:
    folder = EagleHead().write(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / pickle)
    target = from_hf(read_hf_config(target_folder))
    with pytest.raises(ModelRejected, match="safetensors.torch.save_file") as caught, open_head(folder, target):
        pass
    assert caught.value.field == pickle


def test_a_folder_that_is_not_there_or_holds_nothing_is_refused(target_folder: Path, tmp_path: Path) -> None:
    target = from_hf(read_hf_config(target_folder))
    with pytest.raises(ModelRejected, match="no such folder"), open_head(tmp_path / "nowhere", target):
        pass
    with pytest.raises(ModelRejected, match="medusa_lm_head.safetensors"), open_head(tmp_path, target):
        pass


def test_a_spec_says_what_a_head_wants(target_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    target = from_hf(read_hf_config(target_folder))
    found = {}
    for name, make in HEADS.items():
        with open_head(make().write(tmp_path / name), target) as opened:
            found[name] = opened.spec
    assert found["EAGLE"].taps == () and found["EAGLE-3"].taps == (2, 3, 4)
    assert found["EAGLE-3 that numbers outputs"].taps == (1, 3, 5) and found["speculators"].taps == (1, 2, 4)
    assert (found["Medusa"].most_drafts, found["Medusa of two blocks"].most_drafts) == (4, 3)
    eagle3 = found["EAGLE-3"]
    assert isinstance(eagle3, RecurrentSpec)
    assert (eagle3.method, eagle3.draft_vocab_size, eagle3.most_drafts) == ("eagle3", 40, MOST_DRAFTS)


@pytest.mark.parametrize("layers", [3, 4, 6])
def test_a_target_of_few_layers_has_no_usual_ones(layers: int, target_folder: Path, tmp_path: Path) -> None:
    """The second, the middle and the third last layer would not come in this order."""
    spec = from_hf(read_hf_config(target_folder))
    folder = HEADS["EAGLE-3"]().write(tmp_path / "head")
    with (
        pytest.raises(ModelRejected, match=f"eagle_aux_hidden_state_layer_ids.* only {layers}"),
        open_head(folder, replace(spec, layers=spec.layers[:layers])),
    ):
        pass
