"""Every supported adapter gives the logits that PEFT gives, alone and beside 32 others, however tokens are cut."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_folders import peft_model
from layer_normed_models import LAYER_NORMED
from model_driver import OPERATIONS, ModelUnderTest
from parity import test_experts as mixed
from parity import test_families as dense
from torch import Tensor

from headrace.adapters.files import read_adapter
from headrace.adapters.layout import SITES, ModelShape
from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.shared.adapter_device import adapter_shape

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHAPE = ModelShape(num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=112, vocab_size=96)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VIRTUAL = 5
KINDS: dict[str, dict[str, Any]] = {
    "rank 1 on q": {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj"]},
    "q and v": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "k, o and up": {"r": 5, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    "all, rank-stabilised": {"r": 12, "lora_alpha": 7, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 9, r"layers\.1\.self_attn\.[kv]_proj": 17, "^model.layers.2.mlp.down_proj": 3},
        "alpha_pattern": {"down_proj": 11, "layers.0.self_attn.q_proj": 2},
    },
    "one layer": {"r": 6, "target_modules": ["gate_proj", "down_proj"], "layers_to_transform": [1]},
    "embeddings": {"r": 7, "lora_alpha": 9, "target_modules": ["embed_tokens", "v_proj"]},
    "q by MiCA": {"r": 4, "init_lora_weights": "mica", "target_modules": ["q_proj"]},
    "head": {"r": 3, "target_modules": ["lm_head"]},
    "head and embeddings": {"r": 16, "target_modules": ["lm_head", "embed_tokens", "down_proj"]},
    "rank 256": {"r": 256, "target_modules": ["down_proj", "k_proj"]},
    "prompt": {"num_virtual_tokens": VIRTUAL},
    "prefix": {"num_virtual_tokens": VIRTUAL, "num_layers": 3, "token_dim": 32, "num_attention_heads": 2},
}


@pytest.fixture(scope="module")
def base() -> Any:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.12)
    return model


@pytest.fixture(params=OPERATIONS)
def tested(request: pytest.FixtureRequest, base: Any, tmp_path: Path) -> ModelUnderTest:
    base.save_pretrained(tmp_path / "base")
    _, tested = ModelUnderTest.load(tmp_path / "base", native=request.param, num_pages=600, max_rows=40)
    tested.bank = CpuBank(40, 40, torch.float32)
    return tested


def config_of(kind: str, options: dict[str, Any]) -> peft.PeftConfig:
    if kind == "prompt":
        return peft.PromptTuningConfig(task_type="CAUSAL_LM", **options)
    if kind == "prefix":
        return peft.PrefixTuningConfig(task_type="CAUSAL_LM", **options)
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


def adapted(base: Any, kind: str, options: dict[str, Any], folder: Path, ids: list[int], seed: int) -> Tensor:
    """Logits of the base model under a new adapter, which is saved in `folder`; the base is left as it was."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, config_of(kind, options))
    try:
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, 0.0, 0.5 if kind in ("prompt", "prefix") else 0.15)
        model.eval()
        model.save_pretrained(folder)
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([ids])).logits[0]
    finally:
        if hasattr(model, "unload"):
            model.unload()
    return logits[-len(ids) :]


def sequence(seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(SIZES["vocab_size"]) for _ in range(drawn.randrange(9, 24))]


