"""A checkpoint that counts, and draft heads that know it; holds no tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gpu.checkpoints import EXACT, VOCABULARY, build, save
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["KNOWING", "counting_folder", "write_head"]

SIZE, WIDTH, HEADS, KEY_HEADS = (
    EXACT[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
)
KNOWING = {"eagle": 4, "eagle3": 1, "medusa": 4}
"""Kinds of heads, and how many of their drafts are right."""
DRAFTED = range(100, 400)
"""The tokens that the EAGLE-3 head can guess."""


def table() -> Tensor:
    """Embeddings of +1 and -1, of which products with each other are exact in any order."""
    return torch.randint(0, 2, (VOCABULARY, SIZE), generator=torch.Generator().manual_seed(5)) * 2.0 - 1.0


def counting_folder(folder: Path) -> Path:
    """A model whose blocks add nothing, and whose next token is the one behind the latest, by number."""
    model = build("Llama", EXACT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(table())
        model.lm_head.weight.copy_(table().roll(1, 0) / 8)
    save(model, folder)
    return folder


def write_head(folder: Path, kind: str, *, knows: bool = True) -> Path:
    """A head for `counting_folder` that knows it, or one of random numbers."""
    torch.manual_seed(6)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": SIZE,
        "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    if kind == "medusa":
        config, tensors = {"medusa_num_heads": 4}, _medusa()
    elif kind == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(DRAFTED)}
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
        tensors = _eagle3()
    else:
        tensors = {"fc.weight": torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1), **_layer("layers.0.", SIZE)}
    if not knows:
        tensors = {
            name: each if each.dtype != torch.float32 or "norm" in name else torch.randn(each.shape) * 0.1
            for name, each in tensors.items()
        }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def _layer(prefix: str, inputs: int) -> dict[str, Tensor]:
    """A layer that adds nothing."""
    head = SIZE // HEADS
    shapes = {
        "self_attn.q_proj": (SIZE, inputs), "self_attn.k_proj": (KEY_HEADS * head, inputs),
        "self_attn.v_proj": (KEY_HEADS * head, inputs), "mlp.gate_proj": (WIDTH, SIZE), "mlp.up_proj": (WIDTH, SIZE),
    }  # fmt: skip
    found = {f"{prefix}{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    found[f"{prefix}self_attn.o_proj.weight"] = torch.zeros(SIZE, SIZE)
    found[f"{prefix}mlp.down_proj.weight"] = torch.zeros(SIZE, WIDTH)
    return found | {f"{prefix}post_attention_layernorm.weight": torch.ones(SIZE)}


def _eagle3() -> dict[str, Tensor]:
    """A head whose state is the embedding of the token before the next one, which is two before the one it guesses."""
    ids = torch.tensor(DRAFTED)
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    return {
        "fc.weight": torch.cat((torch.zeros(SIZE, SIZE), torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1),
        "lm_head.weight": table().roll(2, 0)[ids] / 8,
        "d2t": ids - torch.arange(len(ids)),
        **_layer("midlayer.", 2 * SIZE),
        **{f"{name}.weight": torch.ones(SIZE) for name in norms},
    }


def _medusa() -> dict[str, Tensor]:
    found = {}
    for number in range(4):
        found[f"{number}.0.linear.weight"] = torch.zeros(SIZE, SIZE)
        found[f"{number}.0.linear.bias"] = torch.zeros(SIZE)
        found[f"{number}.1.weight"] = table().roll(2 + number, 0) / 8
    return found
