"""What transformers' modules cannot do over pages is refused by name; what they can do works as for other models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from against_transformers import greedily
from fallback_models import GREEDY, LONG_ROPE, ORIGINAL, SMALL, config_of, described, generated, made, saved
from published_configs import PUBLISHED_OTHERS
from torch import Tensor, nn
from transformers.models.olmo import modeling_olmo

from headrace.engine import Engine, EngineConfig, InvalidParams, ModelRejected, ResponseFormat, SamplingParams
from headrace.engine.inspection.inspect import inspect_model
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cpu.trial import try_fallback
from headrace.engine.model.fallback.choice import check_native, fallback_for
from headrace.engine.model.fallback.model import FallbackModel
from headrace.engine.model.fallback.small import small_model
from headrace.engine.model.families.registry import read_hf_config
from headrace.engine.model.spec import MixerSpec, SoftcappedAttention

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to fix

MIMO = "mimo_v2_flash, sinks, a window and more keys in the middle layer"
SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip


def of_transformers(model_type: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a model with few layers, as transformers would write it."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    name = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return {**kind(num_hidden_layers=2, **changes).to_dict(), "architectures": [name]}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "code beside the checkpoint": (
        lambda: described(auto_map={"AutoModelForCausalLM": "modeling.Planted"}), "auto_map", "no code of their own",
    ),
    "layers without end": (lambda: described(num_hidden_layers=10**6), "num_hidden_layers", "from 1 to 1024"),
    "no layers": (lambda: described(num_hidden_layers=0), "num_hidden_layers", "from 1 to 1024"),
    "quantised weights": (
        lambda: described(quantization_config={"quant_method": "fp8"}), "quantization_config", "not quantised",
    ),
    "an unknown model": (lambda: described(model_type="planted"), "model_type", "families of headrace"),
    "no name of a model": (lambda: described(model_type=["olmo"]), "model_type", "families of headrace"),
    "another architecture": (lambda: described(architectures=["PlantedForCausalLM"]), "architectures", "causal"),
    "an encoder and a decoder": (lambda: of_transformers("bart"), "is_encoder_decoder", "without an encoder"),
    "cross attention": (
        lambda: {**of_transformers("gpt2"), "add_cross_attention": True}, "add_cross_attention", "own tokens",
    ),
    "later tokens": (lambda: of_transformers("bert"), "encoder.layer.0.attention.self", "causal attention"),
    "a state-space model": (lambda: of_transformers("rwkv"), "architectures", "keeps a state beside keys"),
    "linear attention in a hybrid": (
        lambda: of_transformers("qwen3_next", layer_types=["linear_attention", "full_attention"]),
        "layer_types", "full_attention",
    ),
    "attention in chunks": (
        lambda: of_transformers("llama4_text", layer_types=["chunked_attention", "full_attention"]),
        "layer_types", "full_attention",
    ),
    "positions added to scores": (lambda: of_transformers("bloom"), "architectures", "computes its attention itself"),
    "keys and values of another layer": (
        lambda: of_transformers("gemma3n_text", num_kv_shared_layers=1), "num_kv_shared_layers", "of their own",
    ),
    "two attentions in a layer": (lambda: of_transformers("diffllama"), "attention", "one attention in each layer"),
    "a rope of other sizes": (
        lambda: described(rope_parameters={**LONG_ROPE, ORIGINAL: 64}), "short_factor",
        "'4 numbers'; supported: 8, one for each pair",
    ),
    "a rope that reads lengths in its own way": (
        lambda: described(
            "phimoe", rope_parameters={
                **LONG_ROPE, ORIGINAL: 64, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.1,
                "long_mscale": 1.2,
            },
        ),
        "architectures", "without looking at numbers",
    ),
    "slopes of scores": (lambda: {**of_transformers("falcon"), "alibi": True}, "alibi", "not added to scores"),
    "experts that are counted": (
        lambda: of_transformers("jetmoe"), "architectures", "cannot be run on tokens without looking at numbers",
    ),
    "a mask that depends on values": (
        lambda: of_transformers("doge", num_attention_heads=8), "architectures", "without looking at numbers",
    ),
    "convolutions by their old names": (
        lambda: {**of_transformers("lfm2", full_attn_idxs=[1]), "layer_types": None}, "layer_types", "full_attention",
    ),
    "convolutions of images": (
        lambda: of_transformers("phi4_multimodal"),
        "model.embed_tokens_extend.image_embed.img_processor.embeddings.patch_embedding", "through attention alone",
    ),
    "values larger than keys": (
        lambda: described("minicpm3, divisors of short texts", v_head_dim=32), "layers.0.self_attn",
        "values no larger than keys",
    ),
    "attention to both sides": (
        lambda: described("gemma", use_bidirectional_attention=True), "use_bidirectional_attention", "earlier tokens",
    ),
    "images beside text": (lambda: of_transformers("fuyu"), "model_type", "text alone"),
    "no bound of positions": (lambda: described(max_position_embeddings=0), "max_position_embeddings", "integer"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_by_name(what: str) -> None:
    make, field, words = REFUSED[what]
    with pytest.raises(ModelRejected, match=words) as caught:
        FallbackModel.read(make(), "random")
    assert caught.value.field == field


def without_attention(patch: pytest.MonkeyPatch) -> None:
    """A decoder whose last layer is a feed alone."""
    plain = modeling_olmo.OlmoDecoderLayer.forward

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        is_last = self.self_attn.layer_idx == self.self_attn.config.num_hidden_layers - 1
        return self.mlp(hidden_states) if is_last else plain(self, hidden_states, **options)

    patch.setattr(modeling_olmo.OlmoDecoderLayer, "forward", forward)


def with_another_mask(patch: pytest.MonkeyPatch) -> None:
    """An attention that leaves out its mask."""
    plain = modeling_olmo.OlmoAttention.forward

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Any:
        return plain(self, hidden_states, **{**options, "attention_mask": None})

    patch.setattr(modeling_olmo.OlmoAttention, "forward", forward)


def with_option(**more: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """An attention that asks for more than those of its kind do."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = modeling_olmo.OlmoAttention.forward
        patch.setattr(modeling_olmo.OlmoAttention, "forward", lambda *given, **named: plain(*given, **named, **more))

    return plant


