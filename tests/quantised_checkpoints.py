"""Tiny quantised checkpoints in every layout that is read, each beside the matrices that it stands for; no tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
from numpy.typing import NDArray
from quantised_layouts import (
    Writer,
    awq,
    bnb4,
    bnb8,
    ct_bytes,
    ct_words,
    fp8,
    gptq,
    mxfp4,
    nvfp4,
    plain,
)
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["CASES", "CONFIG", "Case", "products", "write_checkpoint"]

CONFIG: dict[str, Any] = tiny_models.CONFIG | {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""A model whose matrices have 192 and 320 inputs, so that blocks of 128 end in partial ones."""
_SHAPES = {
    "self_attn.q_proj": (192, 192),
    "self_attn.k_proj": (64, 192),
    "self_attn.v_proj": (64, 192),
    "self_attn.o_proj": (192, 192),
    "mlp.gate_proj": (320, 192),
    "mlp.up_proj": (320, 192),
    "mlp.down_proj": (192, 320),
}


def products() -> dict[str, tuple[int, int]]:
    """The shape of each module that may be quantised, by its name."""
    layers = range(CONFIG["num_hidden_layers"])
    found = {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in _SHAPES.items()}
    return found | {"lm_head": (CONFIG["vocab_size"], CONFIG["hidden_size"])}


@dataclass(frozen=True)
class Case:
    """One way to quantise the model."""

    config: Mapping[str, Any]
    """The `quantization_config`."""
    writer: Callable[[str], Writer]
    """Function that returns how the tool writes a module."""
    formats: frozenset[str]
    """Names of the formats that the modules are kept in."""
    file: str = "config.json"


def _but_head(writer: Writer) -> Callable[[str], Writer]:
    return lambda module: plain if module == "lm_head" else writer


def _case(config: Mapping[str, Any], writer: Writer, *formats: str, file: str = "config.json") -> Case:
    return Case(config, _but_head(writer), frozenset(formats), file)


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def _packed(bits: int, group: int | None, **weights: Any) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    options = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group}
    return _compressed("pack-quantized", **options, **weights)


def _gptq(bits: int, group: int, **options: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, **options}


def _auto_round(packing: str, **options: Any) -> dict[str, Any]:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "data_type": "int"}
    return config | {"packing_format": packing, "block_name_to_quantize": "model.layers"} | options


_FP8 = {"num_bits": 8, "type": "float"}
_FLOAT4 = {"num_bits": 4, "type": "float"}
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]}
_MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head*"]}}
_EXTRA = {"model.layers.0.self_attn.o_proj": {"bits": 16}, ".*down_proj": {"bits": 8, "group_size": -1}}


def _mixed_auto_round(module: str) -> Writer:
    if module == "lm_head" or module == "model.layers.0.self_attn.o_proj":
        return plain
    return gptq(8, None) if module.endswith("down_proj") else gptq(4, 64)


def _mixed_gptq(module: str) -> Writer:
    if "layers.0.mlp" in module:
        return plain
    return gptq(8, 32, zeros=True) if "o_proj" in module or module == "lm_head" else gptq(4, 64, zeros=True)


_MIXED_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head", "re:.*layers[.]1[.]mlp.*"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _FP8 | {"strategy": "channel"}, "format": "float-quantized"},
        "group_1": {
            "targets": [r"re:.*mlp\.(gate|up)_proj$", "model.layers.0.mlp.down_proj"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
            "format": "pack-quantized",
        },
    },
}


def _mixed_compressed(module: str) -> Writer:
    if module == "lm_head" or "layers.1.mlp" in module:
        return plain
    return ct_words(4, 32, zeros=True) if "mlp" in module else fp8("weight_scale", "channel", torch.bfloat16)


_BLOCKS_OF_MODELOPT = {"quantization": {"quant_algo": "fp8_pb_wo", "exclude_modules": ["lm_head"]}}
_ALGORITHMS = {
    **{f"self_attn.{part}_proj": "FP8_PB_WO" for part in "qkv"},
    "self_attn.o_proj": "FP8_PB",
    "mlp.gate_proj": "NVFP4",
    "mlp.up_proj": "NVFP4",
    "mlp.down_proj": "FP8",
}
_MIXED_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"model.layers.{layer}.{name}": {"quant_algo": algorithm}
        for layer in range(CONFIG["num_hidden_layers"])
        for name, algorithm in _ALGORITHMS.items()
    },
}


