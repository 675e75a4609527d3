"""Fused parameters equal the modules that transformers saved; no damaged or hostile checkpoint gets past its name."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.spec import DecoderSpec

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MODELS: dict[str, Callable[[bool], Any]] = {
    "llama": lambda tied: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    ),
    "mistral": lambda tied: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, tie_word_embeddings=tied)
    ),
    "qwen2": lambda tied: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=tied)),
    "qwen3": lambda tied: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied)),
}


@cache
def model(family: str, tied: bool) -> Any:
    """A tiny model none of whose parameters has a value that could hide a mix-up."""
    torch.manual_seed(7)
    made = MODELS[family](tied)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def load(folder: Path, **options: Any) -> tuple[DecoderSpec, DecoderWeights]:
    spec = from_hf(read_hf_config(folder))
    return spec, load_weights(folder, spec, **{"dtype": torch.float32, "device": "cpu", **options})


def saved(folder: Path, family: str = "llama", tied: bool = False, **options: Any) -> Path:
    model(family, tied).save_pretrained(folder, **options)
    return folder


def expected_layer(layer: Any) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]:
    """The parameters of a layer's mixer and of its feed."""
    attention, mlp = layer.self_attn, layer.mlp

    def cat(field: str, *modules: Any) -> torch.Tensor | None:
        tensors = [getattr(module, field) for module in modules]
        return None if tensors[0] is None else torch.cat(tensors)

    mixer = {
        "norm_E": layer.input_layernorm.weight,
        "qkv": cat("weight", attention.q_proj, attention.k_proj, attention.v_proj),
        "qkv_bias": cat("bias", attention.q_proj, attention.k_proj, attention.v_proj),
        "q_norm_D": attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        "k_norm_D": attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        "o": attention.o_proj.weight,
        "o_bias": attention.o_proj.bias,
    }
    feed = {
        "norm_E": layer.post_attention_layernorm.weight,
        "gate_up": cat("weight", mlp.gate_proj, mlp.up_proj),
        "gate_up_bias": cat("bias", mlp.gate_proj, mlp.up_proj),
        "down": mlp.down_proj.weight,
        "down_bias": mlp.down_proj.bias,
    }
    return mixer, feed


