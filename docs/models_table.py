"""Writes the table of families in models.md from the registry, from transformers, and from what is noted here.

    python docs/models_table.py

A test fails where the table is not what this writes. Whether and why a model is refused is what the code says of
transformers' default configuration of it, with the changes that are noted here: of one that runs its module is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.engine import ModelRejected
from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.fallback.model import FallbackModel
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.registry import FAMILIES, from_hf
from headrace.engine.model.latent import has_latents
from headrace.engine.model.spec import DecoderSpec

PAGE = Path(__file__).with_name("models.md")
BEGIN = "<!-- `python docs/models_table.py` writes this table -->\n"
HEADER = ("`architectures`", "models", "runs", "files", "adapters", "tool calls", "tested in", "GPU")
NONE = "–"


class Noted(NamedTuple):
    """What only people know of a family with native code."""

    models: str
    tools: str = ""
    """Names of the formats in which its chat templates teach tool calls."""
    gpu: str = "yes"
    """Where its tokens on a GPU have been compared: on an H200, in the tests' emulation, or ("yes") nowhere."""


H200, EMULATION = "H200", "emulation"
NATIVE = {
    "llama": Noted("Llama 2 and 3.x, SmolLM2, and others of their shape", "llama3_json pythonic", H200),
    "mistral": Noted("Mistral 7B and its successors", "mistral", H200),
    "ministral": Noted("Ministral 8B, with windows by layer", "mistral", EMULATION),
    "ministral3": Noted("Ministral 3, also as a text part", "mistral_args", EMULATION),
    "qwen2": Noted("Qwen2 and 2.5", "hermes", H200),
    "qwen3": Noted("Qwen3, dense", "hermes", H200),
    "gemma": Noted("Gemma, its first models", gpu=H200),
    "gemma2": Noted("Gemma 2", gpu=H200),
    "gemma3_text": Noted("Gemma 3, text models", "tool_code", H200),
    "gemma4_text": Noted("Gemma 4: 31B, 26B-A4B, E2B, E4B", "gemma4", f"{H200}: dense"),
    "gemma4_unified_text": Noted("Gemma 4 12B", "gemma4", EMULATION),
    "phi3": Noted("Phi-3, Phi-3.5, Phi-4 and Phi-4-mini", "phi4_mini_json", H200),
    "granite": Noted("Granite 3, dense", "granite", H200),
    "smollm3": Noted("SmolLM3", "hermes", H200),
    "olmo2": Noted("OLMo 2", gpu=EMULATION),
    "olmo3": Noted("OLMo 3", "olmo3", H200),
    "exaone4": Noted("EXAONE 4", "hermes", H200),
    "seed_oss": Noted("Seed-OSS", "seed_oss", EMULATION),
    "qwen3_moe": Noted("Qwen3 with experts: 30B-A3B, 235B-A22B, Coder", "hermes qwen3_coder", H200),
    "qwen2_moe": Noted("Qwen1.5-MoE, Qwen2-57B-A14B", "hermes", H200),
    "mixtral": Noted("Mixtral 8x7B and 8x22B", "mistral", H200),
    "phimoe": Noted("Phi-3.5-MoE", gpu=EMULATION),
    "olmoe": Noted("OLMoE", gpu=EMULATION),
    "granitemoe": Noted("Granite 3 with experts: 1B-A400M, 3B-A800M", "granite", EMULATION),
    "granitemoeshared": Noted("Granite's models with experts and a shared one", "granite", EMULATION),
    "granitemoehybrid": Noted("Granite 4: Micro, 1B and 350M; not hybrids, which keep states", "hermes", EMULATION),
    "glm4_moe": Noted("GLM-4.5 and 4.6, and their Air models", "glm45", EMULATION),
    "solar_open": Noted("Solar Open 100B", gpu=EMULATION),
    "deepseek_v2": Noted("DeepSeek-V2, V2-Lite and Coder-V2", gpu=H200),
    "deepseek_v3": Noted("DeepSeek-V3, V3.1 and R1, also in FP8", "deepseek_v3 deepseek_v31", H200),
    "glm4_moe_lite": Noted("GLM-4.7-Flash", "glm45", H200),
    "gpt_oss": Noted("gpt-oss 20B and 120B, plain or MXFP4", "harmony", H200),
    "ernie4_5_moe": Noted("ERNIE 4.5, text models with experts: 21B-A3B", "hermes", EMULATION),
    "glm": Noted("GLM-4 of 2024, in the format of transformers (`glm-4-9b-chat-hf`)", "glm4", H200),
    "glm4": Noted("GLM-4-0414 and GLM-Z1", "glm4", H200),
    "ernie4_5": Noted("ERNIE 4.5, dense", "hermes", H200),
    "hunyuan_v1_dense": Noted("Hunyuan, dense", "hunyuan_a13b", H200),
    "helium": Noted("Helium 1", gpu=EMULATION),
    "cwm": Noted("Code World Model", gpu=EMULATION),
    "starcoder2": Noted("StarCoder 2", gpu=H200),
    "gpt2": Noted("GPT-2 and DistilGPT-2", gpu=H200),
    "opt": Noted('OPT; OPT-350M by `model_impl="transformers"`', gpu=H200),
    "falcon": Noted("Falcon 7B, 40B and 180B, Falcon 2; not with ALiBi (Falcon-RW)", gpu=H200),
    "cohere": Noted("Command R and R+", "cohere", EMULATION),
    "cohere2": Noted("Command R7B and Command A", "cohere", H200),
    "gpt_neox": Noted("GPT-NeoX and Pythia", gpu=H200),
    "phi": Noted("Phi-1, Phi-1.5 and Phi-2", gpu=H200),
    "stablelm": Noted("StableLM and Stable LM 2", gpu=H200),
    "jais2": Noted("Jais 2", gpu=EMULATION),
    "arcee": Noted("Arcee's foundation models: AFM-4.5B", gpu=EMULATION),
}
"""Families of the registry, by `model_type`."""
ALIKE = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma4_unified_text": "gemma4",
    "olmo3": "olmo2",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granite",
}
"""Families whose GGUF files call themselves like those of another."""
CHANGES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "granitemoehybrid": {"layer_types": ["attention"] * 32, "num_local_experts": 0},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}
"""What a published config has beside transformers' default one."""
FALLBACK = {
    "afmoe": "AFMoE: experts, windows",
    "apertus": "Apertus",
    "codegen": "CodeGen",
    "flex_olmo": "FlexOlmo: experts",
    "flint": "Flint: experts, windows, sinks",
    "gpt_bigcode": "StarCoder 1, SantaCoder",
    "gptj": "GPT-J",
    "granite_swa": "Granite with windows, sinks",
    "granitemoe_swa": "Granite with experts, windows, sinks",
    "hunyuan_v1_moe": "Hunyuan-MoE: experts",
    "hyperclovax": "HyperCLOVA X",
    "laguna": "Laguna: experts, windows, other heads in some layers",
    "mimo_v2_flash": "MiMo-V2-Flash: experts, windows, sinks, other heads in some layers",
    "minicpm3": "MiniCPM3: values in smaller heads",
    "minimax_m2": "MiniMax-M2: experts",
    "nanochat": "NanoChat",
    "nemotron": "Nemotron and Minitron",
    "olmo": "OLMo 1",
    "persimmon": "Persimmon",
    "vaultgemma": "VaultGemma: windows, bounded scores",
}
"""Models that have been compared by the fallback, by `model_type`; more may run."""
FALLBACK_ON_GPU = {"mimo_v2_flash": EMULATION, "olmo": H200, "vaultgemma": EMULATION}
"""Where the tokens of these on a GPU have been compared."""
REFUSED = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, its text part",
    "kimi_linear": "Kimi Linear",
    "minimax": "MiniMax-Text-01",
    "mamba": "Mamba",
    "mamba2": "Mamba 2",
    "falcon_mamba": "Falcon Mamba",
    "jamba": "Jamba",
    "bamba": "Bamba",
    "zamba2": "Zamba 2",
    "falcon_h1": "Falcon-H1",
    "nemotron_h": "Nemotron-H",
    "recurrent_gemma": "RecurrentGemma",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 with experts",
    "rwkv": "RWKV",
    "xlstm": "xLSTM",
    "bloom": "BLOOM, with ALiBi",
    "mpt": "MPT, with ALiBi",
    "gpt_neo": "GPT-Neo",
    "gemma3n_text": "Gemma 3n, its text part",
    "llama4_text": "Llama 4, its text part",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm_moe_dsa": "GLM-5",
    "t5": "T5 and Flan-T5",
    "bart": "BART",
    "mllama": "Llama 3.2 Vision",
}
"""Models that are refused, by `model_type`."""
PUBLISHED_AS = {"t5": "T5ForConditionalGeneration", "mllama": "MllamaForConditionalGeneration"}
"""Names of architectures in published configs, where transformers has no causal language model of that name."""
REASONS = {
    "is_encoder_decoder": "has an encoder",
    "num_kv_shared_layers": "layers share keys and values",
    "model_type": "attends to images",
}
"""What the fields say that a refusal names."""


