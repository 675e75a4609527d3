"""Tiny draft heads in the formats of their authors, each with its definition in plain torch; holds no tests.

A reference computes a whole sequence at once with full causal attention, from the hidden states of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from headrace.engine.scheduling.asked import Sampling
from headrace.ops.cpu.sample import Choosing, sample
from headrace.ops.formats import Stored
from headrace.ops.quantise import Method, quantise

__all__ = [
    "HEADS",
    "VOCABULARY",
    "Eagle3Head",
    "EagleHead",
    "Head",
    "MedusaHead",
    "MtpHead",
    "TargetStates",
    "chosen",
    "random_target",
    "rounded",
    "rounded_matrix",
    "widen",
]

GREEDY = Sampling()
SIZE, VOCABULARY, EPSILON, THETA = 32, 96, 1e-5, 10000.0
HEAD_COUNT, KEY_HEADS, HEAD_SIZE, WIDTH = 4, 2, 8, 48
Tensors = dict[str, Tensor]


@dataclass
class TargetStates:
    """What transformers computes for one sequence: its states, and its table of embeddings and output head."""

    final: Tensor
    inputs: list[Tensor]
    embedding: Tensor
    head: Tensor


def rms(x: Tensor, weight: Tensor, eps: float = EPSILON) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor) -> Tensor:
    """Heads [n, H, D] at the positions 0 to n - 1, the first half of each paired with the second."""
    count, _, size = x.shape
    frequencies = THETA ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(count).float(), frequencies)[:, None]
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(x: Tensor, w: Tensors, prefix: str) -> Tensor:
    def part(name: str, heads: int) -> Tensor:
        bias = w.get(f"{prefix}self_attn.{name}_proj.bias")
        return functional.linear(x, w[f"{prefix}self_attn.{name}_proj.weight"], bias).view(len(x), heads, HEAD_SIZE)

    q, k, v = rotated(part("q", HEAD_COUNT)), rotated(part("k", KEY_HEADS)), part("v", KEY_HEADS)
    group = HEAD_COUNT // KEY_HEADS
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_SIZE**0.5
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ w[f"{prefix}self_attn.o_proj.weight"].T


def feed(x: Tensor, w: Tensors, prefix: str) -> Tensor:
    gate, up, down = (w[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def layer_tensors(prefix: str, inputs: int, *, biased: bool = False) -> Tensors:
    queries, keys = HEAD_COUNT * HEAD_SIZE, KEY_HEADS * HEAD_SIZE
    shapes = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (SIZE, queries),
        "mlp.gate_proj": (WIDTH, SIZE),
        "mlp.up_proj": (WIDTH, SIZE),
        "mlp.down_proj": (SIZE, WIDTH),
    }
    found = {f"{prefix}{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    if biased:
        found |= {f"{prefix}self_attn.{name}_proj.bias": torch.randn(rows) for name, rows in
                  (("q", queries), ("k", keys), ("v", keys))}  # fmt: skip
    return found | {f"{prefix}post_attention_layernorm.weight": 1 + torch.randn(SIZE) * 0.2}


def chosen(scores: Tensor, sampling: Sampling, position: int) -> int:
    """The token that a target with these scores would choose for a position."""
    asked = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed
    return sample(scores[None], [Choosing(*asked, position)])[0]


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEAD_COUNT,
    "num_key_value_heads": KEY_HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPSILON,
}


def widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let heads have 64 inputs from now on, of which a GPU takes codes."""
    for name, size in (("SIZE", 64), ("HEAD_SIZE", 16), ("WIDTH", 64)):
        monkeypatch.setattr(f"{__name__}.{name}", size)
    for name in ("hidden_size", "intermediate_size"):
        monkeypatch.setitem(LLAMA, name, 64)


@dataclass
class Head:
    """A head that drafts for the model of `target_folder`."""

    config: dict[str, Any] = field(default_factory=lambda: dict(LLAMA))
    tensors: Tensors = field(default_factory=dict)
    file: str = "model.safetensors"

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: each.contiguous() for name, each in self.tensors.items()}, folder / self.file)
        return folder

    def drafts(
        self, states: TargetStates, following: Sequence[int], count: int, sampling: Sampling = GREEDY
    ) -> list[int]:
        """Tokens behind the last of `following`, which holds the token behind each computed position."""
        raise NotImplementedError


class Chained(Head):
    """A head each of whose drafts follows from the one before it."""

    def entries(self, states: TargetStates) -> Tensor:
        """What stands for the state of each position that the target has computed."""
        return states.final

    def outputs(self, tokens: Tensor, entries: Tensor) -> Tensor:
        """The head's states of all positions, of embedded tokens and the states before them."""
        raise NotImplementedError

    def scores(self, output: Tensor, states: TargetStates) -> Tensor:
        return output @ states.head.T

    def drafts(
        self, states: TargetStates, following: Sequence[int], count: int, sampling: Sampling = GREEDY
    ) -> list[int]:
        table = self.tensors.get("embed_tokens.weight", states.embedding)
        tokens, entries = table[torch.tensor(following)], self.entries(states)[: len(following)]
        found: list[int] = []
        for place in range(count):
            output = self.outputs(tokens, entries)[-1:]
            scores = self.scores(output, states)[0]
            ids = torch.tensor([self.target_id(draft) for draft in range(len(scores))])
            wide = torch.full((len(states.head),), -torch.inf).index_copy(0, ids, scores)
            found.append(chosen(wide, sampling, len(following) + 1 + place))
            tokens = torch.cat((tokens, table[found[-1:]]))
            entries = torch.cat((entries, output))
        return found

    def target_id(self, draft: int) -> int:
        return draft