def with_module(kind: Callable[[], torch.nn.Module]) -> Callable[[pytest.MonkeyPatch], None]:
    """A feed that has a module of this kind."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = modeling_olmo.OlmoMLP.__init__

        def init(self: Any, config: Any) -> None:
            plain(self, config)
            self.mixing = kind()

        patch.setattr(modeling_olmo.OlmoMLP, "__init__", init)

    return plant


def without_positions(patch: pytest.MonkeyPatch) -> None:
    """A decoder that is given no positions."""
    plain = modeling_olmo.OlmoModel.forward
    patch.setattr(modeling_olmo.OlmoModel, "forward", lambda self, input_ids=None, **more: plain(self, input_ids))


def without_parts(patch: pytest.MonkeyPatch) -> None:
    """A model that is not made of a decoder and a head."""
    patch.setattr(modeling_olmo.OlmoForCausalLM, "base_model_prefix", "")


@pytest.mark.parametrize(
    ("plant", "field", "words"),
    [
        (without_attention, "layers with attention", "2 of 3"),
        (with_another_mask, "layers.0.self_attn", "a mask that the module changes"),
        (with_module(lambda: torch.nn.Conv1d(64, 64, 3)), "model.layers.0.mlp.mixing", "through attention alone"),
        (with_module(lambda: torch.nn.GRU(64, 64)), "model.layers.0.mlp.mixing", "through attention alone"),
        (with_option(planted=1), "layers.0.self_attn", "attention with planted"),
        (with_option(s_aux=torch.zeros(4)), "layers.0.self_attn", "with sinks that the module computes"),
        (with_option(s_aux=torch.zeros(4), softcap=2.0), "layers.0.self_attn", "with a cap and with sinks"),
        (without_positions, "position_ids", "the position of each token"),
        (without_parts, "architectures", "not a model with a head behind it"),
    ],
)
def test_what_only_a_module_shows_is_refused_by_name(
    plant: Callable[[pytest.MonkeyPatch], None], field: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(ModelRejected, match=words) as caught:
        FallbackModel.read(described(), "random")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [("rope_type", "planted", "do not depend on a request's length"), ("max_seq_len_cached", 100, "at most 100")],
)
def test_a_rope_that_would_change_is_refused_by_name(
    attribute: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that stretch in a way of their own, or at another length than transformers' do."""
    plain = modeling_olmo.OlmoRotaryEmbedding.__init__

    def init(self: Any, config: Any) -> None:
        plain(self, config)
        setattr(self, attribute, value)

    monkeypatch.setattr(modeling_olmo.OlmoRotaryEmbedding, "__init__", init)
    config = described("olmo, a dynamic rope")
    with pytest.raises(ModelRejected, match=words) as caught:
        FallbackModel.read(config, "random")
    assert (caught.value.field, caught.value.value) == ("rope_type", "dynamic")
    if attribute == "max_seq_len_cached":
        assert FallbackModel.read(config, "random", max_context=100).spec.max_context == 128


