"""Tiny random models of any layers: a checkpoint, the package's decoder over it, and a slow reference; no tests.

The reference computes one whole sequence in float64 from the tensors under their checkpoint's names, without caches,
fused parameters or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from model_driver import ModelUnderTest, capacity
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from headrace.engine.model.checkpoint.plan import all_parts
from headrace.engine.model.checkpoint.weights import load_weights
from headrace.engine.model.cpu.operations import Variants, cpu_ops
from headrace.engine.model.families.hf import HF_NAMES
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.network.layers import FEEDS, MIXERS, Feeds, Mixers
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec

EPSILON = 1e-5
NO_VARIANTS: Variants = {}
LENGTHS = (37, 21, 6)
"""Tokens of the sequences that run side by side: several pages, chunks and blocks of queries."""
CUTS = {"in one piece": (64, None), "in chunks": (7, None), "decode after a prefill": (64, 5), "one by one": (1, None)}
"""For each cut of a sequence into steps: tokens of a chunk, and tokens before single ones."""

Part = Callable[["Reference", Tensor, int], Tensor]
"""Half of a layer in the reference: returns the residual stream [N, E] after it; takes the layer's number, too."""


def toy_spec(layers: Sequence[LayerSpec], roles: Mapping[str, str] | None = None) -> DecoderSpec:
    """Return a model of these layers, whose tensors are named as Llama's, and `roles` besides."""
    return DecoderSpec(
        architecture="ToyForCausalLM",
        layers=tuple(layers),
        ropes=(Rope(100.0),),
        hidden_size=32,
        vocab_size=48,
        max_context=64,
        norm_eps=EPSILON,
        tied_head=False,
        names=replace(HF_NAMES, roles={**HF_NAMES.roles, **(roles or {})}),
    )


def checkpoint(folder: Path, spec: DecoderSpec) -> dict[str, Tensor]:
    """Write random tensors none of which is without effect; return them by name."""
    torch.manual_seed(3)
    tensors = {}
    for part, shape in all_parts(spec):
        mean, spread = (1.0, 0.3) if "norm" in part.role else (0.0, 0.3)
        tensors[spec.names.of(part)] = torch.randn(shape) * spread + mean
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def sequences(spec: DecoderSpec) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, spec.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