def virtual(kind: str) -> list[int]:
    return [0] * (VIRTUAL if kind in ("prompt", "prefix") else 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_alone(kind: str, base: Any, tested: ModelUnderTest, tmp_path: Path) -> None:
    ids = sequence(1)
    with torch.inference_mode():
        plain = base(torch.tensor([ids])).logits[0]
    expected = adapted(base, kind, KINDS[kind], tmp_path / "adapter", ids, seed=2)
    assert (expected - plain).abs().max() > 0.05, "the adapter does nothing"
    assert tested.bank is not None
    tested.bank.put(0, 0, read_adapter(tmp_path / "adapter", SHAPE, torch.float32, max_rank=256))
    before = virtual(kind)
    for chunk, prompt in ((128, None), (4, 11), (1, None)):
        (found,) = tested.logits([before + ids], chunk, prompt, [0])
        torch.testing.assert_close(found[len(before) :], expected, rtol=0, atol=2e-4)


def check_alone(base: Any, kind: str, options: dict[str, Any], folder: Path, *, least: float) -> None:
    """A new adapter of another base changes some logit by `least`, and gives PEFT's logits in chunks and tokens."""
    base.save_pretrained(folder / "base")
    spec, tested = ModelUnderTest.load(folder / "base")
    tested.bank = CpuBank(4, 4, torch.float32)
    ids, before = sequence(1), virtual(kind)
    with torch.inference_mode():
        plain = base(torch.tensor([ids])).logits[0]
    expected = adapted(base, kind, options, folder / "adapter", ids, seed=2)
    assert (expected - plain).abs().max() > least, "the adapter does nothing"
    tested.bank.put(0, 0, read_adapter(folder / "adapter", adapter_shape(spec), torch.float32, max_rank=256))
    (found,) = tested.logits([before + ids], 4, len(before) + 7, [0])
    torch.testing.assert_close(found[len(before) :], expected, rtol=0, atol=2e-4)


JOINED: dict[str, dict[str, Any]] = {
    "qkv": {"r": 3, "lora_alpha": 5, "target_modules": ["qkv_proj"]},
    "all": {"r": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "patterns": {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"], "rank_pattern": {"qkv_proj": 11}},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", JOINED)
def test_joined_modules(kind: str, tmp_path: Path) -> None:
    """Phi-3 has queries, keys and values in one module, and gates and ups in one."""
    torch.manual_seed(3)
    base = transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)).eval()
    for name, parameter in base.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.12)
    check_alone(base, kind, JOINED[kind], tmp_path, least=0.05)