def _mixed_modelopt(module: str) -> Writer:
    writers = {
        "FP8_PB_WO": fp8("weight_scale", "spread block"),
        "FP8_PB": fp8("weight_scale_inv", "block"),
        "NVFP4": nvfp4("weight", "weight_scale_2", divides=False),
        "FP8": fp8("weight_scale", "tensor", extra="input_scale"),
    }
    return plain if module == "lm_head" else writers[_ALGORITHMS[module.split(".", 3)[3]]]


CASES: Mapping[str, Case] = {
    "fp8 blocks": _case(_BLOCKS, fp8("weight_scale_inv", "block"), "fp8-128x128"),
    "fp8 blocks in bfloat16": _case(_BLOCKS, fp8("weight_scale_inv", "block", torch.bfloat16), "fp8-128x128"),
    "fp8 blocks with exponents": _case(
        _BLOCKS | {"scale_fmt": "ue8m0"}, fp8("weight_scale_inv", "block", torch.float8_e8m0fnu), "fp8-128x128"
    ),
    "fp8 tensors": _case(
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8("weight_scale", "tensor", extra="input_scale"),
        "fp8",
    ),
    "modelopt fp8": _case(
        _MODELOPT, fp8("weight_scale", "tensor", extra="input_scale"), "fp8", file="hf_quant_config.json"
    ),
    "modelopt nvfp4": _case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        nvfp4("weight", "weight_scale_2", divides=False),
        "nvfp4",
    ),
    "modelopt fp8 blocks": _case(
        _BLOCKS_OF_MODELOPT, fp8("weight_scale", "spread block"), "fp8-128x128", file="hf_quant_config.json"
    ),
    "modelopt mixture": Case(_MIXED_MODELOPT, _mixed_modelopt, frozenset(("fp8-128x128", "nvfp4", "fp8"))),
    "compressed fp8 channels": _case(
        _compressed("float-quantized", **_FP8, strategy="channel"),
        fp8("weight_scale", "channel", torch.bfloat16),
        "fp8",
    ),
    "compressed fp8 tensors": _case(
        _compressed("float-quantized", **_FP8, strategy="tensor"), fp8("weight_scale", "one", torch.bfloat16), "fp8"
    ),
    "compressed fp8 blocks": _case(
        _compressed("float-quantized", **_FP8, strategy="block", block_structure=[128, 128]),
        fp8("weight_scale", "block"),
        "fp8-128x128",
    ),
    "compressed int8": _case(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"), ct_bytes(), "int8"
    ),
    "compressed int8 with zeros": _case(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        ct_bytes(zeros=True),
        "int8-zeros",
    ),
    "compressed int4 groups": _case(_packed(4, 64), ct_words(4, 64), "int4-g64"),
    "compressed int4 groups with zeros": _case(
        _packed(4, 32, symmetric=False), ct_words(4, 32, zeros=True), "int4-g32-zeros"
    ),
    "compressed int4 channels": _case(_packed(4, None), ct_words(4, None, dtype=torch.float16), "int4"),
    "compressed int4 in an order": _case(
        _packed(4, 64, actorder="group", symmetric=False),
        ct_words(4, 64, zeros=True, ordered=True),
        "int4-g64-zeros-ordered",
    ),
    "compressed int8 words": _case(_packed(8, 64, symmetric=False), ct_words(8, 64, zeros=True), "int8-g64-zeros"),
    "compressed nvfp4": _case(
        _compressed("nvfp4-pack-quantized", **_FLOAT4, strategy="tensor_group", group_size=16),
        nvfp4("weight_packed", "weight_global_scale", divides=True),
        "nvfp4",
    ),
    "compressed mxfp4": _case(
        _compressed("mxfp4-pack-quantized", **_FLOAT4, strategy="group", group_size=32),
        mxfp4("weight_packed", "weight_scale"),
        "mxfp4",
    ),
    "compressed mixture": Case(_MIXED_COMPRESSED, _mixed_compressed, frozenset(("fp8", "int4-g32-zeros", "float32"))),
    "gptq": _case(_gptq(4, 64), gptq(4, 64), "int4-g64"),
    "gptq with v2's zeros under v1's name": _case(_gptq(4, 64), gptq(4, 64, stored_half=1), "int4-g64"),
    "gptq with a partial group": _case(_gptq(4, 128, sym=False), gptq(4, 128, zeros=True), "int4-g128-zeros"),
    "gptq v2 in an order": _case(
        _gptq(4, 32, sym=False, desc_act=True, checkpoint_format="gptq_v2"),
        gptq(4, 32, zeros=True, ordered=True, v2=True),
        "int4-g32-zeros-ordered",
    ),
    "gptq of 8 bits": _case(_gptq(8, -1), gptq(8, None), "int8"),
    "gptq with rules": Case(
        _gptq(
            4,
            64,
            sym=False,
            lm_head=True,
            dynamic={
                r"-:model\.layers\.0\.mlp.*": {},
                r"+:.*o_proj": {"bits": 8, "group_size": 32},
                "lm_head": {"bits": 8, "group_size": 32},
            },
        ),
        _mixed_gptq,
        frozenset(("int4-g64-zeros", "int8-g32-zeros", "float32")),
    ),
    "awq": _case({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq(64), "int4-g64-zeros"),
    "auto-round": _case(_auto_round("auto_round:auto_gptq", sym=False), gptq(4, 64, zeros=True), "int4-g64-zeros"),
    "auto-round of its own": _case(
        _auto_round("auto_round:gptqmodel", sym=False), gptq(4, 64, zeros=True, v2=True), "int4-g64-zeros"
    ),
    "auto-round as awq": _case(_auto_round("auto_round:auto_awq"), awq(64), "int4-g64-zeros"),
    "auto-round fp8": _case(
        _auto_round("auto_round:fp8_static", bits=8, group_size=-1, data_type="fp8"),
        fp8("weight_scale", "row", torch.bfloat16, extra="input_scale"),
        "fp8",
    ),
    "auto-round fp8 blocks": _case(
        _auto_round("auto_round:fp8_static", bits=8, group_size=[128, 128], data_type="fp8"),
        fp8("weight_scale", "block"),
        "fp8-128x128",
    ),
    "auto-round nvfp4": _case(
        _auto_round("auto_round:llm_compressor", group_size=16, data_type="nv_fp"),
        nvfp4("weight_packed", "weight_global_scale", divides=True),
        "nvfp4",
    ),
    "auto-round mxfp4": _case(
        _auto_round("auto_round:llm_compressor", group_size=32, data_type="mx_fp"),
        mxfp4("weight_packed", "weight_scale"),
        "mxfp4",
    ),
    "auto-round mixture": Case(
        _auto_round("auto_round:auto_gptq", extra_config=_EXTRA),
        _mixed_auto_round,
        frozenset(("int4-g64", "int8", "float32")),
    ),
    "mxfp4": _case(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        mxfp4("weight_blocks", "weight_scales", blocked=True),
        "mxfp4",
    ),
    "bitsandbytes nf4": _case(_BNB4, bnb4(), "table4-g64"),
    "bitsandbytes fp4": _case(_BNB4, bnb4(nested=False, kind="fp4"), "table4-g64"),
    "bitsandbytes nf4 across outputs": _case(_BNB4, bnb4(block=128), "float32"),
    "bitsandbytes int8": _case({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8, "int8"),
}
"""Every way by its name."""


def write_checkpoint(folder: Path, case: Case, **changes: Any) -> dict[str, NDArray[np.float32]]:
    """Write a checkpoint with a tokenizer; return the state dict of the plain model that it stands for."""
    rng = np.random.default_rng(7)
    tensors: dict[str, Tensor] = {}
    state: dict[str, NDArray[np.float32]] = {}
    for module, (outs, ins) in products().items():
        parts, state[f"{module}.weight"] = case.writer(module)(rng, outs, ins)
        tensors |= {f"{module}.{name}": part for name, part in parts.items()}
    shapes = {
        "model.embed_tokens": (CONFIG["vocab_size"], CONFIG["hidden_size"]),
        "model.norm": (CONFIG["hidden_size"],),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}"] = (CONFIG["hidden_size"],)
    for module, shape in shapes.items():
        drawn = torch.from_numpy(rng.normal(1.0 if len(shape) == 1 else 0.0, 0.4, shape)).bfloat16()
        tensors[f"{module}.weight"] = drawn
        state[f"{module}.weight"] = drawn.float().numpy()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG | changes
    if case.file == "config.json":
        config |= {"quantization_config": dict(case.config)}
    else:
        (folder / case.file).write_text(json.dumps(case.config))
    (folder / "config.json").write_text(json.dumps(config))
    tiny_models.write_tokenizer(folder)
    return state