@pytest.mark.parametrize("shard_size", ["20KB", "1GB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_fused_parameters_equal_the_modules(family: str, tied: bool, shard_size: str, tmp_path: Path) -> None:
    saved(tmp_path, family, tied, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shard_size == "20KB")
    done: list[tuple[int, int]] = []
    _, weights = load(tmp_path, progress=lambda now, total: done.append((now, total)))
    reference = model(family, tied)
    assert torch.equal(weights.embedding_VE, reference.model.embed_tokens.weight)
    assert torch.equal(weights.final_norm_E, reference.model.norm.weight)
    assert (weights.head.parts["values"] is weights.embedding_VE) is tied
    assert torch.equal(weights.head.dense(torch.float32), reference.lm_head.weight)
    assert len(weights.layers) == 2
    for found, layer in zip(weights.layers, reference.model.layers, strict=True):
        for part, expected in zip((found.mixer, found.feed), expected_layer(layer), strict=True):
            values = {name: matrix.dense(torch.float32) for name, matrix in part.matrices.items()} | dict(part.vectors)
            assert values.keys() == {field for field, tensor in expected.items() if tensor is not None}
            for field, value in values.items():
                assert torch.equal(value, expected[field]), field
    assert done == sorted(done) and done[-1][0] == done[-1][1] == sum(p.nbytes for p in reference.parameters())


def test_dtypes_convert_by_rounding_once(tmp_path: Path) -> None:
    saved(tmp_path)
    _, weights = load(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(weights.embedding_VE, model("llama", False).model.embed_tokens.weight.bfloat16())
    save_changed(tmp_path, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    _, widened = load(tmp_path)
    assert widened.embedding_VE.dtype == torch.float32
    assert torch.equal(widened.embedding_VE, weights.embedding_VE.float())


def test_large_matrices_arrive_in_several_blocks(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 3001}, tie_word_embeddings=True)
    reference = transformers.LlamaForCausalLM(config)
    reference.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)[1].embedding_VE, reference.model.embed_tokens.weight)


def test_random_weights_come_from_the_seed_alone() -> None:
    spec = from_hf(json.loads(model("qwen3", True).config.to_json_string()) | {"architectures": ["Qwen3ForCausalLM"]})

    def make(seed: int) -> DecoderWeights:
        return load_weights("random", spec, dtype=torch.float32, device="cpu", seed=seed)

    first, again, other = make(1), make(1), make(2)
    one, two = (made.layers[1].mixer.matrices["qkv"].dense(torch.float32) for made in (first, again))
    assert torch.equal(one, two)
    assert not torch.equal(first.embedding_VE, other.embedding_VE)
    assert first.head.parts["values"] is first.embedding_VE
    assert first.embedding_VE.std().item() == pytest.approx(0.02, rel=0.1)
    vectors = first.layers[0].mixer.vectors
    assert (first.final_norm_E == 1).all() and (vectors["q_norm_D"] == 1).all() and "qkv_bias" not in vectors


def save_changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def rejected(folder: Path) -> ModelRejected:
    with pytest.raises(ModelRejected) as caught:
        load(folder)
    assert str(folder.parent) not in str(caught.value), "messages name the base name alone"
    return caught.value


KV0 = "model.layers.0.self_attn."
K1 = "model.layers.1.self_attn.k_proj.weight"
CHANGES: list[tuple[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str, str]] = [
    ("missing", lambda t: {n: v for n, v in t.items() if n != K1}, K1, "missing"),
    ("left over", lambda t: {**t, "model.layers.2.extra": torch.ones(2)}, "model.layers.2.extra", "left over"),
    ("shape", lambda t: {**t, K1: torch.ones(32, 47)}, K1, r"\[32, 47\]"),
    ("transposed", lambda t: {**t, K1: torch.ones(48, 32)}, K1, r"\[48, 32\]"),
    ("nan", lambda t: {**t, K1: torch.full((32, 48), float("nan"))}, K1, "not finite"),
    ("inf", lambda t: {**t, K1: torch.full((32, 48), -float("inf"))}, K1, "not finite"),
    ("integers", lambda t: {**t, K1: torch.ones(32, 48, dtype=torch.int8)}, K1, "is int8"),
    ("scale", lambda t: {**t, KV0 + "k_scale": torch.tensor(0.0)}, KV0 + "k_scale", "positive"),
    ("scale", lambda t: {**t, KV0 + "v_scale": torch.tensor(float("nan"))}, KV0 + "v_scale", "positive"),
    ("scales", lambda t: {**t, KV0 + "v_scale": torch.ones(2)}, KV0 + "v_scale", "one number"),
    ("scale of no layer", lambda t: {**t, "model.layers.2.self_attn.k_scale": torch.ones(1)}, "2.self", "left over"),
    ("other head", lambda t: {**t, "lm_head.weight": torch.ones(96, 48)}, "lm_head.weight", "equal"),
]


@pytest.mark.parametrize(("change", "tensor", "word"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tensor: str, word: str, tmp_path: Path
) -> None:
    saved(tmp_path, tied=True)
    save_changed(tmp_path, change)
    error = rejected(tmp_path)
    assert tensor in str(error.field)
    with pytest.raises(ModelRejected, match=word):
        raise error


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("Glm", "model.layers.1.mlp.gate_up_proj.weight"),
        ("Glm4", "model.layers.1.post_self_attn_layernorm.weight"),
        ("HunYuanDenseV1", "model.layers.0.self_attn.key_layernorm.weight"),
        ("Phi3", "model.layers.0.self_attn.qkv_proj.weight"),
    ],
)
def test_names_of_a_family_alone_are_those_of_the_errors(architecture: str, tensor: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{architecture}Config")(**SIZES, pad_token_id=None)
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(tmp_path)
    load(tmp_path)
    other = tensor.replace("_proj", "_project").replace("_layernorm", "_norm")
    save_changed(tmp_path, lambda tensors: {**tensors, other: torch.ones(2)})
    error = rejected(tmp_path)
    assert error.field == other and "left over" in str(error)
    save_changed(
        tmp_path, lambda tensors: {name: each for name, each in tensors.items() if name not in (tensor, other)}
    )
    error = rejected(tmp_path)
    assert error.field == tensor and "missing" in str(error)


def test_values_too_large_for_the_wanted_dtype_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    save_changed(tmp_path, lambda tensors: {**tensors, K1: torch.full((32, 48), 1e6)})
    with pytest.raises(ModelRejected, match="finite values in float16"):
        load(tmp_path, dtype=torch.float16)


def test_harmless_leftovers_are_allowed(tmp_path: Path) -> None:
    saved(tmp_path, tied=True)
    save_changed(
        tmp_path,
        lambda tensors: {
            **tensors,
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "lm_head.weight": tensors["model.embed_tokens.weight"].double(),
        },
    )
    _, weights = load(tmp_path)
    assert weights.head.parts["values"] is weights.embedding_VE


@pytest.mark.parametrize("name", ["v_proj.v_scale", "attn.v_scale", "v_proj.output_scale"])
def test_scales_of_an_8_bit_cache_are_read_under_every_name(name: str, tmp_path: Path) -> None:
    saved(tmp_path, tied=True)
    found = {
        KV0 + "k_scale": torch.tensor(0.25, dtype=torch.bfloat16),
        KV0 + "v_scale": torch.tensor([0.5]),
        KV0.replace("0", "1") + name: torch.tensor(3.0),
    }
    save_changed(tmp_path, lambda tensors: {**tensors, **found})
    _, weights = load(tmp_path)
    assert weights.kv_scales == {0: (0.25, 0.5), 1: (1.0, 3.0)}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard = sorted(saved(tmp_path, max_shard_size="20KB").glob("*.safetensors"))[1]
    shard.unlink()
    assert rejected(tmp_path).field == shard.name


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", "", 7, None])
def test_an_index_names_plain_safetensors_only(name: object, tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="20KB")
    edit_index(tmp_path, lambda weight_map: weight_map.update({K1: name}))  # type: ignore[dict-item]
    assert K1 in str(rejected(tmp_path).field)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="20KB")
    edit_index(tmp_path, lambda weight_map: weight_map.pop(K1))
    assert K1 in str(rejected(tmp_path).field)
    edit_index(tmp_path, lambda weight_map: weight_map.clear())
    assert rejected(tmp_path).field == "weight_map"