REORDERED: list[tuple[str, str, dict[str, Any]]] = [
    ("Glm", "lora", {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"]}),
    ("Glm", "lora", {"r": 9, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    ("Glm", "prefix", KINDS["prefix"]),
    ("Ernie4_5", "lora", KINDS["patterns"]),
    ("Ernie4_5", "prefix", KINDS["prefix"]),
    ("Phi3", "lora", JOINED["qkv"]),
    ("Phi3", "prefix", KINDS["prefix"]),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("architecture", "kind", "options"), REORDERED)
def test_models_whose_heads_are_put_in_another_order(
    architecture: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Adapters keep the order of the checkpoint: pairs side by side, and heads of which a part is rotated."""
    torch.manual_seed(3)
    sizes = SIZES | {"head_dim": 16} | ({} if architecture == "Ernie4_5" else {"partial_rotary_factor": 0.5})
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    base = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    for name, parameter in base.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.12)
    check_alone(base, kind, options, tmp_path, least=0.02)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["Gemma3", "Granite"])
def test_virtual_tokens_of_models_whose_embeddings_have_a_factor(architecture: str, tmp_path: Path) -> None:
    """Gemma multiplies what its table holds alone, and Granite virtual tokens, too."""
    torch.manual_seed(3)
    if architecture == "Gemma3":
        sizes = SIZES | {"head_dim": 16, "tie_word_embeddings": True}
        base = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)).eval()
    else:
        base = transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, embedding_multiplier=5.0)).eval()
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.12)
    check_alone(base, "prompt", KINDS["prompt"], tmp_path, least=0.02)


NEOX = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2, joined": ("gpt2", {"r": 3, "lora_alpha": 5, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "gpt2, all": ("gpt2", {"r": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2, ends": ("gpt2", {"r": 4, "target_modules": ["wte", "mlp.c_proj"], "fan_in_fan_out": True}),
    "starcoder2": ("starcoder2", {"r": 5, "target_modules": [*ALL[:4], "c_fc", "c_proj"], "rank_pattern": {"c_fc": 9}}),
    "opt": ("opt", {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]}),
    "opt, ends": ("opt", {"r": 4, "target_modules": ["lm_head", "embed_tokens", "fc2"]}),
    "falcon, one key for all queries": ("falcon", {"r": 8, "target_modules": NEOX}),
    "falcon, new architecture": (
        "falcon, new architecture",
        {"r": 8, "target_modules": NEOX, "rank_pattern": {r"h\.1\.self_attention\.query_key_value": 11}},
    ),
    "gpt-neox": ("gpt-neox", {"r": 8, "target_modules": [*NEOX, "embed_in", "embed_out"]}),
    "phi": ("phi", {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2", "lm_head"]}),
    "stablelm, parallel": ("stablelm, parallel", {"r": 8, "target_modules": ALL}),
    "cohere": ("cohere", {"r": 8, "target_modules": ALL}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NAMED)
def test_modules_with_names_of_their_own(kind: str, tmp_path: Path) -> None:
    """Joined modules may hold heads group by group, and a feed may lack a gate."""
    family, options = NAMED[kind]
    check_alone(layer_normed(family), "lora", options, tmp_path, least=0.05)


DENSE = [
    "mistral, window", "ministral, window in the middle layer", "ministral 3", "qwen2, later layers windowed",
    "qwen3, tied, biased, later layers windowed", "smollm3, window in the middle layer", "seed-oss with every bias",
    "olmo2 with every bias", "olmo3, window in the middle layer", "exaone4, window in the middle layer",
    "gemma2, window in the middle layer", "gemma3, window in the middle layer", "gemma", "granite with every bias",
    "granite 4, tied",
    "helium with every bias", "cwm, window in the middle layer", "hunyuan, stretched, biased, tied", "glm4",
    "phi-4-mini, half of each head, window",
    *(each for each in dense.FAMILIES if each.startswith(("jais", "arcee", "cohere2"))),
]  # fmt: skip
MIXED = [
    "mixtral, windowed", "olmoe, renormalised, biased", "granite", "granite, shared", "qwen2, windowed, renormalised",
    "phi, windowed, every bias, longrope", "ernie, corrected, shared, a dense layer",
    "glm, groups, scaled, dense first layers", "solar, groups, scaled, biased", "gpt-oss, windowed",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "family"), [*((dense.reference, each) for each in DENSE), *((mixed.reference, each) for each in MIXED)]
)
def test_every_product_that_a_family_allows(made: Callable[[str], Any], family: str, tmp_path: Path) -> None:
    model, (*_, ids), (*_, plain) = made(family)
    model.save_pretrained(tmp_path / "base")
    spec, tested = ModelUnderTest.load(tmp_path / "base")
    shape = adapter_shape(spec)
    names = [name for name, _ in shape.names.modules] + [shape.names.embedding.rpartition(".")[2], shape.names.head]
    torch.manual_seed(2)
    wrapped = peft_model(copy.deepcopy(model), r=4, target_modules=rf"(.*\.)?({'|'.join(map(re.escape, names))})")
    wrapped.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        expected = wrapped(input_ids=torch.tensor([ids])).logits[0]
    assert float((expected - plain).abs().max()) > 0.05, "the adapter does nothing"
    loaded = read_adapter(tmp_path / "adapter", shape, torch.float32, max_rank=8)
    products = [
        (layer, module) for layer in range(shape.num_layers) for site in SITES for module in shape.modules(site, layer)
    ]
    assert [place[:2] for place in loaded.layout.places()] == [*products, (-1, "embed"), (-1, "head")]
    tested.bank = CpuBank(2, 8, torch.float32)
    tested.bank.put(1, 0, loaded)
    found, worn = tested.logits([ids, ids], 7, 12, [-1, 1])
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-4)
    torch.testing.assert_close(worn, expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_virtual_tokens_have_learned_positions_too(kind: str, family: str, tmp_path: Path) -> None:
    options = KINDS[kind] | ({"token_dim": 64, "num_attention_heads": 4} if kind == "prefix" else {})
    check_alone(layer_normed(family), kind, options, tmp_path, least=0.02)


def layer_normed(family: str) -> Any:
    """A base whose every parameter matters."""
    torch.manual_seed(3)
    name = next(name for name in LAYER_NORMED if name == family or name.startswith(f"{family},"))
    base = LAYER_NORMED[name]().eval()
    for parameter_name, parameter in base.named_parameters():
        is_norm = "norm" in parameter_name or "ln_" in parameter_name
        torch.nn.init.normal_(parameter, 1.0 if is_norm else 0.0, 0.12)
    return base


@pytest.mark.filterwarnings("ignore")
def test_trained_on_the_model_without_its_head(base: Any, tested: ModelUnderTest, tmp_path: Path) -> None:
    """As for embeddings: names and patterns lack the outer module."""
    torch.manual_seed(4)
    options = {"r": 4, "rank_pattern": {"^layers.1.self_attn.q_proj": 9}}
    config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=[*ALL, "embed_tokens"], **options)
    model = peft.get_peft_model(copy.deepcopy(base.model), config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.save_pretrained(tmp_path / "adapter")
    ids = sequence(1)
    with torch.inference_mode():
        expected = base.lm_head(model(torch.tensor([ids])).last_hidden_state[0])
    assert tested.bank is not None
    tested.bank.put(0, 0, read_adapter(tmp_path / "adapter", SHAPE, torch.float32, max_rank=16))
    (found,) = tested.logits([ids], 128, None, [0])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("native", OPERATIONS)
def test_in_bfloat16(native: bool, base: Any, tmp_path: Path) -> None:
    """Adapters of every kind side by side, their updates in float32."""
    base.save_pretrained(tmp_path / "base")
    _, tested = ModelUnderTest.load(tmp_path / "base", torch.bfloat16, native=native, num_pages=200, max_rows=20)
    tested.bank = CpuBank(len(KINDS), 20, torch.float32 if native else torch.bfloat16)
    ids, wanted = sequence(1), []
    for slot, kind in enumerate(KINDS):
        wanted.append(adapted(base, kind, KINDS[kind], tmp_path / str(slot), ids, seed=2))
        tested.bank.put(slot, 0, read_adapter(tmp_path / str(slot), SHAPE, torch.float32, max_rank=256))
    sequences = [virtual(kind) + ids for kind in KINDS]
    for chunk, prompt in ((128, None), (5, 11)):
        found = tested.logits(sequences, chunk, prompt, list(range(len(KINDS))))
        for kind, logits, expected in zip(KINDS, found, wanted, strict=True):
            error = (logits[len(virtual(kind)) :] - expected).norm() / expected.norm()
            assert error < 0.05, kind


@pytest.mark.filterwarnings("ignore")
def test_32_adapters_and_base_rows_in_one_batch(base: Any, tested: ModelUnderTest, tmp_path: Path) -> None:
    assert tested.bank is not None
    sequences, slots, wanted = [], [], []
    for slot in range(32):
        kind = list(KINDS)[slot % len(KINDS)]
        options = dict(KINDS[kind])
        if "r" in options and kind != "rank 256":
            options["r"] += slot
        ids = sequence(slot)
        wanted.append(adapted(base, kind, options, tmp_path / str(slot), ids, seed=slot))
        tested.bank.put(slot, 0, read_adapter(tmp_path / str(slot), SHAPE, torch.float32, max_rank=256))
        sequences.append(virtual(kind) + ids)
        slots.append(slot)
    for extra in range(6):  # four that wear nothing, two that wear what others wear
        ids = sequence(100 + extra)
        place = 7 * extra
        slot = -1 if extra < 4 else extra
        with torch.inference_mode():
            logits = base(torch.tensor([ids])).logits[0]
        if slot >= 0:
            model = peft.PeftModel.from_pretrained(base, tmp_path / str(slot)).eval()
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0]
            model.unload()
        sequences.insert(place, ids)
        slots.insert(place, slot)
        wanted.insert(place, logits)
    for chunk, prompt in ((128, None), (3, 8)):
        for found, expected in zip(tested.logits(sequences, chunk, prompt, slots), wanted, strict=True):
            torch.testing.assert_close(found[len(found) - len(expected) :], expected, rtol=0, atol=3e-4)


@pytest.fixture(autouse=True)
def no_threads_but_one() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
