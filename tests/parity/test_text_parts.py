"""Text parts of models that see or hear give the logits that transformers gives for text, whatever their names are."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import peft
import pytest
import tiny_models
import torch
import transformers
from against_transformers import CUTS, check_cuts, check_engine
from model_driver import ModelUnderTest
from planted_bugs import change_tensors
from published_configs import GIVEN
from quantising import Told
from rich.console import Console
from safetensors.torch import load_file, save_file
from text_part_models import TEXT_PARTS, text_part_model
from torch import Tensor

from headrace.adapters.files import read_adapter
from headrace.engine import AdapterRejected, Engine, EngineConfig, InvalidParams, ModelRejected, SamplingParams
from headrace.engine.inspection.inspect import inspect_model
from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.families.registry import from_hf, has_family, read_hf_config
from headrace.engine.model.families.text_parts import MULTIMODAL
from headrace.engine.model.quantising.run import quantise_folder
from headrace.engine.model.shared.adapter_device import adapter_shape
from headrace.engine.tokens.tokenizer import Tokenizer
from headrace.server.commands.model_facts import print_facts

LENGTHS = (64, 17)
IN_CHUNKS = {"in chunks": CUTS["in chunks"]}
SPEAKING = [each for each in MULTIMODAL if each.within is not None]
WITHOUT_FORMER_NAMES = ("idefics", "smolvlm", "qwen3_vl", "glm4v", "cohere2_vision", "gemma4")
"""Models whose files have had one set of names; transformers writes those of the others under their former names."""


@cache
def reference(name: str) -> tuple[Any, list[list[int]], list[Tensor]]:
    """A model, sequences of text, and their logits in one piece by transformers."""
    model = text_part_model(name)
    vocab = model.config.get_text_config().vocab_size
    sequences = [torch.randint(0, vocab, (length,)).tolist() for length in LENGTHS]
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences]
    if getattr(model.config.get_text_config(), "model_type", "") == "cohere2":
        # Cohere's own class of the text part scales them; the class around it has left that out since it was rewritten.
        logits = [each * model.config.text_config.logit_scale for each in logits]
    if name == "granite_speech":  # as in Cohere's
        logits = [each / model.config.text_config.logits_scaling for each in logits]
    return model, sequences, logits


def other_names(folder: Path, model: Any) -> None:
    """Write the weights again, under the names of the modules of transformers 5."""
    held = load_file(folder / "model.safetensors")
    tensors = {name: each.contiguous() for name, each in model.state_dict().items() if name != "lm_head.weight"}
    if any(name.endswith("lm_head.weight") for name in held):
        tensors["lm_head.weight"] = model.lm_head.weight.detach().contiguous()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", TEXT_PARTS)
def test_logits_of_text_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, sequences, expected = reference(name)
    model.save_pretrained(tmp_path)
    published = set(load_file(tmp_path / "model.safetensors"))
    _, tested = ModelUnderTest.load(tmp_path)
    check_cuts(tested, sequences, expected)
    other_names(tmp_path, model)
    has_one_name = name.startswith(WITHOUT_FORMER_NAMES) and name not in ("gemma4_unified", "glm4v_moe")
    assert (published == set(load_file(tmp_path / "model.safetensors"))) == has_one_name
    _, tested = ModelUnderTest.load(tmp_path)
    check_cuts(tested, sequences, expected, IN_CHUNKS)


@pytest.mark.parametrize("name", TEXT_PARTS)
def test_an_engine_generates_and_embeds_what_transformers_does(name: str, tmp_path: Path) -> None:
    model, sequences, _ = reference(name)
    model.save_pretrained(tmp_path)
    check_engine(tmp_path, model, sequences[0])


def test_every_architecture_has_been_compared() -> None:
    compared = {(model.config_class.model_type, type(model).__name__) for model in map(text_part_model, TEXT_PARTS)}
    assert compared == {(each.model_type, each.architecture) for each in MULTIMODAL if each.within is None}


@pytest.mark.parametrize("whole", SPEAKING, ids=lambda each: each.model_type)
def test_the_thinker_within_a_model_that_speaks(whole: Any, tmp_path: Path) -> None:
    """Its files are those of the thinker alone, with a word before the names, and with parts that speak."""
    model, sequences, expected = reference(f"{whole.model_type}_thinker")
    speech = {f"{part}.weight": torch.ones(2) for part in ("talker.model", whole.others[-1])}

    def surround(tensors: dict[str, Tensor]) -> None:
        tensors.update(speech | {f"thinker.{name}": tensors.pop(name) for name in [*tensors]})

    for rename in (lambda *_: None, other_names):
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        outer = {"model_type": whole.model_type, "talker_config": {"hidden_size": 8}, "thinker_config": config}
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [whole.names[-1]], **outer}))
        rename(tmp_path, model)
        change_tensors(tmp_path, surround)
        spec, tested = ModelUnderTest.load(tmp_path)
        assert spec == from_hf({"architectures": [whole.architecture], **outer})
        check_cuts(tested, sequences, expected, IN_CHUNKS)
    with pytest.raises(ModelRejected) as refused:
        from_hf({"architectures": [whole.architecture], **outer, "thinker_config": None})
    assert refused.value.field == "thinker_config"


@pytest.mark.parametrize(
    "whole", [each for each in MULTIMODAL if each.within is None], ids=lambda each: str(each.model_type)
)
def test_fields_that_are_left_out_mean_what_they_mean_in_transformers(whole: Any) -> None:
    """Published files leave out what equals the defaults of a class, and their text parts are of these sizes."""
    kind = {"qwen2_5_vl": "qwen2_5_vl_text"}.get(whole.model_type, whole.text_type)
    given = {"model_type": kind, **GIVEN.get(kind, {})}
    config = getattr(transformers, whole.architecture).config_class(text_config=dict(given))
    tied = {"tie_word_embeddings": config.tie_word_embeddings} if hasattr(config, "tie_word_embeddings") else {}
    named = {"architectures": [whole.architecture], "model_type": whole.model_type}
    text = config.text_config.to_dict() | {"model_type": kind}
    if whole.model_type == "voxtral":  # whose class has other defaults than its text part's, for old files alone
        text = transformers.LlamaConfig().to_dict()
    short = from_hf({**named, **tied, "text_config": given})
    assert short == from_hf({**named, **tied, "text_config": text})
    assert short.architecture == whole.architecture


def test_stacks_of_published_qwen3_vl_lie_the_other_way_round(tmp_path: Path) -> None:
    model, sequences, expected = reference("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    stacks = ("experts.gate_up_proj", "experts.down_proj")

    def turn(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if each.endswith(stacks)]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()

    change_tensors(tmp_path, turn)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], each) for name, each in model.state_dict().items())
    _, tested = ModelUnderTest.load(tmp_path)
    check_cuts(tested, sequences, expected, IN_CHUNKS)
    change_tensors(
        tmp_path,
        lambda tensors: tensors.update({name: each[:5] for name, each in tensors.items() if name.endswith(stacks)}),
    )
    with pytest.raises(ModelRejected, match="of 5 experts"):
        ModelUnderTest.load(tmp_path)


FLAT = ["qwen2_vl", "qwen2_5_vl, tied, later layers windowed", "glm4v", "hunyuan_vl"]


@pytest.mark.parametrize("name", FLAT)
def test_fields_of_the_text_part_beside_the_others_as_in_older_files(name: str, tmp_path: Path) -> None:
    model, sequences, expected = reference(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "rope_type": "mrope", "mrope_section": rope["mrope_section"]}
    if name == "hunyuan_vl":
        numbers = {"alpha": rope["alpha"], "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
        scaling = {"type": "xdrope", "xdrope_section": rope["mrope_section"], **numbers}
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    older |= {"partial_rotary_factor": rope["partial_rotary_factor"]} if name == "glm4v" else {}
    (tmp_path / "config.json").write_text(json.dumps({**text, **older, **config}))
    spec, tested = ModelUnderTest.load(tmp_path)
    assert spec.max_context == 128
    check_cuts(tested, sequences, expected, IN_CHUNKS)


def test_dtype_and_tied_heads_are_those_of_either_config(tmp_path: Path) -> None:
    text_part_model("llava_onevision").save_pretrained(tmp_path)
    config = read_hf_config(tmp_path)
    text = config["text_config"]
    assert isinstance(text, dict)
    bare = {name: value for name, value in config.items() if name not in ("dtype", "tie_word_embeddings")}
    bare["text_config"] = {name: value for name, value in text.items() if name not in ("dtype", "tie_word_embeddings")}
    assert not from_hf(bare).tied_head and from_hf(bare).checkpoint_dtype is None
    for fields in ({"tie_word_embeddings": True}, {"torch_dtype": "bfloat16"}):
        said = [from_hf(bare | fields), from_hf(bare | {"text_config": {**bare["text_config"], **fields}})]
        assert said[0] == said[1] != from_hf(bare)


def test_tensors_of_no_part_are_refused_by_name(tmp_path: Path) -> None:
    model = text_part_model("llava")
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in held)
    for extra in ("vision_towers.weight", "language_model.model.more.weight", "model.language_model.norm.weight"):
        save_file({**held, extra: torch.ones(4)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelRejected, match=extra) as refused:
            ModelUnderTest.load(tmp_path)
        assert refused.value.field == extra and "left over" in str(refused.value)
    missing = {name: each for name, each in held.items() if name != "language_model.model.norm.weight"}
    save_file(missing, tmp_path / "model.safetensors")
    with pytest.raises(ModelRejected, match=r"language_model\.model\.norm\.weight.*missing"):
        ModelUnderTest.load(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gemma3", "llava", "smolvlm"])
def test_adapters_of_the_text_part(name: str, tmp_path: Path) -> None:
    model = text_part_model(name)
    model.save_pretrained(tmp_path / "base")
    layers = r".*(language|text)_model\.layers\.\d+\.(self_attn\.q_proj|mlp\.down_proj)"
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers, modules_to_save=None)).eval()
    torch.manual_seed(2)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    wrapped.save_pretrained(tmp_path / "adapter")
    ids = torch.randint(0, 96, (23,)).tolist()
    with torch.inference_mode():
        expected = wrapped(input_ids=torch.tensor([ids])).logits[0]
    spec, tested = ModelUnderTest.load(tmp_path / "base")
    tested.bank = CpuBank(1, 8, torch.float32)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    written = load_file(file)
    homes = ["model.text_model."] if name == "smolvlm" else ["model.language_model.", "language_model.model.", "model."]
    for home in homes:
        save_file({key.replace(_home(key), home): each for key, each in written.items()}, file)
        tested.bank.put(0, 0, read_adapter(tmp_path / "adapter", adapter_shape(spec), torch.float32, max_rank=8))
        (found,) = tested.logits([ids], 128, None, [0])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    save_file({key.replace(_home(key), "vision_tower."): each for key, each in written.items()}, file)
    with pytest.raises(AdapterRejected, match="vision_tower"):
        read_adapter(tmp_path / "adapter", adapter_shape(spec), torch.float32, max_rank=8)


def _home(key: str) -> str:
    return key.removeprefix("base_model.model.").partition("layers.")[0]


def test_a_quantised_copy_leaves_the_other_parts_as_they_are(tmp_path: Path) -> None:
    model, sequences, expected = reference("gemma3")
    model.save_pretrained(tmp_path / "model")
    tiny_models.write_tokenizer(tmp_path / "model")
    quantise_folder(tmp_path / "model", tmp_path / "copy", "int8", Told())
    held, kept = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "copy"))
    others = [name for name in held if name.startswith(("vision_tower.", "multi_modal_projector."))]
    assert len(others) > 10 and all(torch.equal(kept[name], held[name]) for name in others)
    ignored = read_hf_config(tmp_path / "copy")["quantization_config"]
    assert isinstance(ignored, dict) and r"re:(model\.)?vision_tower\..*" in ignored["ignore"]
    _, tested = ModelUnderTest.load(tmp_path / "copy")
    for wanted, found in zip(expected, tested.logits(sequences, 128), strict=True):
        assert 1e-4 < float((found - wanted).norm() / wanted.norm()) < 0.05


def test_inspecting_says_which_parts_are_unread(tmp_path: Path) -> None:
    text_part_model("llava_next").save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    facts = inspect_model(EngineConfig(model=tmp_path))
    held = load_file(tmp_path / "model.safetensors")
    assert facts.runs and facts.unread == ("vision_tower", "multi_modal_projector", "image_newline")
    assert facts.stored_bytes + facts.unread_bytes == sum(each.nbytes for each in held.values())
    assert facts.shape is not None and facts.shape.family == "llava_next"
    out = io.StringIO()
    print_facts(facts, Console(file=out, width=200))
    assert "not read: vision_tower, multi_modal_projector, image_newline: " in out.getvalue()


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_an_engine_refuses_images(tmp_path: Path) -> None:
    text_part_model("smolvlm").save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert Tokenizer.from_folder(tmp_path).chat_template == TEMPLATE
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]

    async def run() -> None:
        async with Engine(tmp_path, dtype="float32", kv_memory="1MiB") as engine:
            assert engine.info.architecture == "SmolVLMForConditionalGeneration"
            with pytest.raises(InvalidParams, match=r"messages\[0\]\.content\[0\].*only text"):
                await engine.generate(image, SamplingParams(max_tokens=1))

    anyio.run(run)


@pytest.mark.parametrize("whole", SPEAKING, ids=lambda each: each.model_type)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_encoder_decoder", True), ("add_cross_attention", True), ("alibi", True), ("model_type", "planted"),
        ("auto_map", {"AutoModel": "a.Planted"}), ("architectures", ["Qwen3VLForConditionalGeneration"]),
        ("architectures", []), ("architectures", "Qwen2_5OmniThinkerForConditionalGeneration"),
    ],
)  # fmt: skip
def test_what_a_thinker_says_counts(whole: Any, field: str, value: object) -> None:
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[whole.model_type]
    config = kind().to_dict() | {"architectures": [whole.architecture]}
    config["thinker_config"]["text_config"]["num_attention_heads"] = 16  # by which hidden sizes can be divided
    assert from_hf(config).architecture == whole.architecture
    config["thinker_config"][field] = value
    with pytest.raises(ModelRejected, match=f"config.json: thinker_config: {field} is") as refused:
        from_hf(config)
    assert (refused.value.field, refused.value.value) == (field, value)


def test_a_thinker_may_have_its_own_name_and_no_other() -> None:
    """Published files of Qwen2.5-Omni call it by a former name, those of Qwen3-Omni say nothing of it."""
    thinker = {"text_config": {}, "model_type": "qwen2_5_omni_thinker"}
    outer = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni"}
    expected = from_hf({**outer, "thinker_config": thinker})
    for name in ("Qwen2OmniNaViTThinkerForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration"):
        assert from_hf({**outer, "thinker_config": {**thinker, "architectures": [name]}}) == expected
    assert from_hf({**outer, "thinker_config": {**thinker, "architectures": None}}) == expected
    with pytest.raises(ModelRejected, match="supported: Qwen2_5OmniThinkerForConditionalGeneration, which goes with"):
        from_hf({**outer, "thinker_config": {**thinker, "architectures": outer["architectures"]}})


@pytest.mark.parametrize("places", [(), ("text_config",), ("thinker_config",), ("thinker_config", "text_config")])
def test_quantisation_is_found_wherever_a_config_says_so(places: tuple[str, ...], tmp_path: Path) -> None:
    said = {"quant_method": "compressed-tensors"}
    config: dict[str, Any] = {"quantization_config": said}
    for place in reversed(places):
        config = {place: config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hf_config(tmp_path)["quantization_config"] == said


NAMED = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
QWEN2_VL = {"architectures": ["Qwen2VLForConditionalGeneration"]}
REFUSED = [
    ({"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": {}}, "architectures"),  # sees both ways
    ({"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "text_config": {}}, "architectures"),
    ({"architectures": ["Llama4ForConditionalGeneration"], "text_config": {}}, "architectures"),
    ({**NAMED, "model_type": "llava_next", "text_config": {"model_type": "llama"}}, "model_type"),
    ({**NAMED, "text_config": {"model_type": "mamba"}}, "model_type"),
    ({**NAMED}, "text_config"),
    ({**NAMED, "text_config": ["llama"]}, "text_config"),
    ({**NAMED, "text_config": {"model_type": "llama", "attn_logit_softcapping": 3.0}}, "attn_logit_softcapping"),
    ({**NAMED, "is_encoder_decoder": True, "text_config": {"model_type": "llama"}}, "is_encoder_decoder"),
    ({**NAMED, "auto_map": {"AutoModel": "other.Other"}, "text_config": {"model_type": "llama"}}, "auto_map"),
    ({**NAMED, "text_config": {"model_type": "llama", "num_hidden_layers": 0}}, "num_hidden_layers"),
    ({**QWEN2_VL, "text_config": {"rope_parameters": {"rope_type": ["mrope"]}}}, "rope_type"),
]


@pytest.mark.parametrize(("config", "field"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
def test_refusals_name_the_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelRejected) as refused:
        from_hf(config)
    assert refused.value.field == field
    assert has_family(config) == (config["architectures"] in (NAMED["architectures"], QWEN2_VL["architectures"]))