def test_max_context_chooses_among_the_divisors_of_a_long_rope(tmp_path: Path) -> None:
    """As in families with native code: by what a request may have, not by what it has."""
    rope = {**LONG_ROPE, "short_factor": [1.1] * 8, "long_factor": [5.0] * 8, "attention_factor": 1.2}
    model = made("olmo", rope_parameters={**rope, ORIGINAL: 32})
    saved(model, tmp_path)
    short = anyio.run(lambda: generated(tmp_path, [5, 6, 7], max_context=32))
    long = anyio.run(lambda: generated(tmp_path, [5, 6, 7], max_context=33))
    assert long == anyio.run(lambda: generated(tmp_path, [5, 6, 7])) != short
    always = made("olmo", rope_parameters={**rope, ORIGINAL: 2})
    assert [greedily(each, [5, 6, 7], found) for each, found in ((model, short), (always, long))] == [short, long]


def test_code_beside_a_checkpoint_is_never_imported(tmp_path: Path) -> None:
    saved(made("olmo"), tmp_path)
    (tmp_path / "modeling.py").write_text("raise SystemExit('imported')")
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["auto_map"] = {"AutoModelForCausalLM": "modeling.Planted", "AutoConfig": "modeling.PlantedConfig"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelRejected, match="auto_map"):
        anyio.run(generated, tmp_path, [1, 2, 3])


def test_code_of_transformers_own_class_is_neither_needed_nor_imported(tmp_path: Path) -> None:
    saved(made("olmo"), tmp_path)
    plain = anyio.run(generated, tmp_path, [1, 2, 3])
    for kind in ("modeling", "configuration"):
        (tmp_path / f"{kind}_olmo.py").write_text("raise SystemExit('imported')")
    fields = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoModelForCausalLM": "modeling_olmo.OlmoForCausalLM", "AutoConfig": "configuration_olmo.OlmoConfig"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "auto_map": code}))
    assert anyio.run(generated, tmp_path, [1, 2, 3]) == plain


@pytest.mark.parametrize("window", [1, 2, 13, 4096, 100_000])
def test_windows_are_found_however_long(window: int) -> None:
    changes = {"sliding_window": window, "max_position_embeddings": 1 << 18}
    spec = FallbackModel.read({**described("cwm, window in the middle layer"), **changes}, "random").spec
    assert spec.windows == (None, window, None)


