"""`HeadSpec`: the shape of a trained draft head; never imports torch, reads a file or computes.

A draft head guesses the tokens behind the next one from hidden states of the model that it was trained for, its target.
There are two kinds. A recurrent head is a small decoder whose input is a token and the hidden state before it, and
whose output stands for the next hidden state (EAGLE, MTP). Medusa's heads each guess one position from one state.
Next to read: reading.py, which tells the formats of checkpoints apart, then recurrent.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from headrace.engine.model.roles import Fused, Names, bias, matrix, norm
from headrace.engine.model.spec import DecoderSpec

__all__ = ["MOST_DRAFTS", "HeadSpec", "MedusaSpec", "RecurrentSpec"]

MOST_DRAFTS: Final = 16
"""Most tokens that a recurrent head drafts in a row: every further one is computed from guesses alone."""


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A head that computes one state after another, each from a token and the state before it.

    - `eagle`: EAGLE and EAGLE-2 (Li et al., 2024), which differ in how they search, not in the head.
    - `eagle3`: EAGLE-3 (Li et al., 2025), whose attention reads the token beside the state.
    - `mtp`: a module for multi-token prediction that came with the target (DeepSeek-AI, 2024, "DeepSeek-V3", 2.2).
    """

    method: Literal["eagle", "eagle3", "mtp"]
    origin: str
    """Base name of the folder or file that the head was read from, for messages."""
    block: DecoderSpec
    """The layers of the head, its sizes and the names of its tensors; its vocabulary is that of the target."""
    target_size: int
    """Hidden size of the target."""
    taps: tuple[int, ...]
    """Layers of the target whose inputs the head reads, the number of layers standing for the output of the last one;
    empty if the head reads the hidden state behind the final norm."""
    draft_vocab_size: int
    """Number of tokens that the head can guess."""
    fuse_bias: bool = False
    """Whether the first product has a bias."""
    has_embedding: bool = False
    """Whether the head has embeddings of its own; otherwise it reads those of the target."""
    has_head: bool = False
    """Whether the head has an output head of its own; otherwise it uses that of the target."""
    norm_before_residual: bool = False
    """Whether the residual stream of `eagle3` begins with the normed state, not with the state itself."""
    norms_fused: bool = False
    """Whether all states of the target side by side are RMS-normalised as one before the first product."""
    norms_each: bool = False
    """Whether each state of the target is RMS-normalised by itself before the first product."""
    feeds_back_normed: bool = False
    """Whether the next token is computed from the state behind the head's last norm, not from the one before it."""

    @property
    def most_drafts(self) -> int:
        """Largest number of drafts of a row and step."""
        return MOST_DRAFTS

    @property
    def names(self) -> Names:
        """Names of the tensors."""
        return self.block.names

    def parameters(self) -> dict[str, Fused]:
        """Return the parameters outside the layers, by their names in `RecurrentWeights`."""
        size, inputs = self.block.hidden_size, len(self.taps) * self.target_size
        joins_all = self.method != "eagle3"
        found = {"fuse": matrix(2 * size if joins_all else inputs, fuse=size)}
        if self.fuse_bias:
            found["fuse_bias"] = bias(fuse=size)
        if self.norms_fused:
            found["fused_norm"] = norm(fused_norm=inputs)
        if self.norms_each:
            roles = (f"tap_norm_{number}" for number in range(len(self.taps)))
            found.update((role, norm(**{role: self.target_size})) for role in roles)
        if self.method != "eagle":
            found.update((role, norm(**{role: size})) for role in ("token_norm", "state_norm", "final_norm"))
        if self.has_embedding:
            found["embedding"] = matrix(size, embedding=self.block.vocab_size)
        if self.has_head:
            found["head"] = matrix(size, head=self.draft_vocab_size)
        return found

    def layer_parameters(self, layer: int) -> tuple[dict[str, Fused], dict[str, Fused]]:
        """Return the parameters of mixer and feed of one layer, by their names in `SublayerWeights`."""
        size, names = self.block.hidden_size, self.names
        mixer, feed = self.block.layers[layer].parameters(size)
        if self.method != "mtp":  # the first norm is missing, or counts as the head's own
            mixer = {name: fused for name, fused in mixer.items() if name != "norm_E"}
        if self.method == "eagle3":
            mixer["qkv"] = replace(mixer["qkv"], columns=2 * size)
        plans = ({name: names.stored(fused.of_layer(layer)) for name, fused in plan.items()} for plan in (mixer, feed))
        found_mixer, found_feed = plans
        return found_mixer, found_feed

    def all_parameters(self) -> tuple[Fused, ...]:
        """Return every parameter of the head."""
        plans: list[Mapping[str, Fused]] = [self.parameters()]
        for layer in range(self.block.num_layers):
            plans += self.layer_parameters(layer)
        return tuple(fused for plan in plans for fused in plan.values())


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """Heads of which each guesses the token at one distance (Cai et al., 2024, "Medusa").

    Head i guesses the token i + 2 places behind the one whose hidden state it reads, behind the final norm.
    """

    origin: str
    """Base name of the folder that the heads were read from, for messages."""
    heads: int
    blocks: int
    """Number of residual blocks of each head."""
    hidden_size: int
    vocab_size: int
    names: Names
    """Names of the tensors: role `block_{head}_{block}` for a residual block, and `head_{head}` for an output head."""

    @property
    def most_drafts(self) -> int:
        """Largest number of drafts of a row and step: one from each head."""
        return self.heads

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the heads read: none."""
        return ()

    def block(self, head: int, block: int) -> tuple[Fused, Fused]:
        """Return weight and bias of one residual block."""
        role, size = f"block_{head}_{block}", self.hidden_size
        return matrix(size, **{role: size}), bias(**{role: size})

    def output(self, head: int) -> Fused:
        """Return the weight of one output head."""
        return matrix(self.hidden_size, **{f"head_{head}": self.vocab_size})

    def all_parameters(self) -> tuple[Fused, ...]:
        """Return every parameter of the heads."""
        pairs = (self.block(head, block) for head in range(self.heads) for block in range(self.blocks))
        return (*(fused for pair in pairs for fused in pair), *map(self.output, range(self.heads)))


HeadSpec: TypeAlias = RecurrentSpec | MedusaSpec
"""A trained draft head."""
