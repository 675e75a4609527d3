"""Random PEFT adapters of a checkpoint, and what transformers and PEFT say of them; no tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from adapter_folders import wrapped
from gpu.judge import Output
from torch import Tensor

__all__ = ["KINDS", "VIRTUAL", "Adapter", "make", "make_virtual", "mixed"]

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "q and v": {"r": 8, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "r": 5,
        "lora_alpha": 8,
        "alpha_pattern": {"k_proj": 20},
        "target_modules": ALL,
        "rank_pattern": {"k_proj": 33, r"layers\.1\.mlp.*": 21},
        "layers_to_transform": [1, 2],
    },
    "top and bottom": {"r": 9, "lora_alpha": 5, "target_modules": ["embed_tokens", "lm_head", "down_proj"]},
}
VIRTUAL = ("prompt", "prefix")
_COUNT = 5


class Adapter(NamedTuple):
    """A folder for an engine and one for a judge."""

    folder: Path
    merged: Path
    """The base with the adapter in it, in float32."""


def mixed(number: int) -> dict[str, Any]:
    """What an adapter of many updates: a rank and modules of its own."""
    rank = 1 + 11 * number % 64
    return {"r": rank, "lora_alpha": -(-rank // 2), "target_modules": ALL[number % 3 :: 1 + number % 2]}


def make(base: Path, root: Path, kind: str, config: dict[str, Any] | None = None) -> Adapter:
    """A random adapter of a checkpoint, strong enough to change what it says: one of `KINDS` unless it has a config."""
    made = Adapter(root / kind / "adapter", root / kind / "merged")
    torch.manual_seed(len(kind) if config is None else sum(kind.encode()))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = wrapped(model, **(config or KINDS[kind]))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # a third of what they update, whatever their ranks
            spread = 1.0 if "embedding_A" in name else parameter.shape[1] ** -0.5
            parameter.data = (torch.randn_like(parameter) * spread * (0.3 if "_B" in name else 1.0)).bfloat16().float()
    model.save_pretrained(made.folder)
    model.merge_and_unload().save_pretrained(made.merged)
    return made


class Virtual(NamedTuple):
    """An adapter of virtual tokens, which no checkpoint can have merged."""

    folder: Path
    model: Any

    def gaps(self, outputs: Sequence[Output]) -> Tensor:
        """How far below PEFT's best each generated token is, in float32 logits."""
        found = []
        for prompt, tokens in outputs:
            with torch.inference_mode():
                logits_TV = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -len(tokens) - 1 : -1]
            found.append(logits_TV.amax(1) - logits_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0])
        return torch.cat(found)


def make_virtual(base: Path, root: Path, kind: str) -> Virtual:
    """Random virtual tokens: `kind` of `VIRTUAL`."""
    import peft

    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    config = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[kind]
    model = peft.get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=_COUNT)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter).bfloat16().float()
    model.save_pretrained(root / kind)
    return Virtual(root / kind, model)