@pytest.mark.parametrize("size", [1, 2, 13, 4096])
def test_masks_that_are_no_window_are_found(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose mask is in chunks, or lets tokens see others of their block, whatever its config calls it."""
    from transformers import masking_utils

    chunked = masking_utils.chunked_causal_mask_function
    for planted in (
        lambda window: chunked(max(2, size), torch.zeros(1, dtype=torch.int64)),
        lambda window: lambda batch, head, query, key: key // 64 <= query // 64,
    ):
        monkeypatch.setattr(masking_utils, "sliding_window_causal_mask_function", planted)
        with pytest.raises(ModelRejected, match="a mask that is no window") as caught:
            FallbackModel.read(described("cwm, window in the middle layer"), "random")
        assert caught.value.field == "layers.1.self_attn"


# -- the trial --------------------------------------------------------------------------------------------------------


def test_a_trial_passes_and_has_the_kinds_of_layers_of_the_model() -> None:
    model = FallbackModel.read(described("vaultgemma, window in the middle layer"), "random")
    with torch.inference_mode():
        spec = small_model(model).spec
    assert [layer.mixer.state.window for layer in spec.layers] == [None, 5]
    assert all(isinstance(layer.mixer, SoftcappedAttention) for layer in spec.layers)
    try_fallback(model)


@pytest.mark.parametrize("name", PUBLISHED_OTHERS)
def test_a_trial_of_a_published_model_is_small(name: str) -> None:
    """Nothing in its config ties it to the model's own sizes, with which a trial would take gigabytes."""
    model = FallbackModel.read(PUBLISHED_OTHERS[name], "random")
    with torch.inference_mode():
        assert small_model(model).spec.hidden_size == 64


def planted_state(patch: pytest.MonkeyPatch) -> None:
    """A feed that counts its calls."""
    plain = modeling_olmo.OlmoMLP.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return plain(self, x)

    patch.setattr(modeling_olmo.OlmoMLP, "forward", forward)


def planted_buffer(patch: pytest.MonkeyPatch) -> None:
    """A rotary embedding that changes its frequencies in place, by nothing that would show in few tokens."""
    plain = modeling_olmo.OlmoRotaryEmbedding.forward

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        self.inv_freq.mul_(1 + 1e-6)
        return plain(self, x, position_ids)

    patch.setattr(modeling_olmo.OlmoRotaryEmbedding, "forward", forward)


def planted_mixing(patch: pytest.MonkeyPatch) -> None:
    """A feed that adds the token before, as convolutions and shifts of tokens do."""
    plain = modeling_olmo.OlmoMLP.forward
    patch.setattr(modeling_olmo.OlmoMLP, "forward", lambda self, x: plain(self, x + 0.1 * x.roll(1, 1)))


def planted_positions(patch: pytest.MonkeyPatch) -> None:
    """A rotary embedding that counts tokens instead of reading their positions."""
    plain = modeling_olmo.OlmoRotaryEmbedding.forward

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        return plain(self, x, torch.arange(x.shape[1], device=x.device)[None])

    patch.setattr(modeling_olmo.OlmoRotaryEmbedding, "forward", forward)


def planted_window(patch: pytest.MonkeyPatch) -> None:
    """A mixer that the trace takes for one with a window of 4."""
    from headrace.engine.model.fallback import tracing

    patch.setattr(tracing, "_window", lambda found, name, mask: 4)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (planted_state, r"keeps state from one call to the next, in layers.0.mlp.calls"),
        (planted_buffer, r"keeps state from one call to the next, in rotary_emb.inv_freq"),
        (planted_mixing, "differs over pages"),
        (planted_positions, "differs over pages"),
        (planted_window, r"differs over pages: .* at token \d+ of text 0, in step 0"),
    ],
)
def test_a_trial_finds_what_no_config_shows(
    plant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    model = FallbackModel.read(described(), "random")
    with pytest.raises(ModelRejected, match=words) as caught:
        try_fallback(model)
    assert caught.value.field == "architectures" and caught.value.value == "OlmoForCausalLM"


# -- an engine --------------------------------------------------------------------------------------------------------


def test_a_family_with_native_code_runs_either_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("gemma", head_dim=16)
    config = transformers.LlamaConfig(**{name: getattr(config, name) for name in SHAPE})
    saved(transformers.LlamaForCausalLM(config), tmp_path)

    async def run(implementation: Any) -> tuple[str, list[int]]:
        async with Engine(tmp_path, **SMALL, model_impl=implementation) as engine:
            return engine.info.model_impl, (await engine.generate([5, 6, 7], GREEDY)).choices[0].token_ids

    with caplog.at_level(logging.INFO, "headrace.engine"):
        native, auto, other = (anyio.run(run, each) for each in ("native", "auto", "transformers"))
    assert native == auto and native[0] == "native" and other == ("transformers", native[1])
    told = [record.message for record in caplog.records if "transformers' module" in record.message]
    assert told == ['transformers\' module computes the layers of this model: model_impl="transformers" was asked for']


def test_native_code_is_all_that_native_takes(tmp_path: Path) -> None:
    saved(made("olmo"), tmp_path)
    with pytest.raises(ModelRejected, match='architectures is .*OlmoForCausalLM.*supported: Olmo.*; model_impl="auto"'):
        anyio.run(lambda: generated(tmp_path, [1], model_impl="native"))


def test_transformers_is_not_proposed_for_what_it_does_not_know() -> None:
    unknown = described(architectures=["PlantedForCausalLM"])
    assert fallback_for(EngineConfig(model="m", model_impl="native"), unknown, "random") is None


@pytest.mark.parametrize(("field", "value"), [("adapter_slots", 1), ("quantize", "int8")])
def test_options_that_need_native_code_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidParams, match=f"{field}: .*OlmoForCausalLM has no native code") as caught:
        fallback_for(EngineConfig(model="m", **{field: value}), described(), "random")
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize("kind", ["GGUF files", "encoders"])
def test_models_that_headrace_alone_computes_have_no_other_way(kind: str) -> None:
    with pytest.raises(InvalidParams, match=f"model_impl: {kind} are computed by headrace's own code") as caught:
        check_native(EngineConfig(model="m", model_impl="transformers"), kind)
    assert (caught.value.field, caught.value.limit) == ("model_impl", "auto")
    check_native(EngineConfig(model="m"), kind)


def test_opening_leaves_the_default_dtype_of_other_threads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine's step that runs meanwhile makes tensors, too."""
    saved(made("olmo").to(torch.bfloat16), tmp_path)
    seen: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", seen.append)
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_memory": "1MiB"}
    for more in ({}, {"load_format": "random"}):
        anyio.run(lambda more=more: generated(tmp_path, [1, 2], **options, **more))
    assert seen and set(seen) <= {torch.float32}