class Reference:
    """One sequence at a time through a model, in float64."""

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, Tensor]) -> None:
        """Read `tensors`, by their names in the checkpoint."""
        self.spec = spec
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def logits(self, ids: Sequence[int], mixer: Part, feed: Part) -> Tensor:
        """Return the logits [N, V] of a model whose layers are all `mixer`, then `feed`."""
        x_NE = self._tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in range(self.spec.num_layers):
            x_NE = feed(self, mixer(self, x_NE, layer), layer)
        return self.norm(x_NE, "model.norm") @ self._tensors["lm_head.weight"].T

    def weight(self, layer: int, name: str) -> Tensor:
        """Return the weight of a module of a layer."""
        return self._tensors[f"model.layers.{layer}.{name}.weight"]

    def norm(self, x_NE: Tensor, name: str) -> Tensor:
        """Return the RMS norm of x, times the weight of the module `name`."""
        return x_NE / (x_NE.square().mean(-1, keepdim=True) + EPSILON).sqrt() * self._tensors[f"{name}.weight"]

    def layer_norm(self, x_NE: Tensor, layer: int, name: str) -> Tensor:
        """Return the RMS norm of x with the weight of a layer's module."""
        return self.norm(x_NE, f"model.layers.{layer}.{name}")

    def attention(self, x_NE: Tensor, layer: int, scored: Callable[[Tensor], Tensor] = lambda scores: scores) -> Tensor:
        """Return W_o softmax(scored(q k^T / sqrt(D))) v, causal, [N, E]."""
        spec = self.spec.layers[layer].mixer
        assert isinstance(spec, Attention)
        q_NHD, k_NKD, v_NKD = (
            (x_NE @ self.weight(layer, f"self_attn.{kind}_proj").T).unflatten(1, (-1, spec.head_dim)) for kind in "qkv"
        )
        q_NHD, k_NKD = self._rotated(q_NHD), self._rotated(k_NKD)
        group = spec.heads // spec.kv_heads
        out = []
        for head in range(spec.heads):
            k_ND, v_ND = k_NKD[:, head // group], v_NKD[:, head // group]
            scores_NN = scored(q_NHD[:, head] @ k_ND.T / spec.head_dim**0.5)
            future_NN = torch.ones_like(scores_NN).triu(1).bool()
            out.append(torch.softmax(scores_NN.masked_fill(future_NN, -torch.inf), -1) @ v_ND)
        return torch.cat(out, 1) @ self.weight(layer, "self_attn.o_proj").T

    def gated(self, x_NE: Tensor, layer: int, module: str = "mlp") -> Tensor:
        """Return down(silu(gate(x)) * up(x)) of a layer's module, [N, E]."""
        gate_NF, up_NF = (x_NE @ self.weight(layer, f"{module}.{kind}_proj").T for kind in ("gate", "up"))
        return (functional.silu(gate_NF) * up_NF) @ self.weight(layer, f"{module}.down_proj").T

    def _rotated(self, x_NHD: Tensor) -> Tensor:
        frequencies = torch.from_numpy(self.spec.ropes[0].inverse_frequencies(x_NHD.shape[2], len(x_NHD))).double()
        angles_N1F = torch.outer(torch.arange(len(x_NHD)).double(), frequencies)[:, None]
        one_NHF, two_NHF = x_NHD.chunk(2, 2)
        cos, sin = angles_N1F.cos(), angles_N1F.sin()
        return torch.cat((one_NHF * cos - two_NHF * sin, two_NHF * cos + one_NHF * sin), 2)


def plain_mixer(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
    """Pre-norm attention, as the package has it."""
    return x_NE + reference.attention(reference.layer_norm(x_NE, layer, "input_layernorm"), layer)


def plain_feed(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
    """Pre-norm gated feed, as the package has it."""
    return x_NE + reference.gated(reference.layer_norm(x_NE, layer, "post_attention_layernorm"), layer)


def check(
    folder: Path,
    spec: DecoderSpec,
    parts: tuple[Part, Part],
    unlike: tuple[Part, Part],
    *,
    mixers: Mixers = MIXERS,
    feeds: Feeds = FEEDS,
    variants: Variants = NO_VARIANTS,
) -> None:
    """Assert that the CPU's decoder computes what the reference does, however sequences are cut into steps.

    Args:
        folder: An empty folder, for the checkpoint.
        spec: The model.
        parts: The mixer and the feed of its layers in the reference.
        unlike: A mixer and a feed without what is new, whose results must differ, or the check could not fail.
        mixers: What computes each kind of mixer.
        feeds: What computes each kind of feed.
        variants: The variants of attention beside softmax.
    """
    reference = Reference(spec, checkpoint(folder, spec))
    ids = sequences(spec)
    expected = [reference.logits(each, *parts) for each in ids]
    for each, logits_NV in zip(ids, expected, strict=True):
        assert (reference.logits(each, *unlike) - logits_NV).abs().max() > 0.1
    weights = load_weights(folder, spec, dtype=torch.float32, device="cpu")
    size = capacity(spec.vocab_size)
    ops = cpu_ops(
        spec, page_size=size.page_size, max_positions=size.max_context, dtype=torch.float32, variants=variants
    )
    kv = next(iter(ops.values())).allocate_kv(spec.num_layers, size.num_pages)
    model = ModelUnderTest(Decoder(spec, weights, ops, mixers=mixers, feeds=feeds), ops, kv, size)
    for cut, (chunk, prompt) in CUTS.items():
        for found, wanted in zip(model.logits(ids, chunk, prompt), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-4, msg=lambda text: f"{cut}: {text}")  # noqa: B023