def rounded_matrix(matrix: Tensor, method: Method) -> Tensor:
    """What quantising leaves of a matrix, in float32."""
    return quantise(Stored.from_dense(matrix), method).dense(torch.float32)


def rounded(head: Head, method: Method) -> Head:
    """The head whose matrices are what quantising leaves of them; embeddings stay."""
    found = copy(head)
    found.tensors = {
        name: rounded_matrix(each, method) if each.dim() == 2 and name != "embed_tokens.weight" else each
        for name, each in head.tensors.items()
    }
    return found


class EagleHead(Chained):
    """Li et al. (2024), "EAGLE: Speculative sampling requires rethinking feature uncertainty"."""

    def __init__(self, *, biased: bool = True) -> None:
        super().__init__()
        layer = layer_tensors("layers.0.", SIZE, biased=biased)
        self.tensors = {"fc.weight": torch.randn(SIZE, 2 * SIZE) * 0.3, **layer}
        if biased:
            self.tensors["fc.bias"] = torch.randn(SIZE)
            self.tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, SIZE)

    def outputs(self, tokens: Tensor, entries: Tensor) -> Tensor:
        w = self.tensors
        x = functional.linear(torch.cat((tokens, entries), -1), w["fc.weight"], w.get("fc.bias"))
        x = x + attention(x, w, "layers.0.")
        return x + feed(rms(x, w["layers.0.post_attention_layernorm.weight"]), w, "layers.0.")


class Eagle3Head(Chained):
    """Li et al. (2025), "EAGLE-3: Scaling up inference acceleration via training-time test"; with the flags of 3.1."""

    def __init__(
        self,
        *,
        prefix: str = "midlayer.",
        taps: Sequence[int] = (2, 3, 4),
        vocabulary: int = 40,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__()
        self.prefix, self.taps, self.vocabulary = prefix, taps, vocabulary
        self.flags = {
            "norm_before_residual": norm_before_residual,
            "norm_before_fc": norm_before_fc,
            "fc_norm": fc_norm,
            "norm_output": norm_output,
        }
        names = [f"{prefix}input_layernorm", f"{prefix}hidden_norm", "norm"]
        sizes = dict.fromkeys(names, SIZE)
        if norm_before_fc:
            sizes["input_norm"] = len(taps) * SIZE
        if fc_norm:
            sizes |= {f"fc_norm.{number}": SIZE for number in range(len(taps))}
        self.tensors = {
            "fc.weight": torch.randn(SIZE, len(taps) * SIZE) * 0.2,
            "lm_head.weight": torch.randn(vocabulary, SIZE) * 0.3,
            **{f"{name}.weight": 1 + 0.3 * torch.randn(size) for name, size in sizes.items()},
            **layer_tensors(prefix, 2 * SIZE),
        }
        if vocabulary < VOCABULARY:
            ids = torch.randperm(VOCABULARY)[:vocabulary].sort().values
            self.tensors["d2t"] = ids - torch.arange(vocabulary)
            self.tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids, True)
        self.config |= {"draft_vocab_size": vocabulary, **self.flags}
        self.config["architectures"] = ["LlamaForCausalLMEagle3"]

    def entries(self, states: TargetStates) -> Tensor:
        w, inputs = self.tensors, [states.inputs[layer] for layer in self.taps]
        if self.flags["fc_norm"]:
            inputs = [rms(x, w[f"fc_norm.{number}.weight"]) for number, x in enumerate(inputs)]
        x = torch.cat(inputs, -1)
        if self.flags["norm_before_fc"]:
            x = rms(x, w["input_norm.weight"])
        return x @ w["fc.weight"].T

    def outputs(self, tokens: Tensor, entries: Tensor) -> Tensor:
        w, prefix = self.tensors, self.prefix
        normed = rms(entries, w[f"{prefix}hidden_norm.weight"])
        residual = normed if self.flags["norm_before_residual"] else entries
        both = torch.cat((rms(tokens, w[f"{prefix}input_layernorm.weight"]), normed), -1)
        x = residual + attention(both, w, prefix)
        x = x + feed(rms(x, w[f"{prefix}post_attention_layernorm.weight"]), w, prefix)
        return rms(x, w["norm.weight"]) if self.flags["norm_output"] else x

    def scores(self, output: Tensor, states: TargetStates) -> Tensor:
        if not self.flags["norm_output"]:
            output = rms(output, self.tensors["norm.weight"])
        return output @ self.tensors["lm_head.weight"].T

    def target_id(self, draft: int) -> int:
        return draft + int(self.tensors["d2t"][draft]) if "d2t" in self.tensors else draft