def test_pickles_are_refused_as_such(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    error = rejected(tmp_path)
    assert error.field == "pytorch_model.bin" and "pickle" in str(error)
    (tmp_path / "pytorch_model.bin").unlink()
    assert rejected(tmp_path).field == "model.safetensors"


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match=r"config\.json: no such file"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "vocab_size": 2}')
    with pytest.raises(ModelRejected, match="'vocab_size' occurs twice"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelRejected, match="not valid JSON"):
        read_hf_config(tmp_path)


def write(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def entry(start: int, end: int, shape: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE: dict[str, tuple[object, int, str]] = {
    "hole": ({"a": entry(4, 8, [1])}, 8, "the offset of a"),
    "overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, 8, "the offset of b"),
    "past the end": ({"a": entry(0, 8, [2])}, 4, "the file's size"),
    "trailing bytes": ({"a": entry(0, 4, [1])}, 5, "the file's size"),
    "shape against range": ({"a": entry(0, 4, [2])}, 4, "the data_offsets of a"),
    "product past 64 bits": ({"a": entry(0, 0, [1 << 61] * 8)}, 0, "the data_offsets of a"),
    "negative size": ({"a": entry(0, 4, [-1, -1])}, 4, "the shape of a"),
    "boolean size": ({"a": entry(0, 4, [True])}, 4, "the shape of a"),
    "real size": ({"a": entry(0, 4, [1.0])}, 4, "the shape of a"),
    "many dimensions": ({"a": entry(0, 4, [1] * 99)}, 4, "the shape of a"),
    "backwards": ({"a": entry(4, 0, [1])}, 4, "the data_offsets of a"),
    "unknown dtype": ({"a": entry(0, 4, [1], "F33")}, 4, "the dtype of a"),
    "extra key": ({"a": {**entry(0, 4, [1]), "x": 1}}, 4, "a"),
    "no object": ({"a": [1]}, 0, "a"),
    "an array": ([], 0, "model.safetensors (header)"),
}


@pytest.mark.parametrize(("header", "size", "field"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_are_refused(header: object, size: int, field: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", json.dumps(header).encode(), bytes(size))
    with pytest.raises(ModelRejected) as caught:
        SafetensorsFolder(tmp_path)
    assert caught.value.field == field


@pytest.mark.parametrize("length", [0, 3, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_its_file_is_refused(length: int, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", b"{}", b"", length)
    with pytest.raises(ModelRejected, match="header"):
        SafetensorsFolder(tmp_path)


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    text = json.dumps(entry(0, 4, [1]))
    write(tmp_path / "model.safetensors", f'{{"a": {text}, "a": {text}}}'.encode(), bytes(4))
    with pytest.raises(ModelRejected, match="'a' occurs twice"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "model.safetensors" in str(rejected(tmp_path))


def test_a_file_that_shrinks_while_open_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    with SafetensorsFolder(tmp_path) as files:
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(ModelRejected, match="size"):
            for name in files.shapes:
                list(files.blocks(name, 1 << 20))


def test_closing_lets_the_files_go(tmp_path: Path) -> None:
    saved(tmp_path)
    with SafetensorsFolder(tmp_path) as files:
        pass
    with pytest.raises(ValueError, match="closed"):
        list(files.blocks(K1, 1 << 20))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = saved(tmp_path_factory.mktemp("fuzzed"), tied=True)
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=250, deadline=2000)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=4),
    st.none() | st.integers(0, 4000),
)
def test_mutated_files_raise_only_what_they_should(
    fuzzed: tuple[Path, bytes], changes: list[tuple[int, int]], cut: int | None
) -> None:
    folder, original = fuzzed
    data = bytearray(original)
    for at, byte in changes:
        data[at] = byte
    (folder / "model.safetensors").write_bytes(data[:cut])
    try:
        load(folder)
    except ModelRejected as error:
        assert error.field


def test_a_folder_may_link_to_its_files(tmp_path: Path) -> None:
    source = saved(tmp_path / "blobs")
    linked = tmp_path / "snapshot"
    linked.mkdir()
    shutil.copy(source / "config.json", linked)
    (linked / "model.safetensors").symlink_to(source / "model.safetensors")
    assert load(linked)[1].embedding_VE.shape == (96, 48)