def table() -> str:
    """Return the table: families with native code, then others that run, then those that are refused."""
    rows = [HEADER, ("---",) * len(HEADER), *native(), *others()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def written() -> str:
    """Return the page with the table as it should be."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition("\n\n")
    return f"{before}{begin}{table()}\n{after}"


def native() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the registry's families, in the order that is noted."""
    families = {family.model_type: family for family in FAMILIES}
    for model_type, noted in NATIVE.items():
        family = families[model_type]
        spec = from_hf({**config_of(model_type), "architectures": [family.architecture]})
        name = family.gguf or ALIKE.get(model_type)
        files = f"safetensors, GGUF `{name}`" if name else "safetensors"
        tools = ", ".join(f"`{each}`" for each in noted.tools.split()) or NONE
        tests = [parity(family, spec), *(["test_gguf_families"] if name else [])]
        told = ", ".join(f"`{each}`" for each in tests)
        yield f"`{family.architecture}`", noted.models, "native", files, adapters(spec), tools, told, noted.gpu


def others() -> Iterator[tuple[str, ...]]:
    """Yield the rows of models without native code."""
    for model_type, models in FALLBACK.items():
        gpu = FALLBACK_ON_GPU.get(model_type, "yes")
        name, why = architecture(model_type), refusal(model_type)
        if why is not None:
            raise ValueError(f"{model_type} is refused: {why}")
        yield f"`{name}`", models, "fallback", "safetensors", "no", NONE, "`test_fallback`", gpu
    for model_type, models in REFUSED.items():
        why = refusal(model_type)
        if why is None:
            raise ValueError(f"{model_type} is not refused")
        yield f"`{architecture(model_type)}`", models, f"refused: {why}", *[NONE] * 5


def config_of(model_type: str) -> dict[str, Any]:
    """Return a config.json of a kind of model."""
    return {**CONFIG_MAPPING[model_type]().to_dict(), **CHANGES.get(model_type, {})}


def architecture(model_type: str) -> str:
    """Return what transformers calls the language model of a kind."""
    return PUBLISHED_AS.get(model_type) or str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


@cache
def refusal(model_type: str) -> str | None:
    """Return why a kind of model is refused, in few words; None if it is not."""
    try:
        FallbackModel.read({**config_of(model_type), "architectures": [architecture(model_type)]}, "random")
    except ModelRejected as error:
        if error.field == "layer_types":
            return f"layers of `{error.value}`"
        if error.field == "architectures":
            return str(error).partition("in transformers ")[2].partition(",")[0]
        return REASONS[str(error.field)]
    return None


def adapters(spec: DecoderSpec) -> str:
    """Return which matrices of a model adapters update."""
    return "not experts" if any(isinstance(layer.feed, ExpertsFeed) for layer in spec.layers) else "yes"


def parity(family: Family, spec: DecoderSpec) -> str:
    """Return the test file that compares a family with transformers."""
    if family.model_type.startswith("gemma4"):
        return "test_gemma4"
    if has_latents(spec):
        return "test_latents"
    if any(isinstance(layer.feed, ExpertsFeed) for layer in spec.layers):
        return "test_experts"
    return "test_families"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