def test_structure_sleep_and_hidden_states(tmp_path: Path) -> None:
    """What lies around the network does not ask what computes it."""
    model = made("olmo", eos_token_id=95)
    saved(model, tmp_path)
    with torch.inference_mode():
        hidden_NE = model.model(torch.tensor([[5, 6, 7, 8]]), use_cache=False).last_hidden_state[0]

    async def run() -> None:
        async with Engine(tmp_path, **SMALL) as engine:
            first = (await engine.generate([5, 6, 7], GREEDY)).choices[0].token_ids
            digits = SamplingParams(temperature=0, max_tokens=6, response_format=ResponseFormat.regex("[0-9]{5}"))
            assert (await engine.generate([5, 6, 7], digits)).choices[0].text.isdigit()
            (vector,) = (await engine.embed([[5, 6, 7, 8]])).vectors
            wanted = nn.functional.normalize(hidden_NE[-1], dim=0)
            torch.testing.assert_close(torch.as_tensor(vector), wanted, rtol=0, atol=1e-5)
            for level in (1, 2):
                await engine.sleep(level)
                await engine.wake()
                assert (await engine.generate([5, 6, 7], GREEDY)).choices[0].token_ids == first

    anyio.run(run)


@pytest.mark.parametrize("family", ["granite_swa, sinks and a window in the middle layer", MIMO])
def test_a_deep_sleep_keeps_nothing_of_the_weights(family: str, tmp_path: Path) -> None:
    """In bfloat16, of which operations would need another copy of sinks; MiMo has a buffer in its checkpoints, too."""
    model = made(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    fallback = FallbackModel.read(read_hf_config(tmp_path), tmp_path)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    ops = cpu_ops(fallback.spec, page_size=4, max_positions=64, dtype=torch.bfloat16, context=None)
    kept: dict[tuple[MixerSpec, int], Tensor] = {}
    for mixer, each in ops.items():
        each.keep_sinks = lambda layer, sinks_H, mixer=mixer: kept.update({(mixer, layer): sinks_H})  # type: ignore[method-assign]
    memory: list[Tensor] = []

    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory.append(torch.empty(shape, dtype=dtype))
        return memory[-1]

    decoder = fallback.open(ops, lambda step: step.positions_N, **options, empty=empty)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor += 3
    model.save_pretrained(tmp_path)
    again = iter(memory)
    fallback.reload(**options, empty=lambda shape, dtype: next(again))
    assert next(again, None) is None
    wanted, found = model.state_dict(), decoder.base.state_dict(prefix="model.")
    assert all(torch.equal(tensor, wanted[name].to(tensor.dtype)) for name, tensor in found.items())
    sinks = {name: tensor.float() for name, tensor in wanted.items() if "sink" in name}
    assert len(kept) == len(sinks) and all(
        torch.equal(sinks_H, sinks[f"model.{fallback.traced.sinks[layer]}"]) for (_, layer), sinks_H in kept.items()
    )


def test_a_model_without_a_head_embeds(tmp_path: Path) -> None:
    model = made("olmo")
    saved(model.model, tmp_path)

    async def run() -> int:
        async with Engine(tmp_path, **SMALL) as engine:
            with pytest.raises(InvalidParams):
                await engine.generate([1, 2], GREEDY)
            return len((await engine.embed([[5, 6, 7]])).vectors[0])

    assert anyio.run(run) == model.config.hidden_size


def test_random_weights_need_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described()))
    first, again, other = (
        anyio.run(lambda seed=seed: generated(tmp_path, [1, 2, 3], load_format="random", seed=seed))
        for seed in (0, 0, 1)
    )
    assert len(first) == 8 and first == again != other


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.update(planted=torch.ones(2)), "planted"),
        (lambda tensors: tensors["lm_head.weight"].fill_(torch.nan), "lm_head.weight"),
    ],
)
def test_damaged_weights_are_refused_by_name(change: Callable[[Any], Any], field: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(made("olmo"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRejected) as caught:
        anyio.run(generated, tmp_path, [1])
    assert caught.value.field == field


def test_inspect_says_what_computes_a_model_and_what_it_takes(tmp_path: Path) -> None:
    saved(made("olmo"), tmp_path)
    facts = inspect_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    assert facts.runs and facts.fallback == "OlmoForCausalLM has no native code"

    async def weights() -> Any:
        async with Engine(tmp_path, **SMALL) as engine:
            return engine.info.weights

    assert facts.devices[0].weights == facts.stored == anyio.run(weights)
    assert sum(part.nbytes for part in facts.stored) == facts.stored_bytes
    refused = inspect_model(EngineConfig(model=str(tmp_path), device="cpu", model_impl="native"))
    assert not refused.runs and refused.fallback is None