def sgl_head() -> Eagle3Head:
    """A head whose config numbers layers by their outputs, as those of SpecForge do."""
    head = Eagle3Head(taps=(1, 3, 5))
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}
    return head


def speculators_head(**flags: bool) -> Eagle3Head:
    """A head in the format of the speculators library."""
    head = Eagle3Head(prefix="layers.0.", taps=(1, 2, 4), **flags)
    outer = {name: head.config.pop(name) for name in (*head.flags, "draft_vocab_size")}
    layer = {name: value for name, value in head.config.items() if name != "architectures"}
    verifier = {"name_or_path": "somebody/target", "architectures": ["LlamaForCausalLM"]}
    head.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "target_hidden_size": None,
        **outer,
    }
    return head


class MedusaHead(Head):
    """Cai et al. (2024), "Medusa: Simple LLM inference acceleration framework with multiple decoding heads"."""

    def __init__(self, heads: int = 4, blocks: int = 1, prefix: str = "", file: str = "model.safetensors") -> None:
        super().__init__()
        self.heads, self.blocks, self.prefix, self.file = heads, blocks, prefix, file
        self.config = {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "somebody/target"}
        for head in range(heads):
            for block in range(blocks):
                self.tensors[f"{prefix}{head}.{block}.linear.weight"] = torch.randn(SIZE, SIZE) * 0.3
                self.tensors[f"{prefix}{head}.{block}.linear.bias"] = torch.randn(SIZE)
            self.tensors[f"{prefix}{head}.{blocks}.weight"] = torch.randn(VOCABULARY, SIZE) * 0.3

    def drafts(
        self, states: TargetStates, following: Sequence[int], count: int, sampling: Sampling = GREEDY
    ) -> list[int]:
        found = []
        for head in range(count):
            x = states.final[len(following) - 1]
            for block in range(self.blocks):
                name = f"{self.prefix}{head}.{block}.linear"
                x = x + functional.silu(self.tensors[f"{name}.weight"] @ x + self.tensors[f"{name}.bias"])
            scores = self.tensors[f"{self.prefix}{head}.{self.blocks}.weight"] @ x
            found.append(chosen(scores, sampling, len(following) + 1 + head))
        return found


class MtpHead(Chained):
    """DeepSeek-AI (2024), "DeepSeek-V3", section 2.2, with a layer of transformers and its norm behind the layer."""

    def __init__(self, block: Callable[[Tensor], Tensor], tensors: Tensors, eps: float) -> None:
        super().__init__()
        self.block, self.mtp, self.eps = block, tensors, eps

    def outputs(self, tokens: Tensor, entries: Tensor) -> Tensor:
        w = self.mtp
        normed = rms(tokens, w["enorm.weight"], self.eps), rms(entries, w["hnorm.weight"], self.eps)
        return rms(self.block(torch.cat(normed, -1) @ w["eh_proj.weight"].T), w["shared_head.norm.weight"], self.eps)

    @staticmethod
    def add_to(folder: Path, layer: int, size: int) -> Tensors:
        """Add a module's own tensors beside those of its layer to a checkpoint, and return them."""
        made = {f"{name}.weight": 1 + 0.3 * torch.randn(size) for name in ("enorm", "hnorm", "shared_head.norm")}
        made["eh_proj.weight"] = torch.randn(size, 2 * size) * 0.3
        held = load_file(folder / "model.safetensors")
        stored = {f"model.layers.{layer}.{name}": each for name, each in made.items()}
        for name, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            stored[f"model.layers.{layer}.{name}.weight"] = held[f"{source}.weight"].clone()
        save_file(held | stored, folder / "model.safetensors", {"format": "pt"})
        return made


HEADS: dict[str, Callable[[], Head]] = {
    "EAGLE": EagleHead,
    "EAGLE without biases or embeddings": lambda: EagleHead(biased=False),
    "EAGLE-3": Eagle3Head,
    "EAGLE-3 of all tokens, named like a layer": lambda: Eagle3Head(
        prefix="layers.0.", taps=(2, 3, 4), vocabulary=VOCABULARY
    ),
    "EAGLE-3 that numbers outputs": sgl_head,
    "speculators": lambda: speculators_head(norm_before_residual=True),
    "speculators, norm of all states": lambda: speculators_head(norm_before_fc=True, norm_output=True),
    "speculators, norm of each state": lambda: speculators_head(fc_norm=True),
    "Medusa": MedusaHead,
    "Medusa of two blocks": lambda: MedusaHead(3, 2, "medusa_head.", "medusa_lm_head.safetensors"),
}
"""Heads of each format, by name, for a target of 7 layers."""


def random_target(folder: Path) -> Path:
    """A model of seven layers for which the heads draft, and whose norms are no ones."""
    import transformers

    torch.manual_seed(11)
    sizes = {"num_hidden_layers": 7, "tie_word_embeddings": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny_models.CONFIG | sizes))
    for name, parameter in model.named_parameters():
        mean, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.3)
        torch.nn.init.normal_(parameter, mean, spread)
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return folder
